"""Dropout, residual sum and activation, each one pass forward and one backward; masks are regenerated, never stored.

In: rows of activations, a seed on the device. Out: rows in the same dtype; the arithmetic is fp32.
"""

# pyright: reportGeneralTypeIssues=false
# Triton has no types for functions within kernels that return several values.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivetune.errors import ModelError, suggest_names
from fivetune.model.cuda.random import choose_seed, gain, keep, round_dropout_rate
from fivetune.model.cuda.tiles import TILES, Kernel, divide_up, launch
from fivetune.model.modules import AutogradContext


class _Context(AutogradContext):
    rate: int
    kind: torch.dtype
    call: dict[str, int]


ACTIVATIONS = ("relu", "gelu_new")


def compute_dropout(x: Tensor, probability: float, seed: Tensor | None = None) -> Tensor:
    """Drop elements of x (probability rounded to 2^-16) and scale the others up; returns x itself at probability 0.

    Args:
        x: any shape, fp32 or bf16. seed: [1] int64 on the device, equal seeds drop equal positions;
            None draws one from torch's generator.
    """
    rate = round_dropout_rate(probability)
    if rate == 0:
        return x
    return _apply_dropped_sum(x, None, seed, rate)


def add_dropout(residual: Tensor, x: Tensor, probability: float, seed: Tensor | None = None) -> Tensor:
    """residual + dropout(x) in the dtype of residual, rounded once; both have one shape. See `compute_dropout`."""
    assert residual.shape == x.shape, (residual.shape, x.shape)
    rate = round_dropout_rate(probability)
    if rate == 0:
        return residual + x
    return _apply_dropped_sum(x, residual, seed, rate)


def compute_activation_dropout(
    x: Tensor, kind: str, *, gated: bool, probability: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """dropout(f(x)), or if gated dropout(f(left half) * right half), as in T5's feed-forward layer.

    Args:
        x: [N, F], or [N, 2 F] if gated: the concatenated outputs of wi_0 and wi_1. fp32 or bf16.
        kind: name of f: relu, or gelu_new (Hendrycks and Gimpel 2016, with tanh).

    Returns: [N, F]. Raises ModelError for another f.
    """
    if kind not in ACTIVATIONS:
        raise ModelError(f"activation: the Triton kernels have no {kind!r}. {suggest_names(kind, ACTIVATIONS)}")
    rate = round_dropout_rate(probability)
    out = _Activation.apply(x, choose_seed(x, rate, seed), kind == "gelu_new", gated, rate)
    assert isinstance(out, Tensor)
    return out


def _apply_dropped_sum(x: Tensor, residual: Tensor | None, seed: Tensor | None, rate: int) -> Tensor:
    out = _AddDropout.apply(x, residual, choose_seed(x, rate, seed), rate)
    assert isinstance(out, Tensor)
    return out


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, residual: Tensor | None, seed: Tensor, rate: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.rate = rate
        ctx.kind = x.dtype
        dtype = x.dtype if residual is None else residual.dtype
        return _launch_dropped_sum(x, residual, seed, rate, dtype)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        # The gradient of the residual is the gradient of the sum.
        residual = grads[0] if ctx.needs_input_grad[1] else None
        return _launch_dropped_sum(grads[0], None, seed, ctx.rate, ctx.kind), residual, None, None


def _launch_dropped_sum(x: Tensor, residual: Tensor | None, seed: Tensor, rate: int, dtype: torch.dtype) -> Tensor:
    """dropout(x), plus residual if there is one, in `dtype`."""
    x = x.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    tile = TILES["pointwise", ""]
    grid = (divide_up(x.numel(), tile.cols),)
    launch(_dropped, grid, x, residual, seed, out, x.numel(), rate, tile=tile, BLOCK=tile.cols)
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, seed: Tensor | None, gelu: bool, gated: bool, rate: int) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, seed)
        ctx.call = {"rate": rate, "GELU": gelu, "GATED": gated}
        rows, width = x.shape
        out = torch.empty((rows, width // 2 if gated else width), dtype=x.dtype, device=x.device)
        _launch_by_rows(_activated, out.shape, x, seed, out, **ctx.call)
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, seed = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        _launch_by_rows(_activated_backward, grads[0].shape, x, seed, grads[0].contiguous(), grad_x, **ctx.call)
        return grad_x, None, None, None, None


def _launch_by_rows(kernel: Kernel, shape: torch.Size, *tensors: Tensor | None, **call: int) -> None:
    rows, width = shape
    tile = TILES["pointwise", ""]
    grid = (rows, divide_up(width, tile.cols))
    launch(kernel, grid, *tensors, tile=tile, width=width, BLOCK=tile.cols, **call)


@triton.jit
def _dropped(x, residual, seed, out, size, rate, BLOCK: tl.constexpr):
    """out = dropout(x), plus residual if there is one. Random numbers are indexed by the element's number."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < size, other=0.0).to(tl.float32)
    # One call of the generator serves 8 elements.
    kept = keep(seed, first // 8 + tl.arange(0, BLOCK // 8), rate)
    values = tl.where(kept, values * gain(rate), 0.0)
    if residual is not None:
        values += tl.load(residual + places, mask=places < size, other=0.0).to(tl.float32)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=places < size)


@triton.jit
def _function(x, GELU: tl.constexpr):
    """f(x) and f'(x); 0.5 (1 + tanh(u)) is computed as sigmoid(2 u)."""
    if GELU:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
        share = tl.sigmoid(inner)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * share, share + x * share * (1.0 - share) * slope
    return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _draw_gain(seed, row, cols_from, width, rate, BLOCK: tl.constexpr):
    """The dropout factor of each element of a row: 0 or 1 / (1 - p)."""
    places = row * tl.cdiv(width, 8) + cols_from // 8 + tl.arange(0, BLOCK // 8)
    return tl.where(keep(seed, places, rate), gain(rate), 0.0)


@triton.jit
def _activated(x, seed, out, width, rate, GELU: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    row, cols_from = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    cols = cols_from + tl.arange(0, BLOCK)
    inputs = x + row * width * (2 if GATED else 1) + cols
    values, _ = _function(tl.load(inputs, mask=cols < width, other=0.0).to(tl.float32), GELU)
    if GATED:
        values *= tl.load(inputs + width, mask=cols < width, other=0.0).to(tl.float32)
    if seed is not None:
        values *= _draw_gain(seed, row, cols_from, width, rate, BLOCK)
    tl.store(out + row * width + cols, values.to(out.dtype.element_ty), mask=cols < width)


@triton.jit
def _activated_backward(
    x, seed, grad, grad_x, width, rate, GELU: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows, blocks of columns)."""
    row, cols_from = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    cols = cols_from + tl.arange(0, BLOCK)
    offset = row * width * (2 if GATED else 1)
    values, slopes = _function(tl.load(x + offset + cols, mask=cols < width, other=0.0).to(tl.float32), GELU)
    grads = tl.load(grad + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    if seed is not None:
        grads *= _draw_gain(seed, row, cols_from, width, rate, BLOCK)
    kind = grad_x.dtype.element_ty
    if GATED:  # the right half gets f(left), the left half f'(left) times right
        right = tl.load(x + offset + width + cols, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(grad_x + offset + width + cols, (grads * values).to(kind), mask=cols < width)
        slopes *= right
    tl.store(grad_x + offset + cols, (grads * slopes).to(kind), mask=cols < width)
