"""Data parallel: every process holds the whole model and computes its share of every global batch.

The gradients are summed after the last micro-batch, in the model's own tensors and exactly once; nothing is hooked into
the model, so that any forward can be used. The exchange is a phase of its own in the step clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fivetune.strategies import ALONE, Strategy, World

if TYPE_CHECKING:
    from torch import Tensor, nn

BUCKET_BYTES = 32 * 2**20  # small gradients that travel together


class Ddp(Strategy):
    """The whole model in each process; gradients are summed."""

    def wrap(self, model: nn.Module, device: str, world: World = ALONE) -> nn.Module:
        model = model.to(device)
        world.send_first(list(model.parameters()))
        return model

    def exchange(self, model: nn.Module, world: World) -> None:
        if world.size == 1:
            return
        import torch

        gradients = [p.grad if p.grad is not None else _zeros(p) for p in model.parameters() if p.requires_grad]
        for bucket in buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket]) if len(bucket) > 1 else bucket[0]
            world.add_up(flat)
            if len(bucket) > 1:
                parts = flat.split([gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, as many together as BUCKET_BYTES hold, but one at least, and of one type."""
    bucket: list[Tensor] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (size > room or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        room = (room if bucket else BUCKET_BYTES) - size
        bucket.append(tensor)
    if bucket:
        yield bucket


def _zeros(parameter: Any) -> Tensor:
    import torch

    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
