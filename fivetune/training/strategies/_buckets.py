"""All-reduce of gradients in buckets, while the backward pass still computes the others.

In: a model on each rank. Out: gradients summed over the copies of the model. A bucket is sent as soon as the last
micro-batch of a step has accumulated all of its gradients, always in the same order, so that the all-reduces of the
ranks match; a rank that ran out of memory sends zeros for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fivetune.distributed.sharding import get_local

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fivetune.distributed.world import World

BUCKET_BYTES = 16 * 2**20  # of small gradients that one all-reduce sums


class GradientReducer:
    """Sums the gradients of a model over the copies of a world.

    Args:
        model: its trainable weights; the order of their gradients in a backward pass is about the reverse.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = list(iter_buckets(parameters[::-1]))
        self._bucket_of = {parameter: i for i, bucket in enumerate(self._buckets) for parameter in bucket}
        self._missing: list[int] = []  # gradients of each bucket that are not complete
        self._sent: list[tuple[Any, Tensor]] = []  # of the first buckets: the all-reduce and its flat tensor
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def start(self) -> None:
        """Send the gradients of the next backward pass."""
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Send the rest and wait for all sums. A weight without a gradient, unused on this rank, counts as 0."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (work, flat) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            if len(bucket) > 1:
                sizes = [get_local(parameter).numel() for parameter in bucket]
                for parameter, part in zip(bucket, flat.split(sizes), strict=True):
                    gradient = _ensure_gradient(parameter)
                    gradient.copy_(part.view_as(gradient))
        self._sent, self._missing = [], []

    def _count_gradient(self, parameter: Tensor) -> None:
        if not self._missing:  # not the last micro-batch of a step
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        import torch

        bucket = self._buckets[len(self._sent)]
        if len(bucket) == 1:
            flat = _ensure_gradient(bucket[0])
        else:
            flat = torch.cat([_ensure_gradient(parameter).flatten() for parameter in bucket])
        self._sent.append((self._world.start_all_reduce_sum(flat), flat))


def start_reduction(model: nn.Module, world: World) -> None:
    """Sum the gradients over the copies of the model while the next backward pass computes them."""
    if world.data_size > 1:
        _get_reducer(model, world).start()


def finish_reduction(model: nn.Module, world: World) -> None:
    """Sum the gradients that have not been summed yet. Collective: all ranks call it."""
    if world.data_size > 1:
        _get_reducer(model, world).finish()


def iter_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
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


def _ensure_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, zeros if there is none."""
    import torch

    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return get_local(parameter.grad)


def _get_reducer(model: nn.Module, world: World) -> GradientReducer:
    """The reducer of a model's gradients, made at the first call."""
    if "reducer" not in model.__dict__:
        model.__dict__["reducer"] = GradientReducer(model, world)
    return model.__dict__["reducer"]
