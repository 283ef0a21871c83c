"""A driver library that answers as NVML does."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class FakeDriver:
    """Stands for the module pynvml: a handle is the device's number, or (number, instance).

    `answers` replaces what calls return, by name without "nvml"; an exception is raised.
    """

    nvmlMemory_v2 = 0x02000028

    def __init__(self, num_devices: int = 1, **answers) -> None:
        self.calls: list[str] = []
        self.answers = {
            "Init": None,
            "Shutdown": None,
            "DeviceGetCount": num_devices,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetName": "NVIDIA H100 80GB HBM3",
            "DeviceGetUUID": lambda handle: f"GPU-{handle}0000000",
            "DeviceGetMigMode": NVMLError("Not Supported"),
            "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=95 - handle, memory=65),
            "DeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(used=2**30, total=80 * 2**30),
            "DeviceGetTemperatureV": lambda handle, sensor: 61,
            "DeviceGetTemperature": lambda handle, sensor: 61,
            "DeviceGetPowerUsage": 402_500,
            "DeviceGetEnforcedPowerLimit": 700_000,
            "DeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 2619}[kind],
            "DeviceGetCurrentClocksEventReasons": 0x4,
            "DeviceGetCurrentClocksThrottleReasons": 0x4,
            "DeviceGetPcieThroughput": lambda handle, way: {0: 1500, 1: 250}[way],
            "DeviceGetTotalEnergyConsumption": 123_456,
            "DeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77)],
            **answers,
        }

    def __getattr__(self, name: str):
        if name.removeprefix("nvml") not in self.answers:
            raise AttributeError(name)
        answer = self.answers[name.removeprefix("nvml")]

        def call(*values, **named):
            self.calls.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer(*values, **named) if callable(answer) else answer

        return call
