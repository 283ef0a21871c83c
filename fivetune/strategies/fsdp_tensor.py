"""Two-dimensional: tensor parallel inside groups of `size` ranks, fully sharded data parallel between the groups.

A rank's share of the heads and features is sharded once more among the groups, gathered for each block and freed
afterwards. For models that neither dimension alone can hold: `size` is the number of devices of a machine.
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
from fivetune.strategies._tensor import split_heads

if TYPE_CHECKING:
    from torch import nn


class FSDPTensor(StrategyOptions):
    """Heads and features split inside groups, the shares sharded between them."""

    sharded: ClassVar[bool] = True

    size: Annotated[int, Field(ge=2)] = Field(2, description="ranks that share the heads and features of a block")
    offload: bool = Field(False, description="keep weights, gradients and optimizer state in the host's memory")
    reduce_once: bool = Field(
        True, description="reduce gradients once per step; false: after every micro-batch, which takes less memory"
    )

    def get_model_size(self, num_ranks: int) -> int:
        return self.size

    def explain_incompatibility(
        self, *, optimizer: str, precision: str, forward: str, batch_size: int | str, num_ranks: int
    ) -> str:
        if precision == "fp16":
            return "train.precision fp16 adapts the loss scale on each rank alone. Use bf16 with this strategy"
        if batch_size == "auto":
            return "train.batch_size auto is measured on each rank alone; this strategy needs all. Set a number"
        if num_ranks < 2 * self.size:
            return (
                f"strategy.name fsdp_tensor needs at least two groups of strategy.size {self.size} ranks, launch.nproc "
                f"is {num_ranks}. Use tensor for one group, or raise launch.nproc"
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
        if world.mesh is None:
            return model.to(device)
        if not is_on_meta(model):
            world.broadcast(list(model.parameters()))
        split_heads(model, world.mesh["model"])
        shard_fully(model, world.mesh["data"], precision=precision, offload=self.offload)
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
