"""The flat forward: a training forward pass on real tokens only, with the weights of transformers' modules.

In: a model of the T5 family and a Batch. Out: token losses, -log p of every label [N_tgt] in nats; differentiable.
Nothing is padded: matrix products and norms run over all tokens, attention over each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fivetune.distributed.pipeline import Stage, find_bias_block, find_stage
from fivetune.distributed.sharding import GATHER, call_gathered
from fivetune.model.attention import SequenceBounds, SequencePairs, get_relative_buckets
from fivetune.model.family import (
    ACTIVATIONS,
    FAMILIES,
    GENERATION_CLASSES,
    compute_output_scale,
    get_family,
    is_gated,
    should_scale_output,
)
from fivetune.model.flat_gemma import compute_gemma_losses, explain_unsupported_gemma
from fivetune.model.layers import Residual, has_hooks, is_plain_linear
from fivetune.model.loss import TiedGradient, compute_head_losses, embed
from fivetune.model.modules import T5Attention, T5Block, T5Layer, T5Model, T5Stack
from fivetune.model.objective import PLAIN, Objective
from fivetune.model.ops import EncoderOutput, FlatInputs, Ops
from fivetune.model.virtual_tokens import find_prefix, find_prompt
from fivetune.types import Batch, PhaseTimer, ignore_phase

GEMMA_CLASSES = tuple(family.generation_class for family in FAMILIES.values() if family.flat and not family.t5_blocks)


def explain_unsupported_model(model: T5Model, device: str = "cpu") -> str:
    """Explain why `compute_flat_losses` cannot run a model; empty if it can.

    Args:
        device: where a T5Gemma would run; a T5 runs on every device.
    """
    names = {kind.__name__ for kind in type(model).__mro__}
    if not names.isdisjoint(GEMMA_CLASSES):
        reason = explain_unsupported_gemma(model, device.partition(":")[0])
    elif not names.isdisjoint(GENERATION_CLASSES):
        reason = _explain_unsupported_t5(model)
    else:
        return f"it is a {type(model).__name__}, not one of {', '.join((*GENERATION_CLASSES, *GEMMA_CLASSES))}"
    if reason:
        return reason
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return "some of its weights are not fp32"
    for name, module in model.named_modules():
        if has_hooks(module):
            return f"its module {name or 'itself'} has hooks, which the flat forward would not call"
    return ""


def _explain_unsupported_t5(model: T5Model) -> str:
    if find_prompt(model) or find_prefix(model):
        return "its adapter has virtual tokens, which transformers' modules compute"
    if not is_plain_linear(model.lm_head):
        return "its output head is not a plain linear module"
    for embedding in (model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens):
        if type(embedding) is not nn.Embedding or embedding.weight is not model.shared.weight:
            return "its encoder and decoder do not share one plain embedding"
    if model.config.dense_act_fn not in ACTIVATIONS:
        return f"its activation is {model.config.dense_act_fn}, not one of {', '.join(ACTIVATIONS)}"
    return ""


# --- losses ---


def compute_flat_losses(
    model: T5Model,
    batch: Batch,
    *,
    recompute: bool = False,
    fused: bool = False,
    objective: Objective = PLAIN,
    timer: PhaseTimer = ignore_phase,
) -> Tensor:
    """Compute the negative log-likelihood of every label (teacher forcing); with dropout in training mode.

    Args:
        model: a model for which `explain_unsupported_model` returns "".
        batch: batch on the host; its tensors are copied to the model's device.
        recompute, fused: see `Ops`.
        objective: loss whose gradient is computed.
        timer: function called with the phase that begins: copy, forward.

    Returns: [N_tgt] fp32, in nats; of a pipeline stage that is not the last one, [0].
    """
    # A stage knows its device: the head may be on another rank.
    stage = find_stage(model)
    device = stage.device if stage else model.get_output_embeddings().weight.device
    if device.type != "cpu":
        timer("copy")
    inputs = _copy_inputs(model, batch, device)
    timer("forward")
    return compute_device_losses(model, inputs, Ops(fused, recompute), objective)


@torch.no_grad()
def compute_flat_states(model: T5Model, batch: Batch, *, fused: bool = False) -> Tensor:
    """Compute the decoder's output before every label, scaled for the head: [N_tgt, d]. For models of T5's blocks."""
    inputs = _copy_inputs(model, batch, model.get_output_embeddings().weight.device)
    return _compute_states(model, inputs, Ops(fused), TiedGradient())


def _copy_inputs(model: T5Model, batch: Batch, device: torch.device) -> FlatInputs:
    source = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_src, device)
    target = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_tgt, device)
    labels = batch.labels.to(device, non_blocking=True)
    shifted = shift_right_flat(batch.labels, batch.cu_seqlens_tgt, start_id=model.config.decoder_start_token_id)
    # All ids are looked up at once: a tied table has then one gradient (`loss.embed`).
    ids = torch.cat([batch.input_ids, shifted]).to(device, non_blocking=True)
    return FlatInputs(ids, labels, source, target)


def shift_right_flat(labels: Tensor, cu_seqlens: Tensor, *, start_id: int) -> Tensor:
    """Build the decoder inputs: in every sequence the start id, then the labels without the last.

    >>> shift_right_flat(torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5]), start_id=0).tolist()
    [0, 7, 8, 0, 9]
    """
    shifted = labels.roll(1)
    shifted[cu_seqlens[:-1]] = start_id
    return shifted


def compute_device_losses(model: T5Model, inputs: FlatInputs, ops: Ops, objective: Objective = PLAIN) -> Tensor:
    """`compute_flat_losses` for tensors on the device; on CUDA without host synchronisation."""
    return call_gathered(model, _compute_losses, inputs, ops, objective)


def _compute_losses(model: T5Model, inputs: FlatInputs, ops: Ops, objective: Objective) -> Tensor:
    if stage := find_stage(model):
        return _compute_stage(model, stage, inputs, ops, objective)
    if not get_family(model.config).t5_blocks:
        return compute_gemma_losses(model, inputs, ops, objective)
    tied_gradient = TiedGradient()
    states = _compute_states(model, inputs, ops, tied_gradient)
    return _compute_head(model, states, inputs.labels, tied_gradient, ops, objective)


def _compute_states(model: T5Model, inputs: FlatInputs, ops: Ops, tied_gradient: TiedGradient) -> Tensor:
    # Gathered weights may be in bf16; the sums of the residual stream are in fp32.
    embedded = embed(model.shared.weight, inputs.ids, tied_gradient).float()
    x, y = inputs.split(embedded)
    encoded = run_stack(model.encoder, x, inputs.source, ops)
    decoded = run_stack(model.decoder, y, inputs.target, ops, EncoderOutput.cast(encoded, inputs.source))
    return _scale(model, decoded)


def _compute_stage(model: T5Model, stage: Stage, inputs: FlatInputs, ops: Ops, objective: Objective) -> Tensor:
    """Compute the blocks of a pipeline stage from the activations of the stage before, and send the results.

    Behind the decoder's first block the tokens of both stacks travel between stages, before it the encoder's alone.
    """
    ids, decoder_ids = inputs.split(inputs.ids)
    if stage.is_first:
        received = [embed(model.shared.weight, ids, TiedGradient())]
    else:
        shapes = [(len(ids), model.config.d_model)]
        if stage.decoder and not stage.starts_decoder:
            shapes.append((len(decoder_ids), model.config.d_model))
        received = stage.receive(*shapes)
    x = received[0]
    if stage.encoder:
        x = run_stack(model.encoder, x, inputs.source, ops, numbers=stage.encoder)
    if not stage.decoder:
        stage.send(x)
        return x.new_zeros(0)
    tied_gradient = TiedGradient()
    y = embed(model.shared.weight, decoder_ids, tied_gradient) if stage.starts_decoder else received[1]
    y = run_stack(model.decoder, y, inputs.target, ops, EncoderOutput.cast(x, inputs.source), stage.decoder)
    if not stage.is_last:
        stage.send(x, y)
        return x.new_zeros(0)
    # Only where this stage also looks up the decoder's ids does a lookup take the head's gradient.
    tied = tied_gradient if stage.starts_decoder else None
    return _compute_head(model, _scale(model, y), inputs.labels, tied, ops, objective)


def _scale(model: T5Model, decoded: Tensor) -> Tensor:
    if not should_scale_output(model.config):
        return decoded
    return decoded * compute_output_scale(model.config)


def _compute_head(
    model: T5Model, states: Tensor, labels: Tensor, tied: TiedGradient | None, ops: Ops, objective: Objective
) -> Tensor:
    head = model.lm_head.weight
    if head is not model.shared.weight:
        tied = None  # the gradient of an untied head is its own
    return compute_head_losses(states, head, labels, tied, objective=objective, fused=ops.fused)


def find_nonfinite_block(model: T5Model, compute_losses: Callable[[], Tensor]) -> str | None:
    """Run a forward pass and return this rank's first block with a non-finite output, or "the loss"; None if all are
    finite."""
    found: list[str] = []

    def watch(name: str, block: T5Block, run: Callable[..., Residual], *inputs: object) -> Residual:
        output = run(block, *inputs)
        if not output.stream.isfinite().all():
            found.append(name)
        return output

    watched: list[T5Block] = []
    for stack_name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, block in enumerate(stack.block):
            # The forward calls every block through this attribute, as it would to gather its weights.
            block.__dict__[GATHER] = partial(watch, f"{stack_name}.block.{number}", block)
            watched.append(block)
    try:
        losses = compute_losses()
    finally:
        for block in watched:
            del block.__dict__[GATHER]
    if found:
        return found[0]
    return None if losses.isfinite().all() else "the loss"


# --- stacks ---


def run_stack(
    stack: T5Stack,
    x: Tensor,
    bounds: SequenceBounds,
    ops: Ops,
    memory: EncoderOutput | None = None,
    numbers: range | None = None,
) -> Tensor:
    """Run the encoder, or the decoder with a memory, on embedded tokens: [N, d] -> [N, d].

    Args:
        numbers: numbers of the blocks to run, from the output of the block before; default: all.
    """
    if numbers is None:
        numbers = range(len(stack.block))
    if numbers.start == 0:
        # A copy, because dropout is in place: the lookup of both stacks is one tensor.
        x = ops.drop(x.clone(), stack.dropout)
    stream = Residual(x)
    table: Tensor | None = None
    memories: list[EncoderOutput | None] = [None] * len(numbers)
    if memory is not None:
        memories[:] = ops.project_memory(memory, [stack.block[n].layer[1].EncDecAttention for n in numbers])
    # T5 computes the biases in the first block and shares them, umT5 in each block.
    for number, own in zip(numbers, memories, strict=True):
        # The first block of a pipeline stage may use the table of a block before it.
        owner = find_bias_block(stack, number) if table is None else number
        attention = stack.block[owner].layer[0].SelfAttention
        if attention.has_relative_attention_bias:
            table = _build_bias_table(attention, bounds.longest, ops)
        stream = ops.run_block(stack.block[number], _run_block, stream, bounds, table, own, ops)
    if numbers.stop < len(stack.block):
        return stream.sum(fused=ops.fused)  # a later stage has the stack's last block and norm
    _, normed = ops.begin_branch(stream, stack.final_layer_norm)
    return ops.drop(normed, stack.dropout)


def _build_bias_table(attention: T5Attention, longest: int, ops: Ops) -> Tensor:
    """The bias of every distance, [H, 2 * longest - 1]."""
    embedding = attention.relative_attention_bias
    buckets = get_relative_buckets(
        embedding.weight.device,
        longest,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return ops.read_biases(embedding, buckets)


# --- layers ---


def _run_block(
    block: T5Block, x: Residual, bounds: SequenceBounds, table: Tensor | None, memory: EncoderOutput | None, ops: Ops
) -> Residual:
    x = apply_self_attention(block.layer[0], x, bounds, table, ops, causal=memory is not None)
    if memory is not None:
        x = apply_cross_attention(block.layer[1], x, bounds, memory, ops)
    act = block.layer[0].SelfAttention.config.dense_act_fn
    return ops.end_block(block, apply_feed_forward(block.layer[-1], x, act, ops))


def apply_self_attention(
    layer: T5Layer, x: Residual, bounds: SequenceBounds, table: Tensor | None, ops: Ops, *, causal: bool
) -> Residual:
    """x + dropout(o(attention(q, k, v of norm(x))))."""
    module = layer.SelfAttention
    stream, normed = ops.begin_branch(x, layer.layer_norm)
    q, k, v = ops.project_heads(normed, module.key_value_proj_dim, module.q, module.k, module.v)
    out = ops.attend(module, q, k, v, SequencePairs(bounds, bounds, causal), module.dropout, table=table)
    return ops.end_branch(stream, ops.project_last(out.flatten(1), module.o), layer.dropout)


def apply_cross_attention(
    layer: T5Layer, x: Residual, bounds: SequenceBounds, memory: EncoderOutput, ops: Ops
) -> Residual:
    """x + dropout(o(attention(q of norm(x), k and v of the encoder's output)))."""
    module = layer.EncDecAttention
    stream, normed = ops.begin_branch(x, layer.layer_norm)
    (q,) = ops.project_heads(normed, module.key_value_proj_dim, module.q)
    out = ops.attend_memory(module, q, bounds, memory)
    return ops.end_branch(stream, ops.project_last(out.flatten(1), module.o), layer.dropout)


def apply_feed_forward(layer: T5Layer, x: Residual, act: str, ops: Ops) -> Residual:
    """x + dropout(wo(dropout(act(wi(norm(x)))))); gated models have wi_0 and wi_1."""
    dense = layer.DenseReluDense
    stream, normed = ops.begin_branch(x, layer.layer_norm)
    gated = is_gated(dense)
    inner = ops.project(normed, dense.wi_0, dense.wi_1) if gated else ops.project(normed, dense.wi)
    inner = ops.apply_activation(dense, inner, act, gated=gated)
    return ops.end_branch(stream, ops.project_last(inner, dense.wo), layer.dropout)
