"""The engine of a pipeline: the micro-batches of a step pass through stages, each on a rank of its own.

In: a Learner whose model is one stage. Out: an Update. The order of passes is from Huang et al. 2019, "GPipe", or
Narayanan et al. 2019, "PipeDream" (1F1B, here with a flush after each step).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from fivetune.distributed.pipeline import find_stage, order_passes
from fivetune.errors import is_out_of_memory
from fivetune.training.step.learner import GradientEngine, Learner, StepInputs, Update
from fivetune.training.step.plain import LearnerPasses, take_step
from fivetune.types import Batch, ignore_phase


class PipelineEngine(GradientEngine):
    """Runs the passes of this rank's stage, which knows their order."""

    def step(self, learner: Learner, inputs: StepInputs) -> Update:
        return take_step(self, learner, inputs)

    def accumulate(self, learner: Learner, batches: list[Batch], inputs: StepInputs) -> Tensor:
        stage = find_stage(learner.model)
        assert stage is not None
        passes = LearnerPasses.begin(learner, inputs)
        total = torch.zeros((), device=stage.device)
        losses = deque[Any]()  # of forward passes whose backward pass is to come, oldest first
        failed = None
        waiting = {"F": iter(batches), "B": iter(batches)}
        stage.timer = inputs.timer
        for kind in order_passes(stage.schedule, stage.number, len(stage.ranks), len(batches)):
            batch = next(waiting[kind])
            stage.begin_pass()
            # After a failure the order of passes goes on without computing, so that no neighbour waits for ever.
            try:
                if failed is None and kind == "F":
                    losses.append(passes.compute_loss(batch))
                    total += losses[-1].detach()
                elif failed is None:
                    stage.run_backward(losses.popleft(), passes.backward)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = error.with_traceback(None)  # whose frames hold activations
                losses.clear()
                stage.forget_passes()
                learner.model.zero_grad(set_to_none=True)
            if failed is not None:  # the neighbours wait for what this stage would send
                stage.send_zeros(kind, passes.count_rows(batch), learner.model.config.d_model)
        stage.timer = ignore_phase  # generation passes through the stages too
        inputs.timer("exchange")
        stage.finish_sends()
        # A weight of two stages, such as the embedding, has a part of its gradient on each.
        stage.sum_shared_gradients(learner.model)
        # The last stage alone computes the loss.
        total = stage.broadcast_last(total)
        if failed is not None:
            raise failed
        return torch.stack([total, passes.positions])
