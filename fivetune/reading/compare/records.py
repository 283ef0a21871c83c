"""The records of a comparison: measures, variants, and the comparison as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fivetune.rundir.records import Run
from fivetune.types import Verdict

CONSTANT_RULES = ("abstention", "majority_label")


@dataclass(frozen=True, slots=True)
class Measure:
    """Value and spread of one figure over a variant's runs, or of its difference to the baseline's.

    Args:
        low, high: by `spread`: the 95 % interval of a score over "seeds", or over the "examples" of one run; the two
            "values" of two runs, which are too few for an interval; the "range" (minimum, maximum) of other measures;
            None if `num` runs are too few.
        p_value: two-sided, of a difference over examples.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    num: int = 1
    spread: str = ""
    p_value: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end of the interval or range; None where they are unknown, or the values of two runs."""
        if self.low is None or self.high is None or self.spread == "values":
            return None
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of a comparison: its runs (one per seed) and their measures.

    Args:
        settings: the varied keys with their values.
        measures: by name (`compare.MEASURES`): score_best, score_last, seconds, examples_per_second, ...
        against: by the same names, this variant minus the baseline, or divided by it, as `compare.MEASURES` defines;
            over runs with the same seed. {} for the baseline.
        over_examples: best score minus the baseline's by a paired bootstrap over the examples, averaged over the
            shared seeds; None if the evaluations were not of the same examples.
        pareto: whether the variant is on the Pareto front of score and time.
        failures: a sentence for each run that did not finish.
        scaling_losses: 1 - scaling efficiency by phase of the step, as shares (0-1) of its time; {} if unknown.
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
    scaling_losses: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def constant(self) -> Verdict | None:
        """The verdict that its score comes from silence or from one label, so that it has learnt no task."""
        for verdict in self.verdicts:
            if verdict.rule in CONSTANT_RULES and verdict is not self.abstaining:
                return verdict
        return None

    @property
    def abstaining(self) -> Verdict | None:
        """The verdict that its score rose by answering less, while it still answers; None for a silent one."""
        for verdict in self.verdicts:
            if verdict.rule == "abstention":
                # Below the threshold no answer is right, as in a variant that is silent.
                is_silent = verdict.figure is not None and verdict.figure < (verdict.threshold or 0.0)
                return None if is_silent else verdict
        return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants beside their baseline; `warnings` are differences other than the varied keys.

    Args:
        disturbed: names of the runs that shared their machine with other work. If there is one, times and rates are
            not a property of the variants: `against` lacks them, and `pareto` is False for all.
        incomparable: the reason why scores are not compared, in sentences; "" if they are. Without comparable scores,
            `against` lacks them, and `pareto` is False for all.
        higher_is_better: whether a higher score of `metric` is better.
        price_per_hour: price of the machine, in any currency; None if unknown.
    """

    title: str
    baseline: str
    metric: str
    varied: tuple[str, ...]
    variants: tuple[Variant, ...]
    warnings: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()
    incomparable: str = ""
    higher_is_better: bool = True
    price_per_hour: float | None = None
