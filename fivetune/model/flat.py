"""The forward of training on flat tokens: transformers' models hold the weights, the computing is done here.

In: a model of the T5 family and a Batch. Out: -log p of every label, [N_tgt], in nats; differentiable.
Nothing is padded: every product and norm sees real tokens only, and attention knows where a sequence ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivetune.model.attention import Spans, attend, buckets_on
from fivetune.model.dispatch import on_kernels
from fivetune.model.layers import (
    ACTIVATIONS,
    add_dropped,
    dropout_,
    gated_dropout,
    has_hooks,
    is_plain_linear,
    project,
    relu_dropout_,
    rms_norm,
)
from fivetune.model.loss import Meeting, embed, label_nats_of
from fivetune.types import Batch, Mark, unmarked

FAMILIES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration")


def supports_flat(model: Any) -> str:
    """Why `flat_nats` cannot run a model; empty if it can."""
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "its weights are divided among processes, and it reads them whole"
    if type(model).__name__ not in FAMILIES:
        return f"it is a {type(model).__name__}, not one of {', '.join(FAMILIES)}"
    if not is_plain_linear(model.lm_head):
        return "its output head is not a plain linear module"
    embeddings = (model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens)
    if any(type(e) is not nn.Embedding or e.weight is not model.shared.weight for e in embeddings):
        return "its encoder and decoder do not share one plain embedding"
    if model.config.dense_act_fn not in ACTIVATIONS:
        return f"its activation is {model.config.dense_act_fn}, not one of {', '.join(ACTIVATIONS)}"
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return "some of its weights are not fp32"
    if hooked := [name for name, module in model.named_modules() if has_hooks(module)]:
        return f"its module {hooked[0] or 'itself'} has hooks, which the flat forward would not call"
    return ""


def flat_nats(model: Any, batch: Batch, *, recompute: bool = False, mark: Mark = unmarked) -> Tensor:
    """Negative log-likelihood of every label, teacher-forced; with dropout if the model is in training mode.

    Args:
        model: one that `supports_flat`.
        batch: on the host; its tensors are brought to the device of the model.
        recompute: keep only the input of every block and compute the block again in the backward pass (exact).
        mark: told what begins: copy, forward.

    Returns: [N_tgt] fp32, in nats.
    """
    device = model.shared.weight.device
    if device.type != "cpu":
        mark("copy")
    source, target = Spans.of(batch.cu_seqlens_src, device), Spans.of(batch.cu_seqlens_tgt, device)
    labels = batch.labels.to(device, non_blocking=True)
    shifted = flat_shift_right(batch.labels, batch.cu_seqlens_tgt, start_id=model.config.decoder_start_token_id)
    ids = torch.cat([batch.input_ids, shifted]).to(device, non_blocking=True)
    mark("forward")
    return nats_of(model, ids, labels, source, target, recompute=recompute)


def nats_of(
    model: Any, ids: Tensor, labels: Tensor, source: Spans, target: Spans, *, recompute: bool = False
) -> Tensor:
    """`flat_nats` of what is on the device already; on CUDA the host reads nothing back.

    Args:
        ids: [N_src + N_tgt], the encoder's inputs and behind them the decoder's.
        labels: [N_tgt].
    """
    meeting = Meeting()
    inputs, outputs = embed(model.shared.weight, ids, meeting).split([len(ids) - len(labels), len(labels)])
    encoded = encode(model.encoder, inputs, source, recompute=recompute)
    decoded = decode(model.decoder, outputs, target, encoded, source, recompute=recompute)
    if scales_output(model):
        decoded = decoded * model.config.d_model**-0.5
    head = model.lm_head.weight
    return label_nats_of(decoded, head, labels, meeting if head is model.shared.weight else None)


def flat_shift_right(labels: Tensor, cu_seqlens: Tensor, *, start_id: int) -> Tensor:
    """Decoder inputs: in every sequence the labels one place later, the start id first.

    >>> flat_shift_right(torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5]), start_id=0).tolist()
    [0, 7, 8, 0, 9]
    """
    shifted = labels.roll(1)
    shifted[cu_seqlens[:-1]] = start_id
    return shifted


def scales_output(model: Any) -> bool:
    """Whether transformers multiplies the decoder's output with d_model^-1/2."""
    if type(model).__name__.startswith("MT5"):
        return False
    config = model.config
    return bool(config.tie_word_embeddings if type(model).__name__.startswith("UMT5") else config.scale_decoder_outputs)


def encode(stack: Any, x: Tensor, spans: Spans, *, recompute: bool = False) -> Tensor:
    """The encoder over embedded tokens: [N, d] -> [N, d]."""
    x = dropout_(x.clone(), _rate(stack.dropout))
    table = None
    for block in stack.block:
        table = _bias_table(block.layer[0].SelfAttention, spans.longest, table)
        x = _maybe_again(recompute, _encoder_block, block, x, spans, table)
    return _finish(stack, x)


def decode(stack: Any, x: Tensor, spans: Spans, memory: Tensor, source: Spans, *, recompute: bool = False) -> Tensor:
    """The decoder over embedded tokens and the encoder's output: [Nt, d], [Ns, d] -> [Nt, d]."""
    x = dropout_(x.clone(), _rate(stack.dropout))
    table = None
    for block in stack.block:
        table = _bias_table(block.layer[0].SelfAttention, spans.longest, table)
        x = _maybe_again(recompute, _decoder_block, block, x, spans, table, memory, source)
    return _finish(stack, x)


