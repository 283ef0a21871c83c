"""Fully sharded data parallel (torch's FSDP2): each rank holds a shard of weights, gradients and optimizer state.

A block's weights are all-gathered for each of its computations, in training and in generation, and freed afterwards;
its gradients are reduce-scattered. A pre-trained model is never whole on a rank. With `replicas`, groups of ranks hold
a copy each (hybrid sharding): weights are gathered inside a group, gradients are also all-reduced between the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fivetune.training.strategies._fully_shard import FullyShardedOptions, shard_fully

if TYPE_CHECKING:
    from torch import nn

    from fivetune.distributed.world import World
    from fivetune.types import RunSettings


class FSDP(FullyShardedOptions):
    """Weights, gradients and optimizer state sharded among the ranks."""

    replicas: Annotated[int, Field(ge=1)] = Field(
        1, description="copies of the sharded model; the ranks of one copy should share a machine"
    )

    def explain_incompatibility(self, settings: RunSettings) -> str:
        if settings.num_ranks % self.replicas:
            return (
                f"strategy.replicas {self.replicas} does not divide launch.nproc {settings.num_ranks}. Every copy of "
                "the model has the same number of ranks"
            )
        return super().explain_incompatibility(settings)

    def shard(self, model: nn.Module, device: str, world: World, *, precision: str, costs: Sequence[float]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        hybrid = self.replicas > 1
        shape = (self.replicas, world.size // self.replicas) if hybrid else (world.size,)
        names = ("replica", "shard") if hybrid else ("shard",)
        mesh = init_device_mesh(device.partition(":")[0], shape, mesh_dim_names=names)
        shard_fully(model, mesh, precision=precision, offload=self.offload)
