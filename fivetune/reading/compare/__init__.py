"""Comparison of runs: differences with confidence intervals, and checks that all runs did the same work. No torch.

In: Variants with their Runs. Out: a Comparison, which report/ renders.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fivetune.errors import RunDirError, suggest_names
from fivetune.reading.compare.changes import (
    ExampleChange,
    PredictionChanges,
    compare_predictions,
    compute_paired_difference,
    read_best_predictions,
)
from fivetune.reading.compare.measures import (
    MEASURES,
    SCORE_MEASURES,
    TIME_MEASURES,
    MeasureSpec,
    compute_measures,
    compute_seconds_to_score,
    find_best_metric_eval,
    find_best_score,
)
from fivetune.reading.compare.records import Comparison, Measure, Variant
from fivetune.reading.compare.same_work import check_same_work, describe_other_eval_sets, find_disturbed_runs
from fivetune.reading.compare.scaling import compute_scaling_efficiency, compute_scaling_losses, find_one_device_runs
from fivetune.reading.compare.spread import clip_interval, compare_to_baseline, summarise_values
from fivetune.reading.compare.variants import get_seed, group_runs
from fivetune.reading.diagnosis.rules import diagnose_run
from fivetune.rundir import read_run
from fivetune.tasks import is_higher_better
from fivetune.types import Verdict

__all__ = [
    "MEASURES",
    "ExampleChange",
    "MeasureSpec",
    "PredictionChanges",
    "compare",
    "compare_predictions",
    "compare_runs",
    "group_runs",
]

Values = dict[str, float | None]


def compare(
    variants: Sequence[Variant],
    *,
    title: str,
    metric: str | None = None,
    baseline: str | None = None,
    varied: Sequence[str] = (),
    price_per_hour: float | None = None,
) -> Comparison:
    """Measure variants and compare them with the baseline.

    Args:
        variants: with name, settings, runs and failures; `compare` computes the other fields.
        metric: the score to compare by; default: the one that chose the runs' best checkpoints.
        baseline: name of a variant; default: the first.
        varied: intended differences in settings; every other difference is a warning.
        price_per_hour: of the machine, in any currency.

    Raises RunDirError for an unknown baseline, and for a metric that no evaluation has.
    """
    names = [variant.name for variant in variants]
    baseline = baseline if baseline is not None else names[0]
    if baseline not in names:
        raise RunDirError(f"baseline: there is no variant {baseline!r}. {suggest_names(baseline, names)}")
    runs = [run for variant in variants for run in variant.runs]
    found = Counter(name for run in runs for record in run.evals for name in record.scores)
    if metric is None:
        chosen_by = Counter(run.status.best.metric for run in runs if run.status.best)
        metric = next((name for name, _ in (chosen_by or found).most_common(1)), "score")
    elif found and metric not in found:
        raise RunDirError(f"metric: no run has a score {metric!r}. {suggest_names(metric, found)}")
    for run in runs:
        read_best_predictions(run, metric)  # of every run, so that the warnings name all damage
    first = variants[names.index(baseline)]
    tables = _measure_runs(variants, baseline=first, metric=metric, price_per_hour=price_per_hour)
    verdicts = {variant.name: [diagnose_run(run) for run in variant.runs] for variant in variants}
    measured = [_measure_variant(variant, first, tables, metric, verdicts[variant.name]) for variant in variants]
    measured = [_add_scaling_losses(variant, variants) for variant in measured]
    better = is_higher_better((run.config for run in runs), metric)
    # Times that other load distorts and scores of other examples are shown, but not compared.
    disturbed, incomparable = find_disturbed_runs(variants), describe_other_eval_sets(variants, metric)
    excluded = (TIME_MEASURES if disturbed else set[str]()) | (SCORE_MEASURES if incomparable else set[str]())
    front = set[str]() if excluded else find_pareto_front(measured, higher_is_better=better)
    shown: list[Variant] = []
    for variant in measured:
        against = {name: one for name, one in variant.against.items() if name not in excluded}
        variant = replace(variant, pareto=variant.name in front, against=against)
        if incomparable:
            unknown = {"seconds_to_score": Measure(None)}
            variant = replace(variant, over_examples=None, measures={**variant.measures, **unknown})
        shown.append(variant)
    return Comparison(
        title=title,
        baseline=baseline,
        metric=metric,
        varied=tuple(varied),
        variants=tuple(shown),
        warnings=(*(text for run in runs for text in run.damage), *check_same_work(variants, verdicts, varied=varied)),
        disturbed=disturbed,
        incomparable=incomparable,
        higher_is_better=better,
        price_per_hour=price_per_hour,
    )


def compare_runs(
    folders: Sequence[str | Path], *, metric: str | None = None, baseline: str | None = None
) -> Comparison:
    """Compare run directories; runs that differ only in the seed are repeats of one variant.

    Args:
        folders: the run directories.
        metric: the score to compare by; default: the one that chose the runs' best checkpoints.
        baseline: a run's name without `-seedN`; default: the first.

    Returns the Comparison. Raises RunDirError for a folder that is not a run directory, and for fewer than two
    variants.

    >>> import fivetune
    >>> changes = {"run.dir": "runs/lower", "optimizer.lr": 1e-4, "train.num_steps": 10}
    >>> other = fivetune.train("runs/tickets", changes, quiet=True)
    >>> comparison = fivetune.compare_runs(["runs/tickets", "runs/lower"])
    >>> [variant.name for variant in comparison.variants], comparison.metric
    (['tickets', 'lower'], 'accuracy')
    """
    variants, varied = group_runs([read_run(folder) for folder in folders])
    if len(variants) < 2:
        raise RunDirError("compare: the runs differ in the seed at most. Give runs with different settings.")
    title = " and ".join(variant.name for variant in variants) if len(variants) < 4 else "Runs compared"
    return compare(variants, title=title, metric=metric, baseline=baseline, varied=varied)


# --- measures ---


def _measure_runs(
    variants: Sequence[Variant], *, baseline: Variant, metric: str, price_per_hour: float | None
) -> dict[str, list[tuple[int | None, Values]]]:
    """Compute the measures of every run: by variant, (seed, measures) in the order of its runs."""
    targets = {get_seed(run): find_best_score(run, metric) for run in baseline.runs}
    known = [target for target in targets.values() if target is not None]
    typical = statistics.median(known) if known else None
    higher = is_higher_better((run.config for run in baseline.runs), metric)
    tables: dict[str, list[tuple[int | None, Values]]] = {}
    for variant in variants:
        tables[variant.name] = []
        for run in variant.runs:
            seed, table = get_seed(run), compute_measures(run, metric=metric, price_per_hour=price_per_hour)
            target = targets.get(seed, typical)
            # Where higher is better, every run has a score of 0 before its first step.
            if target is not None and not (higher and target == 0):
                table["seconds_to_score"] = compute_seconds_to_score(run, metric, target)
            table["scaling_efficiency"] = compute_scaling_efficiency(run, find_one_device_runs(run, variants))
            tables[variant.name].append((seed, table))
    return tables


def _measure_variant(
    variant: Variant,
    baseline: Variant,
    tables: Mapping[str, list[tuple[int | None, Values]]],
    metric: str,
    verdicts: Sequence[Sequence[Verdict]],
) -> Variant:
    """Return a variant with its measures and differences.

    Args:
        tables: the measures of each run, by variant.
        verdicts: on each run of this variant.
    """
    own, theirs = tables[variant.name], tables[baseline.name]
    most = {"score": 100.0, "loss": math.inf}
    measures: dict[str, Measure] = {}
    differences: dict[str, Measure] = {}
    is_compared = variant.name != baseline.name and own and theirs
    for name, kind in MEASURES.items():
        measure = summarise_values(name, [table[name] for _, table in own])
        measures[name] = clip_interval(measure, maximum=most[kind.kind]) if kind.kind in most else measure
        if is_compared:
            sides = [[(seed, table[name]) for seed, table in side] for side in (own, theirs)]
            differences[name] = compare_to_baseline(name, *sides)
    if len(variant.runs) == 1:  # a single run has no interval over seeds, but the recorded one over examples
        best = find_best_metric_eval(variant.runs[0], metric)
        if best is not None and metric in best.intervals:
            low, high = best.intervals[metric]
            measures["score_best"] = replace(measures["score_best"], low=low, high=high, spread="examples")
    over_examples = None
    if is_compared:
        # Seeds that both sides have are compared pair by pair: other seeds would add their own chance.
        shared = {seed for seed, _ in own} & {seed for seed, _ in theirs}
        chosen = [[run for run in side.runs if not shared or get_seed(run) in shared] for side in (variant, baseline)]
        evaluated = [[(run, find_best_metric_eval(run, metric)) for run in side] for side in chosen]
        over_examples = compute_paired_difference(*evaluated, metric=metric)
    # The verdicts that more than half of the runs share, each with the message of the first such run.
    counts = Counter(verdict.rule for each in verdicts for verdict in each)
    agreed: dict[str, Verdict] = {}
    for verdict in (verdict for each in verdicts for verdict in each):
        if 2 * counts[verdict.rule] > len(verdicts):
            agreed.setdefault(verdict.rule, verdict)
    return replace(
        variant,
        measures=measures,
        against=differences,
        over_examples=over_examples,
        verdicts=tuple(agreed.values()),
    )


def _add_scaling_losses(variant: Variant, variants: Sequence[Variant]) -> Variant:
    efficiency = variant.measures["scaling_efficiency"].value
    if efficiency is None:
        return variant
    reference = find_one_device_runs(variant.runs[0], variants)
    return replace(variant, scaling_losses=compute_scaling_losses(variant.runs, reference, efficiency))


def find_pareto_front(variants: Sequence[Variant], *, higher_is_better: bool) -> set[str]:
    """Return the names of the variants that no other dominates in score and time; none if all scores are 0.

    A variant dominates another if it is at least as good in both, and better in one. Variants that learnt silence or
    one label are left out.
    """
    sign = 1 if higher_is_better else -1
    points: dict[str, tuple[float, float]] = {}
    for variant in variants:
        score, seconds = (variant.measures[name].value for name in ("score_best", "seconds"))
        if score is not None and seconds is not None and not variant.constant:
            points[variant.name] = (sign * score, -seconds)
    if higher_is_better and not any(score for score, _ in points.values()):
        return set()
    front: set[str] = set()
    for name, (score, speed) in points.items():
        better = [other for other in points.values() if other[0] >= score and other[1] >= speed]
        if set(better) == {(score, speed)}:
            front.add(name)
    return front
