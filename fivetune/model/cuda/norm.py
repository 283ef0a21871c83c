"""T5's root mean square norm in Triton, with the residual sum before it: forward and backward.

In: rows [..., D] and a weight [D]. Out: rows of the same shape. Statistics are fp32. The weight's gradient is
deterministic: each of a fixed number of programs sums every n-th row, and the n sums are added in order.
"""

# pyright: reportGeneralTypeIssues=false
# Triton has no types for functions within kernels that return several values.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivetune.model.cuda.random import choose_seed, gain, keep, round_dropout_rate
from fivetune.model.cuda.tiles import TILES, launch
from fivetune.model.modules import AutogradContext


class _Context(AutogradContext):
    rate: int
    kind: torch.dtype | None


def compute_branch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    kind: torch.dtype | None = None,
    *,
    branch: Tensor | None = None,
    probability: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x + dropout(branch), or x itself, and its norm; the backward pass adds the gradients of both.

    The norm is s / sqrt(mean(s^2) + eps) * weight over the last dimension, rounded where T5LayerNorm rounds.

    Args:
        x: [..., D] fp32 or bf16, contiguous rows. weight: [D] of the same type.
        kind: dtype of the norm; default: the dtype of x.
        branch: [..., D] fp32 or bf16, the end of the branch before. probability, seed: see `compute_dropout`.
    """
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    size = x.shape[-1]
    rate = 0
    if branch is not None:
        branch = branch.reshape(-1, size)
        rate = round_dropout_rate(probability)
        seed = choose_seed(x, rate, seed)
    found = _RMSNorm.apply(x.reshape(-1, size), branch, seed, weight, rate, eps, kind or x.dtype)
    stream, normed = found
    return stream.view(x.shape), normed.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        branch: Tensor | None,
        seed: Tensor | None,
        weight: Tensor,
        rate: int,
        eps: float,
        kind: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        stream = x
        x = x.contiguous()
        ctx.kind = None
        if branch is not None:
            ctx.kind = branch.dtype
            branch = branch.contiguous()
            stream = torch.empty_like(x)
        rows, size = x.shape
        out = torch.empty(x.shape, dtype=kind, device=x.device)
        factors = torch.empty(rows, dtype=torch.float32, device=x.device)
        args = (x, branch, seed, weight, stream, out, factors, size, rate, eps)
        launch(_forward, (rows,), *args, tile=TILES["norm", ""], BLOCK=_choose_block(size))
        ctx.save_for_backward(x if branch is None else stream, weight, factors, seed)
        ctx.rate = rate
        ctx.set_materialize_grads(False)  # the stream's gradient is None where only the norm is used
        return stream, out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, factors, seed = ctx.saved_tensors
        of_stream, of_norm = grads
        of_norm = torch.zeros_like(x) if of_norm is None else of_norm.contiguous()
        if of_stream is not None:
            of_stream = of_stream.contiguous()
        rows, size = x.shape
        tile = TILES["norm", ""]
        programs = min(tile.rows, rows)
        grad_x = torch.empty_like(x)
        grad_branch = None if ctx.kind is None else torch.empty_like(x, dtype=ctx.kind)
        parts = torch.empty((programs, size), dtype=torch.float32, device=x.device)
        args = (x, weight, factors, seed, of_norm, of_stream, grad_x, grad_branch, parts, rows, size, ctx.rate)
        launch(_backward, (programs,), *args, tile=tile, BLOCK=_choose_block(size))
        return grad_x, grad_branch, None, parts.sum(0).to(weight.dtype), None, None, None


def _choose_block(size: int) -> int:
    """The next power of 2, at least a group of random numbers."""
    return max(8, 1 << (size - 1).bit_length())


@triton.jit
def _drop(values, seed, row, size, rate, BLOCK: tl.constexpr):
    """Dropout of a row, by the numbers that `pointwise` takes for it if size is a multiple of 8."""
    places = tl.cast(row, tl.int64) * tl.cdiv(size, 8) + tl.arange(0, BLOCK // 8)
    return tl.where(keep(seed, places, rate), values * gain(rate), 0.0)


@triton.jit
def _forward(x, branch, seed, weight, stream, out, factors, size, rate, eps, BLOCK: tl.constexpr):
    """Grid: rows. With a branch, stream = x + dropout(branch) in the dtype of x, and the norm is the stream's."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    places = row * size + cols
    kind = x.dtype.element_ty
    values = tl.load(x + places, mask=cols < size, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + places, mask=cols < size, other=0.0).to(tl.float32)
        if seed is not None:
            added = _drop(added, seed, row, size, rate, BLOCK)
        values = (values + added).to(kind).to(tl.float32)
        tl.store(stream + places, values.to(kind), mask=cols < size)
    factor = 1.0 / tl.sqrt(tl.sum(values * values) / size + eps)
    tl.store(factors + row, factor)
    # T5LayerNorm rounds to the dtype of x before it multiplies by the weight.
    scaled = (values * factor).to(kind).to(tl.float32)
    scaled *= tl.load(weight + cols, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(out + places, scaled.to(out.dtype.element_ty), mask=cols < size)


@triton.jit(do_not_specialize=["rows"])  # which changes from batch to batch
def _backward(
    x,
    weight,
    factors,
    seed,
    grad,
    of_stream,
    grad_x,
    grad_branch,
    parts,
    rows,
    size,
    rate,
    BLOCK: tl.constexpr,
):
    """The gradient of x: that of its norm, plus that of x itself if there is one; with dropout, the branch's."""
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
        if grad_branch is not None:
            if seed is not None:
                found = _drop(found, seed, row, size, rate, BLOCK)
            tl.store(grad_branch + places, found.to(grad_branch.dtype.element_ty), mask=cols < size)
    tl.store(parts + tl.program_id(0) * size + cols, weight_sums, mask=cols < size)
