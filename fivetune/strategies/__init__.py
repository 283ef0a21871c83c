"""Strategies: how the model is placed on the devices of the ranks, one per file.

A strategy's file holds one subclass of `StrategyOptions`, whose fields are its options. All of them compute the same
update: `launch.nproc` and `strategy` change speed and memory, not the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.plugins import Options
from fivetune.types import ModelT

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ModelT", "StrategyOptions"]


class StrategyOptions(Options):
    """Base of all strategies, which describes the contract `fivetune.types.Strategy`.

    The defaults are for an unsharded model.
    """

    supports_multiple: ClassVar[bool] = True  # whether it supports more than one rank
    sharded: ClassVar[bool] = False  # whether each rank holds a shard of the weights

    def explain_incompatibility(self, *, optimizer: str, precision: str, forward: str, batch_size: int | str) -> str:
        """Explain why several ranks cannot train with these settings, beginning with a key; empty if they can.

        >>> StrategyOptions().explain_incompatibility(optimizer="adamw", precision="fp32", forward="auto", batch_size=8)
        ''
        """
        return ""

    def wrap(self, model: ModelT, device: str, world: World = SINGLE_PROCESS) -> ModelT:
        """Place the model on its device with the weights of rank 0. Collective: all ranks call it."""
        return model.to(device)

    @contextmanager
    def suppress_warnings(self) -> Iterator[None]:
        """Hide the warnings of libraries that need no action, as long as a run lasts."""
        yield

    @contextmanager
    def gather_model(self, model: ModelT) -> Iterator[ModelT]:
        """Yield the transformers model with all weights, for generation and saving. Collective: all ranks enter it."""
        yield model

    def reduce_gradients(self, model: nn.Module, world: World) -> None:
        """All-reduce (sum) the gradients, unless backward already has."""

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before."""
        import torch

        from fivetune.optimizers._table_adamw import compute_total_norm, scale_tables

        parameters = list(model.parameters())
        norm = compute_total_norm(parameters)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
            scale_tables(parameters, max_norm, norm)
        return norm
