"""All-reduce of gradients in buckets, while the backward pass still computes the others.

In: a model on each rank. Out: gradients summed in place over the copies of the model. A bucket is sent as soon as the
last micro-batch of a step has accumulated all of its gradients, always in the same order, so that the all-reduces of
the ranks match; a rank that ran out of memory sends zeros for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fivetune.distributed.sharding import get_local

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.distributed_c10d import Work

    from fivetune.distributed.world import World

REDUCER = "gradient_reducer"  # attribute of a model
BUCKET_BYTES = 16 * 2**20  # of small gradients that one all-reduce sums


class GradientReducer:
    """Sums the gradients of a model over the copies of a world.

    Args:
        model: its trainable weights; the order of their gradients in a backward pass is about the reverse.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        # Reversed: the last layers have their gradients first.
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = list(iter_buckets(parameters[::-1]))
        self._bucket_of: dict[Tensor, int] = {}
        for number, bucket in enumerate(self._buckets):
            self._bucket_of |= dict.fromkeys(bucket, number)
        self._missing: list[int] = []  # gradients of each bucket that are not complete
        self._sent: list[Work] = []  # all-reduces of the first buckets
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def start(self) -> None:
        """Send the gradients of the next backward pass."""
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Send the rest and wait for all sums. A weight without a gradient, unused on this rank, counts as 0.

        Gradients that no backward pass of autograd has accumulated, such as a replayed CUDA graph's, are sent here.
        """
        while len(self._sent) < len(self._buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent = []
        self._missing = []

    def _count_gradient(self, parameter: Tensor) -> None:
        if not self._missing:  # not the last micro-batch of a step
            return
        self._missing[self._bucket_of[parameter]] -= 1
        # In the order of the buckets on every rank: one that is complete waits for those before it.
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        import torch

        gradients: list[Tensor] = []
        for parameter in self._buckets[len(self._sent)]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(get_local(parameter.grad))
        self._sent.append(self._world.start_all_reduce_sum(gradients))


def get_reducer(model: nn.Module, world: World) -> GradientReducer:
    """The reducer of a model's gradients, made at the first call."""
    if REDUCER not in model.__dict__:
        model.__dict__[REDUCER] = GradientReducer(model, world)
    return model.__dict__[REDUCER]


def iter_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in buckets of at most BUCKET_BYTES (but at least one tensor) and one dtype."""
    bucket: list[Tensor] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (size > room or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        if not bucket:
            room = BUCKET_BYTES
        room -= size
        bucket.append(tensor)
    if bucket:
        yield bucket
