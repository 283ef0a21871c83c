"""Runs side by side: what differs, by how much, how sure, and whether they did the same work. No torch.

In: Variants with their Runs. Out: a Comparison, which report/ shows.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fivetune.compare.changes import Change, Changes, changes, paired_difference
from fivetune.compare.measures import MEASURES, Kind, best_eval, is_higher_better, measures_of, peak, seconds_to
from fivetune.compare.same_work import warnings_of
from fivetune.compare.spread import against, summary, within_scale
from fivetune.compare.variants import differing, group_runs, seed_of, settings_of
from fivetune.errors import RunDirError, nearest
from fivetune.telemetry.verdict import verdicts_of
from fivetune.types import Comparison, Measure, Run, Variant, Verdict
from fivetune.values import known, number

__all__ = ["MEASURES", "Change", "Changes", "Kind", "changes", "compare", "differing", "group_runs", "run_measures"]

Values = dict[str, float | None]

SHARING = ("launch.", "strategy.")  # settings that say how many devices share the work, and how
BATCH = ("train.batch_size", "train.global_batch_size")  # may grow with the devices


def compare(
    variants: Sequence[Variant],
    *,
    title: str,
    metric: str | None = None,
    baseline: str | None = None,
    varied: Sequence[str] = (),
    price_per_hour: float | None = None,
) -> Comparison:
    """Measure variants and hold them against the baseline.

    Args:
        variants: name, settings, runs and failures; the rest is found out here.
        metric: the score that counts; default: the one that the runs chose their best weights by.
        baseline: name of a variant; default: the first.
        varied: the settings that are meant to differ; every other difference is a warning.
        price_per_hour: of the machine, in any currency.

    Raises RunDirError for a baseline that is no variant, or a metric that no evaluation has.
    """
    names = [variant.name for variant in variants]
    baseline = baseline if baseline is not None else names[0]
    if baseline not in names:
        raise RunDirError(f"baseline: there is no variant {baseline!r}. {nearest(baseline, names)}")
    runs = [run for variant in variants for run in variant.runs]
    metric = _metric(runs, metric)
    first = next(variant for variant in variants if variant.name == baseline)
    tables = run_measures(variants, baseline=first, metric=metric, price_per_hour=price_per_hour)
    measured = [_measured(variant, first, tables, metric) for variant in variants]
    better = is_higher_better(runs, metric)
    front = pareto(measured, higher_is_better=better)
    return Comparison(
        title=title,
        baseline=baseline,
        metric=metric,
        varied=tuple(varied),
        variants=tuple(replace(variant, pareto=variant.name in front) for variant in measured),
        warnings=tuple(warnings_of(variants, varied=varied)),
        higher_is_better=better,
        price_per_hour=price_per_hour,
    )


def _metric(runs: Sequence[Run], asked: str | None) -> str:
    """The score that counts. Raises RunDirError if there are scores and it is none of them."""
    found = Counter(name for run in runs for record in run.evals for name in record.get("scores") or {})
    if asked is not None:
        if found and asked not in found:
            raise RunDirError(f"metric: no run has a score {asked!r}. {nearest(asked, found)}")
        return asked
    said = Counter(name for run in runs if (name := (run.status.get("best") or {}).get("metric")))
    return next((name for name, _ in (said or found).most_common(1)), "score")


# --- measures ---


def run_measures(
    variants: Sequence[Variant], *, baseline: Variant, metric: str, price_per_hour: float | None = None
) -> dict[str, list[tuple[int | None, Values]]]:
    """The measures of every run: by variant, (seed, measures) in the order of its runs."""
    tables = {
        variant.name: [
            (seed_of(run), measures_of(run, metric=metric, price_per_hour=price_per_hour)) for run in variant.runs
        ]
        for variant in variants
    }
    targets = {seed_of(run): peak(run, metric) for run in baseline.runs}
    typical = _median(targets.values())
    for variant in variants:
        for run, (seed, table) in zip(variant.runs, tables[variant.name], strict=True):
            target = targets.get(seed, typical)
            table["seconds_to_score"] = seconds_to(run, metric, target) if target is not None else None
            table["scaling_efficiency"] = _efficiency(variant, table, variants, tables)
    return tables


def _median(values: Iterable[float | None]) -> float | None:
    found = known(values)
    return statistics.median(found) if found else None


def _efficiency(
    variant: Variant, table: Values, variants: Sequence[Variant], tables: Mapping[str, list[tuple[int | None, Values]]]
) -> float | None:
    """Examples per second / (processes x those of the measured one-device runs of the same settings); None for one.

    Batches may be of another size on one device, but only where no one-device run has the same size.
    """
    size, rate = table["world_size"], table["examples_per_second"]
    if not size or size < 2 or rate is None:
        return None
    for ignored in (SHARING, (*SHARING, *BATCH)):
        one = _median(
            own["examples_per_second"]
            for other in variants
            if other.runs and _without(ignored, other.runs[0]) == _without(ignored, variant.runs[0])
            for _, own in tables[other.name]
            if own["world_size"] == 1
        )
        if one:
            return rate / (size * one)
    return None


def _without(ignored: tuple[str, ...], run: Run) -> dict[str, object]:
    return {key: value for key, value in settings_of(run).items() if not key.startswith(ignored)}


def _measured(
    variant: Variant, baseline: Variant, tables: Mapping[str, list[tuple[int | None, Values]]], metric: str
) -> Variant:
    own, theirs = tables[variant.name], tables[baseline.name]
    measures = {name: summary(name, [table[name] for _, table in own]) for name in MEASURES}
    most = {"score": 100.0, "loss": math.inf}
    measures |= {n: within_scale(measures[n], most=most[k.kind]) for n, k in MEASURES.items() if k.kind in most}
    if len(variant.runs) == 1:
        measures["score_best"] = _with_interval(measures["score_best"], variant.runs[0], metric)
    differences: dict[str, Measure] = {}
    over_examples = None
    if variant.name != baseline.name and own and theirs:
        differences = {
            name: against(name, [(s, t[name]) for s, t in own], [(s, t[name]) for s, t in theirs]) for name in MEASURES
        }
        shared = {seed for seed, _ in own} & {seed for seed, _ in theirs}
        sides = [[run for run in side.runs if not shared or seed_of(run) in shared] for side in (variant, baseline)]
        over_examples = paired_difference(*sides, metric=metric)
    return replace(
        variant, measures=measures, against=differences, over_examples=over_examples, verdicts=_verdicts(variant.runs)
    )


def _with_interval(measure: Measure, run: Run, metric: str) -> Measure:
    """The score of a single run with the interval over examples that its evaluation wrote."""
    edges = ((best_eval(run, metric) or {}).get("intervals") or {}).get(metric) or (None, None)
    low, high = map(number, edges)
    return measure if low is None or high is None else replace(measure, low=low, high=high, spread="examples")


def _verdicts(runs: Sequence[Run]) -> tuple[Verdict, ...]:
    """The verdicts on which more than half of the runs agree, as the first of them words it."""
    found = [verdict for run in runs for verdict in verdicts_of(run)]
    agreed = {rule for rule, num in Counter(verdict.rule for verdict in found).items() if 2 * num > len(runs)}
    first: dict[str, Verdict] = {}
    for verdict in found:
        if verdict.rule in agreed:
            first.setdefault(verdict.rule, verdict)
    return tuple(first.values())


def pareto(variants: Sequence[Variant], *, higher_is_better: bool) -> set[str]:
    """Names of the variants that no other one beats: as good and as quick, and better in one of the two."""
    sign = 1 if higher_is_better else -1
    points = {}
    for variant in variants:
        score, seconds = (variant.measures[name].value for name in ("score_best", "seconds"))
        if score is not None and seconds is not None and math.isfinite(score):
            points[variant.name] = (sign * score, -seconds)
    return {
        name for name, point in points.items()
        if not any(_beats(other, point) for other in points.values())
    }  # fmt: skip


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether a is nowhere worse than b, and somewhere better."""
    return a != b and a[0] >= b[0] and a[1] >= b[1]
