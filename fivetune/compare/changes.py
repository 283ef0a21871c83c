"""What two runs answer differently, example by example.

In: two Runs with the predictions of their best evaluations. Out: Changes, and the paired bootstrap of a score.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fivetune.analysis.bootstrap import paired
from fivetune.compare.measures import best_eval, score_of, task_of
from fivetune.metrics import details_of, means_of, score_all
from fivetune.types import Line, Measure, Run, Scores
from fivetune.values import known, number

RIGHT = 1.0  # score of an example that is wholly right


class Change(NamedTuple):
    """One example in two runs, the baseline's first; scores of an example are 0-1."""

    id: str
    inputs: str
    references: tuple[str, ...]
    before: str
    after: str
    score_before: float
    score_after: float


class Changes(NamedTuple):
    """The examples that both runs were scored on, by what became of them; `score` says by which score.

    `num_alone` examples stand in one of the two only, and are left out.
    """

    score: str
    fixed: tuple[Change, ...]
    broken: tuple[Change, ...]
    both_wrong: tuple[Change, ...]
    both_right: tuple[Change, ...]
    num_alone: int


def changes(before: Run, after: Run, *, metric: str) -> Changes | None:
    """Which examples `after` gets right that `before` does not, and the other way round, at their best evaluations.

    An example is right where its own score is 1. None if the runs hold no scored predictions of the same examples.
    """
    ours, theirs = lines_of(after, metric), lines_of(before, metric)
    key = _score_name((*ours.values(), *theirs.values()), metric)
    shared = [name for name in theirs if name in ours]
    if key is None or not shared:
        return None
    groups: dict[tuple[bool, bool], list[Change]] = {}
    for name in shared:
        one = _change(name, theirs[name], ours[name], key)
        if one is not None:
            groups.setdefault((one.score_before >= RIGHT, one.score_after >= RIGHT), []).append(one)
    found = [tuple(groups.get(kind, ())) for kind in ((False, True), (True, False), (False, False), (True, True))]
    return Changes(key, *found, num_alone=len(ours.keys() ^ theirs.keys()))


def lines_of(run: Run, metric: str) -> dict[str, Line]:
    """The predictions of a run's best evaluation by id; {} if it has none."""
    best = best_eval(run, metric)
    name = f"{best.get('split')}-{best['step']}" if best else ""
    return {str(line["id"]): line for line in run.predictions[name]} if name in run.predictions else {}


def _score_name(lines: Iterable[Line], metric: str) -> str | None:
    """The score of each example that counts: the metric itself, else the first that examples have."""
    present = {key: None for line in lines for key in line.get("scores") or {}}
    return metric if metric in present else next(iter(present), None)


def _change(name: str, before: Line, after: Line, key: str) -> Change | None:
    scores = [number((line.get("scores") or {}).get(key)) for line in (before, after)]
    if scores[0] is None or scores[1] is None:
        return None
    return Change(
        name, str(before.get("inputs", "")), tuple(before.get("references") or ()), str(before.get("prediction", "")),
        str(after.get("prediction", "")), scores[0], scores[1],
    )  # fmt: skip


def paired_difference(ours: Sequence[Run], theirs: Sequence[Run], *, metric: str) -> Measure | None:
    """Best score of `ours` minus that of `theirs`, with its 95 % interval and p-value by resampling the examples.

    Of several runs (seeds) each resample counts with the mean of their scores. None unless all runs were evaluated on
    the same examples, and their scores can be had from the predictions.
    """
    order = sorted(lines_of(ours[0], metric)) if ours else []
    if not order:
        return None
    sides = [_together([_scores(run, metric, order) for run in runs], metric) for runs in (ours, theirs)]
    if sides[0] is None or sides[1] is None:
        return None
    found = paired(sides[0], sides[1], names=[metric])[metric]
    return Measure(*found[:3], num=min(len(ours), len(theirs)), spread="examples", p_value=found.p_value)


def _scores(run: Run, metric: str, order: Sequence[str]) -> Scores | None:
    """The scores of a run's best evaluation, its examples in an order; None if they are not those examples.

    Where the score is no mean of the examples' own, the task's metrics compute it again from the predictions.
    """
    lines, total = lines_of(run, metric), score_of(best_eval(run, metric), metric)
    if total is None or sorted(lines) != list(order):
        return None
    own = [number((lines[name].get("scores") or {}).get(metric)) for name in order]
    if None not in own and math.isclose(100 * statistics.fmean(known(own)), total, abs_tol=1e-6):
        return Scores({metric: total}, [{metric: value} for value in known(own)])
    task = task_of(run)
    found = _scored_again(task.metrics, [lines[name] for name in order]) if task else None
    return found if found and math.isclose(found.corpus.get(metric, math.inf), total, abs_tol=1e-6) else None


def _scored_again(metrics: Sequence[Any], lines: Sequence[Line]) -> Scores | None:
    if any(line.get("prediction") is None or not line.get("references") for line in lines):
        return None
    details = [details_of(line) for line in lines]
    return score_all(metrics, [line["prediction"] for line in lines], [line["references"] for line in lines],
                     details=details)  # fmt: skip


def _together(several: Sequence[Scores | None], metric: str) -> Scores | None:
    """The mean score of several runs over the same examples; None if one is not known."""
    scores = [one for one in several if one is not None]
    if not scores or len(scores) < len(several):
        return None
    resamplers = [one.resample or means_of(one) for one in scores]

    def resample(rows: Any) -> dict[str, float]:
        return {metric: statistics.fmean(values[metric] for values in (one(rows) for one in resamplers))}

    return Scores({metric: statistics.fmean(one.corpus[metric] for one in scores)}, scores[0].each, resample)
