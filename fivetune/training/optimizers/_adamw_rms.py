"""The steps of AdamW with RMS scaling, on lists of tensors.

In: parameter groups with gradients. Out: changed weights, and the state step, exp_avg, exp_avg_sq and RMS.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivetune.distributed.sharding import compute_norms, get_local
from fivetune.training.optimizers._listed import ListedOptimizer, many

if TYPE_CHECKING:
    from fivetune.types import TorchState


class ScaledAdamW(ListedOptimizer):
    """AdamW with the rate of each tensor multiplied by max(min_rms, RMS of the tensor)."""

    def update(self, group: TorchState, weights: list[Tensor]) -> None:
        states = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
            state["step"] += 1
        grads = [weight.grad for weight in weights]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]

        # AdamW's moments m and v, and its denominator sqrt(v / (1 - beta2^t)) + eps.
        many._foreach_lerp_(means, grads, 1 - beta1)
        many._foreach_mul_(squares, beta2)
        many._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = many._foreach_sqrt(squares)
        many._foreach_div_(denominators, [math.sqrt(1 - beta2 ** state["step"]) for state in states])
        many._foreach_add_(denominators, group["eps"])

        # The root mean square of each whole tensor, before the step.
        scales = compute_norms(weights)
        many._foreach_div_(scales, [math.sqrt(weight.numel()) for weight in weights])
        many._foreach_clamp_min_(scales, group["min_rms"])

        # The step: a scale is one number, which multiplies this rank's part of a divided tensor.
        many._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        updates = many._foreach_div(means, denominators)
        many._foreach_mul_([get_local(update) for update in updates], scales)
        many._foreach_mul_(updates, [-group["lr"] / (1 - beta1 ** state["step"]) for state in states])
        many._foreach_add_(weights, updates)
        for state, scale in zip(states, scales, strict=True):
            state["RMS"] = scale

    def compute_mean_rate(self) -> float | None:
        """Learning rate of the last step, averaged over all parameters; None before the first step."""
        total: Tensor | float = 0.0
        count = 0
        for group in self.param_groups:
            for weight in group["params"]:
                if state := self.state.get(weight):
                    total = total + group["lr"] * state["RMS"] * weight.numel()
                    count += weight.numel()
        return float(total) / count if count else None
