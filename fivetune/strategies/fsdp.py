"""Fully sharded data parallel (torch's FSDP2): each rank holds a shard of weights, gradients and optimizer state.

A block's weights are all-gathered for each of its computations, in training and in generation, and freed afterwards;
its gradients are reduce-scattered. No rank ever holds the whole model. With `replicas`, groups of ranks hold a copy
each (hybrid sharding): weights are gathered inside a group, gradients are also all-reduced between the groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.strategies import ModelT, StrategyOptions, is_on_meta
from fivetune.strategies._fully_shard import shard_fully

if TYPE_CHECKING:
    from torch import nn

OPTIMIZERS = ("adafactor", "adamw")  # their update of a shard equals that of the full tensor


class FSDP(StrategyOptions):
    """Weights, gradients and optimizer state sharded among the ranks."""

    sharded: ClassVar[bool] = True

    replicas: Annotated[int, Field(ge=1)] = Field(
        1, description="copies of the sharded model; the ranks of one copy should share a machine"
    )
    offload: bool = Field(False, description="keep weights, gradients and optimizer state in the host's memory")
    reduce_once: bool = Field(
        True, description="reduce gradients once per step; false: after every micro-batch, which takes less memory"
    )

    def explain_incompatibility(
        self, *, optimizer: str, precision: str, forward: str, batch_size: int | str, num_ranks: int
    ) -> str:
        if optimizer not in OPTIMIZERS:
            return (
                f"optimizer.name {optimizer} may need whole matrices, and strategy.name fsdp shards them. "
                f"Use optimizer.name {' or '.join(OPTIMIZERS)}, or strategy.name ddp"
            )
        if precision == "fp16":
            return "train.precision fp16 adapts the loss scale on each rank alone. Use bf16 with strategy.name fsdp"
        if batch_size == "auto":
            return "train.batch_size auto is measured on each rank alone; strategy.name fsdp needs all. Set a number"
        if num_ranks % self.replicas:
            return (
                f"strategy.replicas {self.replicas} does not divide launch.nproc {num_ranks}. Every copy of the model "
                "has the same number of ranks"
            )
        return ""

    def get_weight_device(self, device: str) -> str:
        return "cpu" if self.offload else device

    def wrap(
        self,
        model: ModelT,
        device: str,
        world: World = SINGLE_PROCESS,
        *,
        precision: str = "fp32",
        costs: Sequence[float] = (),
    ) -> ModelT:
        if world.size == 1:
            return model.to(device)
        from torch.distributed.device_mesh import init_device_mesh

        if not is_on_meta(model):
            world.broadcast(list(model.parameters()))
        hybrid = self.replicas > 1
        shape = (self.replicas, world.size // self.replicas) if hybrid else (world.size,)
        names = ("replica", "shard") if hybrid else ("shard",)
        mesh = init_device_mesh(device.partition(":")[0], shape, mesh_dim_names=names)
        shard_fully(model, mesh, precision=precision, offload=self.offload)
        return model

    @contextmanager
    def suppress_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view")  # never changed in place
            yield

    def prepare_backward(self, model: nn.Module, world: World, *, is_last: bool) -> None:
        sharded: Any = model
        if hasattr(sharded, "set_requires_gradient_sync"):  # not with one rank
            sharded.set_requires_gradient_sync(is_last or not self.reduce_once)
