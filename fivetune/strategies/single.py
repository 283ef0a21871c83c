"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from fivetune.plugins import Options

if TYPE_CHECKING:
    from torch import Tensor, nn


class Single(Options):
    """The whole model on one device."""

    def wrap(self, model: nn.Module, device: str) -> nn.Module:
        return model.to(device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        import torch

        limit = float("inf") if max_norm is None else max_norm
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True)

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()
