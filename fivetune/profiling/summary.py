"""The summary of a trace: work by class and by name, gaps of the devices, calls of the host, memory.

In: counts from `chrome.py` and `nsight.py`. Out: a TraceSummary, written as trace/summary.json. Times are in seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fivetune.profiling.kernels import CLASSES

NUM_TOP = 20
REST = "gradients, activations, temporary"  # the peak minus the parts that were counted from tensors
GAP_BOUNDS = (1e-5, 1e-4, 1e-3)
"""Upper bounds of the length classes of gaps, in seconds: 10 us (kernels launched ahead of time), 100 us, 1 ms."""

TimeSpan = tuple[float, float]


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

    @property
    def gap_seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.gaps)


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
        return count / self.num_steps if count is not None and self.num_steps else None

    def as_dict(self) -> dict[str, Any]:
        """The table of trace/summary.json, derived figures included."""
        return asdict(self) | {
            "busy_share": self.busy_share,
            "host_bound_share": self.host_bound_share,
            "launches_per_step": self.divide_by_steps(self.num_launches),
            "synchronisations_per_step": self.divide_by_steps(self.num_synchronisations),
        }


def rank_work(counted: Mapping[tuple[str, str], tuple[float, int]]) -> tuple[Work, ...]:
    """Convert (name, kind) -> (seconds, number) to Work, longest first."""
    total = sum(seconds for seconds, _ in counted.values())
    works = [
        Work(name, kind, seconds, num, seconds / total if total else 0.0)
        for (name, kind), (seconds, num) in counted.items()
    ]
    return tuple(sorted(works, key=lambda work: (-work.seconds, work.name)))


def sum_by_class(works: Iterable[Work]) -> tuple[Work, ...]:
    """Sum work by class, longest first."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for work in works:
        seconds, num = found.get((work.kind, work.kind), (0.0, 0))
        found[work.kind, work.kind] = (seconds + work.seconds, num + work.num)
    assert {kind for kind, _ in found} <= set(CLASSES)
    return rank_work(found)


def merge_spans(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    """Sort spans, and merge those that touch or overlap.

    >>> merge_spans([(4, 5), (0, 2), (1, 3)])
    [(0, 3), (4, 5)]
    """
    found: list[TimeSpan] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


class SpanCoverage:
    """The union of given spans, to measure how much of another span it covers.

    >>> SpanCoverage([(0, 2), (1, 3), (5, 6)]).measure_overlap(1, 5.5)
    2.5
    """

    def __init__(self, spans: Iterable[TimeSpan]) -> None:
        self.spans = merge_spans(spans)
        self._starts = [start for start, _ in self.spans]
        self._before = [0.0]
        for start, end in self.spans:
            self._before.append(self._before[-1] + end - start)

    def measure_overlap(self, start: float, end: float) -> float:
        """Covered part of [start, end], which may be empty."""
        return self._sum_before(end) - self._sum_before(start) if end > start else 0.0

    def _sum_before(self, time: float) -> float:
        place = bisect.bisect_right(self._starts, time)
        if not place:
            return 0.0
        start, end = self.spans[place - 1]
        return self._before[place - 1] + min(time, end) - start


def build_gap_histogram(gaps: Sequence[float]) -> tuple[tuple[float | None, int, float], ...]:
    """Count gaps by length class, as in DeviceTime.

    >>> build_gap_histogram([5e-6, 2e-3])[0], build_gap_histogram([5e-6, 2e-3])[-1]
    ((1e-05, 1, 5e-06), (None, 1, 0.002))
    """
    kept: list[list[float]] = [[] for _ in range(len(GAP_BOUNDS) + 1)]
    for gap in gaps:
        kept[bisect.bisect_left(GAP_BOUNDS, gap)].append(gap)
    return tuple((bound, len(some), sum(some)) for bound, some in zip((*GAP_BOUNDS, None), kept, strict=True))


def downsample_points(points: Sequence[tuple[float, int]], limit: int = 1000) -> Iterator[tuple[float, int]]:
    """Yield at most `limit` (>= 4) points in time order: first, last, and minimum and maximum of each interval.

    >>> list(downsample_points([(t, t % 7) for t in range(100)], limit=4))
    [(0, 0), (6, 6), (99, 1)]
    """
    if len(points) <= limit:
        yield from points
        return
    kept = {0, len(points) - 1}
    num_stretches = (limit - 2) // 2
    for stretch in range(num_stretches):
        places = range(stretch * len(points) // num_stretches, (stretch + 1) * len(points) // num_stretches)
        kept |= {min(places, key=lambda i: points[i][1]), max(places, key=lambda i: points[i][1])}
    yield from (points[place] for place in sorted(kept))
