"""What follows from an evaluation: its rank among the best ones, and early stopping.

In: the progress of a run, an evaluation, train.early_stopping. Out: the counted progress, and why a run stopped. Both
are part of a checkpoint, so that a resumed run stops at the same step and has the same best checkpoints.
"""

from __future__ import annotations

from fivetune.config.train import EarlyStopping
from fivetune.errors import ConfigError
from fivetune.rundir.figures import is_better_eval
from fivetune.rundir.records import BestEval, EvalRecord
from fivetune.training.state.checkpoint import TrainingState


def count_evaluation(
    state: TrainingState, record: EvalRecord, *, metric: str, min_delta: float, higher_is_better: bool
) -> None:
    """Count an evaluation, which either improves on the last one that did, or brings no improvement.

    Args:
        metric: name of a score, or loss. min_delta: an improvement is larger than this.

    Raises ConfigError for a metric that the evaluation does not have.
    """
    values = dict(record.scores)
    if record.loss is not None:
        values["loss"] = record.loss
    if metric not in values:
        known = ", ".join(values)
        raise ConfigError(f"train.early_stopping.metric: the evaluation has no score {metric!r}. It has: {known}.")
    found = BestEval(record.step, metric, values[metric], record.loss)

    # Compared with the last improvement, not with the last evaluation: gains below min_delta add up.
    before = state.improved
    if before is None or is_improvement(found, before, min_delta=min_delta, higher_is_better=higher_is_better):
        state.improved = found
        state.num_evals_without_improvement = 0
    else:
        state.num_evals_without_improvement += 1


def rank_evaluation(state: TrainingState, found: BestEval, *, num_kept: int, higher_is_better: bool) -> None:
    """Rank an evaluation among the best ones so far, of which `num_kept` are kept."""
    # An evaluation of the same step, which a resume repeats, replaces the earlier one.
    others = [one for one in (state.best, *state.runners_up) if one and one.step != found.step]
    # They are in order: its place is before the first one that it is better than.
    place = 0
    while place < len(others) and not is_better_eval(found, others[place], higher_is_better=higher_is_better):
        place += 1
    ranked = [*others[:place], found, *others[place:]]
    state.best = ranked[0]
    state.runners_up = ranked[1:num_kept]


def is_improvement(later: BestEval, earlier: BestEval, *, min_delta: float, higher_is_better: bool) -> bool:
    """Whether a score is better by more than `min_delta`; if that is 0, a lower loss at equal scores is better too.

    >>> is_improvement(BestEval(2, "f1", 81.0), BestEval(1, "f1", 80.0), min_delta=1.0, higher_is_better=True)
    False
    """
    gain = later.score - earlier.score if higher_is_better else earlier.score - later.score
    if gain or min_delta or later.loss is None or earlier.loss is None:
        return gain > min_delta
    return later.loss < earlier.loss


def describe_stop(state: TrainingState, rule: EarlyStopping | None, num_steps: int) -> str:
    """The reason why a run stopped before its last step; empty if it did not."""
    last = state.improved
    if rule is None or last is None or state.step == num_steps or not is_exhausted(state, rule):
        return ""
    digits = 4 if last.metric == "loss" else 2
    score = f"{last.score:.{digits}f}"
    margin = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
    return (
        f"stopped early after step {state.step:,} of {num_steps:,}: no evaluation was better than that of step "
        f"{last.step:,} ({last.metric} {score}){margin} in {state.num_evals_without_improvement} evaluations "
        "(train.early_stopping)"
    )


def is_exhausted(state: TrainingState, rule: EarlyStopping | None) -> bool:
    """Whether as many evaluations in a row as the rule's patience brought no improvement."""
    return rule is not None and state.num_evals_without_improvement >= rule.patience
