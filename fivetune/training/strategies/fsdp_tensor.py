"""Two-dimensional: tensor parallel inside groups of `size` ranks, fully sharded data parallel between the groups.

A rank's share of the heads and features is sharded once more among the groups, gathered for each block and freed
afterwards. For models that neither dimension alone can hold: `size` is the number of devices of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from fivetune.training.strategies import list_divisors
from fivetune.training.strategies._fully_shard import FullyShardedOptions, shard_fully
from fivetune.types import Layout

if TYPE_CHECKING:
    from torch import nn

    from fivetune.distributed.world import World
    from fivetune.types import RunSettings


class FSDPTensor(FullyShardedOptions):
    """Heads and features split inside groups, the shares sharded between them."""

    complexity = 4

    size: Annotated[int, Field(ge=2)] = Field(2, description="ranks that share the heads and features of a block")

    @classmethod
    def list_variants(cls, num_ranks: int, per_node: int) -> Iterator[Self]:
        for size in list_divisors(per_node):
            if size < num_ranks:
                yield cls(size=size)
                yield cls(size=size, reduce_once=False)

    def get_layout(self, num_ranks: int) -> Layout:
        return Layout(
            num_ranks,
            heads=self.size,
            shards=num_ranks // self.size,
            offload=self.offload,
            reduce_once=self.reduce_once,
        )

    def get_model_size(self, num_ranks: int) -> int:
        return self.size

    def explain_incompatibility(self, settings: RunSettings) -> str:
        if settings.num_ranks < 2 * self.size:
            return (
                f"strategy.name fsdp_tensor needs at least two groups of strategy.size {self.size} ranks, launch.nproc "
                f"is {settings.num_ranks}. Use tensor for one group, or raise launch.nproc"
            )
        return super().explain_incompatibility(settings)

    def shard(self, model: nn.Module, device: str, world: World, *, precision: str, costs: Sequence[float]) -> None:
        from fivetune.training.strategies._tensor import split_heads

        assert world.mesh is not None
        split_heads(model, world.mesh["model"])
        shard_fully(model, world.mesh["data"], precision=precision, offload=self.offload)
