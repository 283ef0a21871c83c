"""Schedule-free AdamW (Defazio et al. 2024, "The Road Less Scheduled"): an average of the weights instead of a decay.

Gradients are computed between the fast weights z and their average x, which is evaluated and exported. The rate is
constant after a warm-up. State: two fp32 tensors of the parameters' size; an evaluation copies the weights too, in the
room of the gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fivetune.training.optimizers import AdamWOptions, Decay, Rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState


class ScheduleFree(AdamWOptions):
    """Schedule-free AdamW. Learning rates 1 to 10 times AdamW's; a warm-up of a few per cent of the steps."""

    state_bytes_per_parameter = 8.0
    lr_range = (1e-5, 2e-2)
    supports_shards = True
    replaces_decay = True

    lr: Rate = Field(1e-3, description="learning rate after the warm-up")
    weight_decay: Decay = Field(0.0, description="decoupled, of the weights that are trained; not applied to norms")
    beta1: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.9, description="share of the average in the weights that are trained; 0.95 or 0.98 for long runs"
    )

    def build(self, groups: list[TorchState]) -> Optimizer:
        from fivetune.training.optimizers._schedule_free import ScheduleFreeAdamW

        return ScheduleFreeAdamW(groups, self.build_arguments())
