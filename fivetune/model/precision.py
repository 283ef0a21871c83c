"""The dtype of matrix products under autocast, and weights in that dtype.

In: a device, weights. Out: the dtype of its matrix products; a context without autocast; weights cast once a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fivetune.model.modules import AutogradContext
from fivetune.model.weight_cache import find_kept, join_rows


class _Context(AutogradContext):
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]


def get_matmul_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products of fp32 weights in the current autocast context."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.float32


def suppress_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast inside the block."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def suppress_half(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast in fp16 inside the block: for transformers' modules, whose sums overflow in it."""
    return suppress_autocast(device) if get_matmul_dtype(device) == torch.float16 else nullcontext()


def cast_weights(*weights: Tensor) -> Tensor:
    """Weights below each other in the dtype of matrix products: [n_1, ...], [n_2, ...] -> [n_1 + n_2, ...].

    Their gradients have their own dtypes. On a CPU, weights are cast once per update: see `copy_weights`.
    """
    kind = get_matmul_dtype(weights[0].device)
    if all(weight.dtype == kind for weight in weights):
        # A gradient reaches the weights through a copy alone.
        if torch.is_grad_enabled() and len(weights) > 1:
            return torch.cat(list(weights))
        return join_rows(weights)
    return CastWeights.apply(kind, *weights)


class CastWeights(torch.autograd.Function):
    """`copy_weights` with a gradient."""

    @staticmethod
    def forward(ctx: _Context, kind: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.dtypes = tuple(weight.dtype for weight in weights)
        ctx.sizes = tuple(map(len, weights))
        return copy_weights(kind, *weights)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_weights: list[Tensor | None] = []
        for part, dtype, needed in zip(grad.split(ctx.sizes), ctx.dtypes, ctx.needs_input_grad[1:], strict=True):
            of_weights.append(part.to(dtype) if needed else None)
        return None, *of_weights


_copies = WeakIdKeyDictionary()
"""The last copy that begins with a parameter, with the versions of the parameters that it was made of."""


def copy_weights(kind: torch.dtype, *weights: Tensor) -> Tensor:
    """Weights below each other in a dtype, without a gradient.

    The copy of parameters on a CPU is kept until one of them changes in place, which torch counts. It does not count
    writes through `.data`, by collectives and by fused kernels: they need `increment_version`. On other devices
    kernels and graphs change weights without torch's knowledge: there `KeptWeights` says how long copies hold.
    """
    places: list[Tensor] = []
    for weight in weights:
        place = find_kept(weight)
        if place is not None and place.value.dtype == kind:
            places.append(place.value)
    if len(places) == len(weights):
        return join_rows(places)
    is_counted = all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in weights)
    if not is_counted or all(weight.dtype == kind for weight in weights):
        return join_rows([weight.to(kind) for weight in weights])
    # A weight that was changed, or replaced by another tensor, has another stamp.
    stamp = kind, [(weight.data_ptr(), weight._version) for weight in weights]
    found = _copies.get(weights[0])  # one copy for each first weight: the last one replaces those before
    if found is None or found[0] != stamp:
        found = stamp, join_rows([weight.detach().to(kind) for weight in weights])
        _copies[weights[0]] = found
    return found[1].detach()
