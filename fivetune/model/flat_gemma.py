"""The flat forward of T5Gemma and T5Gemma 2: rotary positions, grouped heads, windows, norms on both sides of a branch.

In: the flat ids of `flat.py` and transformers' modules. Out: token losses. Attention is that of T5 with another scale
and, in T5Gemma, a bound of the scores; a window is a table of biases that is -inf beyond it. A query of T5Gemma 2's
decoder attends at once to the tokens of the input and to those before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
from fivetune.model.objective import Objective

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model

    Rotation = tuple[Tensor, Tensor]  # cosines and sines of every token's position, [N, 1, D] each


def explain_unsupported_gemma(model: T5Model, device: str) -> str:
    """Explain why `compute_gemma_losses` cannot run a T5Gemma on a device; empty if it can."""
    if device != "cpu":
        return "the kernels of the flat forward have neither soft-capped scores nor merged attention"
    stacks = _find_stacks(model)
    if any(stack.config.hidden_activation not in ACTIVATIONS for stack in stacks):
        return f"its activation is not one of {', '.join(ACTIVATIONS)}"
    linears = [module for stack in stacks for module in stack.modules() if hasattr(module, "in_features")]
    if not all(is_plain_linear(module) or hasattr(module, "base_layer") for module in linears):  # or an adapter's
        return "some of its linear modules have a bias or are not plain"
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return "some of its weights are not fp32"
    if hooked := [name for name, module in model.named_modules() if has_hooks(module)]:
        return f"its module {hooked[0] or 'itself'} has hooks, which the flat forward would not call"
    return ""


def compute_gemma_losses(
    model: T5Model,
    ids: Tensor,
    labels: Tensor,
    source: SequenceBounds,
    target: SequenceBounds,
    recompute: bool,
    objective: Objective,
) -> Tensor:
    """The arguments and the result of `flat.compute_device_losses`."""
    encoder, decoder = _find_stacks(model)
    head, tied_gradient = model.get_output_embeddings().weight, TiedGradient()
    inputs, outputs = ids.split([len(ids) - len(labels), len(labels)])
    encoded = _run_stack(encoder, _embed(encoder, inputs, TiedGradient()), source, recompute, _run_encoder_layer)
    run = partial(_run_decoder_layer, memory=encoded, source=source)
    if has_merged_attention(decoder):
        run = partial(_run_merged_layer, memory=encoded, source=source, order=_order_keys(source, target))
    decoded = _run_stack(decoder, _embed(decoder, outputs, tied_gradient), target, recompute, run)
    tied = tied_gradient if head is decoder.embed_tokens.weight else None
    cap = get_logit_cap(model.config)
    return compute_head_losses(decoded, head, labels, tied, cap=cap, objective=objective, fused=target.fused)


def _find_stacks(model: T5Model) -> tuple[Any, Any]:
    """Encoder and decoder; the encoder of T5Gemma 2 has a part for text and one for images."""
    encoder: Any = model.get_encoder()
    return getattr(encoder, "text_model", encoder), model.get_decoder()


def has_merged_attention(decoder: Any) -> bool:
    """Whether the decoder is T5Gemma 2's, which has no cross-attention of its own."""
    return not hasattr(decoder.layers[0], "cross_attn")


def _embed(stack: Any, ids: Tensor, tied_gradient: TiedGradient) -> Tensor:
    table = stack.embed_tokens
    x = embed(table.weight, ids, tied_gradient) * stack.config.hidden_size**0.5
    if hasattr(table, "eoi_embedding"):  # the end of an image, which a text may spell out, has a row of its own
        x = torch.where((ids == table.eoi_token_index)[:, None], table.eoi_embedding, x)
    return x


def _run_stack(stack: Any, x: Tensor, bounds: SequenceBounds, recompute: bool, run: Callable[..., Tensor]) -> Tensor:
    rate = _get_rate(stack.dropout)
    x = apply_dropout_(x, rate)
    rotations = _compute_rotations(stack, x, bounds)
    window = _build_window(stack, bounds)
    for layer in stack.layers:
        rotation = rotations[layer.attention_type]
        table = window if layer.self_attn.sliding_window else None
        if recompute and torch.is_grad_enabled():
            x = checkpoint(run, layer, x, bounds, rotation, table, use_reentrant=False)
        else:
            x = run(layer, x, bounds, rotation, table)
    return apply_dropout_(_apply_norm(stack.norm, x), rate)


def _compute_rotations(stack: Any, x: Tensor, bounds: SequenceBounds) -> dict[str, Rotation]:
    """The rotations by type of layer, which have frequencies of their own in T5Gemma 2."""
    starts = bounds.cu_seqlens[:-1].repeat_interleave(bounds.cu_seqlens.diff())
    positions = torch.arange(len(x), device=x.device) - starts
    found: dict[str, Rotation] = {}
    for kind in set(stack.config.layer_types):
        given = (kind,) if hasattr(stack.rotary_emb, "layer_types") else ()
        cosines, sines = stack.rotary_emb(x[None], positions[None], *given)
        found[kind] = cosines[0, :, None], sines[0, :, None]
    return found


