"""Norm, dropout, residual sum and activations of a T5 layer on flat tokens [N, d], each with its own backward pass.

In: tensors and weights. Out: tensors. Written for CPUs, where each pass over memory counts: values change in place,
dropout writes only the dropped values, and activations save only what their backward passes need. `fused` selects a
Triton kernel for forward and backward where it supports the device and dtype (`cuda/dispatch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.distributed.sharding import get_local, is_gathered_by_call
from fivetune.distributed.tensor_parallel import ColumnLinear, copy_to_group
from fivetune.model.cuda.dispatch import supports_fused
from fivetune.model.dropout import compute_keep_scale, draw_dropout, zero_dropped_
from fivetune.model.half import apply_half_product
from fivetune.model.low_rank import LowRankPair, apply_low_rank, find_pair
from fivetune.model.modules import AutogradContext
from fivetune.model.precision import cast_weights, get_matmul_dtype, suppress_autocast
from fivetune.model.weight_cache import KeptLinear, find_kept


class _Context(AutogradContext):
    scale: float
    kind: torch.dtype
    act: str


RECORDERS = "transformers.utils.output_capturing"


def apply_projections(x: Tensor, modules: Sequence[nn.Linear]) -> Tensor:
    """Concatenate the outputs of several linear modules, [N, sum of widths].

    It is one matrix product if all are plain, or if all are plain ones with a low-rank pair.

    The result is a new tensor, which the next operation may change in place.
    """
    first = modules[0]
    if type(first) is ColumnLinear:  # all of them are; their input's gradient needs one all-reduce, not one each
        x = copy_to_group(x, first.group)
    elif not all(is_plain_linear(module) for module in modules):
        pairs: list[LowRankPair] = []
        for module in modules:
            pair = find_pair(module) or _build_empty_pair(module)
            if pair is None:  # a module that only computes itself: all of them do
                return torch.cat([module(x) for module in modules], -1)
            pairs.append(pair)
        return apply_low_rank(x, pairs)
    weights = [get_local(module.weight) for module in modules]
    # Kept copies are used without a cast, and their gradients are added in place.
    if all(find_kept(weight) for weight in weights):
        return KeptLinear.apply(x, *weights)
    return F.linear(x, cast_weights(*weights))


def apply_last_projection(x: Tensor, module: nn.Linear) -> Tensor:
    """The output of the linear module that ends a branch, [N, f] -> [N, d]: in fp16 in fp32, see `half.py`."""
    if get_matmul_dtype(x.device) != torch.float16:
        return apply_projections(x, (module,))
    if is_plain_linear(module):
        return apply_half_product(x, get_local(module.weight))
    if pair := find_pair(module):
        inner = apply_half_product(x, pair.a)
        return apply_half_product(x, pair.weight) + pair.scale * apply_half_product(inner, pair.b)
    with suppress_autocast(x.device):  # an adapter with a formula of its own
        return module(x.float())


def _build_empty_pair(module: nn.Module) -> LowRankPair | None:
    """A pair of rank 0 for a plain frozen module; None for others.

    With it, a matrix without an adapter is part of one product with its neighbours that have one.
    """
    if not is_plain_linear(module) or module.weight.requires_grad:
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return LowRankPair(weight, weight.new_empty(0, weight.shape[1]), weight.new_empty(len(weight), 0), 0.0)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear without bias, subclass (adapters, quantisation) or hooks."""
    return type(module) is nn.Linear and module.bias is None and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks, except those that gather its weights and transformers' recorders.

    The first forward pass installs recorders on all blocks; they act only if hidden states are requested.
    """
    if is_gathered_by_call(module):  # `call_gathered` calls its hooks
        return False
    before = module._forward_pre_hooks
    after = module._forward_hooks
    hooks = (*before.values(), *after.values(), *module._backward_pre_hooks.values(), *module._backward_hooks.values())
    return any(getattr(hook, "__module__", None) != RECORDERS for hook in hooks)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, fused: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return normalize_branch(Residual(x), weight, eps, fused=fused)[1]


class Residual(NamedTuple):
    """The residual stream [N, d] after a branch: stream + dropout(branch), a sum that the next norm computes."""

    stream: Tensor
    branch: Tensor | None = None
    rate: float = 0.0

    def sum(self, *, fused: bool = False) -> Tensor:
        """The stream as a tensor. Overwrites the branch."""
        if self.branch is None:
            return self.stream
        return add_dropout_residual(self.stream, self.branch, self.rate, fused=fused)


def normalize_branch(x: Residual, weight: Tensor, eps: float, *, fused: bool = False) -> tuple[Tensor, Tensor]:
    """The residual stream and its `rms_norm`, which begins a branch; a kernel adds the gradients of both."""
    stream = x.stream
    kind = get_matmul_dtype(stream.device)
    tensors = [stream, weight] if x.branch is None else [stream, weight, x.branch]
    if fused and stream.dtype == weight.dtype and x.rate < 1 and supports_fused(*tensors):
        from fivetune.model.cuda import norm

        return norm.compute_branch_norm(stream, weight, eps, kind, branch=x.branch, probability=x.rate)
    stream = x.sum(fused=fused)
    return stream, RmsNorm.apply(stream, weight, eps, kind)


class RmsNorm(torch.autograd.Function):
    """T5's root mean square norm, without a bias, computed in fp32."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, eps: float, kind: torch.dtype) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(kind)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad = grad.float()
        wide = x.float()
        product = grad * wide
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (scale.t() @ product)[0].to(weight.dtype)
        # x s w with s = (mean(x^2) + eps)^-1/2, whose own gradient is -s^3 x / d.
        along = (product @ weight.float()).unsqueeze(-1).mul_(scale.pow(3)).div_(-x.shape[-1])
        # `product` is not needed any more: its memory takes the result.
        of_x = torch.mul(grad, weight, out=product).mul_(scale).addcmul_(wide, along)
        return of_x.to(x.dtype), of_weight, None, None


