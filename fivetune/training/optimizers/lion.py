"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"): steps of one size, by the momentum's sign.

State: one fp32 tensor of the parameters' size, half of AdamW's. Neither torch nor transformers has it; bitsandbytes has
one without shards, and is not installed everywhere.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

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
        defaults = {"lr": self.lr, "betas": (self.beta1, self.beta2), "weight_decay": self.weight_decay}
        return _make_torch_lion()(groups, defaults)


@cache
def _make_torch_lion() -> type[Optimizer]:
    """Make the class of the torch optimizer: not in the module, because settings are read without torch."""
    import torch

    many: Any = torch  # untyped, because torch's _foreach functions are private

    class TorchLion(torch.optim.Optimizer):
        """p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p), then m = b2 * m + (1 - b2) * g."""

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                weights = [weight for weight in group["params"] if weight.grad is not None]
                if not weights:
                    continue
                grads = [weight.grad for weight in weights]
                for weight in weights:
                    if not self.state[weight]:
                        self.state[weight]["exp_avg"] = torch.zeros_like(weight)
                means = [self.state[weight]["exp_avg"] for weight in weights]
                # Two averages of one momentum: the step's direction has a larger share of the new gradient.
                beta1, beta2 = group["betas"]
                signs = many._foreach_lerp(means, grads, 1 - beta1)
                many._foreach_sign_(signs)
                many._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                many._foreach_add_(weights, signs, alpha=-group["lr"])
                many._foreach_lerp_(means, grads, 1 - beta2)

    return TorchLion
