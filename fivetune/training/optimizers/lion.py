"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"): steps of one size, by the momentum's sign.

State: one fp32 tensor of the parameters' size, half of AdamW's. Neither torch nor transformers has it; bitsandbytes has
one without shards, and is not installed everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fivetune.training.optimizers import Beta, Decay, OptimizerOptions, Rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState


class Lion(OptimizerOptions):
    """Lion. Its learning rate is 3 to 10 times smaller than AdamW's, its weight decay as much larger."""

    state_bytes_per_parameter = 4.0
    lr_range = (3e-6, 2e-3)
    supports_shards = True

    lr: Rate = Field(1e-4, description="peak learning rate")
    weight_decay: Decay = Field(0.0, description="decoupled; not applied to norms")
    beta1: Beta = Field(0.9, description="share of the momentum in a step's direction")
    beta2: Beta = Field(0.99, description="decay of the momentum")

    def build(self, groups: list[TorchState]) -> Optimizer:
        from fivetune.training.optimizers._lion import TorchLion

        defaults = {"lr": self.lr, "betas": (self.beta1, self.beta2), "weight_decay": self.weight_decay}
        return TorchLion(groups, defaults)
