"""Rules about what a model learnt: its training data by heart, or to stay silent.

In: Evidence. Out: a Verdict, or None where nothing is wrong or the evidence does not tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fivetune.telemetry.evidence import Evidence, percent
from fivetune.types import Verdict

LOSS_RISE = 0.10
"""Rise of the evaluation loss over its least, relative to it, from where on it is over-fitting: while a model still
learns, its loss on one set goes up and down by a few per cent from one evaluation to the next."""
MIN_RISE = 0.01
"""Nats per token that the rise must be besides, so that a loss near zero does not count in relative terms."""
AFTER = 2
"""Evaluations above the least one: a single bad one may be chance."""

POINTS_LOST = 5.0
"""Points of HasAns_exact, and two standard errors of the difference at least: more than chance does."""


def over_fitting(evidence: Evidence) -> Verdict | None:
    """The evaluation loss rises while the score gets no better."""
    losses = [(record["step"], record["loss"]) for record in evidence.evals if record.get("loss") is not None]
    if len(losses) <= AFTER:
        return None
    at, least = min(losses, key=lambda pair: pair[1])
    later = [loss for step, loss in losses if step > at]
    rise = (losses[-1][1] - least) / least if least > 0 else math.inf
    rose = len(later) >= AFTER and min(later) > least and losses[-1][1] - least > MIN_RISE
    if not rose or rise < LOSS_RISE or evidence.best_step == losses[-1][0]:
        return None
    return Verdict(
        rule="over_fitting",
        says=f"Over-fitting since step {at:,}: the evaluation loss was {least:.3f} there and is {losses[-1][1]:.3f} at "
        f"step {losses[-1][0]:,}{_training_loss(evidence, at)}.",
        figure=rise, threshold=LOSS_RISE, confidence=min(0.95, 0.6 + 0.1 * len(later)),
        change={"train.num_steps": at, "train.num_epochs": None} if at else {},
        advice="Stop there: model/ holds the weights of the best score, not the last ones. More data, or dropout "
        "(model.dropout), moves the turn; a lower learning rate delays it.",
    )  # fmt: skip


def _training_loss(evidence: Evidence, at: int) -> str:
    """The training loss around a step and at the end, in words; nothing where it is not known."""
    losses = list(evidence.train_loss.items())
    width = max(1, len(losses) // 20)
    before = [loss for step, loss in losses if step <= at][-width:] or [loss for _, loss in losses[:width]]
    last = [loss for _, loss in losses[-width:]]
    if not last:
        return ""
    return f", while that of training went from {sum(before) / len(before):.3f} to {sum(last) / len(last):.3f}"


def abstention(evidence: Evidence) -> Verdict | None:
    """The score rises because the model answers less: right where there is no answer, worse where there is one."""
    points = [_points(record) for record in evidence.evals]
    known = [point for point in points if point is not None]
    if len(known) < 2 or len(known) < len(points):
        return None
    has, no, _, num_answerable = known[-1]
    most = max(point[0] for point in known[:-1])
    first = next(point for point in known if point[0] == most)
    threshold = max(POINTS_LOST, 2 * _standard_error(most, has, num_answerable))
    if most - has < threshold or no <= first[1] or known[-1][2] <= first[2]:
        return None
    return Verdict(
        rule="abstention",
        says=f"The score rose from {first[2]:.1f} to {known[-1][2]:.1f} by answering less: HasAns_exact fell from "
        f"{most:.1f} to {has:.1f} while NoAns_exact rose from {first[1]:.1f} to {no:.1f}{_silent(evidence.evals)}.",
        figure=most - has, threshold=threshold, confidence=0.9,
        advice="Judge by HasAns_f1 and NoAns_f1, not by their mean; train on fewer unanswerable questions, or longer; "
        "fivetune score --no-answer-scores finds the threshold at which silence pays.",
    )  # fmt: skip


def _points(record: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    """HasAns_exact, NoAns_exact, exact, number of answerable questions of one evaluation."""
    names = ("HasAns_exact", "NoAns_exact", "exact", "HasAns_total")
    scores = record.get("scores") or {}
    return tuple(scores[name] for name in names) if all(scores.get(name) is not None for name in names) else None  # type: ignore[return-value]


def _standard_error(first: float, second: float, num: float) -> float:
    """Standard error of the difference of two shares, in points, each of `num` questions (binomial).

    >>> round(_standard_error(50, 50, 200), 2)
    5.0
    """
    return 100 * math.sqrt(sum(p * (1 - p) for p in (first / 100, second / 100)) / max(1.0, num))


def _silent(evals: Sequence[Mapping[str, Any]]) -> str:
    share = (evals[-1].get("rates") or {}).get("empty")
    return f"; {percent(share)} of the answers are empty" if share is not None else ""
