"""Products of flat tokens with frozen matrices beside which LoRA trains a low-rank pair: x W^T + s (x A^T) B^T.

In: tokens [N, d], linear modules of torch or peft. Out: their outputs side by side, [N, sum of widths]. The matrices
of one input are multiplied at once, as without an adapter; so are their A. No gradient is computed for W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fivetune.model.modules import AutogradContext
from fivetune.model.precision import cast_weights, get_matmul_dtype, suppress_autocast


class _Context(AutogradContext):
    scales: tuple[float, ...]


class LowRankPair(NamedTuple):
    """A frozen matrix [m, d] with A [r, d], B [m, r] and their scale."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float


def find_pair(module: nn.Module) -> LowRankPair | None:
    """The pair of one of peft's modules, if its output follows the formula above; None if it does not.

    Dropout, DoRA and other variants, a bias, hooks and a matrix in 4 bits compute something else.
    """
    pairs: Any = getattr(module, "lora_A", None)
    if pairs is None or len(pairs) != 1 or "default" not in pairs:
        return None
    layer: Any = module
    base = layer.base_layer
    a = pairs["default"]
    b = layer.lora_B["default"]
    dropout = layer.lora_dropout["default"]
    if layer.lora_variant or layer.lora_magnitude_vector or layer.merged or layer.disable_adapters:
        return None
    if not isinstance(dropout, nn.Identity) and dropout.training and dropout.p > 0:
        return None
    for one in (base, a, b):
        if type(one) is not nn.Linear or one.bias is not None or one._forward_hooks:
            return None
    if base.weight.requires_grad or module._forward_hooks:
        return None
    return LowRankPair(base.weight, a.weight, b.weight, layer.scaling["default"])


def apply_low_rank(x: Tensor, pairs: Sequence[LowRankPair]) -> Tensor:
    """The outputs side by side, [N, sum of m]: a new tensor."""
    kind = get_matmul_dtype(x.device)
    weight = cast_weights(*(pair.weight for pair in pairs))
    a = cast_weights(*(pair.a for pair in pairs))
    bs = [cast_weights(pair.b) for pair in pairs]
    scales = tuple(pair.scale for pair in pairs)
    with suppress_autocast(x.device):
        return LowRankProduct.apply(x.to(kind), weight, a, scales, *bs)


class LowRankProduct(torch.autograd.Function):
    """x W^T, with scale_i (x A_i^T) B_i^T added to the columns of the i-th matrix."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, a: Tensor, scales: tuple[float, ...], *bs: Tensor) -> Tensor:
        out = x @ weight.t()
        inner = x @ a.t()
        columns = list(map(len, bs))
        ranks = [b.shape[1] for b in bs]
        # The parts of `out` are views: each matrix adds to its own columns.
        for part, own, b, scale in zip(out.split(columns, 1), inner.split(ranks, 1), bs, scales, strict=True):
            part.addmm_(own, b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, inner, *bs)
        ctx.scales = scales
        return out

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, inner, *bs = ctx.saved_tensors
        of_inner = torch.empty_like(inner)
        columns = list(map(len, bs))
        ranks = [b.shape[1] for b in bs]
        parts = grad.split(columns, 1), inner.split(ranks, 1), of_inner.split(ranks, 1)
        of_bs = []
        for of_part, own, of_own, b, scale in zip(*parts, bs, ctx.scales, strict=True):
            of_own.addmm_(of_part, b, beta=0, alpha=scale)  # beta 0: the memory holds nothing yet
            of_bs.append((of_part.t() @ own).mul_(scale))
        of_x = (grad @ weight).addmm_(of_inner, a) if ctx.needs_input_grad[0] else None
        return of_x, None, of_inner.t() @ x, None, *of_bs


def add_pair(found: Tensor, x: Tensor, pair: LowRankPair | None) -> Tensor:
    """Add to x W_h of every head h its x s B_h A, [H, n, m / H] -> [H, n, d]; without a pair, nothing."""
    if pair is None:
        return found
    return found + pair.scale * (torch.bmm(x, _divide(pair.b, len(x))) @ pair.a)


def add_transposed_pair(found: Tensor, x: Tensor, pair: LowRankPair | None) -> Tensor:
    """Add to x W_h^T of every head h its s x A^T B_h^T, [H, n, d] -> [H, n, m / H]; without a pair, nothing."""
    if pair is None:
        return found
    return found + pair.scale * torch.bmm(x @ pair.a.t(), _divide(pair.b, len(x)).transpose(1, 2))


def _divide(matrix: Tensor, num_heads: int) -> Tensor:
    return matrix.view(num_heads, -1, matrix.shape[1])
