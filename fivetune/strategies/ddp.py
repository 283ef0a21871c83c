"""Data parallel: every rank holds the whole model and computes its share of every global batch.

The gradients are all-reduced in place, once per step after the last micro-batch; no hooks are installed, so that any
forward can be used. The all-reduce is the phase "exchange" of the step's times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.strategies import ModelT, StrategyOptions
from fivetune.strategies._buckets import all_reduce_gradients

if TYPE_CHECKING:
    from torch import nn


class DDP(StrategyOptions):
    """The whole model on each rank; gradients are summed."""

    def wrap(self, model: ModelT, device: str, world: World = SINGLE_PROCESS, *, precision: str = "fp32") -> ModelT:
        model = model.to(device)
        world.broadcast(list(model.parameters()))
        return model

    def reduce_gradients(self, model: nn.Module, world: World) -> None:
        if world.size > 1:
            all_reduce_gradients(model, world)