def apply_dropout_(x: Tensor, rate: float, *, fused: bool = False) -> Tensor:
    """Dropout in place."""
    if rate == 0:
        return x
    if fused and rate < 1 and supports_fused(x):
        from fivetune.model.cuda import pointwise

        return pointwise.compute_dropout(x, rate)
    return Dropout.apply(x, draw_dropout(x.numel(), rate, x.device), rate)


class Dropout(torch.autograd.Function):
    """Set the dropped values to 0, scale the others."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, dropped: Tensor, rate: float) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(dropped)
        ctx.scale = compute_keep_scale(rate)
        return zero_dropped_(x, dropped).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (dropped,) = ctx.saved_tensors
        return zero_dropped_(grad * ctx.scale, dropped), None, None


def add_dropout_residual(stream: Tensor, x: Tensor, rate: float, *, fused: bool = False) -> Tensor:
    """stream + dropout(x): the end of every branch. Overwrites `x`."""
    if fused and rate < 1 and supports_fused(stream, x):
        from fivetune.model.cuda import pointwise

        return pointwise.add_dropout(stream, x, rate)
    return AddDropout.apply(stream, x, draw_dropout(x.numel(), rate, x.device), compute_keep_scale(rate))


class AddDropout(torch.autograd.Function):
    """A residual sum with dropout of its second term."""

    @staticmethod
    def forward(ctx: _Context, stream: Tensor, x: Tensor, dropped: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(dropped)
        ctx.scale = scale
        ctx.kind = x.dtype
        return torch.add(stream, zero_dropped_(x, dropped), alpha=scale)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (dropped,) = ctx.saved_tensors
        if dropped is None:
            return grad, grad.to(ctx.kind), None, None
        return grad, zero_dropped_(grad * ctx.scale, dropped).to(ctx.kind), None, None


def apply_relu_dropout_(x: Tensor, rate: float, *, fused: bool = False) -> Tensor:
    """dropout(relu(x)), in place. The backward pass needs only the result: zeros have no gradient."""
    if fused and rate < 1 and supports_fused(x):
        from fivetune.model.cuda import pointwise

        return pointwise.compute_activation_dropout(x, "relu", gated=False, probability=rate)
    return ReluDropout.apply(x, draw_dropout(x.numel(), rate, x.device), compute_keep_scale(rate))


class ReluDropout(torch.autograd.Function):
    """ReLU and dropout; the backward pass needs the result only."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, dropped: Tensor | None, scale: float) -> Tensor:
        ctx.mark_dirty(x)
        zero_dropped_(x.relu_(), dropped)
        if dropped is not None:
            x.mul_(scale)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        of_x = torch.ops.aten.threshold_backward(grad, result, 0)
        if ctx.scale != 1:
            of_x.mul_(ctx.scale)
        return of_x, None, None


