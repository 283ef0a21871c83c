"""The steps of Lion, on lists of tensors.

In: parameter groups with gradients. Out: changed weights, and the state `exp_avg`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fivetune.training.optimizers._closure import run_closure

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

many: Any = torch  # untyped, because torch's _foreach functions are private


class Lion(Optimizer):
    """p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p), then m = b2 * m + (1 - b2) * g."""

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = run_closure(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            grads = [weight.grad for weight in weights]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            means = [self.state[weight]["exp_avg"] for weight in weights]
            beta1, beta2 = group["betas"]
            signs = many._foreach_lerp(means, grads, 1 - beta1)
            many._foreach_sign_(signs)
            many._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            many._foreach_add_(weights, signs, alpha=-group["lr"])
            many._foreach_lerp_(means, grads, 1 - beta2)
        return loss
