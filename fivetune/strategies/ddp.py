"""Data parallel: every rank holds the whole model and computes its share of every global batch.

The gradients are all-reduced in place, in buckets, while the backward pass of the step's last micro-batch goes on; any
forward can be used. What remains after the backward pass is the phase "exchange" of the step's times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.strategies import ModelT, StrategyOptions
from fivetune.strategies._buckets import get_reducer

if TYPE_CHECKING:
    from torch import nn


class DDP(StrategyOptions):
    """The whole model on each rank; gradients are summed."""

    def wrap(
        self,
        model: ModelT,
        device: str,
        world: World = SINGLE_PROCESS,
        *,
        precision: str = "fp32",
        costs: Sequence[float] = (),
    ) -> ModelT:
        model = model.to(device)
        world.broadcast(list(model.parameters()))
        return model

    def prepare_backward(self, model: nn.Module, world: World, *, is_last: bool) -> None:
        if is_last and world.size > 1:
            get_reducer(model, world).start()

    def reduce_gradients(self, model: nn.Module, world: World) -> None:
        if world.size > 1:
            get_reducer(model, world).finish()
