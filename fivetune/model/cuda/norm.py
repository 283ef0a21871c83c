"""T5's root mean square norm in Triton: forward and backward.

In: rows [..., D] and a weight [D]. Out: rows of the same shape. Statistics are fp32. The weight's gradient is
deterministic: each of a fixed number of programs sums every n-th row, and the n sums are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivetune.model.cuda.tiles import TILES, launch
from fivetune.model.modules import AutogradContext


def compute_rms_norm(x: Tensor, weight: Tensor, eps: float, kind: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded where transformers' T5LayerNorm rounds.

    Args:
        x: [..., D] fp32 or bf16, contiguous rows. weight: [D] of the same type.
        kind: dtype of the result; default: the dtype of x.
    """
    return compute_branch_norm(x, weight, eps, kind)[1]


def compute_branch_norm(
    x: Tensor, weight: Tensor, eps: float, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x itself and its `compute_rms_norm`; the norm's backward pass adds the gradients of both."""
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    stream, normed = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps, kind or x.dtype)
    return stream.view(x.shape), normed.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        stream = x
        x = x.contiguous()
        rows, size = x.shape
        out = torch.empty(x.shape, dtype=kind, device=x.device)
        factors = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = 1 << (size - 1).bit_length()  # the next power of 2
        launch(_forward, (rows,), x, weight, out, factors, size, eps, tile=TILES["norm", ""], BLOCK=block)
        ctx.save_for_backward(x, weight, factors)
        ctx.set_materialize_grads(False)  # the stream's gradient is None where only the norm is used
        return stream, out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, factors = ctx.saved_tensors
        of_stream, of_norm = grads
        if of_norm is None:
            return of_stream, None, None, None
        of_norm = of_norm.contiguous()
        if of_stream is not None:
            of_stream = of_stream.contiguous()
        rows, size = x.shape
        tile = TILES["norm", ""]
        programs = min(tile.rows, rows)
        grad_x = torch.empty_like(x)
        parts = torch.empty((programs, size), dtype=torch.float32, device=x.device)
        block = 1 << (size - 1).bit_length()  # the next power of 2
        args = (x, weight, factors, of_norm, of_stream, grad_x, parts, rows, size)
        launch(_backward, (programs,), *args, tile=tile, BLOCK=block)
        return grad_x, parts.sum(0).to(weight.dtype), None, None


@triton.jit
def _forward(x, weight, out, factors, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    values = tl.load(x + row * size + cols, mask=cols < size, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values) / size + eps)
    tl.store(factors + row, factor)
    # T5LayerNorm rounds to the dtype of x before it multiplies by the weight.
    scaled = (values * factor).to(x.dtype.element_ty).to(tl.float32)
    scaled *= tl.load(weight + cols, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + cols, scaled.to(out.dtype.element_ty), mask=cols < size)


@triton.jit(do_not_specialize=["rows"])  # which changes from batch to batch
def _backward(x, weight, factors, grad, of_stream, grad_x, parts, rows, size, BLOCK: tl.constexpr):
    """The gradient of x: that of its norm, plus that of x itself if there is one."""
    cols = tl.arange(0, BLOCK)
    kind = grad_x.dtype.element_ty
    weights = tl.load(weight + cols, mask=cols < size, other=0.0).to(tl.float32)
    weight_sums = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * size + cols
        factor = tl.load(factors + row)
        scaled = tl.load(x + places, mask=cols < size, other=0.0).to(tl.float32) * factor
        grads = tl.load(grad + places, mask=cols < size, other=0.0).to(tl.float32)
        weight_sums += grads * scaled.to(kind).to(tl.float32)
        grads *= weights
        along = tl.sum(grads * scaled) / size
        found = (grads - scaled * along) * factor
        if of_stream is not None:
            found += tl.load(of_stream + places, mask=cols < size, other=0.0).to(tl.float32)
        tl.store(grad_x + places, found.to(kind), mask=cols < size)
    tl.store(parts + tl.program_id(0) * size + cols, weight_sums, mask=cols < size)
