"""The NVIDIA devices of this node, by NVML (the package nvidia-ml-py): what nvidia-smi shows.

In: the processes of this run. Out: a DeviceSample per device, MIG instances behind theirs. Without driver or package
there are no devices. Every counter is asked for by itself: a call that fails, or answers with something that cannot
be, makes its own counter None and no other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fivetune.telemetry.host import ask
from fivetune.types import DeviceSample

THROTTLE_REASONS = {  # nvml.h, nvmlClocksEventReason*; an idle device (bit 0) is not held down
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
IDLE = 0x001
MOST = 2**50  # bytes, millijoules: above it the driver means "not known" (all bits set) or is out of its mind


@dataclass(frozen=True, slots=True)
class Device:
    """One device or MIG instance: its handle, and what does not change."""

    handle: Any
    index: int
    mig: int | None = None
    name: str | None = None
    uuid: str | None = None


class Nvml:
    """All devices of the node, also those that CUDA_VISIBLE_DEVICES hides.

    Args:
        library: a module with the functions of `pynvml`; None imports it.
        environ: where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up.
    """

    def __init__(self, library: Any = None, environ: Mapping[str, str] = os.environ) -> None:
        self._library = library if library is not None else ask(import_module, "pynvml")
        self._environ = environ
        self._devices: list[Device] = []
        self._cuda_index: dict[int, int] = {}
        self._sees_all_processes = ask(Path("/proc/2/comm").read_text) == "kthreadd\n"
        try:
            self._library.nvmlInit()
            self._is_open = True
        except Exception:  # no package, no driver, no rights, versions that do not fit
            self._is_open = False

    def sample(self, pids: frozenset[int] = frozenset()) -> tuple[DeviceSample, ...]:
        """Every device as it is now; `pids` are the processes of this run."""
        if self._is_open and (not self._devices or any(device.handle is None for device in self._devices)):
            self._devices = list(self._found())
            self._cuda_index = {place: index for index, place in enumerate(cuda_order(self._devices, self._environ))}
        return tuple(self._sample(device, self._cuda_index.get(i), pids) for i, device in enumerate(self._devices))

    def close(self) -> None:
        if self._is_open:
            self._ask("Shutdown")

    def _ask(self, name: str, *values: Any, **named: Any) -> Any:
        return ask(lambda: getattr(self._library, f"nvml{name}")(*values, **named))

    def _found(self) -> Iterator[Device]:
        for index in range(whole(self._ask("DeviceGetCount"), most=1024) or 0):
            handle = self._ask("DeviceGetHandleByIndex", index)
            yield self._described(handle, index)
            modes = self._ask("DeviceGetMigMode", handle)  # now, after the next reset
            if not (isinstance(modes, list) and modes[:1] == [1]):
                continue
            for mig in range(whole(self._ask("DeviceGetMaxMigDeviceCount", handle), most=64) or 0):
                if (instance := self._ask("DeviceGetMigDeviceHandleByIndex", handle, mig)) is not None:
                    yield self._described(instance, index, mig)

    def _described(self, handle: Any, index: int, mig: int | None = None) -> Device:
        name, uuid = self._ask("DeviceGetName", handle), self._ask("DeviceGetUUID", handle)
        return Device(handle, index, mig, _text(name), _text(uuid))

    def _sample(self, device: Device, cuda_index: int | None, pids: frozenset[int]) -> DeviceSample:
        handle = device.handle
        busy = self._ask("DeviceGetUtilizationRates", handle)
        used, total = self._memory(handle)
        return DeviceSample(
            index=device.index,
            mig=device.mig,
            name=device.name,
            cuda_index=cuda_index,
            utilisation=number(getattr(busy, "gpu", None), unit=0.01, most=100),
            memory_busy=number(getattr(busy, "memory", None), unit=0.01, most=100),
            memory_used_bytes=used,
            memory_total_bytes=total,
            temperature_celsius=self._temperature(handle),
            power_watts=self._number("DeviceGetPowerUsage", handle, unit=0.001, most=10**7),
            power_limit_watts=self._number("DeviceGetEnforcedPowerLimit", handle, unit=0.001, most=10**7),
            sm_clock_mhz=self._number("DeviceGetClockInfo", handle, 1, most=10**5),  # NVML_CLOCK_SM
            memory_clock_mhz=self._number("DeviceGetClockInfo", handle, 2, most=10**5),  # NVML_CLOCK_MEM
            throttle_reasons=self._throttle_reasons(handle),
            pcie_sent_bytes_per_second=self._number("DeviceGetPcieThroughput", handle, 0, unit=1000, most=2**31),
            pcie_received_bytes_per_second=self._number("DeviceGetPcieThroughput", handle, 1, unit=1000, most=2**31),
            energy_joules=self._number("DeviceGetTotalEnergyConsumption", handle, unit=0.001, most=MOST),
            ours=self._ours(handle, pids),
        )

    def _number(self, name: str, *values: Any, unit: float = 1.0, most: float) -> float | None:
        return number(self._ask(name, *values), unit=unit, most=most)

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Bytes used and there are. Version 2 counts as nvidia-smi does; the first takes the driver's own for used."""
        version = getattr(self._library, "nvmlMemory_v2", None)
        memory = self._ask("DeviceGetMemoryInfo", handle, version=version) if version else None
        memory = memory or self._ask("DeviceGetMemoryInfo", handle)
        total = whole(getattr(memory, "total", None), most=MOST) or None
        return whole(getattr(memory, "used", None), most=total or MOST), total

    def _temperature(self, handle: Any) -> float | None:
        """Degrees of the chip; the second call is the one of older drivers."""
        for name in ("DeviceGetTemperatureV", "DeviceGetTemperature"):
            if degrees := self._number(name, handle, 0, most=200):  # NVML_TEMPERATURE_GPU; 0 is not one
                return degrees
        return None

    def _throttle_reasons(self, handle: Any) -> tuple[str, ...] | None:
        """The second call is the one of older drivers."""
        for name in ("DeviceGetCurrentClocksEventReasons", "DeviceGetCurrentClocksThrottleReasons"):
            bits = whole(self._ask(name, handle), most=2**32)
            if bits is not None:
                return reasons_of(bits)
        return None

    def _ours(self, handle: Any, pids: frozenset[int]) -> bool | None:
        """Whether one of `pids` computes here; a container hides others' numbers, or shows the host's: not known."""
        processes = self._ask("DeviceGetComputeRunningProcesses", handle)
        if not isinstance(processes, list):
            return None
        if any(getattr(process, "pid", None) in pids for process in processes):
            return True
        return False if self._sees_all_processes else None


