"""One optimizer step: updates the weights with its micro-batches, or raises before any weight changes.

In: a Learner and the step's micro-batches. Out: an Update. The result does not depend on how the examples are split, on
how many processes share it, or on whether the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fivetune.training.step.learner import Learner, StepInputs, Update
from fivetune.types import Batch, PhaseTimer, ignore_phase


def train_step(
    learner: Learner,
    batches: list[Batch],
    *,
    lr: float | None,
    step: int,
    batch_size: int | None = None,
    num_scored_tokens: int | None = None,
    timer: PhaseTimer = ignore_phase,
    nonfinite_flag: Tensor | None = None,
    get_signum: Callable[[], int] = lambda: 0,
) -> Update:
    """Run one optimizer step over the micro-batches of this rank and of the other ranks.

    loss = sum of the losses of all scored tokens / number of scored tokens of all ranks: any split of examples gives
    the same gradient (a mean of means does not). If memory runs out, micro-batches are halved and the step is retried.

    Args:
        batch_size: most examples per forward pass; default: examples of the largest micro-batch.
        num_scored_tokens: target tokens on all ranks; default: world.data_size times the tokens of these micro-batches.
        nonfinite_flag: lets the host run ahead of the device; the reader of the values must call `refuse_nonfinite`.
            Without it a NumericError is raised before the weights change.
        get_signum: returns the signal that this rank has received, 0 if none.
    """
    if batch_size is None:
        batch_size = max(len(batch.ids) for batch in batches)
    if num_scored_tokens is None:
        num_scored_tokens = learner.world.data_size * sum(batch.num_target_tokens for batch in batches)
    inputs = StepInputs(
        batches=batches,
        number=step,
        lr=lr,
        batch_size=batch_size,
        num_scored_tokens=num_scored_tokens,
        timer=timer,
        nonfinite_flag=nonfinite_flag,
        get_signum=get_signum,
    )
    return learner.engine.step(learner, inputs)
