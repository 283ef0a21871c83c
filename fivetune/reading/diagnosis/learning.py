"""Rules about the learnt model: divergence, a training too short, over-fitting, abstention, one predicted label.

In: RunStats. Out: a Verdict, or None if nothing is wrong or data is missing.
"""

from __future__ import annotations

import math
from statistics import fmean

from fivetune.reading.diagnosis.faults import suggest_lower_lr
from fivetune.reading.diagnosis.stats import RunStats, compute_eval_interval, format_share
from fivetune.rundir.figures import (
    DIVERGED_NATS,
    DIVERGED_RATIO,
    FROZEN_STEPS,
    find_best_eval,
    find_divergence,
    list_eval_losses,
)
from fivetune.types import Verdict

LOSS_RISE = 0.10
"""Relative rise of the evaluation loss over its minimum that counts as over-fitting: while a model still learns, its
loss on one set varies by a few per cent between evaluations."""
MIN_RISE = 0.01
"""Absolute rise in nats per token that is also required, because a loss near zero varies a lot in relative terms."""
MIN_EVALS_ABOVE = 2
"""Number of evaluations above the minimum: a single one can be chance."""
NUM_MEAN_LOSSES = 10
"""Training losses of a mean. A fixed number: the board reads the last steps alone, and says the same as the report."""

POINTS_LOST = 5.0
"""Fall of HasAns_exact in points; two standard errors of the difference are also required, to exclude chance."""
MIN_ANSWERED, MIN_SILENT = 1.0, 50.0
"""Scores in points: below MIN_ANSWERED on answerable and above MIN_SILENT on unanswerable questions, a model abstains
throughout."""

ABSTENTION_SCORES = {"HasAns_exact", "NoAns_exact", "exact", "HasAns_total"}

ONE_LABEL_SHARE = 0.98
"""Share of the most frequent predicted label from which on a model does not distinguish labels."""

FALL = 0.05
"""Relative fall of the training loss, in the last quarter of the steps against the quarter before, of a model that
still learns."""
EPOCHS = 3
"""Passes over the data that are suggested instead."""
MIN_LOSSES = 8
"""Steps from which on quarters of them are compared."""


def check_diverged(stats: RunStats) -> Verdict | None:
    """Divergence: the training loss rises from its minimum to the end of the run, or the gradient norm explodes."""
    found = find_divergence(
        stats.train_loss,
        stats.grad_norms,
        vocab_size=stats.vocab_size,
        eval_losses=list_eval_losses(stats.evals),
    )
    length, first = stats.freeze or (0, 0)
    before = [loss for step, loss in stats.train_loss.items() if step < first]
    if found is not None:
        message = (
            f"The training diverged after step {found.step:,}: the loss rose from {found.lowest_loss:.3g} to "
            f"{found.last_loss:.3g} at the end"
        )
        if found.guessing_loss is not None and found.last_loss > found.guessing_loss:
            message += f", above the loss of guessing, {found.guessing_loss:.3g}"
        if found.norm_ratio is not None and found.norm_ratio >= 10:
            message += f", and the gradient norm grew {found.norm_ratio:,.0f}-fold"
        message += "."
        figure = found.last_loss / found.lowest_loss if found.lowest_loss > 0 else found.last_loss
    elif length >= FROZEN_STEPS and before and max(before) >= DIVERGED_RATIO * (before[0] + DIVERGED_NATS):
        # The loss exploded and then stays at one value: the weights answer the same to every input.
        message = (
            f"The training diverged: the loss rose from {before[0]:.3g} to {max(before):.3g}, and from step "
            f"{first:,} on it is exactly {stats.train_loss.get(first, 0.0):.3g}, because the weights are ruined."
        )
        figure = max(before) / max(before[0], 1e-9)
    else:
        return None
    return Verdict(
        rule="diverged",
        message=message,
        figure=figure,
        threshold=DIVERGED_RATIO,
        confidence=0.95,
        change=suggest_lower_lr(stats),
        advice="Start a new run with a lower optimizer.lr or more warm-up steps: resuming repeats the divergence."
        f"{_describe_model(stats)}",
    )


def _describe_model(stats: RunStats) -> str:
    """Describe which weights model/ holds; "" while the run is not finished, because there is none yet."""
    if not stats.has_model:
        return ""
    return f" model/ holds the weights of the {'best evaluation' if stats.best_eval else 'last step'}."


def check_majority_label(stats: RunStats) -> Verdict | None:
    """Almost all predictions of a label task are the same label."""
    record = stats.best_eval or (stats.evals[-1] if stats.evals else None)
    if record is None or record.step == 0:
        return None
    one_label = record.rates.get("one_label")
    majority = record.rates.get("majority_label")
    if one_label is None or one_label < ONE_LABEL_SHARE:
        return None
    if majority is not None and majority >= ONE_LABEL_SHARE:
        return None  # almost all gold labels are equal too, so the predictions can be right
    message = f"{format_share(one_label)} of the predictions at step {record.step:,} are the same label."
    if majority is not None:
        message += f" Always predicting the most frequent label is right for {format_share(majority)} of the examples."
    return Verdict(
        rule="majority_label",
        message=message,
        figure=one_label,
        threshold=ONE_LABEL_SHARE,
        confidence=0.95,
        advice="The model does not distinguish the labels. Train longer, check optimizer.lr, and balance the labels of "
        "the training data.",
    )


