"""Fully sharded data parallel (torch's FSDP2): every process holds a part of weights, gradients and optimizer state.

A block's weights are collected right before it computes and given back afterwards; its gradients are summed over the
processes in every micro-batch, so that no process ever holds all of them. The embeddings that are tied are one group.
To generate and to save, all weights are collected in every process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from fivetune.sharding import whole
from fivetune.strategies import ALONE, Strategy, World

if TYPE_CHECKING:
    from torch import Tensor, nn

OPTIMIZERS = ("adafactor", "adamw")  # that update a part as they would update the whole


class Fsdp(Strategy):
    """Weights, gradients and optimizer state divided among the processes."""

    sharded: ClassVar[bool] = True

    def obstacle(self, *, optimizer: str, precision: str, forward: str, batch_size: int | str) -> str:
        if optimizer not in OPTIMIZERS:
            return (f"optimizer.name {optimizer} may need whole matrices, and strategy.name fsdp divides them. "
                    f"Use optimizer.name {' or '.join(OPTIMIZERS)}, or strategy.name ddp")  # fmt: skip
        if precision == "fp16":
            return "train.precision fp16 scales the loss by what each process sees. Use bf16 with strategy.name fsdp"
        if forward == "flat":
            return "train.forward flat reads weights that strategy.name fsdp divides. Use auto or padded"
        if batch_size == "auto":
            return "train.batch_size auto is found by one process, and strategy.name fsdp needs all. Give a number"
        return ""

    def wrap(self, model: nn.Module, device: str, world: World = ALONE) -> nn.Module:
        model = model.to(device)
        if world.size == 1:
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view")  # which nothing changes
        world.send_first(list(model.parameters()))
        replica = deepcopy(model).requires_grad_(False)
        _empty(replica)
        model.__dict__["replica"] = replica  # not a module of the model
        mesh = init_device_mesh(device.partition(":")[0], (world.size,))
        for group in (_tied_embeddings(model), *_blocks(model), model):
            fully_shard(group, mesh=mesh)
            module: Any = group[0] if isinstance(group, list) else group
            module.set_force_sum_reduction_for_comms(True)  # not the mean: the loss is divided by the tokens of all
            module.set_gradient_divide_factor(1.0)
        return model

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[Any]:
        replica: Any = model.__dict__.get("replica")
        if replica is None:
            yield model
            return
        for own, part in zip(replica.parameters(), model.parameters(), strict=True):
            own.data = whole(part.detach())
        try:
            yield replica
        finally:
            _empty(replica)

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        import torch

        limit = float("inf") if max_norm is None else max_norm
        return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True))


def _tied_embeddings(model: Any) -> list[nn.Module]:
    """The modules that share the embedding's table, each once."""
    table = model.get_input_embeddings().weight
    return [module for module in model.modules() if getattr(module, "weight", None) is table]


def _blocks(model: Any) -> Iterator[nn.Module]:
    yield from model.encoder.block
    yield from model.decoder.block


def _empty(replica: nn.Module) -> None:
    """Give the memory of the weights back; they stay what they are, tied ones too."""
    for parameter in replica.parameters():
        parameter.data = parameter.data.new_empty(0)
