"""The records of a comparison: measures, variants, and the comparison as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fivetune.rundir.records import Run
from fivetune.types import Verdict


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a variant over its runs, or its difference to the baseline's: value and range.

    Args:
        low, high: of the kind `spread`: the 95 % interval of a score over the "seeds", or over the "examples" of one
            run; the "range" (minimum, maximum) of other measures; None where `num` runs are too few.
        p_value: two-sided, of a difference over examples.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    num: int = 1
    spread: str = ""
    p_value: float | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of a comparison: its runs (one per seed) and their measures.

    Args:
        settings: the varied keys with their values.
        measures: by name (`compare.MEASURES`): score_best, score_last, seconds, examples_per_second, ...
        against: the same names: this variant minus the baseline, or divided by it, as `compare.MEASURES` says; over
            runs with the same seed. {} for the baseline.
        over_examples: best score minus the baseline's by a paired bootstrap over the examples, of each the mean over
            the seeds that both have; None where the evaluations were not of the same examples.
        pareto: no other variant is both better and cheaper.
        failures: why runs did not finish, a sentence each.
    """

    name: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    measures: Mapping[str, Measure]
    against: Mapping[str, Measure] = field(default_factory=dict[str, Measure])
    verdicts: tuple[Verdict, ...] = ()
    pareto: bool = False
    failures: tuple[str, ...] = ()
    over_examples: Measure | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants beside their baseline; `warnings` are differences other than the varied keys.

    Args:
        disturbed: names of the runs beside which other work used the machine. Where there is one, times and rates of
            the variants are no property of the variants: nothing is concluded from them, and `pareto` is False for all.
        higher_is_better: of `metric`.
        price_per_hour: of the machine, in any currency; None if unknown.
    """

    title: str
    baseline: str
    metric: str
    varied: tuple[str, ...]
    variants: tuple[Variant, ...]
    warnings: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()
    higher_is_better: bool = True
    price_per_hour: float | None = None
