"""Ragged attention with T5's relative bias in Triton: forward and backward over concatenated sequences.

In: q [Nq, H, D], k and v [Nk, H, D], the sequence starts, and a bias per head and distance. Out: [Nq, H, D].
Memory is O(Nq H D): scores exist in registers only (flash attention, Dao 2023). The bias is a vector per head,
bias[h, key_position - query_position + S - 1] with S the longest sequence, loaded per tile.
Its gradient is summed by distance in each tile of queries, then over the tiles in a fixed order, without atomics.
Grids depend on the longest lengths only, and the host reads nothing back, so a CUDA graph can capture the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.errors import ModelError
from fivetune.model.cuda import attention_kernels as kernels
from fivetune.model.cuda.random import choose_seed, round_dropout_rate
from fivetune.model.cuda.tiles import LARGEST_HEAD, Tile, choose_attention_tile, divide_up, launch
from fivetune.model.modules import AutogradContext


class _Context(AutogradContext):
    call: _CallOptions


SEQUENCES_TOGETHER = 128  # of which the sums of the bias gradient are read at once
SMALLEST_HEAD = 16  # tensor cores multiply 16 columns at a time


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    scale: float = 1.0,
    overwrite: bool = False,
) -> Tensor:
    """softmax(scale q k^T + bias) v within each sequence, differentiable in q, k, v and bias.

    Args:
        q: [Nq, H, D] fp32 or bf16; D a power of two up to 128. k, v: [Nk, H, D] of the same dtype. Sums are fp32.
        cu_seqlens_q: [B + 1] int32 or int64: sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; every row of
            q belongs to a sequence. cu_seqlens_k likewise. A sequence may be empty; a query without keys gives 0.
        max_seqlen_q: upper bound of the lengths; a longer sequence would be truncated. max_seqlen_k likewise.
        bias: [H, 2 S - 1], S at least both maxima; None in cross-attention.
        causal: mask the keys after each query's position.
        dropout: probability with which an attention weight is dropped, rounded to 2^-16.
        seed: [1] int64 on the device, read when the kernels run; None draws one from torch's generator.
        scale: 1 in T5, which has no 1/sqrt(D).
        overwrite: write the gradients of k and v over them. Nothing else may read them in the backward pass.

    Returns: [Nq, H, D] in q's dtype. Raises ModelError for a head size that the kernels do not support.
    """
    head_size = q.shape[-1]
    if head_size & (head_size - 1) or head_size > LARGEST_HEAD:
        raise ModelError(
            f"attention: the model's heads have {head_size} columns. The Triton kernels support powers of two up to "
            f"{LARGEST_HEAD}. Set train.forward: padded."
        )
    if bias is not None:
        assert bias.shape[1] % 2 and bias.shape[1] > 2 * (max(max_seqlen_q, max_seqlen_k) - 1), bias.shape
    rate = round_dropout_rate(dropout)
    if head_size < SMALLEST_HEAD:  # columns of zeros change no product
        q, k, v = (F.pad(x, (0, SMALLEST_HEAD - head_size)) for x in (q, k, v))
    call = _CallOptions(max_seqlen_q, max_seqlen_k, causal, rate, scale, overwrite)
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()  # the kernels read them by address
    out = _Attention.apply(q, k, v, bias, choose_seed(q, rate, seed), *starts, call)
    assert isinstance(out, Tensor)
    return out[..., :head_size]


@dataclass(frozen=True, slots=True)
class _CallOptions:
    """The arguments of a call that are not tensors."""

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    rate: int
    scale: float
    overwrite: bool


class _Attention(torch.autograd.Function):
    """The kernels as one differentiable function."""

    @staticmethod
    def forward(ctx: _Context, q, k, v, bias, seed, cu_q, cu_k, call: _CallOptions) -> Tensor:
        q, k, v = (_make_rows_contiguous(x) for x in (q, k, v))
        if bias is not None:
            bias = bias.contiguous()
        heads, head_size = q.shape[1:]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # log of each row's sum of exponentials: with it the backward pass computes the weights again.
        lse = torch.empty((heads, len(q)), dtype=torch.float32, device=q.device)
        tile = choose_attention_tile("forward", head_size, num_bytes=q.element_size())
        grid = (divide_up(call.max_seqlen_q, tile.rows), heads, len(cu_q) - 1)
        inputs = (q, k, v, bias, seed, cu_q, cu_k)
        launch(
            kernels.forward,
            grid,
            *inputs,
            out,
            lse,
            tile=tile,
            **_build_kernel_arguments(inputs, call),
            M=tile.rows,
            N=tile.cols,
        )
        ctx.save_for_backward(q, k, v, bias, seed, cu_q, cu_k, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, seed, cu_q, cu_k, out, lse = ctx.saved_tensors
        call: _CallOptions = ctx.call
        grad = grads[0].contiguous()
        # grad_kv reads a tile of k and v before it writes it, and all others have read them by then.
        grad_q, grad_k, grad_v = (q.new_empty(q.shape), k, v) if call.overwrite else _allocate_gradients(q, k, v)
        delta = torch.empty_like(lse)  # written by grad_q, which is launched first
        heads, head_size = q.shape[1:]
        inputs = (q, k, v, bias, seed, cu_q, cu_k, grad, lse, delta)
        numbers = _build_kernel_arguments(inputs, call)
        tile = choose_attention_tile("grad_q", head_size, num_bytes=q.element_size())
        grid = (divide_up(call.max_seqlen_q, tile.rows), heads, len(cu_q) - 1)
        tiles_k = divide_up(call.max_seqlen_k, tile.cols)
        parts = None  # sums of the bias gradient
        if ctx.needs_input_grad[3]:
            assert tile.rows == tile.cols, tile
            num_slots = len(q) // tile.rows + len(cu_q) - 1
            parts = torch.empty((num_slots, heads, tiles_k + 1, tile.cols), dtype=torch.float32, device=q.device)
        stride = {"grad_stride": grad_q.stride(0), "tiles_k": tiles_k}
        outs = (out, grad_q, parts)
        launch(kernels.grad_q, grid, *inputs, *outs, tile=tile, **stride, **numbers, M=tile.rows, N=tile.cols)
        grad_bias = None if parts is None else _sum_parts(parts, bias, cu_q, cu_k, call, tile)
        tile = choose_attention_tile("grad_kv", head_size, num_bytes=q.element_size())
        grid = (divide_up(call.max_seqlen_k, tile.cols), heads, len(cu_k) - 1)
        stride = {"grad_stride": grad_k.stride(0)}
        launch(kernels.grad_kv, grid, *inputs, grad_k, grad_v, tile=tile, **stride, **numbers, M=tile.rows, N=tile.cols)
        return grad_q, grad_k, grad_v, grad_bias, None, None, None, None


def _sum_parts(parts: Tensor, bias: Tensor, cu_q: Tensor, cu_k: Tensor, call: _CallOptions, tile: Tile) -> Tensor:
    """Sum the parts of grad_q to the gradient of bias, [H, 2 S - 1] in its dtype."""
    side = tile.cols
    heads, width = bias.shape
    summed = torch.empty((heads, width), dtype=torch.float32, device=bias.device)
    numbers = {
        "tiles_q": divide_up(call.max_seqlen_q, side),
        "tiles_k": divide_up(call.max_seqlen_k, side),
        "num_sequences": len(cu_q) - 1,
        "width": width,
    }
    grid = (2 * divide_up(width // 2 + 1, side), heads)
    sizes = {"CAUSAL": call.causal, "SIDE": side, "TOGETHER": SEQUENCES_TOGETHER}
    launch(kernels.sum_parts, grid, parts, cu_q, cu_k, summed, tile=tile, **numbers, **sizes)
    return summed.to(bias.dtype)


def is_tf32_set() -> bool:
    """Whether CUDA multiplies fp32 matrices in tf32 (`train.precision: tf32`)."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _make_rows_contiguous(x: Tensor) -> Tensor:
    """x with contiguous heads in each row; a slice of a merged projection has them and is not copied."""
    heads, head_size = x.shape[1:]
    if x.stride(2) == 1 and (heads == 1 or x.stride(1) == head_size):
        return x
    return x.contiguous()


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Memory of the gradients: side by side if q, k and v are slices of one projection's rows."""
    row = q.shape[1] * q.shape[2]
    if len(q) == len(k) and all(x.stride(0) == 3 * row for x in (q, k, v)):
        return k.new_empty(len(k), 3, *k.shape[1:]).unbind(1)
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _build_kernel_arguments(inputs: tuple[Any, ...], call: _CallOptions) -> dict[str, float | str]:
    """Build the scalar arguments of every kernel; `inputs` begin with q, k, v, bias."""
    q, k, v, bias, *_ = inputs
    uses_tf32 = q.dtype == torch.float32 and is_tf32_set()
    return {
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "num_rows": len(q),
        "width": 0 if bias is None else bias.shape[1],
        "groups": divide_up(call.max_seqlen_k, 8),
        "rate": call.rate,
        "scale": call.scale,
        "CAUSAL": call.causal,
        "PRODUCTS": "tf32" if uses_tf32 else "ieee",
        "D": q.shape[2],
    }