def number(value: Any, *, unit: float = 1.0, most: float) -> float | None:
    """`value` times `unit`; None if it is no number from 0 to `most`.

    >>> number(95, unit=0.01, most=100), number(4294967295, unit=0.01, most=100), number("95", most=100)
    (0.95, None, None)
    """
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not (math.isfinite(value) and 0 <= value <= most):
        return None
    return round(float(value) * unit, 4)


def whole(value: Any, *, most: int) -> int | None:
    """`value`, if it is a whole number from 0 to `most`; otherwise None."""
    return value if isinstance(value, int) and number(value, most=most) is not None else None


def reasons_of(bits: int) -> tuple[str, ...]:
    """Names of the bits that hold clocks down, as nvidia-smi spells them.

    >>> reasons_of(0x1), reasons_of(0x4 + 0x20), reasons_of(0x8000)
    ((), ('sw_power_cap', 'sw_thermal_slowdown'), ('reason_0x8000',))
    """
    single = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(THROTTLE_REASONS.get(bit, f"reason_{bit:#x}") for bit in single if bit != IDLE)


def cuda_order(devices: Sequence[Device], environ: Mapping[str, str]) -> list[int]:
    """Which devices CUDA shows to a process, in its order: their places in `devices`.

    After the CUDA programming guide, "Environment Variables": entries of CUDA_VISIBLE_DEVICES are numbers or beginnings
    of uuids; the first that fits nothing ends the list, and a device named twice leaves none. Numbers count by speed
    unless CUDA_DEVICE_ORDER is PCI_BUS_ID, so they tell nothing among devices of different names. MIG instances are
    known by uuid alone.

    >>> cards = [Device(None, index, name="H100", uuid=f"GPU-{index}a") for index in range(3)]
    >>> cuda_order(cards, {}), cuda_order(cards, {"CUDA_VISIBLE_DEVICES": "2,GPU-0,-1,1"})
    ([0, 1, 2], [2, 0])
    """
    in_bus_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) == 1
    has_mig = any(device.mig is not None for device in devices)
    by_number = list(range(len(devices))) if in_bus_order and not has_mig else []
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return by_number
    seen: list[int] = []
    for entry in map(str.strip, entries.split(",")):
        if entry.isdecimal():
            fitting = by_number[int(entry) : int(entry) + 1]
        else:
            fitting = [i for i, device in enumerate(devices) if entry and (device.uuid or "").startswith(entry)]
        if len(fitting) != 1:
            break
        seen += fitting
    return seen if len(set(seen)) == len(seen) else []


def _text(value: Any) -> str | None:
    """Old versions of the package give bytes."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text else None
