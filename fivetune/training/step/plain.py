"""The plain step engine: the mathematics of an optimizer step, each kernel launched by the host.

In: a Learner and the micro-batches of a step. Out: an Update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fivetune.model.modules import T5Model
from fivetune.training.step.accumulate import accumulate_over_ranks
from fivetune.training.step.groups import set_lr
from fivetune.training.step.learner import GradientEngine, Learner, StepInputs, Update
from fivetune.training.step.nonfinite import check_values
from fivetune.types import Batch


class PlainEngine(GradientEngine):
    """Runs the forward and backward pass of one micro-batch after the other."""

    def step(self, learner: Learner, inputs: StepInputs) -> Update:
        return take_step(self, learner, inputs)

    def accumulate(self, learner: Learner, batches: list[Batch], inputs: StepInputs) -> Tensor:
        passes = LearnerPasses.begin(learner, inputs)
        total = learner.strategy.accumulate_gradients(learner.model, learner.world, batches, passes)
        return torch.stack([total, passes.positions])


def take_step(engine: GradientEngine, learner: Learner, inputs: StepInputs) -> Update:
    """Accumulate, sum over the ranks, unscale, clip, check, apply: in this order, for every engine with gradients."""
    optimizer = learner.optimizer
    scaler = learner.scaler

    # The gradient of the mean loss over the scored tokens of all ranks: the division is in the loss of each pass.
    sums = accumulate_over_ranks(engine, learner, inputs)

    # Unscale before clipping: max_grad_norm bounds the true gradient.
    inputs.timer("optimizer")
    scaler.unscale_(optimizer)
    norm = learner.strategy.clip(learner.model, learner.max_grad_norm)

    # Check before any weight changes: here, or with a flag on the device, which then skips the update.
    values = check_values(learner, inputs, torch.stack([sums.loss, norm, sums.positions]))
    if inputs.nonfinite_flag is not None:
        optimizer.found_inf = inputs.nonfinite_flag  # type: ignore[attr-defined]

    set_lr(optimizer, inputs.lr)
    scaler.step(optimizer)
    scaler.update()
    engine.clear_gradients(learner)
    inputs.timer("host")
    return Update(values, sums.batch_size, sums.signum)


@dataclass(frozen=True, slots=True)
class LearnerPasses:
    """The passes of a Learner's micro-batches, which a strategy orders.

    Args:
        model: in training mode.
        positions: [] fp32 on the device, positions computed so far.
    """

    learner: Learner
    inputs: StepInputs
    model: T5Model
    positions: Tensor

    @classmethod
    def begin(cls, learner: Learner, inputs: StepInputs) -> LearnerPasses:
        positions = torch.zeros((), device=learner.compute.device)
        return cls(learner, inputs, learner.model.train(), positions)

    def compute_loss(self, batch: Batch) -> Tensor:
        """Run the forward pass; returns this micro-batch's share of the step's loss, []."""
        compute = self.learner.compute
        timer = self.inputs.timer
        timer("host")
        with compute.make_autocast():
            losses, num_positions = self.learner.forward.compute_losses(
                self.model, batch, device=compute.device, timer=timer
            )
            self.positions.add_(num_positions)
            weight = 0 if batch.is_filler else 1  # another rank trains on a filler's example
            return weight * losses.sum() / self.inputs.num_scored_tokens

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss."""
        self.inputs.timer("backward")
        self.learner.scaler.scale(loss).backward()

    def count_rows(self, batch: Batch) -> tuple[int, int]:
        """Count the rows of the encoder's and of the decoder's activations."""
        return self.learner.forward.count_rows(batch)
