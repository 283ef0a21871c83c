"""Tensor parallel: the ranks share every matrix product of a block (Megatron-LM); all compute the same examples.

Each rank computes its attention heads and feed-forward features; an all-reduce sums the results of every layer (two in
an encoder block, three in a decoder block), and their gradients. Generation runs the same way. Worth it inside one
machine, for models whose blocks are large. With more ranks than `size`, each group of `size` ranks holds a copy, and
gradients are all-reduced between the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from fivetune.training.strategies import ShardedOptions, is_on_meta, list_divisors
from fivetune.types import Layout

if TYPE_CHECKING:
    from torch import nn

    from fivetune.distributed.world import World
    from fivetune.types import RunSettings


class Tensor(ShardedOptions):
    """Attention heads and feed-forward features split among the ranks."""

    complexity = 3

    size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="ranks that share one copy of the model; default: all"
    )

    @classmethod
    def list_variants(cls, num_ranks: int, per_node: int) -> Iterator[Self]:
        for size in list_divisors(per_node):  # groups that share heads stay inside a node
            yield cls(size=None if size == num_ranks else size)

    def get_layout(self, num_ranks: int) -> Layout:
        return Layout(num_ranks, heads=self.get_model_size(num_ranks))

    def get_model_size(self, num_ranks: int) -> int:
        return self.size or num_ranks

    def explain_incompatibility(self, settings: RunSettings) -> str:
        return self.explain_whole_tensors(settings) or super().explain_incompatibility(settings)

    def shard(self, model: nn.Module, device: str, world: World, *, precision: str, costs: Sequence[float]) -> None:
        from fivetune.training.strategies._tensor import split_heads

        assert world.mesh is not None
        split_heads(model, world.mesh["model"])
        if not is_on_meta(model):
            model.to(device)
