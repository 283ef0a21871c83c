"""Weights in the dtype of matrix products, copied once per update, and gradients that backward passes add in place.

In: a model. Out: while `KeptWeights.attach` is entered, the parameters' copies and gradients at fixed addresses.
Autocast casts each weight for each product and each gradient back, and adds it to the parameter's. Here a product reads
the copy and its backward pass adds to the gradient at once. Matrices that lie below each other in memory (q, k and v of
a layer) are one matrix without being joined, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.distributed.sharding import get_local
from fivetune.model.cuda.tiles import round_up
from fivetune.model.modules import AutogradContext, T5Model


class _Context(AutogradContext):
    totals: list[Tensor | None]
    sizes: list[int]
    kind: torch.dtype


many: Any = torch  # its functions of many tensors have private names
KEPT = "kept"  # attribute of a parameter
JOINED = (("q", "k", "v"), ("wi_0", "wi_1"))  # names of linear modules of one input
ALIGNMENT = 64  # elements; every matrix begins at 128 bytes in bf16
CROSS_PROJECTIONS = ("EncDecAttention.k", "EncDecAttention.v")  # modules whose input is the encoder's output


@dataclass(frozen=True, slots=True)
class Kept:
    """A parameter's value in the dtype of products, and its gradient, to which backward passes add."""

    value: Tensor
    grad: Tensor | None


class KeptWeights:
    """The copies of a model's matrices: those of linear modules that no strategy divides and the table of embeddings.

    Args:
        kind: dtype of matrix products; weights of this dtype are not copied.
        written: copies that the optimizer's kernel writes, each at the place that a trained weight has in its memory.
    """

    def __init__(self, model: T5Model, kind: torch.dtype, written: Tensor | None = None) -> None:
        self._tables: list[Any] = [model.get_input_embeddings().weight]  # looked up in fp32 unless it is the head too
        self._weights = list_factors(model)
        cast = [weight for weight in self._weights if weight.dtype != kind]
        # A frozen weight is not in the optimizer's memory.
        own = [weight for weight in cast if written is None or not weight.requires_grad]
        self._copies: dict[nn.Parameter, Tensor] = dict(zip(own, allocate_views(own, kind)[1], strict=True))
        for weight in cast:
            if weight not in self._copies:
                assert written is not None
                part = written[weight.storage_offset() :]
                self._copies[weight] = part[: weight.numel()].view(weight.shape)
        self._is_written = written is not None
        self._versions: list[int] = []

    @torch.no_grad()
    def update(self) -> None:
        """Copy the weights again, which have changed; where a kernel writes both, only what torch has changed."""
        versions = [weight._version for weight in self._copies]  # which a kernel does not count
        if self._copies and not (self._is_written and versions == self._versions):
            many._foreach_copy_([*self._copies.values()], [*self._copies])
        self._versions = versions

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Let `copy_weights`, linear modules, the lookup of embeddings and the head use what is kept.

        Where gradients are enabled, every trainable parameter must have its gradient buffer.
        """
        parameters = list(dict.fromkeys([*self._weights, *self._tables]))
        if torch.is_grad_enabled():  # a product would drop the gradient of a weight that has no place for it
            missing = [tuple(each.shape) for each in parameters if each.requires_grad and each.grad is None]
            assert not missing, f"trainable weights without a gradient buffer, by shape: {missing}"
        for parameter in parameters:
            vars(parameter)[KEPT] = Kept(self._copies.get(parameter, parameter.detach()), parameter.grad)
        try:
            yield
        finally:  # the next update makes the copies stale
            for parameter in parameters:
                del vars(parameter)[KEPT]


def count_places(weights: Sequence[Tensor]) -> int:
    """The elements of a buffer in which weights lie one after the other, each aligned.

    >>> count_places([torch.ones(3, 5), torch.ones(70)])
    192
    """
    return sum(round_up(weight.numel(), ALIGNMENT) for weight in weights)


def allocate_views(weights: Sequence[Tensor], kind: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """Allocate zeros for weights in one buffer. Returns: the buffer, and a view of it in the shape of each weight."""
    sizes = [count_places([weight]) for weight in weights]
    buffer = torch.zeros(sum(sizes), dtype=kind, device=weights[0].device if weights else None)
    parts = zip(weights, buffer.split(sizes), strict=True)
    return buffer, [part[: weight.numel()].view(weight.shape) for weight, part in parts]


def list_factors(model: T5Model) -> list[nn.Parameter]:
    """List the matrices of linear modules that no strategy divides, each once: those of the encoder's output first.

    Buffers in this order have matrices below each other that one product reads.
    """
    first: list[Any] = []
    others: list[Any] = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            (first if name.endswith(CROSS_PROJECTIONS) else others).append(module.weight)
    return [weight for weight in dict.fromkeys([*first, *others]) if get_local(weight) is weight]


def find_kept(weight: Tensor) -> Kept | None:
    """What is kept of a parameter at present."""
    return vars(weight).get(KEPT) if type(weight) is nn.Parameter else None


def get_kept_grad(parameter: Tensor) -> Tensor | None:
    """The gradient to which a backward pass adds; None if it returns its own."""
    kept = find_kept(parameter)
    return kept.grad if kept and parameter.requires_grad else None


def join_projections(model: nn.Module) -> None:
    """Move matrices that are one product (q, k and v of a layer) below each other in memory, once: no copy joins them.

    For a model that answers: optimizers and strategies divide weights in ways of their own.
    """
    for module in model.modules():
        for names in JOINED:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if not all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in parts):
                continue
            weights: list[Tensor] = [part.weight.detach() for part in parts]
            rows = join_rows(weights).split([*map(len, weights)])
            for part, own in zip(parts, rows, strict=True):
                part.weight.data = own


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Matrices below each other; without a copy if they lie so in memory."""
    found = _find_joined(parts)
    return torch.cat(list(parts)) if found is None else found


