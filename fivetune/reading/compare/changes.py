"""Differences between the predictions of two runs, example by example.

In: two Runs with the predictions of their best evaluations. Out: PredictionChanges; the paired bootstrap of a score.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivetune.reading.compare.measures import find_best_metric_eval, get_score
from fivetune.reading.compare.records import Measure
from fivetune.rundir.records import EvalRecord, Prediction, Run
from fivetune.scores.analysis.bootstrap import compare_paired
from fivetune.scores.metrics import Scorer, build_mean_resampler, collect_details
from fivetune.tasks import load_run_task
from fivetune.types import Scores

RIGHT = 1.0  # score of a right prediction
Evaluation = tuple[Run, EvalRecord | None]


class ExampleChange(NamedTuple):
    """One example in two evaluations, the earlier or the baseline's first; scores of an example are 0-1."""

    id: str
    inputs: str
    references: tuple[str, ...]
    before: str
    after: str
    score_before: float
    score_after: float


class PredictionChanges(NamedTuple):
    """The examples of both evaluations by outcome, right or wrong before and after; `score` is the score that decides.

    The examples of only one are excluded.
    """

    score: str
    fixed: tuple[ExampleChange, ...]
    broken: tuple[ExampleChange, ...]
    both_wrong: tuple[ExampleChange, ...]
    both_right: tuple[ExampleChange, ...]


def compare_predictions(
    before: Iterable[Prediction], after: Sequence[Prediction], *, metric: str
) -> PredictionChanges | None:
    """Compare the predictions of two evaluations: fixed, broken, wrong in both, right in both.

    A prediction is right if its score is 1: the metric itself, else the first score that examples have. Returns None
    without scored predictions of the same examples.
    """
    earlier = {one.id: one for one in before}
    names: dict[str, float] = {}
    for one in (*after, *earlier.values()):
        names |= one.scores
    key = metric if metric in names else next(iter(names), metric)
    groups: dict[tuple[bool, bool], list[ExampleChange]] = {}  # by right before, right after
    for one in after:
        old = earlier.get(one.id)
        if old is None or key not in old.scores or key not in one.scores:
            continue
        first, second = old.scores[key], one.scores[key]
        change = ExampleChange(one.id, old.inputs, old.references, old.prediction, one.prediction, first, second)
        groups.setdefault((first >= RIGHT, second >= RIGHT), []).append(change)
    if not groups:
        return None
    return PredictionChanges(
        key,
        fixed=tuple(groups.get((False, True), ())),
        broken=tuple(groups.get((True, False), ())),
        both_wrong=tuple(groups.get((False, False), ())),
        both_right=tuple(groups.get((True, True), ())),
    )


def read_best_predictions(run: Run, metric: str) -> list[Prediction]:
    """Return the predictions of a run's best evaluation; [] if it has none. See `Run.read_predictions`."""
    return run.read_predictions(find_best_metric_eval(run, metric))


def compute_paired_difference(
    ours: Sequence[Evaluation], theirs: Sequence[Evaluation], *, metric: str
) -> Measure | None:
    """Score of `ours` minus score of `theirs`, with 95 % interval and p-value by a paired bootstrap.

    With several runs (seeds) per side, a resample is scored by the mean over the runs. None unless all evaluations have
    scores per example of the same examples.
    """
    if not ours:
        return None
    run, record = ours[0]
    order = sorted(one.id for one in run.read_predictions(record))
    if not order:
        return None
    means: list[Scores] = []
    for side in (ours, theirs):
        scores: list[Scores] = []
        for run, record in side:
            found = _collect_scores(run, record, metric, order)
            if found is None:
                return None
            scores.append(found)
        if not scores:
            return None
        means.append(_average_scores(scores, metric))
    difference = compare_paired(*means, names=[metric])[metric]
    return Measure(*difference[:3], num=min(len(ours), len(theirs)), spread="examples", p_value=difference.p_value)


def _collect_scores(run: Run, record: EvalRecord | None, metric: str, order: Sequence[str]) -> Scores | None:
    """Return the scores of an evaluation with its examples in `order`; None if it has other examples.

    A score that is not a mean over examples is recomputed from the predictions by the task's metrics.
    """
    by_id = {one.id: one for one in run.read_predictions(record)}
    total = get_score(record, metric)
    if total is None or sorted(by_id) != list(order):
        return None
    predictions = [by_id[name] for name in order]
    # The usual case, a mean over examples, needs no metric and no task.
    own = [one.scores[metric] for one in predictions if metric in one.scores]
    if len(own) == len(order) and math.isclose(100 * statistics.fmean(own), total, abs_tol=1e-6):
        return Scores({metric: total}, [{metric: value} for value in own])
    task = load_run_task(run.config)
    if task is None or not all(one.references for one in predictions):
        return None
    found = Scorer(task.metrics).score(
        [one.prediction for one in predictions],
        [one.references for one in predictions],
        details=[collect_details(one) for one in predictions],
    )
    # Another version of the metric would give another score than the run recorded.
    if not math.isclose(found.corpus.get(metric, math.inf), total, abs_tol=1e-6):
        return None
    # Scores at the best threshold cannot be resampled.
    resample = found.resample or build_mean_resampler(found)
    return found if metric in resample(np.arange(len(order))) else None


def _average_scores(scores: Sequence[Scores], metric: str) -> Scores:
    """Average the scores of several runs over the same examples."""
    resamplers = [one.resample or build_mean_resampler(one) for one in scores]

    def resample(rows: NDArray[np.int64]) -> dict[str, float]:
        return {metric: statistics.fmean(one(rows)[metric] for one in resamplers)}

    mean = statistics.fmean(one.corpus[metric] for one in scores)
    return Scores({metric: mean}, scores[0].each, resample)
