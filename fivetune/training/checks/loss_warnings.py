"""Warnings about training losses: constant ones, and a loss that diverges.

In: the losses and gradient norms of a run so far. Out: messages with their kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

from fivetune.rundir.figures import FROZEN_STEPS, find_divergence, is_frozen

DIVERGENCE_CHECKS = 50  # per run


def iter_loss_warnings(
    losses: dict[int, float],
    grad_norms: Mapping[int, float],
    eval_losses: Mapping[int, float],
    *,
    num_steps: int,
    vocab_size: int,
    has_diverged: bool,
) -> Iterator[tuple[str, str]]:
    """Yield warnings about the last step, each with its kind.

    Args:
        losses, grad_norms: values by step, in order; eval_losses: losses of the evaluations so far, by step.
        has_diverged: whether the divergence was reported already.
    """
    step = next(reversed(losses))
    # The last ones alone: a long run has 100,000 losses, and this is asked after each step.
    if is_frozen([*islice(reversed(losses.values()), FROZEN_STEPS)]):
        yield (
            f"the training loss is exactly {losses[step]} in {FROZEN_STEPS} steps in a row: "
            "the weights do not move. Check optimizer.lr and train.precision.",
            "frozen_loss",
        )
    if has_diverged or step % math.ceil(num_steps / DIVERGENCE_CHECKS):
        return
    if found := find_divergence(losses, grad_norms, vocab_size=vocab_size, eval_losses=eval_losses):
        guessing = f"; guessing has {found.guessing_loss:.3g}" if found.guessing_loss else ""
        yield (
            f"the training diverges: after step {found.step} the loss rose from {found.lowest_loss:.3g} to "
            f"{found.last_loss:.3g} at step {step}{guessing}. "
            "Start a new run with a lower optimizer.lr or more warm-up steps.",
            "diverged",
        )