def apply_gated_dropout(x: Tensor, act: str, rate: float, *, fused: bool = False) -> Tensor:
    """dropout(act(a) * b) of x = [a, b]: [N, 2 f] -> [N, f]; in fp32 if x is in fp16."""
    if fused and act in FUSED_ACTIVATIONS and rate < 1 and supports_fused(x):
        from fivetune.model.cuda import pointwise

        return pointwise.compute_activation_dropout(x, FUSED_ACTIVATIONS[act], gated=True, probability=rate)
    return GatedDropout.apply(x, act, draw_dropout(x.numel() // 2, rate, x.device), compute_keep_scale(rate))


class GatedDropout(torch.autograd.Function):
    """A gated activation and dropout; the activation is recomputed in the backward pass, not saved."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, act: str, dropped: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(x, dropped)
        ctx.act = act
        ctx.scale = scale
        return zero_dropped_(_multiply_gate(x, act), dropped).mul_(scale)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dropped = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        gate = _widen(gate)
        grad = zero_dropped_(grad * ctx.scale, dropped)
        of_x = torch.empty_like(x)
        of_gate, of_value = of_x.chunk(2, -1)  # views, which the two products fill
        torch.mul(compute_activation(gate, ctx.act), grad, out=of_value)
        of_gate.copy_(compute_activation_grad(grad.mul_(value), gate, ctx.act))
        return of_x, None, None, None


def compute_gated(x: Tensor, act: str) -> Tensor:
    """act(a) * b of x = [a, b] without a gradient: [..., 2 f] -> [..., f]."""
    if act in FUSED_ACTIVATIONS and supports_fused(x):
        from fivetune.model.cuda import pointwise

        rows = x.reshape(-1, x.shape[-1])
        return pointwise.compute_activation_dropout(rows, FUSED_ACTIVATIONS[act], gated=True).view(*x.shape[:-1], -1)
    return _multiply_gate(x, act)


def _multiply_gate(x: Tensor, act: str) -> Tensor:
    """act(a) * b of x = [a, b] as a new tensor; in fp32 if x is in fp16, which the product may pass."""
    gate, value = x.chunk(2, -1)
    return compute_activation(_widen(gate), act).mul_(value)


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x


FUSED_ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}  # names in the kernels
STEEPNESS, BEND = 2 * (2 / math.pi) ** 0.5, 0.044715  # of gelu_new, written as x sigmoid(x (1 + bend x^2) steepness)


def compute_activation(x: Tensor, act: str) -> Tensor:
    """Compute one of `family.ACTIVATIONS` as a new tensor."""
    if act == "relu":
        return F.relu(x)
    if act in ("silu", "swish"):
        return F.silu(x)
    if act == "gelu":
        return F.gelu(x)
    return _compute_gelu_sigmoid(x).mul_(x)


def compute_activation_grad(grad: Tensor, x: Tensor, act: str) -> Tensor:
    """Compute the gradient of x from that of `compute_activation(x)`."""
    if act == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    if act in ("silu", "swish"):
        return torch.ops.aten.silu_backward(grad, x)
    if act == "gelu":
        return torch.ops.aten.gelu_backward(grad, x)
    # y = x s(u) with the sigmoid s of u(x): y' = s (1 + x u' (1 - s)), and `slope` is x u'.
    share = _compute_gelu_sigmoid(x)
    slope = (x * x).mul_(3 * BEND * STEEPNESS).add_(STEEPNESS).mul_(x)
    return slope.addcmul_(slope, share, value=-1).add_(1).mul_(share).mul_(grad)


def _compute_gelu_sigmoid(x: Tensor) -> Tensor:
    """The factor of x in gelu_new as a sigmoid, which takes a third of the time of the equivalent tanh."""
    return (x * x).mul_(BEND * STEEPNESS).add_(STEEPNESS).mul_(x).sigmoid_()
