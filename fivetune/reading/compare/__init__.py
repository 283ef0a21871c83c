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
from fivetune.rundir.records import EvalRecord, Run
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
        variants: variants with name, settings, runs and failures; `compare` computes the other fields.
        metric: score to compare by; default: the score that chose the runs' best checkpoints.
        baseline: name of a variant; default: the first.
        varied: intended differences in settings; every other difference is a warning.
        price_per_hour: price of the machine, in any currency.

    Raises RunDirError for an unknown baseline, and for a metric that no evaluation has.
    """
    names = [variant.name for variant in variants]
    baseline = baseline if baseline is not None else names[0]
    if baseline not in names:
        raise RunDirError(f"baseline: there is no variant {baseline!r}. {suggest_names(baseline, names)}")
    runs = [run for variant in variants for run in variant.runs]
    metric = _choose_metric(runs, metric)
    # The predictions of every run are read now, so that the warnings name all damage.
    for run in runs:
        read_best_predictions(run, metric)
    first = variants[names.index(baseline)]
    tables = _measure_runs(variants, baseline=first, metric=metric, price_per_hour=price_per_hour)
    verdicts = {variant.name: [diagnose_run(run) for run in variant.runs] for variant in variants}
    measured: list[Variant] = []
    for variant in variants:
        one = _measure_variant(variant, first, tables, metric, verdicts[variant.name])
        measured.append(_add_scaling_losses(one, variants))
    better = is_higher_better((run.config for run in runs), metric)
    # Times that other load distorts and scores of other examples are shown, but not compared.
    disturbed = find_disturbed_runs(variants)
    incomparable = describe_other_eval_sets(variants, metric)
    excluded: set[str] = set()
    if disturbed:
        excluded |= TIME_MEASURES
    if incomparable:
        excluded |= SCORE_MEASURES
    front: set[str] = set()
    if not excluded:
        front = find_pareto_front(measured, higher_is_better=better)
    shown: list[Variant] = []
    for variant in measured:
        against = {name: one for name, one in variant.against.items() if name not in excluded}
        variant = replace(variant, pareto=variant.name in front, against=against)
        if incomparable:
            measures = {**variant.measures, "seconds_to_score": Measure(None)}
            variant = replace(variant, over_examples=None, measures=measures)
        shown.append(variant)
    damage = [text for run in runs for text in run.damage]
    return Comparison(
        title=title,
        baseline=baseline,
        metric=metric,
        varied=tuple(varied),
        variants=tuple(shown),
        warnings=(*damage, *check_same_work(variants, verdicts, varied=varied)),
        disturbed=disturbed,
        incomparable=incomparable,
        higher_is_better=better,
        price_per_hour=price_per_hour,
    )


def _choose_metric(runs: Sequence[Run], metric: str | None) -> str:
    """Return a metric that the runs have: the given one, else the one that chose most of the best checkpoints."""
    found: Counter[str] = Counter()
    chosen_by: Counter[str] = Counter()
    for run in runs:
        for record in run.evals:
            found.update(record.scores.keys())
        if run.status.best:
            chosen_by[run.status.best.metric] += 1
    if metric is not None:
        if found and metric not in found:
            raise RunDirError(f"metric: no run has a score {metric!r}. {suggest_names(metric, found)}")
        return metric
    most_common = (chosen_by or found).most_common(1)
    return most_common[0][0] if most_common else "score"


def compare_runs(
    folders: Sequence[str | Path], *, metric: str | None = None, baseline: str | None = None
) -> Comparison:
    """Compare run directories; runs that differ only in the seed are repeats of one variant.

    Args:
        folders: run directories.
        metric: score to compare by; default: the score that chose the runs' best checkpoints.
        baseline: name of a run without `-seedN`; default: the first.

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
            seed = get_seed(run)
            table = compute_measures(run, metric=metric, price_per_hour=price_per_hour)
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
        tables: measures of each run, by variant.
        verdicts: verdicts on each run of this variant.
    """
    own = tables[variant.name]
    theirs = tables[baseline.name]
    is_compared = variant.name != baseline.name and own and theirs
    most = {"score": 100.0, "loss": math.inf}
    measures: dict[str, Measure] = {}
    differences: dict[str, Measure] = {}
    for name, spec in MEASURES.items():
        ours = [(seed, table[name]) for seed, table in own]
        measure = summarise_values(name, [value for _, value in ours])
        if spec.kind in most:
            measure = clip_interval(measure, maximum=most[spec.kind])
        measures[name] = measure
        if is_compared:
            differences[name] = compare_to_baseline(name, ours, [(seed, table[name]) for seed, table in theirs])
    # A single run has no interval over seeds, but the recorded one over examples.
    if len(variant.runs) == 1:
        best = find_best_metric_eval(variant.runs[0], metric)
        if best is not None and metric in best.intervals:
            low, high = best.intervals[metric]
            measures["score_best"] = replace(measures["score_best"], low=low, high=high, spread="examples")
    over_examples = None
    if is_compared:
        # Seeds that both sides have are compared pair by pair: other seeds would add their own chance.
        shared = {seed for seed, _ in own} & {seed for seed, _ in theirs}
        sides: list[list[tuple[Run, EvalRecord | None]]] = []
        for runs in (variant.runs, baseline.runs):
            chosen = [run for run in runs if not shared or get_seed(run) in shared]
            sides.append([(run, find_best_metric_eval(run, metric)) for run in chosen])
        over_examples = compute_paired_difference(*sides, metric=metric)
    # The verdicts that more than half of the runs share, each with the message of the first such run.
    every = [verdict for found in verdicts for verdict in found]
    counts = Counter(verdict.rule for verdict in every)
    agreed: dict[str, Verdict] = {}
    for verdict in every:
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
        score = variant.measures["score_best"].value
        seconds = variant.measures["seconds"].value
        if score is not None and seconds is not None and not variant.constant:
            points[variant.name] = (sign * score, -seconds)
    if higher_is_better and not any(score for score, _ in points.values()):
        return set()
    front: set[str] = set()
    for name, point in points.items():
        score, speed = point
        # The point itself is as good in both; any other point as good in both is better in one.
        if all(other == point or other[0] < score or other[1] < speed for other in points.values()):
            front.add(name)
    return front
