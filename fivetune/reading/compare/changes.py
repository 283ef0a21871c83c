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
    names = dict.fromkeys(name for one in (*after, *earlier.values()) for name in one.scores)
    key = metric if metric in names else next(iter(names), metric)
    groups: dict[tuple[bool, bool], list[ExampleChange]] = {}
    for one in after:
        old = earlier.get(one.id)
        if old and key in old.scores and key in one.scores:
            scores = old.scores[key], one.scores[key]
            change = ExampleChange(one.id, old.inputs, old.references, old.prediction, one.prediction, *scores)
            groups.setdefault((scores[0] >= RIGHT, scores[1] >= RIGHT), []).append(change)
    found = [tuple(groups.get(kind, ())) for kind in ((False, True), (True, False), (False, False), (True, True))]
    return PredictionChanges(key, *found) if groups else None


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
    order = sorted(one.id for run, record in ours[:1] for one in run.read_predictions(record))
    if not order:
        return None
    means: list[Scores] = []
    for side in (ours, theirs):
        scores = [found for one in side if (found := _collect_scores(*one, metric, order)) is not None]
        if not scores or len(scores) < len(side):
            return None
        means.append(_average_scores(scores, metric))
    found = compare_paired(*means, names=[metric])[metric]
    return Measure(*found[:3], num=min(len(ours), len(theirs)), spread="examples", p_value=found.p_value)


def _collect_scores(run: Run, record: EvalRecord | None, metric: str, order: Sequence[str]) -> Scores | None:
    """Return the scores of an evaluation with its examples in `order`; None if it has other examples.

    A score that is not a mean over examples is recomputed from the predictions by the task's metrics.
    """
    by_id, total = {one.id: one for one in run.read_predictions(record)}, get_score(record, metric)
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
    details = [collect_details(one) for one in predictions]
    answers, references = [one.prediction for one in predictions], [one.references for one in predictions]
    found = Scorer(task.metrics).score(answers, references, details=details)
    return found if math.isclose(found.corpus.get(metric, math.inf), total, abs_tol=1e-6) else None


def _average_scores(scores: Sequence[Scores], metric: str) -> Scores:
    """Average the scores of several runs over the same examples."""
    resamplers = [one.resample or build_mean_resampler(one) for one in scores]

    def resample(rows: NDArray[np.int64]) -> dict[str, float]:
        return {metric: statistics.fmean(one(rows)[metric] for one in resamplers)}

    return Scores({metric: statistics.fmean(one.corpus[metric] for one in scores)}, scores[0].each, resample)
