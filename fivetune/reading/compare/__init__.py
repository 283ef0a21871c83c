"""Comparison of runs: differences with confidence intervals, and checks that all runs did the same work. No torch.

In: Variants with their Runs. Out: a Comparison, which report/ renders.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from fivetune.reading.compare.variants import find_differing_settings, get_seed, group_runs
from fivetune.reading.diagnosis.rules import diagnose_run
from fivetune.rundir import read_run
from fivetune.rundir.records import Run
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
    "find_differing_settings",
    "group_runs",
    "measure_runs",
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
    metric = _choose_metric(runs, metric)
    for run in runs:
        read_best_predictions(run, metric)  # of every run, so that the warnings name all damage
    first = next(variant for variant in variants if variant.name == baseline)
    tables = measure_runs(variants, baseline=first, metric=metric, price_per_hour=price_per_hour)
    verdicts = {variant.name: [diagnose_run(run) for run in variant.runs] for variant in variants}
    measured = [
        _add_scaling_losses(_measure_variant(variant, first, tables, metric, verdicts[variant.name]), variants)
        for variant in variants
    ]
    better = is_higher_better((run.config for run in runs), metric)
    disturbed = find_disturbed_runs(variants)
    incomparable = describe_other_eval_sets(variants, metric)
    kinds = ((TIME_MEASURES, bool(disturbed)), (SCORE_MEASURES, bool(incomparable)))
    excluded = {name for names, is_excluded in kinds if is_excluded for name in names}
    front: set[str] = set() if excluded else find_pareto_front(measured, higher_is_better=better)
    return Comparison(
        title=title,
        baseline=baseline,
        metric=metric,
        varied=tuple(varied),
        variants=tuple(
            replace(
                variant,
                pareto=variant.name in front,
                against={name: one for name, one in variant.against.items() if name not in excluded},
                over_examples=None if incomparable else variant.over_examples,
                measures={**variant.measures, **({"seconds_to_score": Measure(None)} if incomparable else {})},
            )
            for variant in measured
        ),
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
    >>> other = fivetune.train("runs/tickets", {"run.dir": "runs/lower", "optimizer.lr": 1e-4}, quiet=True)
    >>> comparison = fivetune.compare_runs(["runs/tickets", "runs/lower"])
    >>> [variant.name for variant in comparison.variants], comparison.metric
    (['tickets', 'lower'], 'accuracy')
    """
    variants, varied = group_runs([read_run(folder) for folder in folders])
    if len(variants) < 2:
        raise RunDirError("compare: the runs differ in the seed at most. Give runs with different settings.")
    title = " and ".join(variant.name for variant in variants) if len(variants) < 4 else "Runs compared"
    return compare(variants, title=title, metric=metric, baseline=baseline, varied=varied)


def _choose_metric(runs: Sequence[Run], requested: str | None) -> str:
    """Return the score to compare by. Raises RunDirError if the runs have scores, but not the requested one."""
    found = Counter(name for run in runs for record in run.evals for name in record.scores)
    if requested is not None:
        if found and requested not in found:
            raise RunDirError(f"metric: no run has a score {requested!r}. {suggest_names(requested, found)}")
        return requested
    chosen_by = Counter(run.status.best.metric for run in runs if run.status.best)
    return next((name for name, _ in (chosen_by or found).most_common(1)), "score")


# --- measures ---


def measure_runs(
    variants: Sequence[Variant], *, baseline: Variant, metric: str, price_per_hour: float | None = None
) -> dict[str, list[tuple[int | None, Values]]]:
    """Compute the measures of every run: by variant, (seed, measures) in the order of its runs."""
    tables = {
        variant.name: [
            (get_seed(run), compute_measures(run, metric=metric, price_per_hour=price_per_hour)) for run in variant.runs
        ]
        for variant in variants
    }
    targets = {get_seed(run): find_best_score(run, metric) for run in baseline.runs}
    typical = _compute_median(targets.values())
    higher = is_higher_better((run.config for run in baseline.runs), metric)
    for variant in variants:
        for run, (seed, table) in zip(variant.runs, tables[variant.name], strict=True):
            target = targets.get(seed, typical)
            if target is None or (higher and target == 0):  # every run has a score of 0 before its first step
                table["seconds_to_score"] = None
            else:
                table["seconds_to_score"] = compute_seconds_to_score(run, metric, target)
            table["scaling_efficiency"] = compute_scaling_efficiency(run, find_one_device_runs(run, variants))
    return tables


