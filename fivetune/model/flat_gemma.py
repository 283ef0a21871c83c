"""The flat forward of T5Gemma: rotary positions, grouped heads, windows, soft-capped scores, norms on both sides.

In: the flat ids of `flat.py` and transformers' modules. Out: token losses. Attention is that of T5 with another scale
and a bound of the scores; a window is a table of biases that is -inf beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivetune.model.attention import SequenceBounds, attend
from fivetune.model.family import ACTIVATIONS, get_logit_cap
from fivetune.model.layers import (
    add_dropout_residual,
    apply_dropout_,
    apply_gated_dropout,
    apply_projections,
    has_hooks,
    is_plain_linear,
    rms_norm,
)
from fivetune.model.loss import TiedGradient, compute_head_losses, embed

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model

    Rotation = tuple[Tensor, Tensor]  # cosines and sines of every token's position, [N, 1, D] each


def explain_unsupported_gemma(model: T5Model, device: str) -> str:
    """Explain why `compute_gemma_losses` cannot run a T5Gemma on a device; empty if it can."""
    if device != "cpu":
        return "the kernels of the flat forward have no soft-capped scores"
    stacks: tuple[Any, ...] = (model.get_encoder(), model.get_decoder())
    if any(stack.config.hidden_activation not in ACTIVATIONS for stack in stacks):
        return f"its activation is not one of {', '.join(ACTIVATIONS)}"
    linears = [module for module in model.modules() if hasattr(module, "in_features")]
    if not all(is_plain_linear(module) for module in linears):
        return "some of its linear modules have a bias or are not plain"
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return "some of its weights are not fp32"
    if hooked := [name for name, module in model.named_modules() if has_hooks(module)]:
        return f"its module {hooked[0] or 'itself'} has hooks, which the flat forward would not call"
    return ""


def compute_gemma_losses(
    model: T5Model, ids: Tensor, labels: Tensor, source: SequenceBounds, target: SequenceBounds, recompute: bool
) -> Tensor:
    """The arguments and the result of `flat.compute_device_losses`."""
    encoder: Any = model.get_encoder()
    decoder: Any = model.get_decoder()
    head, tied_gradient = model.get_output_embeddings().weight, TiedGradient()
    inputs, outputs = ids.split([len(ids) - len(labels), len(labels)])
    encoded = _run_stack(encoder, _embed(encoder, inputs, TiedGradient()), source, recompute, _run_encoder_layer)
    run = partial(_run_decoder_layer, memory=encoded, source=source)
    decoded = _run_stack(decoder, _embed(decoder, outputs, tied_gradient), target, recompute, run)
    tied = tied_gradient if head is decoder.embed_tokens.weight else None
    return compute_head_losses(decoded, head, labels, tied, cap=get_logit_cap(model.config))


def _embed(stack: Any, ids: Tensor, tied_gradient: TiedGradient) -> Tensor:
    return embed(stack.embed_tokens.weight, ids, tied_gradient) * stack.config.hidden_size**0.5


def _run_stack(stack: Any, x: Tensor, bounds: SequenceBounds, recompute: bool, run: Callable[..., Tensor]) -> Tensor:
    rate = _get_rate(stack.dropout)
    x = apply_dropout_(x, rate)
    rotation = _compute_rotation(stack, x, bounds)
    window = _build_window(stack.config.sliding_window, bounds, causal=stack.config.is_decoder)
    for layer in stack.layers:
        table = window if layer.self_attn.sliding_window else None
        if recompute and torch.is_grad_enabled():
            x = checkpoint(run, layer, x, bounds, rotation, table, use_reentrant=False)
        else:
            x = run(layer, x, bounds, rotation, table)
    return apply_dropout_(_apply_norm(stack.norm, x), rate)


def _compute_rotation(stack: Any, x: Tensor, bounds: SequenceBounds) -> Rotation:
    starts = bounds.cu_seqlens[:-1].repeat_interleave(bounds.cu_seqlens.diff())
    positions = torch.arange(len(x), device=x.device) - starts
    cosines, sines = stack.rotary_emb(x[None], positions[None])
    return cosines[0, :, None], sines[0, :, None]


def _apply_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = rotation
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat([-high, low], -1) * sines


def _build_window(size: int | None, bounds: SequenceBounds, *, causal: bool) -> Tensor | None:
    """The bias of every distance key - query, [1, 2 * longest - 1]: a decoder sees `size` keys, itself included, an
    encoder `size` on each side; None if all sequences are shorter.
    """
    longest = bounds.longest
    if size is None or longest <= size:
        return None
    distances = torch.arange(1 - longest, longest, device=bounds.cu_seqlens.device)
    hidden = distances <= -size if causal else distances.abs() > size
    return torch.zeros(1, 2 * longest - 1, device=distances.device).masked_fill_(hidden, -math.inf)


def _run_encoder_layer(
    layer: Any, x: Tensor, bounds: SequenceBounds, rotation: Rotation, table: Tensor | None
) -> Tensor:
    x = _apply_self_attention(layer, x, bounds, rotation, table, causal=False)
    return _apply_feed_forward(layer, x)


def _run_decoder_layer(
    layer: Any,
    x: Tensor,
    bounds: SequenceBounds,
    rotation: Rotation,
    table: Tensor | None,
    *,
    memory: Tensor,
    source: SequenceBounds,
) -> Tensor:
    x = _apply_self_attention(layer, x, bounds, rotation, table, causal=True)
    x = _apply_cross_attention(layer, x, bounds, memory, source)
    return _apply_feed_forward(layer, x)


def _apply_self_attention(
    layer: Any, x: Tensor, bounds: SequenceBounds, rotation: Rotation, table: Tensor | None, *, causal: bool
) -> Tensor:
    module, normed = layer.self_attn, _apply_norm(layer.pre_self_attn_layernorm, x)
    projections = (module.q_proj, module.k_proj, module.v_proj)
    merged = apply_projections(normed, projections).split([one.out_features for one in projections], -1)
    q, k, v = (part.unflatten(-1, (-1, module.head_dim)) for part in merged)
    out = _attend(
        module,
        _apply_rotation(q, rotation),
        _apply_rotation(k, rotation),
        v,
        bounds,
        bounds,
        table=table,
        causal=causal,
    )
    return _add_branch(layer, x, layer.post_self_attn_layernorm, out)


def _apply_cross_attention(
    layer: Any, x: Tensor, bounds: SequenceBounds, memory: Tensor, source: SequenceBounds
) -> Tensor:
    module, normed = layer.cross_attn, _apply_norm(layer.pre_cross_attn_layernorm, x)
    q = apply_projections(normed, (module.q_proj,))
    k, v = apply_projections(memory, (module.k_proj, module.v_proj)).chunk(2, -1)
    q, k, v = (part.unflatten(-1, (-1, module.head_dim)) for part in (q, k, v))
    return _add_branch(layer, x, layer.post_cross_attn_layernorm, _attend(module, q, k, v, bounds, source))


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: SequenceBounds,
    keys: SequenceBounds,
    *,
    table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of grouped heads: every key and value serves several queries."""
    groups = module.num_key_value_groups
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    out = attend(
        q * module.scaling,
        k,
        v,
        queries,
        keys,
        table=table,
        causal=causal,
        dropout=module.attention_dropout if module.training else 0.0,
        cap=module.attn_logit_softcapping,
    )
    return apply_projections(out.flatten(1), (module.o_proj,))


def _apply_feed_forward(layer: Any, x: Tensor) -> Tensor:
    dense, normed = layer.mlp, _apply_norm(layer.pre_feedforward_layernorm, x)
    inner = apply_projections(normed, (dense.gate_proj, dense.up_proj))
    inner = apply_gated_dropout(inner, dense.config.hidden_activation, _get_rate(dense.dropout))
    return _add_branch(layer, x, layer.post_feedforward_layernorm, apply_projections(inner, (dense.down_proj,)))


def _add_branch(layer: Any, x: Tensor, norm: nn.Module, out: Tensor) -> Tensor:
    return add_dropout_residual(x, _apply_norm(norm, out), _get_rate(layer.dropout))


def _apply_norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, 1 + module.weight, module.eps)


def _get_rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0
