"""The flat forward of T5Gemma and T5Gemma 2: rotary positions, grouped heads, windows, norms on both sides of a branch.

In: the flat ids of `flat.py` and transformers' modules. Out: token losses. Attention is T5's with another scale
and, in T5Gemma, a bound of the scores; a window is a table of biases that is -inf beyond it. A query of T5Gemma 2's
decoder attends at once to the tokens of the input and to the decoder's tokens before it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fivetune.model.attention import SequenceBounds, SequencePairs
from fivetune.model.family import ACTIVATIONS, get_logit_cap
from fivetune.model.layers import is_plain_linear
from fivetune.model.loss import TiedGradient, compute_head_losses, embed
from fivetune.model.modules import T5Model
from fivetune.model.objective import Objective
from fivetune.model.ops import EncoderOutput, FlatInputs, Ops

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every token's position, [N, 1, D] each."""


def explain_unsupported_gemma(model: T5Model, device: str) -> str:
    """Explain why the parts that only a T5Gemma has cannot run on a device; empty if they can."""
    if device != "cpu":
        return "the kernels of the flat forward have neither soft-capped scores nor merged attention"
    for stack in _find_stacks(model):
        if stack.config.hidden_activation not in ACTIVATIONS:
            return f"its activation is not one of {', '.join(ACTIVATIONS)}"
        for module in stack.modules():
            is_adapter = hasattr(module, "base_layer")
            if hasattr(module, "in_features") and not is_adapter and not is_plain_linear(module):
                return "some of its linear modules have a bias or are not plain"
    return ""


def compute_gemma_losses(model: T5Model, inputs: FlatInputs, ops: Ops, objective: Objective) -> Tensor:
    """The arguments and the result of `flat.compute_device_losses`."""
    encoder, decoder = _find_stacks(model)
    source = inputs.source
    target = inputs.target
    ids, decoder_ids = inputs.split(inputs.ids)
    encoded = _run_stack(encoder, _embed(encoder, ids, TiedGradient()), source, ops)
    # T5Gemma 2's decoder has no cross-attention of its own.
    has_merged_attention = not hasattr(decoder.layers[0], "cross_attn")
    order = _order_keys(source, target) if has_merged_attention else None
    tied_gradient = TiedGradient()
    y = _embed(decoder, decoder_ids, tied_gradient)
    decoded = _run_stack(decoder, y, target, ops, EncoderOutput(encoded, source, order))
    head = model.get_output_embeddings().weight
    tied = tied_gradient if head is decoder.embed_tokens.weight else None
    cap = get_logit_cap(model.config)
    return compute_head_losses(decoded, head, inputs.labels, tied, cap=cap, objective=objective, fused=ops.fused)


def _find_stacks(model: T5Model) -> tuple[Any, Any]:
    """Encoder and decoder; the encoder of T5Gemma 2 has a part for text and one for images."""
    encoder: Any = model.get_encoder()
    return getattr(encoder, "text_model", encoder), model.get_decoder()


def _embed(stack: Any, ids: Tensor, tied_gradient: TiedGradient) -> Tensor:
    table = stack.embed_tokens
    x = embed(table.weight, ids, tied_gradient) * stack.config.hidden_size**0.5
    if hasattr(table, "eoi_embedding"):  # the end of an image, which a text may spell out, has a row of its own
        x = torch.where((ids == table.eoi_token_index)[:, None], table.eoi_embedding, x)
    return x


def _order_keys(source: SequenceBounds, target: SequenceBounds) -> Tensor:
    """Rows of [source, target] by sequence: the tokens of each input, then the tokens of its target."""
    numbers = torch.arange(len(source.ends) - 1)
    source_owners = numbers.repeat_interleave(torch.tensor(source.lengths))
    target_owners = numbers.repeat_interleave(torch.tensor(target.lengths))
    # A stable sort by sequence keeps the input's tokens before the target's.
    return torch.cat([source_owners, target_owners]).argsort(stable=True)


def _run_stack(stack: Any, x: Tensor, bounds: SequenceBounds, ops: Ops, memory: EncoderOutput | None = None) -> Tensor:
    x = ops.drop(x, stack.dropout)
    rotations = _compute_rotations(stack, x, bounds)
    window = _build_window(stack, bounds)
    for layer in stack.layers:
        rotation = rotations[layer.attention_type]
        table = window if layer.self_attn.sliding_window else None
        x = ops.run_block(layer, _run_layer, x, bounds, rotation, table, memory, ops)
    return ops.drop(_normalize(stack.norm, x, ops), stack.dropout)


