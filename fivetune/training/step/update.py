"""One optimizer step outside the loop, as trials and checks take it: the weights change, or it raises before.

In: a Learner and the step's micro-batches. Out: an Update. The result does not depend on how the examples are split, on
how many processes share it, or on whether the host waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from fivetune.training.step.learner import Learner, StepInputs, Update
from fivetune.types import Batch


def train_step(
    learner: Learner,
    batches: list[Batch],
    *,
    lr: float | None,
    step: int,
    batch_size: int | None = None,
    nonfinite_flag: Tensor | None = None,
) -> Update:
    """Run one optimizer step over the micro-batches of this rank and of the other ranks.

    loss = sum of the losses of all scored tokens / number of scored tokens of all ranks: any split of examples gives
    the same gradient (a mean of means does not). If memory runs out, micro-batches are halved and the step is retried.

    Args:
        batch_size: most examples per forward pass; default: examples of the largest micro-batch.
        nonfinite_flag: lets the host run ahead of the device; the reader of the values must call `refuse_nonfinite`.
            Without it a NumericError is raised before the weights change.
    """
    if batch_size is None:
        batch_size = max(len(batch.ids) for batch in batches)
    num_target_tokens = sum(batch.num_target_tokens for batch in batches if not batch.is_filler)
    inputs = StepInputs(
        batches=batches,
        number=step,
        lr=lr,
        batch_size=batch_size,
        num_scored_tokens=learner.world.data_size * num_target_tokens,
        nonfinite_flag=nonfinite_flag,
    )
    return learner.engine.step(learner, inputs)
