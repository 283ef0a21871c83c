"""The summary of a trace: work by class and by name, gaps of the devices, calls of the host, memory.

In: counts from `chrome.py` and `nsight.py`. Out: parts of a TraceSummary. Times are in seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fivetune.machine.profiling.kernels import CLASSES
from fivetune.rundir.trace import Work

NUM_TOP = 20
REST = "gradients, activations, temporary"  # the peak minus the parts that were counted from tensors
GAP_BOUNDS = (1e-5, 1e-4, 1e-3)
"""Upper bounds of the length classes of gaps, in seconds: 10 us (kernels launched ahead of time), 100 us, 1 ms."""

TimeSpan = tuple[float, float]


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
