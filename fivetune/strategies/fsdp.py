"""Fully sharded data parallel (torch's FSDP2): each rank holds a shard of weights, gradients and optimizer state.

A block's weights are all-gathered before its computation and freed afterwards; its gradients are reduce-scattered in
every micro-batch, so that no rank ever holds all of them. Tied embeddings are one group. For generation and saving,
all weights are gathered on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from fivetune.distributed.sharding import gather_tensor
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.strategies import ModelT, StrategyOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

OPTIMIZERS = ("adafactor", "adamw")  # their update of a shard equals that of the full tensor


class FSDP(StrategyOptions):
    """Weights, gradients and optimizer state sharded among the ranks."""

    sharded: ClassVar[bool] = True

    def explain_incompatibility(self, *, optimizer: str, precision: str, forward: str, batch_size: int | str) -> str:
        if optimizer not in OPTIMIZERS:
            return (
                f"optimizer.name {optimizer} may need whole matrices, and strategy.name fsdp shards them. "
                f"Use optimizer.name {' or '.join(OPTIMIZERS)}, or strategy.name ddp"
            )
        if precision == "fp16":
            return "train.precision fp16 adapts the loss scale on each rank alone. Use bf16 with strategy.name fsdp"
        if forward == "flat":
            return "train.forward flat reads weights that strategy.name fsdp shards. Use auto or padded"
        if batch_size == "auto":
            return "train.batch_size auto is measured on each rank alone; strategy.name fsdp needs all. Set a number"
        return ""

    def wrap(self, model: ModelT, device: str, world: World = SINGLE_PROCESS) -> ModelT:
        model = model.to(device)
        if world.size == 1:
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        world.broadcast(list(model.parameters()))
        replica = deepcopy(model).requires_grad_(False)
        _release_weights(replica)
        model.__dict__["replica"] = replica  # setattr would register it as a submodule
        mesh = init_device_mesh(device.partition(":")[0], (world.size,))
        for group in (_find_tied_embeddings(model), *_iter_blocks(model), model):
            fully_shard(group, mesh=mesh)
            module: Any = group[0] if isinstance(group, list) else group
            module.set_force_sum_reduction_for_comms(True)  # no mean: the loss is already divided by all tokens
            module.set_gradient_divide_factor(1.0)
        return model

    @contextmanager
    def suppress_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view")  # never changed in place
            yield

    @contextmanager
    def gather_model(self, model: ModelT) -> Iterator[ModelT]:
        replica: Any = model.__dict__.get("replica")
        if replica is None:
            yield model
            return
        for own, part in zip(replica.parameters(), model.parameters(), strict=True):
            own.data = gather_tensor(part.detach())
        try:
            yield replica
        finally:
            _release_weights(replica)

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        import torch

        limit = float("inf") if max_norm is None else max_norm
        return gather_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True))


def _find_tied_embeddings(model: Any) -> list[nn.Module]:
    """The modules that share the embedding's table, each once."""
    table = model.get_input_embeddings().weight
    return [module for module in model.modules() if getattr(module, "weight", None) is table]


def _iter_blocks(model: Any) -> Iterator[nn.Module]:
    yield from model.encoder.block
    yield from model.decoder.block


def _release_weights(replica: nn.Module) -> None:
    """Free the memory of the weights; the parameters and their ties remain."""
    for parameter in replica.parameters():
        parameter.data = parameter.data.new_empty(0)
