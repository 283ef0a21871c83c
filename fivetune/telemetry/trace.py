"""What a trace says, in one record: work by class and by name, gaps of the devices, calls of the host, memory.

In: what `chrome.py` and `nsight.py` counted. Out: a TraceSummary, which is trace/summary.json. All times are seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fivetune.telemetry.kernels import CLASSES

NUM_TOP = 20
REST = "gradients, activations, temporary"  # what the peak holds beside what was counted from the tensors
GAP_BOUNDS = (1e-5, 1e-4, 1e-3)
"""Gaps are counted up to 10 us (between kernels that were launched in time), 100 us, 1 ms, and longer, in seconds."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Work:
    """Some of the work: how long, how often, its share (0-1) of the time of all work.

    `kind` is one of kernels.CLASSES; "call" for what the host called.
    """

    name: str
    kind: str
    seconds: float
    num: int
    share: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Memory operations of one direction: HtoD, DtoH, DtoD, ..., memory set. Bytes are None where nobody counted."""

    direction: str
    num: int
    seconds: float
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of the steps, as far as it lies in the window.

    Args:
        host_seconds: on the host's clock.
        device_seconds: of the device work that the host launched in it; None without a device.
        idle_seconds: in which no work ran on the device meanwhile.
    """

    name: str
    num: int
    host_seconds: float
    device_seconds: float | None = None
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """One device in the window. Overlapping work counts once in `busy_seconds`; gaps lie between pieces of work.

    Args:
        gaps: (up to so many seconds, number, seconds in all); None is the bound of the longest.
        host_bound_seconds: in gaps, until the host had launched what came next; None where launches are not recorded.
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
class Memory:
    """Allocated bytes over time, thinned with highs and lows kept.

    Args:
        since_start: what was there before the window is not in the curve (host memory), only in `parts`.
        parts: bytes by category: those counted from the tensors, and what is left at the peak.
    """

    kind: str
    points: tuple[tuple[float, int], ...]
    peak_bytes: int
    since_start: bool
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a window of a run was spent on; what is unknown is None.

    Args:
        source: torch.profiler, or Nsight Systems.
        measures: "kernels" of devices, or "operators" of the host where no device took part.
        window_seconds: first step to the end of the last; for a capture, first to last device work.
        classes: all of kernels.CLASSES that occurred, the longest first; the shares sum to 1.
        top: the NUM_TOP names that took longest.
        outside_seconds: of the window, spent outside any operator (Python, waiting); only for operators.
        calls: what the host called of CUDA, likewise the NUM_TOP longest.
        num_launches, num_synchronisations: calls of the host in the window.
        plain_step_seconds: mean of the same steps without profiler; profiled_step_seconds: in the window.
        notes: what a reader must know about the figures, a sentence each.
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
    memory: Memory | None = None
    plain_step_seconds: float | None = None
    profiled_step_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def busy_share(self) -> float | None:
        """Share of the window in which a device worked, the mean of all; None without devices."""
        return self._of_devices(sum(device.busy_seconds for device in self.devices))

    @property
    def host_bound_share(self) -> float | None:
        """Share of the window in which a device waited for the host to launch; None where launches are unknown."""
        known = [one.host_bound_seconds for one in self.devices if one.host_bound_seconds is not None]
        return self._of_devices(sum(known)) if len(known) == len(self.devices) else None

    def _of_devices(self, seconds: float) -> float | None:
        total = self.window_seconds * len(self.devices)
        return seconds / total if total else None

    def per_step(self, count: float | None) -> float | None:
        return count / self.num_steps if count is not None and self.num_steps else None

    def as_dict(self) -> dict[str, Any]:
        """For trace/summary.json, with what is derived."""
        return asdict(self) | {
            "busy_share": self.busy_share,
            "host_bound_share": self.host_bound_share,
            "launches_per_step": self.per_step(self.num_launches),
            "synchronisations_per_step": self.per_step(self.num_synchronisations),
        }


def ranked(counted: Mapping[tuple[str, str], tuple[float, int]]) -> tuple[Work, ...]:
    """(name, kind) -> (seconds, number), as Work, the longest first."""
    total = sum(seconds for seconds, _ in counted.values())
    works = [
        Work(name, kind, seconds, num, seconds / total if total else 0.0)
        for (name, kind), (seconds, num) in counted.items()
    ]
    return tuple(sorted(works, key=lambda work: (-work.seconds, work.name)))


def by_class(works: Iterable[Work]) -> tuple[Work, ...]:
    """Work by name, gathered by class."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for work in works:
        seconds, num = found.get((work.kind, work.kind), (0.0, 0))
        found[work.kind, work.kind] = (seconds + work.seconds, num + work.num)
    assert {kind for kind, _ in found} <= set(CLASSES)
    return ranked(found)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that touch or overlap as one.

    >>> joined([(4, 5), (0, 2), (1, 3)])
    [(0, 3), (4, 5)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


class Cover:
    """How much of a span is covered by given spans.

    >>> Cover([(0, 2), (1, 3), (5, 6)]).seconds(1, 5.5)
    2.5
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = joined(spans)
        self._starts = [start for start, _ in self.spans]
        self._before = [0.0]
        for start, end in self.spans:
            self._before.append(self._before[-1] + end - start)

    def seconds(self, start: float, end: float) -> float:
        """Covered part of [start, end], which may be empty."""
        return self._until(end) - self._until(start) if end > start else 0.0

    def _until(self, time: float) -> float:
        place = bisect.bisect_right(self._starts, time)
        if not place:
            return 0.0
        start, end = self.spans[place - 1]
        return self._before[place - 1] + min(time, end) - start


def gap_table(gaps: Sequence[float]) -> tuple[tuple[float | None, int, float], ...]:
    """Gaps by length, as in DeviceTime.

    >>> gap_table([5e-6, 2e-3])[0], gap_table([5e-6, 2e-3])[-1]
    ((1e-05, 1, 5e-06), (None, 1, 0.002))
    """
    kept: list[list[float]] = [[] for _ in range(len(GAP_BOUNDS) + 1)]
    for gap in gaps:
        kept[bisect.bisect_left(GAP_BOUNDS, gap)].append(gap)
    return tuple((bound, len(some), sum(some)) for bound, some in zip((*GAP_BOUNDS, None), kept, strict=True))


def thinned(points: Sequence[tuple[float, int]], limit: int = 1000) -> Iterator[tuple[float, int]]:
    """At most `limit` (>= 4) points in order of time: first and last, the lowest and the highest of each stretch.

    >>> list(thinned([(t, t % 7) for t in range(100)], limit=4))
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
