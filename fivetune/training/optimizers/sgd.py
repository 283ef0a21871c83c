"""Stochastic gradient descent with momentum, torch's.

State: with momentum one fp32 tensor of the parameters' size. T5's gradients differ in size by layer, so that one rate
for all of them learns slowly: a baseline for comparisons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fivetune.training.optimizers import Beta, Decay, OptimizerOptions, Rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState


class SGD(OptimizerOptions):
    """Gradient descent with momentum. It needs clipping and a much larger rate than AdamW."""

    state_bytes_per_parameter = 4.0
    lr_range = (1e-3, 0.5)
    supports_shards = True

    lr: Rate = Field(0.05, description="peak learning rate")
    momentum: Beta = 0.9
    nesterov: bool = Field(False, description="Nesterov's momentum")
    weight_decay: Decay = Field(0.0, description="added to the gradient; not applied to norms")

    def build(self, groups: list[TorchState]) -> Optimizer:
        import torch

        return torch.optim.SGD(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )
