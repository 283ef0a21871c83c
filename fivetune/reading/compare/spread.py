"""Summary statistics of a variant over its runs, and its difference to the baseline.

In: values by seed. Out: Measures: for scores and losses mean and 95 % interval over seeds, else median and range.
Of fewer than MIN_SEEDS values there is no interval: Student's t of two is so wide that it only says they are two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from fivetune.reading.compare.measures import MEASURES, SCORE_KINDS
from fivetune.reading.compare.records import Measure
from fivetune.scores.analysis.bootstrap import Z

MIN_SEEDS = 3

# 97.5th percentile of Student's t distribution with 1, 2, ... degrees of freedom (Student 1908; any table has them).
T_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip


def compute_t_quantile(degrees: int) -> float:
    """Compute the 97.5th percentile of Student's t; from 21 degrees on by its expansion (Abramowitz and Stegun 26.7.5).

    >>> round(compute_t_quantile(1), 2), round(compute_t_quantile(30), 3)
    (12.71, 2.042)
    """
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    return Z + first / degrees + second / degrees**2


def summarise_values(name: str, values: Sequence[float | None]) -> Measure:
    """Summarise one measure over the runs of a variant; `num` counts the runs that have it."""
    found = [value for value in values if value is not None]
    if MEASURES[name].kind in SCORE_KINDS or len(found) < 2:
        return compute_mean_interval(found)
    return Measure(statistics.median(found), min(found), max(found), len(found), spread="range")


def compute_mean_interval(values: Sequence[float]) -> Measure:
    """Compute the mean with its 95 % interval, mean -+ t s / sqrt(n); with the two values if there are no more.

    >>> compute_mean_interval([1.0, 3.0, 2.0])  # doctest: +ELLIPSIS
    Measure(value=2.0, low=-0.484..., high=4.484..., num=3, spread='seeds', p_value=None)
    """
    if len(values) < 2:
        return Measure(values[0] if values else None, num=len(values))
    mean = statistics.fmean(values)
    if len(values) < MIN_SEEDS:
        return Measure(mean, min(values), max(values), len(values), spread="values")
    reach = compute_t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Measure(mean, mean - reach, mean + reach, len(values), spread="seeds")


def clip_interval(measure: Measure, *, maximum: float = 100.0) -> Measure:
    """Clip an interval to [0, maximum], the scale of its measure, because Student's t is unbounded.

    >>> clip_interval(Measure(80.0, 43.0, 117.0)).high
    100.0
    """
    if measure.low is None or measure.high is None:
        return measure
    return replace(measure, low=max(measure.low, 0.0), high=min(measure.high, maximum))


def compare_to_baseline(
    name: str, ours: Sequence[tuple[int | None, float | None]], theirs: Sequence[tuple[int | None, float | None]]
) -> Measure:
    """Compare a variant with the baseline: paired by seed if they share seeds, else by their averages.

    Args:
        ours, theirs: (seed, value) of each run.

    >>> compare_to_baseline("seconds", [(1, 20.0), (2, 30.0)], [(1, 10.0), (2, 10.0)])
    Measure(value=2.5, low=2.0, high=3.0, num=2, spread='range', p_value=None)
    """
    left = list(theirs)
    pairs: list[tuple[float | None, float | None]] = []
    for seed, value in ours:
        partner = next((entry for entry in left if entry[0] == seed), None)
        if partner is not None:
            left.remove(partner)
            pairs.append((value, partner[1]))
    # Without a common seed the averages are all that can be compared.
    if not pairs:
        mean = summarise_values(name, [value for _, value in ours]).value
        baseline = summarise_values(name, [value for _, value in theirs]).value
        pairs.append((mean, baseline))
    is_difference = MEASURES[name].compared == "minus"
    changes: list[float | None] = []
    for a, b in pairs:
        if a is not None and b is not None and (b or is_difference):
            changes.append(a - b if is_difference else a / b)
    return summarise_values(name, changes)