def _finish(stack: Any, x: Tensor) -> Tensor:
    return dropout_(_norm(stack.final_layer_norm, x), _rate(stack.dropout))


def _maybe_again(recompute: bool, run: Any, *inputs: Any) -> Tensor:
    return checkpoint(run, *inputs, use_reentrant=False) if recompute and torch.is_grad_enabled() else run(*inputs)


def _encoder_block(block: Any, x: Tensor, spans: Spans, table: Tensor | None) -> Tensor:
    x = self_attention(block.layer[0], x, spans, table, causal=False)
    return feed_forward(block.layer[-1], x, _act(block))


def _decoder_block(block: Any, x: Tensor, spans: Spans, table: Tensor | None, memory: Tensor, source: Spans) -> Tensor:
    x = self_attention(block.layer[0], x, spans, table, causal=True)
    x = cross_attention(block.layer[1], x, spans, memory, source)
    return feed_forward(block.layer[-1], x, _act(block))


def self_attention(layer: Any, x: Tensor, spans: Spans, table: Tensor | None, *, causal: bool) -> Tensor:
    """x + dropout(o(attention(q, k, v of norm(x))))."""
    module = layer.SelfAttention
    merged = project(_norm(layer.layer_norm, x), (module.q, module.k, module.v))
    q, k, v = (_by_head(part, module) for part in merged.split(module.inner_dim, -1))
    out = attend(q, k, v, spans, spans, table=table, causal=causal, dropout=_attention_rate(module))
    return add_dropped(x, project(out.flatten(1), (module.o,)), _rate(layer.dropout))


def cross_attention(layer: Any, x: Tensor, spans: Spans, memory: Tensor, source: Spans) -> Tensor:
    """x + dropout(o(attention(q of norm(x), k and v of the encoder's output)))."""
    module = layer.EncDecAttention
    q = _by_head(project(_norm(layer.layer_norm, x), (module.q,)), module)
    if not on_kernels(x) and reads_memory_directly(module, spans, source):
        out = _attend_memory(module, q, memory, spans, source)
    else:
        merged = project(memory, (module.k, module.v))
        k, v = (_by_head(part, module) for part in merged.split(module.inner_dim, -1))
        out = attend(q, k, v, spans, source, dropout=_attention_rate(module))
    return add_dropped(x, project(out.flatten(1), (module.o,)), _rate(layer.dropout))


def reads_memory_directly(module: Any, spans: Spans, source: Spans) -> bool:
    """Whether it is cheaper to bring the queries into the encoder's space than all its tokens into keys and values.

    q (M W^T)^T = (q W) M^T. The keys and values of a source cost 4 S d i operations whatever the target; the other
    order costs 4 T H S d, fewer while a target has less tokens than a head has numbers (64 in all of the family).
    """
    if not (is_plain_linear(module.k) and is_plain_linear(module.v)):
        return False
    pairs = sum(s * t for s, t in zip(source.lengths, spans.lengths, strict=True))
    return 2 * pairs < source.ends[-1] * module.key_value_proj_dim


def _attend_memory(module: Any, q: Tensor, memory: Tensor, spans: Spans, source: Spans) -> Tensor:
    """Attention whose keys and values are the encoder's output itself: [Nt, H, D] -> [Nt, H, D]."""
    heads, size = module.n_heads, module.key_value_proj_dim
    of_key, of_value = (linear.weight.view(heads, size, -1) for linear in (module.k, module.v))
    asked = torch.bmm(q.transpose(0, 1), of_key).transpose(0, 1)
    rows = asked.reshape(-1, 1, memory.shape[1])
    seen = memory.unsqueeze(1)
    found = attend(rows, seen, seen, spans.times(heads), source, dropout=_attention_rate(module))
    found = found.view(len(q), heads, -1).transpose(0, 1)
    return torch.bmm(found, of_value.transpose(1, 2)).transpose(0, 1)


def feed_forward(layer: Any, x: Tensor, act: str) -> Tensor:
    """x + dropout(wo(dropout(act(wi(norm(x)))))); gated models have wi_0 and wi_1."""
    dense, normed = layer.DenseReluDense, _norm(layer.layer_norm, x)
    rate = _rate(dense.dropout)
    if hasattr(dense, "wi_0"):
        inner = gated_dropout(project(normed, (dense.wi_0, dense.wi_1)), act, rate)
    elif act == "relu":
        inner = relu_dropout_(project(normed, (dense.wi,)), rate)
    else:
        inner = dropout_(dense.act(project(normed, (dense.wi,))), rate)
    return add_dropped(x, project(inner, (dense.wo,)), _rate(layer.dropout))


def _act(block: Any) -> str:
    return block.layer[0].SelfAttention.config.dense_act_fn


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def _by_head(x: Tensor, module: Any) -> Tensor:
    return x.view(len(x), module.n_heads, module.key_value_proj_dim)


def _rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def _attention_rate(module: Any) -> float:
    return module.dropout if module.training else 0.0


def _bias_table(module: Any, longest: int, above: Tensor | None) -> Tensor | None:
    """The bias of every distance, [H, 2 * longest - 1]; a layer without one takes that of the layer before."""
    if not module.has_relative_attention_bias:
        return above
    weight = module.relative_attention_bias.weight
    buckets = buckets_on(
        weight.device,
        longest,
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    return weight[buckets].t().contiguous()
