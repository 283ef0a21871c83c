"""Fully sharded data parallel (torch's FSDP2): each rank holds a shard of weights, gradients and optimizer state.

A block's weights are all-gathered for each of its computations, in training and in generation, and freed afterwards;
its gradients are reduce-scattered. A pre-trained model is never whole on a rank. With `replicas`, groups of ranks hold
a copy each (hybrid sharding): weights are gathered inside a group, gradients are also all-reduced between the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import Field, PositiveInt

from fivetune.training.strategies._fully_shard import FullyShardedOptions, shard_fully
from fivetune.types import Layout

if TYPE_CHECKING:
    from torch import nn

    from fivetune.distributed.world import World
    from fivetune.types import RunSettings


class FSDP(FullyShardedOptions):
    """Weights, gradients and optimizer state sharded among the ranks."""

    supports_tpu = True  # weights and optimizer state are sharded over the chips
    complexity = 2

    replicas: PositiveInt = Field(
        1, description="copies of the sharded model; the ranks of one copy should share a machine"
    )

    @classmethod
    def list_variants(cls, num_ranks: int, per_node: int) -> Iterator[Self]:
        for replicas in dict.fromkeys((1, max(1, num_ranks // per_node))):
            yield cls(replicas=replicas)
            yield cls(replicas=replicas, reduce_once=False)

    def get_layout(self, num_ranks: int) -> Layout:
        shards = num_ranks // self.replicas
        return Layout(num_ranks, shards=shards, offload=self.offload, reduce_once=self.reduce_once)

    def explain_incompatibility(self, settings: RunSettings) -> str:
        if settings.num_ranks % self.replicas:
            return (
                f"strategy.replicas {self.replicas} does not divide launch.nproc {settings.num_ranks}. Every copy of "
                "the model has the same number of ranks"
            )
        return super().explain_incompatibility(settings)

    def shard(self, model: nn.Module, device: str, world: World, *, precision: str, costs: Sequence[float]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        shape = (world.size,)
        names = ("shard",)
        if self.replicas > 1:
            shape = (self.replicas, world.size // self.replicas)
            names = ("replica", "shard")
        mesh = init_device_mesh(device.partition(":")[0], shape, mesh_dim_names=names)
        shard_fully(model, mesh, precision=precision, offload=self.offload)
