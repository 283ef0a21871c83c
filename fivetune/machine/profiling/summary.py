"""The summary of a trace: work by class and by name, gaps of the devices, calls of the host, memory.

In: counts from `chrome.py` and `nsight.py`. Out: parts of a TraceSummary. Times are in seconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from fivetune.rundir.trace import Work

NUM_TOP = 20
REST = "gradients, activations, temporary"  # the peak minus the parts that were counted from tensors
GAP_BOUNDS = (1e-5, 1e-4, 1e-3)
"""Upper bounds of the length classes of gaps, in seconds: 10 us (kernels launched ahead of time), 100 us, 1 ms."""

TimeSpan = tuple[float, float]


def sum_work(rows: Iterable[tuple[str, str, float, int]]) -> tuple[Work, ...]:
    """Sum rows of name, kind, seconds and number by name and kind, longest first.

    >>> [(work.name, work.seconds, work.num) for work in sum_work([("mm", "GEMM", 1.0, 1), ("mm", "GEMM", 2.0, 3)])]
    [('mm', 3.0, 4)]
    """
    found: dict[tuple[str, str], tuple[float, int]] = {}
    total = 0.0
    for name, kind, seconds, num in rows:
        seconds_before, num_before = found.get((name, kind), (0.0, 0))
        found[name, kind] = (seconds_before + seconds, num_before + num)
        total += seconds
    works: list[Work] = []
    for (name, kind), (seconds, num) in found.items():
        share = seconds / total if total else 0.0
        works.append(Work(name, kind, seconds, num, share))
    return tuple(sorted(works, key=lambda work: (-work.seconds, work.name)))


def sum_by_class(works: Iterable[Work]) -> tuple[Work, ...]:
    """Sum work by class, longest first."""
    return sum_work((work.kind, work.kind, work.seconds, work.num) for work in works)


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
        self.seconds = 0.0
        self._starts: list[float] = []
        self._before: list[float] = []  # seconds of the spans before each span
        for start, end in self.spans:
            self._starts.append(start)
            self._before.append(self.seconds)
            self.seconds += end - start

    def measure_overlap(self, start: float, end: float) -> float:
        """Covered part of [start, end], which may be empty."""
        if end <= start:
            return 0.0
        return self._sum_before(end) - self._sum_before(start)

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
    bounds = (*GAP_BOUNDS, None)
    nums, seconds = [0] * len(bounds), [0.0] * len(bounds)
    for gap in gaps:
        place = bisect.bisect_left(GAP_BOUNDS, gap)
        nums[place] += 1
        seconds[place] += gap
    return tuple(zip(bounds, nums, seconds, strict=True))


def downsample_points(points: Sequence[tuple[float, int]], limit: int = 1000) -> Iterator[tuple[float, int]]:
    """Yield at most `limit` (>= 4) points in time order: first, last, and minimum and maximum of each interval.

    >>> list(downsample_points([(t, t % 7) for t in range(100)], limit=4))
    [(0, 0), (6, 6), (99, 1)]
    """
    if len(points) <= limit:
        yield from points
        return
    kept = {0, len(points) - 1}
    num_intervals = (limit - 2) // 2
    for interval in range(num_intervals):
        places = range(interval * len(points) // num_intervals, (interval + 1) * len(points) // num_intervals)
        # both extremes, because a short peak is what a memory curve is read for
        kept.add(min(places, key=lambda place: points[place][1]))
        kept.add(max(places, key=lambda place: points[place][1]))
    for place in sorted(kept):
        yield points[place]