def _compute_median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _measure_variant(
    variant: Variant,
    baseline: Variant,
    tables: Mapping[str, list[tuple[int | None, Values]]],
    metric: str,
    verdicts: Sequence[Sequence[Verdict]],
) -> Variant:
    """Return a variant with its measures and differences.

    Args:
        tables: the measures of each run, by variant. verdicts: on each run of this variant.
    """
    own, theirs = tables[variant.name], tables[baseline.name]
    measures = {name: summarise_values(name, [table[name] for _, table in own]) for name in MEASURES}
    most = {"score": 100.0, "loss": math.inf}
    measures |= {n: clip_interval(measures[n], maximum=most[k.kind]) for n, k in MEASURES.items() if k.kind in most}
    if len(variant.runs) == 1:
        measures["score_best"] = _add_interval(measures["score_best"], variant.runs[0], metric)
    differences: dict[str, Measure] = {}
    over_examples = None
    if variant.name != baseline.name and own and theirs:
        differences = {
            name: compare_to_baseline(name, [(s, t[name]) for s, t in own], [(s, t[name]) for s, t in theirs])
            for name in MEASURES
        }
        shared = {seed for seed, _ in own} & {seed for seed, _ in theirs}
        sides = [
            [(run, find_best_metric_eval(run, metric)) for run in side.runs if not shared or get_seed(run) in shared]
            for side in (variant, baseline)
        ]
        over_examples = compute_paired_difference(*sides, metric=metric)
    return replace(
        variant,
        measures=measures,
        against=differences,
        over_examples=over_examples,
        verdicts=_select_majority_verdicts(verdicts),
    )


def _add_scaling_losses(variant: Variant, variants: Sequence[Variant]) -> Variant:
    efficiency = variant.measures["scaling_efficiency"].value
    if efficiency is None:
        return variant
    reference = find_one_device_runs(variant.runs[0], variants)
    return replace(variant, scaling_losses=compute_scaling_losses(variant.runs, reference, efficiency))


def _add_interval(measure: Measure, run: Run, metric: str) -> Measure:
    """Return the score of a single run with the recorded interval over examples."""
    best = find_best_metric_eval(run, metric)
    if best is None or metric not in best.intervals:
        return measure
    low, high = best.intervals[metric]
    return replace(measure, low=low, high=high, spread="examples")


def _select_majority_verdicts(verdicts: Sequence[Sequence[Verdict]]) -> tuple[Verdict, ...]:
    """Return the verdicts that more than half of the runs share, each with the message of the first such run."""
    found = [verdict for own in verdicts for verdict in own]
    agreed = {rule for rule, num in Counter(verdict.rule for verdict in found).items() if 2 * num > len(verdicts)}
    first: dict[str, Verdict] = {}
    for verdict in found:
        if verdict.rule in agreed:
            first.setdefault(verdict.rule, verdict)
    return tuple(first.values())


def find_pareto_front(variants: Sequence[Variant], *, higher_is_better: bool) -> set[str]:
    """Return the names of the variants that no other dominates in score and time; none if all scores are 0.

    Variants that learnt silence or one label are left out.
    """
    sign = 1 if higher_is_better else -1
    points: dict[str, tuple[float, float]] = {}
    for variant in variants:
        score, seconds = (variant.measures[name].value for name in ("score_best", "seconds"))
        if score is not None and seconds is not None and not variant.constant:
            points[variant.name] = (sign * score, -seconds)
    if higher_is_better and not any(score for score, _ in points.values()):
        return set()
    return {
        name for name, point in points.items() if not any(_is_dominating(other, point) for other in points.values())
    }


def _is_dominating(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether `a` dominates `b`: at least as good in both coordinates, and better in one."""
    return a != b and a[0] >= b[0] and a[1] >= b[1]
