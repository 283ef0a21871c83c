"""Arithmetic on the columns of a run: gaps, smoothing, thinning, quantiles.

A series is a list of numbers, with None for missing and non-finite values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fivetune.rundir.records import StepRecord

Series = list[float | None]

MAX_POINTS = 2000


def select_latest_by_step(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records in order of their steps; of a step that a resume repeated, the last record."""
    newest = {record.step: record for record in records}
    return [newest[step] for step in sorted(newest)]


def choose_smoothing_span(num_points: int) -> int:
    """Choose the span of the moving average for a number of points: 1 (no smoothing) for short series."""
    return 1 if num_points < 20 else max(5, num_points // 25)


def describe_smoothing(num_points: int) -> str:
    """Describe a chart's smoothing for its caption; "" without smoothing."""
    span = choose_smoothing_span(num_points)
    return "" if span == 1 else f" (light: each step; dark: moving average over about {span} steps)"


def smooth_series(series: Series, span: int) -> Series:
    """Exponential moving average over about `span` values, unbiased from the first value on.

    s_t = sum_i (1-a)^(t-i) x_i / sum_i (1-a)^(t-i) with a = 2 / (span + 1), over the known x_i; gaps stay gaps.

    >>> smooth_series([1.0, 3.0, None, 3.0], span=1)
    [1.0, 3.0, None, 3.0]
    """
    keep = 1 - 2 / (span + 1)
    weighted = weight = 0.0
    result: Series = []
    for value in series:
        if value is not None:
            weighted, weight = keep * weighted + value, keep * weight + 1
        result.append(None if value is None else weighted / weight)
    return result


def thin_points(xs: Sequence[float], ys: Series, *, limit: int = MAX_POINTS) -> tuple[list[float], Series]:
    """Select at most `limit` (>= 5) points in order: first, last, and lowest, highest and first gap of each stretch."""
    num = len(xs)
    if num <= limit:
        return list(xs), list(ys)
    kept = {0, num - 1}
    num_stretches = (limit - 2) // 3
    for stretch in range(num_stretches):
        places = range(stretch * num // num_stretches, (stretch + 1) * num // num_stretches)
        values: list[tuple[float, int]] = []
        first_gap: int | None = None
        for place in places:
            value = ys[place]
            if value is not None:
                values.append((value, place))
            elif first_gap is None:
                first_gap = place
        if values:
            kept |= {min(values)[1], max(values)[1]}
        if first_gap is not None:
            kept.add(first_gap)
    order = sorted(kept)
    return [xs[place] for place in order], [ys[place] for place in order]


def compute_quantile(values: Sequence[float], fraction: float) -> float | None:
    """Compute a quantile by linear interpolation between the two nearest sorted values; None without values.

    >>> compute_quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not values:
        return None
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def select_evenly(num_items: int, num_selected: int) -> list[int]:
    """Return the indices of about `num_selected` evenly spaced items, first and last included.

    >>> select_evenly(10, 4)
    [0, 3, 6, 9]
    """
    if num_items <= num_selected:
        return list(range(num_items))
    return [round(i * (num_items - 1) / (num_selected - 1)) for i in range(num_selected)]
