"""Strategies: how the model is placed on the devices of a run's processes, one per file.

A strategy's file holds one subclass of `Strategy`, whose fields are its options. What all of them compute is the same:
`launch.nproc` and `strategy` change how fast and in how much memory a run trains, not what it learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from fivetune.plugins import Options
from fivetune.strategies._world import ALONE, Lost, World, refuse_other_world, refuse_shared_devices

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ALONE", "Lost", "Strategy", "World", "refuse_other_world", "refuse_shared_devices"]


class Strategy(Options):
    """What a strategy does; as it stands here, for a model that is whole in every process."""

    several: ClassVar[bool] = True  # whether it can have more than one process
    sharded: ClassVar[bool] = False  # whether a process holds only its part of the weights

    def obstacle(self, *, optimizer: str, precision: str, forward: str, batch_size: int | str) -> str:
        """Why several processes cannot train with these settings: a sentence that begins with a key; empty if they can.

        >>> Strategy().obstacle(optimizer="adamw", precision="fp32", forward="auto", batch_size=8)
        ''
        """
        return ""

    def wrap(self, model: nn.Module, device: str, world: World = ALONE) -> nn.Module:
        """The model as it is trained, on its device, with the weights of the first process. All processes call it."""
        return model.to(device)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[Any]:
        """The plain transformers model with all its weights, to generate with and to save. All processes enter it."""
        yield model

    def exchange(self, model: nn.Module, world: World) -> None:
        """Make the gradients the sum of those of all processes, where the backward pass has not done so."""

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; the norm before, of all of them together."""
        import torch

        from fivetune.optimizers._table_adamw import scale_tables, total_norm

        parameters = list(model.parameters())
        norm = total_norm(parameters)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
            scale_tables(parameters, max_norm, norm)
        return norm
