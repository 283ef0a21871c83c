"""Tensor parallel: the ranks share every matrix product of a block (Megatron-LM); all compute the same examples.

Each rank computes its attention heads and feed-forward features; two all-reduces per block and direction sum the
results. Generation runs the same way. Worth it inside one machine, for models whose blocks are large.
With more ranks than `size`, each group of `size` ranks holds a copy, and gradients are all-reduced between the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.strategies import ModelT, StrategyOptions, is_on_meta
from fivetune.strategies._buckets import get_reducer
from fivetune.strategies._tensor import split_heads

if TYPE_CHECKING:
    from torch import nn


class Tensor(StrategyOptions):
    """Attention heads and feed-forward features split among the ranks."""

    sharded: ClassVar[bool] = True

    size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="ranks that share one copy of the model; default: all"
    )

    def get_model_size(self, num_ranks: int) -> int:
        return self.size or num_ranks

    def explain_incompatibility(
        self, *, optimizer: str, precision: str, forward: str, batch_size: int | str, num_ranks: int
    ) -> str:
        if precision == "fp16":
            return "train.precision fp16 adapts the loss scale on each rank alone. Use bf16 with strategy.name tensor"
        if batch_size == "auto":
            return "train.batch_size auto is measured on each rank alone; strategy.name tensor needs all. Set a number"
        return ""

    def wrap(
        self,
        model: ModelT,
        device: str,
        world: World = SINGLE_PROCESS,
        *,
        precision: str = "fp32",
        costs: Sequence[float] = (),
    ) -> ModelT:
        if world.mesh is None:
            return model.to(device)
        if not is_on_meta(model):
            world.broadcast(list(model.parameters()))
        split_heads(model, world.mesh["model"])
        return model if is_on_meta(model) else model.to(device)

    def prepare_backward(self, model: nn.Module, world: World, *, is_last: bool) -> None:
        if is_last and world.data_size > 1:
            get_reducer(model, world).start()

    def reduce_gradients(self, model: nn.Module, world: World) -> None:
        if world.data_size > 1:
            get_reducer(model, world).finish()
