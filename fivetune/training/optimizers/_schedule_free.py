"""The steps of schedule-free AdamW, on lists of tensors (Defazio et al. 2024, algorithm 1).

    y = (1 - beta1) z + beta1 x        gradient g at y, v = beta2 v + (1 - beta2) g^2
    z -= lr (g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y)
    x += c (z - x)                     c = lr_max^2 / sum of lr_max^2 over all steps: 1/t after the warm-up

In: parameter groups with gradients, whose weights are y. Out: changed weights, and the state step, z, exp_avg_sq,
lr_max, weight_sum of each weight. x is not stored: y and z determine it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivetune.training.optimizers._listed import ListedOptimizer, many

if TYPE_CHECKING:
    from fivetune.types import TorchState


class ScheduleFreeAdamW(ListedOptimizer):
    """The weights are y; `compute_averages` returns x."""

    def update(self, group: TorchState, weights: list[Tensor]) -> None:
        """Update weights; each counts its own steps, because some may be trained later than others."""
        states = [self.state[weight] for weight in weights]
        lr = group["lr"]
        beta1, beta2 = group["betas"]
        shares: list[float] = []  # c of each weight
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state.update(step=0, lr_max=0.0, weight_sum=0.0)
                state.update(z=weight.detach().clone(), exp_avg_sq=torch.zeros_like(weight))
            state["step"] += 1
            state["lr_max"] = max(state["lr_max"], lr)
            state["weight_sum"] += state["lr_max"] ** 2
            share = 1.0  # as long as the rate is 0
            if state["weight_sum"]:
                share = state["lr_max"] ** 2 / state["weight_sum"]
            shares.append(share)
        fast = [state["z"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        grads = [weight.grad for weight in weights]

        # Adam's step without momentum, with the decay of y.
        many._foreach_mul_(squares, beta2)
        many._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = many._foreach_div(squares, [1 - beta2 ** state["step"] for state in states])
        many._foreach_sqrt_(denominators)
        many._foreach_add_(denominators, group["eps"])
        updates = many._foreach_div(grads, denominators)
        if group["weight_decay"]:
            many._foreach_add_(updates, weights, alpha=group["weight_decay"])

        # y follows x and z: y += c (z - y), with the old z, then beta1 (1 - c) - 1 times the step; and z its step.
        for weight, own, share in zip(weights, fast, shares, strict=True):
            weight.lerp_(own, share)
        factors = [lr * (beta1 * (1 - share) - 1) for share in shares]
        many._foreach_add_(weights, many._foreach_mul(updates, factors))
        many._foreach_add_(fast, updates, alpha=-lr)

    @torch.no_grad()
    def compute_averages(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Compute x of weights: (y - (1 - beta1) z) / beta1; a copy of a weight without a step."""
        beta1_of: dict[Tensor, float] = {}
        for group in self.param_groups:
            beta1_of |= dict.fromkeys(group["params"], group["betas"][0])
        averages: list[Tensor] = []
        for weight in weights:
            if state := self.state.get(weight):
                averages.append(weight.lerp(state["z"], 1 - 1 / beta1_of[weight]))
            else:
                averages.append(weight.clone())
        return averages
