"""The engine of CUDA graphs: forward and backward pass of a micro-batch are replayed, the rest of a step is launched.

In: a Learner whose gradients are views of one buffer. Out: an Update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivetune.model.cuda.graphed import GraphedAdamW, GraphedUpdate
from fivetune.training.step.accumulate import accumulate_over_ranks
from fivetune.training.step.groups import set_lr
from fivetune.training.step.learner import GradientEngine, Learner, StepInputs, Update
from fivetune.training.step.nonfinite import check_values
from fivetune.training.step.plain import take_step
from fivetune.types import Batch


class GraphEngine(GradientEngine):
    """Replays the graphs of a GraphedUpdate; a micro-batch without one is launched."""

    def __init__(self, graphs: GraphedUpdate) -> None:
        self.graphs = graphs

    @property
    def num_graphs(self) -> int:
        return self.graphs.steps.num_graphs

    @property
    def failure(self) -> str:
        return self.graphs.steps.failure

    def step(self, learner: Learner, inputs: StepInputs) -> Update:
        optimizer = learner.optimizer
        if not isinstance(optimizer, GraphedAdamW):
            return take_step(self, learner, inputs)
        # GraphedAdamW clips, checks, updates and clears in one launch, in which a non-finite step changes nothing.
        sums = accumulate_over_ranks(self, learner, inputs)
        inputs.timer("optimizer")
        set_lr(optimizer, inputs.lr)
        norm = optimizer.clip_and_step(sums.loss, inputs.nonfinite_flag)
        values = check_values(learner, inputs, torch.stack([sums.loss, norm, sums.positions]))
        inputs.timer("host")
        return Update(values, sums.batch_size, sums.signum)

    def accumulate(self, learner: Learner, batches: list[Batch], inputs: StepInputs) -> Tensor:
        inputs.timer("forward")  # one launch contains all phases
        return self.graphs.accumulate_gradients(batches, num_scored_tokens=inputs.num_scored_tokens)

    def clear_gradients(self, learner: Learner) -> None:
        """Zero the gradients where they are: graphs write to their addresses."""
        self.graphs.clear_gradients()
