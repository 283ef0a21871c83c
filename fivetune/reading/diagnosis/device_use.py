"""Statistics of each accelerator during training.

In: TelemetryRecords in the order of time. Out: DeviceUse per device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fivetune.rundir.figures import IDLE_UTILISATION, list_device_series, select_training_samples
from fivetune.rundir.records import DeviceSample, TelemetryRecord
from fivetune.values import divide, select_finite

FAULT_REASONS = ("thermal", "slowdown", "brake")
"""Substrings of NVML's clock reasons that indicate a fault: heat or the power supply. Idleness, clocks set by a user,
and the power limit, which a busy device normally reaches, are not faults."""

MIN_SAMPLES = 5
"""Samples below which a device or a process counts as unknown: the first samples cover the time before the training."""

BUSY_SHARE = 0.1
"""Share of active samples above which a device is busy; a single one at the start or the end may be another
program's."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One accelerator over the training; values that its driver does not report are None.

    Args:
        is_used: False if another program alone uses the device.
        utilisation, memory_busy: means (0-1).
        active_share: share of the samples with more than IDLE_UTILISATION.
        memory_share: peak of used over total memory (0-1).
        throttled_share: share of the samples in which heat or the power supply lowered the clock.
        clock_loss: share by which the clock was below its maximum in these samples.
        reasons: the driver's clock reasons in these samples.
    """

    index: int
    is_used: bool
    utilisation: float | None
    active_share: float | None
    memory_busy: float | None
    memory_share: float | None
    throttled_share: float | None
    clock_loss: float | None
    reasons: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        return (self.active_share or 0.0) > BUSY_SHARE


def summarise_devices(telemetry: Iterable[TelemetryRecord]) -> tuple[DeviceUse, ...]:
    """Summarise the accelerators of all nodes with MIN_SAMPLES samples or more.

    A device that only another program keeps busy is excluded. An idle device without a process of the run is included,
    because it may have been requested.
    """
    found: list[DeviceUse] = []
    for device in list_device_series(select_training_samples(telemetry)):
        samples = device.samples
        if len(samples) < MIN_SAMPLES:
            continue
        known = [sample for sample in samples if sample.throttle_reasons is not None]
        throttled = [sample for sample in known if _find_fault_reasons(sample)]
        reasons: set[str] = set()
        for sample in throttled:
            reasons.update(_find_fault_reasons(sample))
        clocks = _select_clocks(samples)
        throttled_clocks = _select_clocks(throttled)
        utilisations = select_finite([sample.utilisation for sample in samples])
        traffic = select_finite([sample.memory_busy for sample in samples])
        memory = select_finite([divide(sample.memory_used_bytes, sample.memory_total_bytes) for sample in samples])
        use = DeviceUse(
            index=device.index,
            is_used=device.is_used,
            utilisation=fmean(utilisations) if utilisations else None,
            active_share=fmean(value > IDLE_UTILISATION for value in utilisations) if utilisations else None,
            memory_busy=fmean(traffic) if traffic else None,
            memory_share=max(memory, default=None),
            throttled_share=len(throttled) / len(known) if known else None,
            clock_loss=1 - fmean(throttled_clocks) / max(clocks) if throttled_clocks else None,
            reasons=tuple(sorted(reasons)),
        )
        # A device that another program keeps busy is not the run's, an idle one may have been asked for.
        if use.is_used or not use.is_busy:
            found.append(use)
    return tuple(found)


def _select_clocks(samples: Sequence[DeviceSample]) -> list[float]:
    return [sample.sm_clock_mhz for sample in samples if sample.sm_clock_mhz]


def _find_fault_reasons(sample: DeviceSample) -> list[str]:
    found: list[str] = []
    for reason in sample.throttle_reasons or ():
        if any(part in reason.lower() for part in FAULT_REASONS):
            found.append(reason)
    return found