def check_short_training(stats: RunStats) -> Verdict | None:
    """The run ended before it had seen its data once: the loss still fell, and no score is better than before."""
    data = stats.splits.get("train")
    seen = stats.num_examples_seen
    scores = {record.step: record.scores.get(stats.metric or "") for record in stats.evals}
    known = [score for score in scores.values() if score is not None]
    if not data or not data.num_examples or not seen or not known or not stats.has_model:
        return None
    before = scores.get(0) or 0.0  # points; a model that was not evaluated may have had none
    losses = list(stats.train_loss.values())
    quarter = len(losses) // 4
    if seen >= data.num_examples or not stats.higher_is_better or max(known) > before or len(losses) < MIN_LOSSES:
        return None
    earlier = fmean(losses[-2 * quarter : -quarter])
    last = fmean(losses[-quarter:])
    if last > (1 - FALL) * earlier:
        return None
    share = seen / data.num_examples
    return Verdict(
        rule="short_training",
        message=f"The run saw {seen:,} of {data.num_examples:,} examples ({format_share(share)} of an epoch), and the "
        f"training loss still fell, from {losses[0]:.3g} to {last:.3g}.",
        figure=share,
        threshold=1.0,
        confidence=0.8,
        change={"train.num_epochs": EPOCHS, "train.num_steps": None},
        advice=f"Train for {EPOCHS} epochs.",
    )


def check_over_fitting(stats: RunStats) -> Verdict | None:
    """Over-fitting: the evaluation loss rises, and the score does not improve significantly."""
    losses = [(record, record.loss) for record in stats.evals if record.loss is not None]
    if len(losses) <= MIN_EVALS_ABOVE:
        return None
    turn, least = min(losses, key=lambda pair: pair[1])
    last, final = losses[-1]
    later = [loss for record, loss in losses if record.step > turn.step]
    # Relative rises of tiny losses mean little, absolute ones of large losses too: both must be large.
    rise = (final - least) / least if least > 0 else math.inf
    rose = len(later) >= MIN_EVALS_ABOVE and min(later) > least and final - least > MIN_RISE
    if not rose or rise < LOSS_RISE:
        return None
    # A score that leaves the 95 % interval of the score at the turn has improved all the same.
    if stats.metric is not None and stats.metric in turn.scores and stats.metric in last.scores:
        low, high = compute_eval_interval(turn, stats.metric)
        score = last.scores[stats.metric]
        has_improved = score > high if stats.higher_is_better else score < low
        if has_improved:
            return None
    message = (
        f"Over-fitting since step {turn.step:,}: the evaluation loss is {least:.3f} there and {final:.3f} at step "
        f"{last.step:,}"
    )
    before = [loss for at, loss in stats.train_loss.items() if at <= turn.step][-NUM_MEAN_LOSSES:]
    if len(before) == NUM_MEAN_LOSSES:
        trained = list(stats.train_loss.values())[-NUM_MEAN_LOSSES:]
        message += f", while the training loss went from {fmean(before):.3f} to {fmean(trained):.3f}"
    # The weights are selected by the metric: steps up to its best value are not to be spared.
    best = None
    if stats.metric:
        best = find_best_eval(stats.evals, metric=stats.metric, higher_is_better=stats.higher_is_better)
    until = max(turn.step, best.step) if best else turn.step
    if best and best.step > turn.step:
        message += f"; {stats.metric} is best at step {best.step:,}"
    are_fewer = 0 < until < last.step
    steps = f"Train up to step {until:,}." if are_fewer else ""
    return Verdict(
        rule="over_fitting",
        message=f"{message}.",
        figure=rise,
        threshold=LOSS_RISE,
        confidence=min(0.95, 0.6 + 0.1 * len(later)),
        change={"train.num_steps": until, "train.num_epochs": None} if are_fewer else {},
        advice=f"{steps}{_describe_model(stats)} More data or dropout (model.dropout) moves the minimum; a lower "
        "learning rate delays it.".lstrip(),
    )


def check_abstention(stats: RunStats) -> Verdict | None:
    """Abstention: the score rises on unanswerable questions while answers get worse, or the model gives no answer."""
    until = stats.best_eval.step if stats.best_eval else math.inf
    records = [record for record in stats.evals if record.step <= until] or list(stats.evals)
    found = [record.scores for record in records if record.scores.keys() >= ABSTENTION_SCORES]
    if not found or len(found) < len(records):
        return None
    last = found[-1]
    first = max(found, key=lambda scores: scores["HasAns_exact"])
    answered = last["HasAns_exact"]
    silent = last["NoAns_exact"]
    if answered < MIN_ANSWERED and silent > MIN_SILENT and records[-1].step > 0:
        message = f"The score comes from silence: HasAns_exact is {answered:.1f}, NoAns_exact {silent:.1f}"
        threshold, figure = MIN_ANSWERED, answered
    else:
        figure = first["HasAns_exact"] - answered
        # The binomial standard error of the difference of two shares, in points.
        shares = (first["HasAns_exact"] / 100, answered / 100)
        error = 100 * math.sqrt(sum(p * (1 - p) for p in shares) / max(1.0, last["HasAns_total"]))
        threshold = max(POINTS_LOST, 2 * error)
        if figure < threshold or silent <= first["NoAns_exact"] or last["exact"] <= first["exact"]:
            return None
        message = (
            f"The score rose from {first['exact']:.1f} to {last['exact']:.1f} by answering less: HasAns_exact fell "
            f"from {first['HasAns_exact']:.1f} to {answered:.1f} while NoAns_exact rose from "
            f"{first['NoAns_exact']:.1f} to {silent:.1f}"
        )
    empty = records[-1].rates.get("empty")
    if empty is not None:
        message += f"; {format_share(empty)} of the answers are empty"
    return Verdict(
        rule="abstention",
        message=f"{message}.",
        figure=figure,
        threshold=threshold,
        confidence=0.9,
        advice="Judge by HasAns_f1 and NoAns_f1, not by their mean. Train longer, or on fewer unanswerable questions; "
        "fivetune score --no-answer-scores finds the best threshold of the no-answer score.",
    )
