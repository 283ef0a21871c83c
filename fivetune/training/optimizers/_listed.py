"""Base of optimizers that update all weights of a group together, by torch's _foreach functions.

In: parameter groups with gradients. Out: changed weights and state, by `update` of a subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from fivetune.types import TorchState

many: Any = torch  # untyped, because torch's _foreach functions are private


class ListedOptimizer(Optimizer):
    """An optimizer whose step is the update of each group's weights that have gradients."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.update(group, weights)

    @abstractmethod
    def update(self, group: TorchState, weights: list[Tensor]) -> None:
        """Update weights, at least one, with the options of their group."""
