"""The steps of Lion, on lists of tensors.

In: parameter groups with gradients. Out: changed weights, and the state exp_avg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivetune.training.optimizers._listed import ListedOptimizer, many

if TYPE_CHECKING:
    from fivetune.types import TorchState


class TorchLion(ListedOptimizer):
    """p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p), then m = b2 * m + (1 - b2) * g."""

    def update(self, group: TorchState, weights: list[Tensor]) -> None:
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
