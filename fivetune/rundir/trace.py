"""The summary of a trace (trace/summary.json): times in seconds, memory in bytes, shares from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivetune.types import JsonTable


@dataclass(frozen=True, slots=True)
class Work:
    """Total time and count of one kind of work, and its share (0-1) of the time of all work.

    `kind` is one of kernels.CLASSES, or "call" for a CUDA call of the host.
    """

    name: str
    kind: str
    seconds: float
    num: int
    share: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Memory operations of one direction: HtoD, DtoH, DtoD, ..., memory set. Bytes are None if not recorded."""

    direction: str
    num: int
    seconds: float
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class Phase:
    """A named phase of the steps, as far as it lies in the window.

    Args:
        host_seconds: duration on the host.
        device_seconds: duration of the device work launched in this phase; None without a device.
        idle_seconds: part of the phase in which no work ran on the device; None without a device.
    """

    name: str
    num: int
    host_seconds: float
    device_seconds: float | None = None
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """One device in the window. Overlapping work counts once in `busy_seconds`; a gap is the time between two works.

    Args:
        gaps: (upper bound in seconds, number, total seconds) per length class; None is the bound of the longest class.
        host_bound_seconds: part of the gaps before the host launched the next work; None if launches are not recorded.
    """

    index: int
    name: str | None
    busy_seconds: float
    gaps: tuple[tuple[float | None, int, float], ...]
    longest_gap_seconds: float
    host_bound_seconds: float | None


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Allocated bytes over time, downsampled; minima and maxima are kept.

    Args:
        since_start: the curve starts at 0 and leaves out memory allocated before the window (host memory).
        parts: bytes by category: those counted from tensors, and the rest of the peak.
    """

    kind: str
    points: tuple[tuple[float, int], ...]
    peak_bytes: int
    since_start: bool
    parts: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The time of a window of a run by kind of work, and its gaps; unknown values are None.

    Args:
        source: torch.profiler, or Nsight Systems.
        measures: "kernels" of devices, or "operators" of the host if no device was used.
        window_seconds: start of the first step to the end of the last; for a capture, first to last device work.
        classes: the kernels.CLASSES that occurred, longest first; the shares sum to 1.
        top: the NUM_TOP names with the most time.
        outside_seconds: time of the window outside any operator (Python, waiting); only for operators.
        calls: the NUM_TOP CUDA calls of the host with the most time.
        num_launches, num_synchronisations: calls of the host in the window.
        plain_step_seconds: mean step of the same steps without the profiler; profiled_step_seconds: with it.
        notes: limits of the figures, one sentence each.
    """

    source: str
    measures: str
    window_seconds: float
    num_steps: int | None
    classes: tuple[Work, ...]
    top: tuple[Work, ...]
    outside_seconds: float | None = None
    devices: tuple[DeviceTime, ...] = ()
    phases: tuple[Phase, ...] = ()
    calls: tuple[Work, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    num_launches: int | None = None
    num_synchronisations: int | None = None
    synchronisation_seconds: float | None = None
    memory: MemoryCurve | None = None
    plain_step_seconds: float | None = None
    profiled_step_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def busy_share(self) -> float | None:
        """Share of the window in which a device worked, the mean over devices; None without devices."""
        return self._average_over_devices(sum(device.busy_seconds for device in self.devices))

    @property
    def host_bound_share(self) -> float | None:
        """Share of the window in which a device waited for a launch; None if launches are not recorded."""
        known = [one.host_bound_seconds for one in self.devices if one.host_bound_seconds is not None]
        return self._average_over_devices(sum(known)) if len(known) == len(self.devices) else None

    def _average_over_devices(self, seconds: float) -> float | None:
        total = self.window_seconds * len(self.devices)
        return seconds / total if total else None

    def divide_by_steps(self, count: float | None) -> float | None:
        """Return a count per step; None if it or the number of steps is unknown."""
        return count / self.num_steps if count is not None and self.num_steps else None

    def as_dict(self) -> JsonTable:
        """Return the table of trace/summary.json, derived figures included."""
        return asdict(self) | {
            "busy_share": self.busy_share,
            "host_bound_share": self.host_bound_share,
            "launches_per_step": self.divide_by_steps(self.num_launches),
            "synchronisations_per_step": self.divide_by_steps(self.num_synchronisations),
        }
