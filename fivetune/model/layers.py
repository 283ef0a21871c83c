"""The parts of a T5 layer between its matrix products, on flat tokens [N, d], each with its own backward pass.

In: tensors and weights. Out: tensors. Written for CPUs, where every pass over memory counts: values are changed in
place, dropout touches only what it drops, the activations keep no more than their backward passes need. On CUDA each
part is one of Triton's kernels, forward and back (`model/dispatch.py` says when).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.model.dispatch import fused
from fivetune.model.dropout import blank_, draw, kept_scale

RECORDERS = "transformers.utils.output_capturing"


def project(x: Tensor, modules: Sequence[Any]) -> Tensor:
    """The outputs of several linear modules side by side, [N, sum of their widths]; one product if all are plain.

    The result is a tensor of its own, which what comes next may change in place.
    """
    if all(is_plain_linear(module) for module in modules):
        weights = [module.weight for module in modules]
        return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))
    return torch.cat([module(x) for module in modules], -1)


def is_plain_linear(module: Any) -> bool:
    """A Linear without a bias and without anything around it (adapters, quantisation, hooks)."""
    return type(module) is nn.Linear and module.bias is None and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or after the module, in either direction; transformers' recorders do nothing.

    Those are left on all blocks by the first forward pass, and act where hidden states are asked for.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    hooks = (*before.values(), *after.values(), *module._backward_pre_hooks.values(), *module._backward_hooks.values())
    return any(getattr(hook, "__module__", None) != RECORDERS for hook in hooks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if x.dtype == weight.dtype and fused(x, weight):
        from fivetune.model.kernels import norm

        return norm.rms_norm(x, weight, eps)
    return RmsNorm.apply(x, weight, eps)


class RmsNorm(torch.autograd.Function):
    """The norm of T5: it scales, and shifts nothing. fp32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad, wide = grad.float(), x.float()
        product = grad * wide
        of_weight = (scale.t() @ product)[0] if ctx.needs_input_grad[1] else None
        along = (product @ weight.float()).unsqueeze(-1).mul_(scale.pow(3)).div_(-x.shape[-1])
        of_x = torch.mul(grad, weight, out=product).mul_(scale).addcmul_(wide, along)
        return of_x.to(x.dtype), None if of_weight is None else of_weight.to(weight.dtype), None


def dropout_(x: Tensor, rate: float) -> Tensor:
    """Dropout of a tensor that nothing else needs; it is changed in place."""
    if rate == 0:
        return x
    if rate < 1 and fused(x):
        from fivetune.model.kernels import pointwise

        return pointwise.dropout(x, rate)
    return Dropout.apply(x, draw(x.numel(), rate, x.device), rate)


class Dropout(torch.autograd.Function):
    """Blank what is dropped, scale the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, rate: float) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(dropped)
        ctx.scale = kept_scale(rate)
        return blank_(x, dropped).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (dropped,) = ctx.saved_tensors
        return blank_(grad * ctx.scale, dropped), None, None


def add_dropped(stream: Tensor, x: Tensor, rate: float) -> Tensor:
    """stream + dropout(x): the end of every branch. `x` is used up."""
    if rate < 1 and fused(stream, x):
        from fivetune.model.kernels import pointwise

        return pointwise.add_dropout(stream, x, rate)
    return AddDropped.apply(stream, x, draw(x.numel(), rate, x.device), kept_scale(rate))


class AddDropped(torch.autograd.Function):
    """A residual sum whose second part is dropped and scaled on the way."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, x: Tensor, dropped: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(dropped)
        ctx.scale, ctx.kind = scale, x.dtype
        return torch.add(stream, blank_(x, dropped), alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (dropped,) = ctx.saved_tensors
        if dropped is None:
            return grad, grad.to(ctx.kind), None, None
        return grad, blank_(grad * ctx.scale, dropped).to(ctx.kind), None, None


def relu_dropout_(x: Tensor, rate: float) -> Tensor:
    """dropout(relu(x)), in place. The result alone says what came through both."""
    if rate < 1 and fused(x):
        from fivetune.model.kernels import pointwise

        return pointwise.activate(x, "relu", gated=False, probability=rate)
    return ReluDropout.apply(x, draw(x.numel(), rate, x.device), kept_scale(rate))


class ReluDropout(torch.autograd.Function):
    """ReLU and dropout; the backward pass needs the result only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor | None, scale: float) -> Tensor:
        ctx.mark_dirty(x)
        blank_(x.relu_(), dropped)
        if dropped is not None:
            x.mul_(scale)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        of_x = torch.ops.aten.threshold_backward(grad, result, 0)
        return of_x.mul_(ctx.scale) if ctx.scale != 1 else of_x, None, None


def gated_dropout(x: Tensor, act: str, rate: float) -> Tensor:
    """dropout(act(a) * b) of a and b side by side: [N, 2 f] -> [N, f]."""
    if act in FUSED_ACTIVATIONS and rate < 1 and fused(x):
        from fivetune.model.kernels import pointwise

        return pointwise.activate(x, FUSED_ACTIVATIONS[act], gated=True, probability=rate)
    return GatedDropout.apply(x, act, draw(x.numel() // 2, rate, x.device), kept_scale(rate))


class GatedDropout(torch.autograd.Function):
    """A gated activation and dropout; the activation is computed again in the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: str, dropped: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(x, dropped)
        ctx.act, ctx.scale = act, scale
        gate, value = x.chunk(2, -1)
        return blank_(activated(gate, act).mul_(value), dropped).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dropped = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        grad = blank_(grad * ctx.scale, dropped)
        of_x = torch.empty_like(x)
        of_gate, of_value = of_x.chunk(2, -1)
        torch.mul(activated(gate, ctx.act), grad, out=of_value)
        of_gate.copy_(activation_grad(grad.mul_(value), gate, ctx.act))
        return of_x, None, None, None


ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
FUSED_ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}  # as the kernels say it
STEEPNESS, BEND = 2 * (2 / math.pi) ** 0.5, 0.044715  # of gelu_new, written as x sigmoid(x (1 + bend x^2) steepness)


def activated(x: Tensor, act: str) -> Tensor:
    """One of ACTIVATIONS by transformers' names; a new tensor."""
    if act == "relu":
        return F.relu(x)
    if act in ("silu", "swish"):
        return F.silu(x)
    return F.gelu(x) if act == "gelu" else _share(x).mul_(x)


def activation_grad(grad: Tensor, x: Tensor, act: str) -> Tensor:
    """The gradient of x from that of `activated(x)`."""
    if act == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    if act in ("silu", "swish"):
        return torch.ops.aten.silu_backward(grad, x)
    if act == "gelu":
        return torch.ops.aten.gelu_backward(grad, x)
    share = _share(x)
    slope = (x * x).mul_(3 * BEND * STEEPNESS).add_(STEEPNESS).mul_(x)
    return slope.addcmul_(slope, share, value=-1).add_(1).mul_(share).mul_(grad)


def _share(x: Tensor) -> Tensor:
    """What gelu_new multiplies x with; the sigmoid takes a third of the time of the tanh that says the same."""
    return (x * x).mul_(BEND * STEEPNESS).add_(STEEPNESS).mul_(x).sigmoid_()
