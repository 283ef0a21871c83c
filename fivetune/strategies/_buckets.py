"""All-reduce of gradients in buckets: few large messages in place of many small ones.

In: a model after its backward pass. Out: the same gradients, summed over the copies of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivetune.distributed.sharding import get_local
from fivetune.distributed.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn

BUCKET_BYTES = 32 * 2**20  # of small gradients that one all-reduce sums


def all_reduce_gradients(model: nn.Module, world: World) -> None:
    """Sum the gradients of all weights in place; a weight without one, which this rank did not use, counts as 0."""
    import torch

    gradients = [
        get_local(p.grad if p.grad is not None else _fill_zero_grad(p)) for p in model.parameters() if p.requires_grad
    ]
    for bucket in iter_gradient_buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket]) if len(bucket) > 1 else bucket[0]
        world.all_reduce_sum(flat)
        if len(bucket) > 1:
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def iter_gradient_buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in buckets of at most BUCKET_BYTES (but at least one tensor) and one dtype."""
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


def _fill_zero_grad(parameter: Tensor) -> Tensor:
    import torch

    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
