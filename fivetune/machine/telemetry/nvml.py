"""The NVIDIA devices of this node, by NVML (the package nvidia-ml-py).

In: the processes of this run. Out: a DeviceSample per device, MIG instances after their device; () without driver or
package. Each counter is queried separately: a call that fails or returns an impossible value makes only its own counter
None.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fivetune.machine.telemetry.host import call_or_none
from fivetune.rundir.records import DeviceSample

THROTTLE_REASONS = {  # nvml.h, nvmlClocksEventReason*; bit 0, an idle device, is not a throttle reason
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
IDLE_BIT = 0x001
MAX_COUNTER = 2**50  # bytes, millijoules: larger values are NVML's "not available" (all bits set) or invalid


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One device or MIG instance: its handle and constant properties."""

    handle: object
    index: int
    mig: int | None = None
    name: str | None = None
    uuid: str | None = None


class Nvml:
    """All devices of the node, including those hidden by CUDA_VISIBLE_DEVICES.

    Args:
        library: a module with the functions of `pynvml`; None imports it.
        environ: environment with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """

    def __init__(self, library: object = None, environ: Mapping[str, str] = os.environ) -> None:
        self._library: Any = library if library is not None else call_or_none(import_module, "pynvml")
        self._environ = environ
        self._devices: list[NvmlDevice] = []
        self._cuda_index: dict[int, int] = {}
        self._sees_all_processes = call_or_none(Path("/proc/2/comm").read_text) == "kthreadd\n"
        try:
            self._library.nvmlInit()
            self._is_open = True
        except Exception:  # no package, no driver, no rights, versions that do not fit
            self._is_open = False

    def sample(self, pids: frozenset[int] = frozenset()) -> tuple[DeviceSample, ...]:
        """A sample of every device; `pids` are the processes of this run."""
        is_complete = self._devices and all(device.handle is not None for device in self._devices)
        if self._is_open and not is_complete:
            self._devices = list(self._find_devices())
            order = find_cuda_order(self._devices, self._environ)
            self._cuda_index = {place: index for index, place in enumerate(order)}
        samples: list[DeviceSample] = []
        for place, device in enumerate(self._devices):
            samples.append(self._sample_device(device, self._cuda_index.get(place), pids))
        return tuple(samples)

    def close(self) -> None:
        if self._is_open:
            self._call("Shutdown")

    def _call(self, name: str, *values: object, **named: object) -> object:
        return call_or_none(lambda: getattr(self._library, f"nvml{name}")(*values, **named))

    def _find_devices(self) -> Iterator[NvmlDevice]:
        for index in range(validate_count(self._call("DeviceGetCount"), maximum=1024) or 0):
            handle = self._call("DeviceGetHandleByIndex", index)
            yield self._describe_device(handle, index)
            modes = self._call("DeviceGetMigMode", handle)  # current mode, mode after the next reset
            if not (isinstance(modes, list) and modes[:1] == [1]):
                continue
            for mig in range(validate_count(self._call("DeviceGetMaxMigDeviceCount", handle), maximum=64) or 0):
                instance = self._call("DeviceGetMigDeviceHandleByIndex", handle, mig)
                if instance is not None:
                    yield self._describe_device(instance, index, mig)

    def _describe_device(self, handle: object, index: int, mig: int | None = None) -> NvmlDevice:
        name = _decode_text(self._call("DeviceGetName", handle))
        uuid = _decode_text(self._call("DeviceGetUUID", handle))
        return NvmlDevice(handle, index, mig, name, uuid)

    def _sample_device(self, device: NvmlDevice, cuda_index: int | None, pids: frozenset[int]) -> DeviceSample:
        handle = device.handle
        busy = self._call("DeviceGetUtilizationRates", handle)
        used, total = self._read_memory_bytes(handle)
        return DeviceSample(
            index=device.index,
            mig=device.mig,
            name=device.name,
            cuda_index=cuda_index,
            utilisation=scale_counter(getattr(busy, "gpu", None), scale=0.01, maximum=100),
            memory_busy=scale_counter(getattr(busy, "memory", None), scale=0.01, maximum=100),
            memory_used_bytes=used,
            memory_total_bytes=total,
            temperature_celsius=self._read_temperature(handle),
            power_watts=self._read_number("DeviceGetPowerUsage", handle, scale=0.001, maximum=10**7),
            power_limit_watts=self._read_number("DeviceGetEnforcedPowerLimit", handle, scale=0.001, maximum=10**7),
            sm_clock_mhz=self._read_number("DeviceGetClockInfo", handle, 1, maximum=10**5),  # NVML_CLOCK_SM
            memory_clock_mhz=self._read_number("DeviceGetClockInfo", handle, 2, maximum=10**5),  # NVML_CLOCK_MEM
            throttle_reasons=self._read_throttle_reasons(handle),
            pcie_sent_bytes_per_second=self._read_number(
                "DeviceGetPcieThroughput", handle, 0, scale=1000, maximum=2**31
            ),
            pcie_received_bytes_per_second=self._read_number(
                "DeviceGetPcieThroughput", handle, 1, scale=1000, maximum=2**31
            ),
            energy_joules=self._read_number(
                "DeviceGetTotalEnergyConsumption", handle, scale=0.001, maximum=MAX_COUNTER
            ),
            ours=self._is_used_by(handle, pids),
        )

    def _read_number(self, name: str, *values: object, scale: float = 1.0, maximum: float) -> float | None:
        return scale_counter(self._call(name, *values), scale=scale, maximum=maximum)

    def _read_memory_bytes(self, handle: object) -> tuple[int | None, int | None]:
        """Used and total bytes. Version 2 counts as nvidia-smi does; version 1 adds the driver's own memory to used."""
        version = getattr(self._library, "nvmlMemory_v2", None)
        memory = self._call("DeviceGetMemoryInfo", handle, version=version) if version else None
        memory = memory or self._call("DeviceGetMemoryInfo", handle)
        total = validate_count(getattr(memory, "total", None), maximum=MAX_COUNTER) or None
        return validate_count(getattr(memory, "used", None), maximum=total or MAX_COUNTER), total

    def _read_temperature(self, handle: object) -> float | None:
        """Temperature of the chip; older drivers have only the second call."""
        for name in ("DeviceGetTemperatureV", "DeviceGetTemperature"):
            if degrees := self._read_number(name, handle, 0, maximum=200):  # NVML_TEMPERATURE_GPU; 0 is not one
                return degrees
        return None

    def _read_throttle_reasons(self, handle: object) -> tuple[str, ...] | None:
        """Reasons of lowered clocks; older drivers have only the second call."""
        for name in ("DeviceGetCurrentClocksEventReasons", "DeviceGetCurrentClocksThrottleReasons"):
            bits = validate_count(self._call(name, handle), maximum=2**32)
            if bits is not None:
                return decode_throttle_reasons(bits)
        return None

    def _is_used_by(self, handle: object, pids: frozenset[int]) -> bool | None:
        """Whether one of `pids` computes on the device; None in a container, which hides or renumbers processes."""
        processes = self._call("DeviceGetComputeRunningProcesses", handle)
        if not isinstance(processes, list):
            return None
        if any(getattr(process, "pid", None) in pids for process in processes):
            return True
        return False if self._sees_all_processes else None


