"""A model as functions of its weights, for compilers that trace whole steps.

In: a model, weights by name, tensors. Out: what a function of the model returns. Its own weights are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fivetune.data.store.batch import PaddedBatch
from fivetune.model.forward import compute_padded_losses
from fivetune.model.modules import T5Model


class StatelessModel(nn.Module):
    """Calls functions of a model with given weights; those that the model ties are replaced together."""

    def __init__(self, model: T5Model) -> None:
        super().__init__()
        self.model = model

    def call(self, function: Callable[..., Tensor], weights: Mapping[str, Tensor], *tensors: Tensor) -> Tensor:
        """Return function(model, *tensors), where the model has `weights`, by the names of its parameters."""
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return torch.func.functional_call(self, named, (function, *tensors), tie_weights=True)

    def forward(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(self.model, *tensors)


def compute_losses(model: T5Model, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """-log p of every label, [B, T] fp32, 0 at labels of -100."""
    return compute_padded_losses(model, PaddedBatch(input_ids, attention_mask, labels))