def _find_joined(parts: Sequence[Tensor]) -> Tensor | None:
    first = parts[0]
    if len(parts) == 1:
        return first
    end = first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == memory and part.storage_offset() == end
        if not (is_next and part.is_contiguous()):
            return None
        end += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total += a b, in place; a and b may be in 16 bits."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if has_mixed_products(total):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(a @ b)


def add_at_(total: Tensor, places: Tensor, rows: Tensor, dim: int = 0) -> None:
    """total[places] += rows along a dimension, several rows at one place in a fixed order: [P, n], [N], [N, n]."""
    if total.device.type == "cuda":  # where `index_add_` uses atomics; this one sorts the places
        total.transpose(0, dim).index_put_((places,), rows.transpose(0, dim), accumulate=True)
    else:
        total.index_add_(dim, places, rows)


def has_mixed_products(x: Tensor) -> bool:
    """Whether torch adds a product of 16-bit factors to fp32 in one kernel."""
    return x.device.type == "cuda"


class KeptLinear(torch.autograd.Function):
    """Outputs of linear modules side by side, by their kept weights: [N, d] -> [N, sum of widths]."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, *weights: Tensor) -> Tensor:
        value = join_rows([vars(weight)[KEPT].value for weight in weights])
        ctx.kind = x.dtype
        ctx.totals = [get_kept_grad(weight) for weight in weights]
        ctx.sizes = [*map(len, weights)]
        grads = [total for total in ctx.totals if total is not None]
        # Gradients that lie below each other are added to by one product.
        if len(grads) == len(weights) and (joined := _find_joined(grads)) is not None:
            ctx.totals = [joined]
            ctx.sizes = [len(joined)]
        x = x.to(value.dtype)
        ctx.save_for_backward(x, value)
        return F.linear(x, value)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, value = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad
        for total, part in zip(ctx.totals, grad.split(ctx.sizes, -1), strict=True):
            if total is not None:
                add_product_(total, part.t(), x)
        of_x = (grad @ value).to(ctx.kind) if needs_x else None
        return of_x, *[None] * len(needed)