def scale_counter(value: object, *, scale: float = 1.0, maximum: float) -> float | None:
    """`value` times `scale`; None unless it is a number from 0 to `maximum`.

    >>> (scale_counter(95, scale=0.01, maximum=100), scale_counter(4294967295, scale=0.01, maximum=100),
    ...  scale_counter("95", maximum=100))
    (0.95, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not (math.isfinite(value) and 0 <= value <= maximum):
        return None
    return round(float(value) * scale, 4)


def validate_count(value: object, *, maximum: int) -> int | None:
    """`value` if it is an integer from 0 to `maximum`, else None."""
    if isinstance(value, int) and scale_counter(value, maximum=maximum) is not None:
        return value
    return None


def decode_throttle_reasons(bits: int) -> tuple[str, ...]:
    """Names of the throttle bits, as in nvidia-smi.

    >>> decode_throttle_reasons(0x1), decode_throttle_reasons(0x4 + 0x20), decode_throttle_reasons(0x8000)
    ((), ('sw_power_cap', 'sw_thermal_slowdown'), ('reason_0x8000',))
    """
    reasons: list[str] = []
    for place in range(bits.bit_length()):
        bit = 1 << place
        if bits & bit and bit != IDLE_BIT:
            reasons.append(THROTTLE_REASONS.get(bit, f"reason_{bit:#x}"))
    return tuple(reasons)


def find_cuda_order(devices: Sequence[NvmlDevice], environ: Mapping[str, str]) -> list[int]:
    """Indices into `devices` of the devices that CUDA shows to a process, in CUDA's order.

    After the CUDA programming guide, "Environment Variables": entries of CUDA_VISIBLE_DEVICES are numbers or prefixes
    of uuids; the first without a match ends the list, and a repeated device empties it. Numbers are ordered by speed
    unless CUDA_DEVICE_ORDER is PCI_BUS_ID, so they identify nothing among devices of different names. MIG instances are
    identified by uuid only.

    >>> cards = [NvmlDevice(None, index, name="H100", uuid=f"GPU-{index}a") for index in range(3)]
    >>> find_cuda_order(cards, {}), find_cuda_order(cards, {"CUDA_VISIBLE_DEVICES": "2,GPU-0,-1,1"})
    ([0, 1, 2], [2, 0])
    """
    is_bus_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) == 1
    has_mig = any(device.mig is not None for device in devices)
    by_number: list[int] = []
    if is_bus_order and not has_mig:
        by_number = list(range(len(devices)))
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


def _decode_text(value: object) -> str | None:
    """Decode bytes, which old versions of the package return."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text else None
