"""Products in fp16 that cannot overflow where T5's do: at the end of a branch.

In: activations, in fp16 or in fp32, and weights. Out: sums in fp32 for the residual stream.
The sums of T5's feed-forward layers pass fp16's largest number, 65,504, in most pre-trained models, and so may a gated
activation. Here the factors of a product are in fp16 and its sums in fp32. Every row of a factor in fp32 is first
divided by a power of two, which is exact, so that the row neither overflows nor vanishes; the row's sums are multiplied
by it.
The divisors come from the rows themselves: nothing is measured before a run or watched in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fivetune.model.modules import AutogradContext
from fivetune.model.precision import copy_weights, suppress_autocast
from fivetune.model.weight_cache import get_kept_grad


class _Context(AutogradContext):
    parameter: Tensor
    dtype: torch.dtype
    total: Tensor | None


LARGEST = 2.0**15  # of a divided row, not reached: within what fp16 holds
RANGE = (2.0**-46, 2.0**74)  # of a row's largest value: fp32 holds the product of two divisors, 2^-60 to 2^60
DEVICES_WITH_WIDE_SUMS = ("cuda",)  # where torch multiplies 16-bit matrices into fp32


def multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, or of two batches of matrices, in 16 bits: its sums in fp32.

    A device without such a product multiplies the same numbers in fp32.
    """
    if a.device.type not in DEVICES_WITH_WIDE_SUMS:
        return a.float() @ b.float()
    multiply = torch.bmm if a.dim() == 3 else torch.mm
    return multiply(a, b, out_dtype=torch.float32)


def divide_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by powers of two into the range of fp16: [N, f] fp32 -> [N, f] fp16 and the divisors, [N, 1] fp32.

    >>> rows, divisors = divide_rows(torch.tensor([[3.0, -1.0], [3.0e6, 1.0e6]]))
    >>> rows.tolist(), divisors.flatten().tolist()
    ([[24576.0, -8192.0], [23440.0, 7812.0]], [0.0001220703125, 128.0])
    """
    largest = torch.linalg.vector_norm(x, math.inf, -1, keepdim=True).clamp_(*RANGE)
    # What is left of m 2^e, with m in [0.5, 1), is a power of two on every device; `ldexp` computes it by pow.
    divisors = (largest / torch.frexp(largest).mantissa).div_(LARGEST)
    return torch.div(x, divisors, out=torch.empty_like(x, dtype=torch.float16)), divisors


def _multiply_rows(x: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x W^T of a weight in fp16, [N, d] fp32; the multiplied rows in fp16, and the divisors of rows from fp32."""
    if x.dtype == torch.float16:
        return multiply_wide(x, value.t()), x, None
    rows, divisors = divide_rows(x)
    return multiply_wide(rows, value.t()).mul_(divisors), rows, divisors


def multiply_half(x: Tensor, value: Tensor) -> Tensor:
    """x W^T of a weight in fp16, without a gradient: [..., f] in fp16 or fp32 -> [..., d] fp32."""
    with suppress_autocast(x.device):
        out, _, _ = _multiply_rows(x.flatten(0, -2), value)
    return out.view(*x.shape[:-1], -1)


def apply_half_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with factors in fp16 and sums in fp32, [N, f] in fp16 or fp32 -> [N, d] fp32."""
    with suppress_autocast(x.device):
        return HalfProduct.apply(x, weight)


class HalfProduct(torch.autograd.Function):
    """`apply_half_product`; the rows of its gradient are divided as well."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor) -> Tensor:
        value = copy_weights(torch.float16, weight)
        out, rows, divisors = _multiply_rows(x, value)
        ctx.save_for_backward(rows, divisors, value)
        ctx.parameter = weight
        ctx.dtype = x.dtype
        ctx.total = get_kept_grad(weight)
        return out

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, of_rows, value = ctx.saved_tensors
        grads, divisors = divide_rows(grad)
        of_x = multiply_wide(grads, value).mul_(divisors).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None
        # The sum over rows has one divisor: each row keeps its share of the largest.
        both = divisors if of_rows is None else divisors * of_rows
        largest = both.amax()
        of_weight = multiply_wide((grads * (both / largest)).half().t(), rows).mul_(largest)
        if ctx.total is None:
            return of_x, of_weight.to(ctx.parameter.dtype)
        ctx.total.add_(of_weight)
        return of_x, None