def _compute_rotations(stack: Any, x: Tensor, bounds: SequenceBounds) -> dict[str, Rotation]:
    """The rotations by type of layer, which have frequencies of their own in T5Gemma 2."""
    starts = bounds.cu_seqlens[:-1].repeat_interleave(bounds.cu_seqlens.diff())
    positions = torch.arange(len(x), device=x.device) - starts
    found: dict[str, Rotation] = {}
    for kind in set(stack.config.layer_types):
        if hasattr(stack.rotary_emb, "layer_types"):
            cosines, sines = stack.rotary_emb(x[None], positions[None], kind)
        else:
            cosines, sines = stack.rotary_emb(x[None], positions[None])
        found[kind] = cosines[0, :, None], sines[0, :, None]
    return found


def _build_window(stack: Any, bounds: SequenceBounds) -> Tensor | None:
    """The bias of every distance key - query in self-attention with a window of n, [1, 2 * longest - 1].

    T5Gemma's decoder sees n keys including its own, its encoder n keys on each side; T5Gemma 2's encoder sees n + 1
    keys around it.
    """
    longest = bounds.longest
    size = stack.config.sliding_window
    attention = stack.layers[0].self_attn
    if size is None or longest <= size // 2:
        return None
    distances = torch.arange(1 - longest, longest, device=bounds.cu_seqlens.device)
    # The rules of transformers' masks; the keys after a query of the decoder are masked by attention itself.
    if attention.is_causal:
        hidden = distances <= -size
    elif hasattr(attention, "q_norm"):
        hidden = (distances <= -((size + 1) // 2)) | (distances > size // 2)
    else:
        hidden = distances.abs() > size
    return torch.zeros(1, 2 * longest - 1, device=distances.device).masked_fill_(hidden, -math.inf)


# --- layers ---


def _run_layer(
    layer: Any,
    x: Tensor,
    bounds: SequenceBounds,
    rotation: Rotation,
    table: Tensor | None,
    memory: EncoderOutput | None,
    ops: Ops,
) -> Tensor:
    """A layer of the encoder, or of a decoder, which has a memory."""
    if memory is not None and memory.order is not None:
        x = _apply_merged_attention(layer, x, bounds, rotation, memory, memory.order, ops)
    else:
        x = _apply_self_attention(layer, x, bounds, rotation, table, ops, causal=memory is not None)
        if memory is not None:
            x = _apply_cross_attention(layer, x, bounds, memory, ops)
    return _apply_feed_forward(layer, x, ops)


def _apply_self_attention(
    layer: Any, x: Tensor, bounds: SequenceBounds, rotation: Rotation, table: Tensor | None, ops: Ops, *, causal: bool
) -> Tensor:
    """x + dropout(norm(o(attention(rotated q, rotated k, v of norm(x)))))."""
    module = layer.self_attn
    normed = _normalize(layer.pre_self_attn_layernorm, x, ops)
    q, k, v = _compute_rotated_heads(module, normed, rotation, ops)
    out = _attend(module, q, k, v, SequencePairs(bounds, bounds, causal), ops, table)
    return _add_branch(layer, x, layer.post_self_attn_layernorm, out, ops)


def _apply_cross_attention(layer: Any, x: Tensor, bounds: SequenceBounds, memory: EncoderOutput, ops: Ops) -> Tensor:
    """x + dropout(norm(o(attention(q of norm(x), k and v of the encoder's output))))."""
    module = layer.cross_attn
    normed = _normalize(layer.pre_cross_attn_layernorm, x, ops)
    (q,) = _compute_heads(module, normed, (module.q_proj,), ops)
    k, v = _compute_heads(module, memory.states, (module.k_proj, module.v_proj), ops)
    out = _attend(module, q, k, v, SequencePairs(bounds, memory.bounds), ops)
    return _add_branch(layer, x, layer.post_cross_attn_layernorm, out, ops)


def _apply_merged_attention(
    layer: Any, x: Tensor, bounds: SequenceBounds, rotation: Rotation, memory: EncoderOutput, order: Tensor, ops: Ops
) -> Tensor:
    """Self-attention and cross-attention in one: the keys of a sequence are its input's, then its own, rotated."""
    module = layer.self_attn
    source = memory.bounds
    normed = _normalize(layer.pre_self_attn_layernorm, x, ops)
    q, k, v = _compute_rotated_heads(module, normed, rotation, ops)
    across_k, across_v = _compute_heads(module, memory.states, (module.k_proj, module.v_proj), ops)
    # Keys of the input have no position: they are not rotated.
    across_k = _normalize_heads(module, "k_norm", across_k, ops)
    k = torch.cat([across_k, k])[order]
    v = torch.cat([across_v, v])[order]
    ends = tuple(s + t for s, t in zip(source.ends, bounds.ends, strict=True))
    longest = max(b - a for a, b in pairwise(ends))
    both = SequenceBounds(source.cu_seqlens + bounds.cu_seqlens, longest, ends)
    prefixes = tuple(source.lengths)
    pairs = SequencePairs(bounds, both, causal=True, prefixes=prefixes, window=module.sliding_window or 0)
    out = _attend(module, q, k, v, pairs, ops)
    return _add_branch(layer, x, layer.post_self_attn_layernorm, out, ops)


def _apply_feed_forward(layer: Any, x: Tensor, ops: Ops) -> Tensor:
    """x + dropout(norm(down(dropout(act(gate(norm(x))) * up(norm(x))))))."""
    dense = layer.mlp
    normed = _normalize(layer.pre_feedforward_layernorm, x, ops)
    inner = ops.project(normed, dense.gate_proj, dense.up_proj)
    inner = ops.apply_activation(dense, inner, dense.config.hidden_activation, gated=True)
    return _add_branch(layer, x, layer.post_feedforward_layernorm, ops.project_last(inner, dense.down_proj), ops)


def _compute_heads(module: Any, x: Tensor, linears: tuple[nn.Linear, ...], ops: Ops) -> list[Tensor]:
    """Heads of several projections of x, [N, H, D] each; keys and values have fewer heads than queries."""
    widths = [linear.out_features for linear in linears]
    parts = ops.project(x, *linears).split(widths, -1)
    return [part.unflatten(-1, (-1, module.head_dim)) for part in parts]


def _compute_rotated_heads(module: Any, x: Tensor, rotation: Rotation, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of self-attention, the first two rotated by their positions."""
    q, k, v = _compute_heads(module, x, (module.q_proj, module.k_proj, module.v_proj), ops)
    q = _apply_rotation(_normalize_heads(module, "q_norm", q, ops), rotation)
    return q, _apply_rotation(_normalize_heads(module, "k_norm", k, ops), rotation), v


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, pairs: SequencePairs, ops: Ops, table: Tensor | None = None
) -> Tensor:
    """Attention of grouped heads: every key and value serves several queries. T5Gemma 2 does not bound its scores."""
    groups = module.num_key_value_groups
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    cap = None if hasattr(module, "q_norm") else module.attn_logit_softcapping
    q = q * module.scaling  # before the products, which `attend` does not scale
    out = ops.attend(module, q, k, v, pairs, module.attention_dropout, table=table, cap=cap)
    return ops.project_last(out.flatten(1), module.o_proj)


def _apply_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = rotation
    low, high = x.chunk(2, -1)
    return (x * cosines + torch.cat([-high, low], -1) * sines).to(x.dtype)


def _normalize_heads(module: Any, name: str, x: Tensor, ops: Ops) -> Tensor:
    """The norm of queries or keys, [N, H, D], which only T5Gemma 2 has."""
    norm = getattr(module, name, None)
    if norm is None:
        return x
    return _normalize(norm, x.flatten(0, 1), ops).view(x.shape)


def _add_branch(layer: Any, x: Tensor, norm: nn.Module, out: Tensor, ops: Ops) -> Tensor:
    return ops.end_branch(x, _normalize(norm, out, ops), layer.dropout).sum(fused=ops.fused)


def _normalize(norm: Any, x: Tensor, ops: Ops) -> Tensor:
    # Gemma's files hold the factor minus 1.
    return ops.normalize(x, 1 + norm.weight, norm.eps)