def _apply_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = rotation
    low, high = x.chunk(2, -1)
    return (x * cosines + torch.cat([-high, low], -1) * sines).to(x.dtype)


def _build_window(stack: Any, bounds: SequenceBounds) -> Tensor | None:
    """The bias of every distance key - query in self-attention with a window of n, [1, 2 * longest - 1].

    The decoder of T5Gemma sees n keys, its own included, its encoder n on each side, that of T5Gemma 2 n + 1 around it.
    """
    longest, size = bounds.longest, stack.config.sliding_window
    attention, is_second = stack.layers[0].self_attn, hasattr(stack.layers[0].self_attn, "q_norm")
    if size is None or longest <= size // 2:
        return None
    distances = torch.arange(1 - longest, longest, device=bounds.cu_seqlens.device)
    if attention.is_causal:
        hidden = distances <= -size
    elif is_second:
        hidden = (distances <= -((size + 1) // 2)) | (distances > size // 2)
    else:
        hidden = distances.abs() > size
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


def _order_keys(source: SequenceBounds, target: SequenceBounds) -> Tensor:
    """Rows of [source, target] by sequence: the tokens of each input, then those of its target."""
    owners = [torch.arange(len(one.ends) - 1).repeat_interleave(torch.tensor(one.lengths)) for one in (source, target)]
    return torch.cat(owners).argsort(stable=True)


def _run_merged_layer(
    layer: Any,
    x: Tensor,
    bounds: SequenceBounds,
    rotation: Rotation,
    table: Tensor | None,
    *,
    memory: Tensor,
    source: SequenceBounds,
    order: Tensor,
) -> Tensor:
    module, normed = layer.self_attn, _apply_norm(layer.pre_self_attn_layernorm, x)
    q, k, v = _compute_heads(module, normed, (module.q_proj, module.k_proj, module.v_proj))
    across_k, across_v = _compute_heads(module, memory, (module.k_proj, module.v_proj))
    k = torch.cat(
        [_normalize_heads(module.k_norm, across_k), _apply_rotation(_normalize_heads(module.k_norm, k), rotation)]
    )[order]
    v = torch.cat([across_v, v])[order]
    both = SequenceBounds(
        source.cu_seqlens + bounds.cu_seqlens,
        max(s + t for s, t in zip(source.lengths, bounds.lengths, strict=True)),
        tuple(s + t for s, t in zip(source.ends, bounds.ends, strict=True)),
    )
    options = {"causal": True, "prefixes": tuple(source.lengths), "window": module.sliding_window or 0}
    out = _attend(module, _apply_rotation(_normalize_heads(module.q_norm, q), rotation), k, v, bounds, both, **options)
    return _apply_feed_forward(layer, _add_branch(layer, x, layer.post_self_attn_layernorm, out))


def _compute_heads(module: Any, x: Tensor, linears: tuple[nn.Linear, ...]) -> Iterator[Tensor]:
    """Heads of several projections of x, [N, H, D] each."""
    for part in apply_projections(x, linears).split([one.out_features for one in linears], -1):
        yield part.unflatten(-1, (-1, module.head_dim))


def _normalize_heads(norm: Any, x: Tensor) -> Tensor:
    return _apply_norm(norm, x.flatten(0, 1)).view(x.shape)


def _apply_self_attention(
    layer: Any, x: Tensor, bounds: SequenceBounds, rotation: Rotation, table: Tensor | None, *, causal: bool
) -> Tensor:
    module, normed = layer.self_attn, _apply_norm(layer.pre_self_attn_layernorm, x)
    q, k, v = _compute_heads(module, normed, (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = _normalize_heads(module.q_norm, q), _normalize_heads(module.k_norm, k)
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
    (q,) = _compute_heads(module, normed, (module.q_proj,))
    k, v = _compute_heads(module, memory, (module.k_proj, module.v_proj))
    return _add_branch(layer, x, layer.post_cross_attn_layernorm, _attend(module, q, k, v, bounds, source))


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: SequenceBounds,
    keys: SequenceBounds,
    **options: Any,
) -> Tensor:
    """Attention of grouped heads: every key and value serves several queries. T5Gemma 2 does not bound its scores."""
    groups = module.num_key_value_groups
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    out = attend(
        q * module.scaling,
        k,
        v,
        queries,
        keys,
        dropout=module.attention_dropout if module.training else 0.0,
        cap=None if hasattr(module, "q_norm") else module.attn_logit_softcapping,
        **options,
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
