"""The flat forward: a training forward pass on real tokens only, with the weights of transformers' modules.

In: a model of the T5 family and a Batch. Out: token losses, -log p of every label [N_tgt] in nats; differentiable.
Nothing is padded: matrix products and norms run over all tokens, attention over each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivetune.distributed.pipeline import Stage, find_bias_block, find_stage
from fivetune.distributed.sharding import GATHER, call_gathered, get_local
from fivetune.distributed.tensor_parallel import draw_own_masks
from fivetune.model.attention import SequenceBounds, attend, get_relative_buckets
from fivetune.model.cuda.dispatch import needs_attention_kernel
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
from fivetune.model.layers import (
    add_dropout_residual,
    apply_dropout_,
    apply_gated_dropout,
    apply_projections,
    apply_relu_dropout_,
    has_hooks,
    is_plain_linear,
    normalize_branch,
    rms_norm,
)
from fivetune.model.loss import TiedGradient, compute_head_losses, embed
from fivetune.model.low_rank import add_pair, add_transposed_pair, find_pair
from fivetune.model.objective import PLAIN, Objective
from fivetune.model.precision import cast_weights, get_matmul_dtype
from fivetune.model.virtual_tokens import find_prefix, find_prompt
from fivetune.types import Batch, PhaseTimer, ignore_phase

if TYPE_CHECKING:
    from fivetune.model.modules import T5Attention, T5Block, T5Layer, T5Model, T5Norm, T5Stack

GEMMA_CLASSES = tuple(family.generation_class for family in FAMILIES.values() if family.flat and not family.t5_blocks)


def explain_unsupported_model(model: T5Model, device: str = "cpu") -> str:
    """Explain why `compute_flat_losses` cannot run a model; empty if it can.

    Args:
        device: where a T5Gemma would run; that of a T5 is not looked at.
    """
    if any(kind.__name__ in GEMMA_CLASSES for kind in type(model).__mro__):
        return explain_unsupported_gemma(model, device.partition(":")[0])
    if not any(kind.__name__ in GENERATION_CLASSES for kind in type(model).__mro__):
        return f"it is a {type(model).__name__}, not one of {', '.join((*GENERATION_CLASSES, *GEMMA_CLASSES))}"
    if find_prompt(model) or find_prefix(model):
        return "its adapter has virtual tokens, which transformers' modules compute"
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
        batch: on the host; its tensors are copied to the model's device.
        recompute: save only the input of every block and recompute the block in the backward pass (exact).
        fused: compute norms, dropout, activations and the cross-entropy by Triton's kernels where these support them.
        objective: what the gradient of the losses is that of.
        timer: called with the phase that begins: copy, forward.

    Returns: [N_tgt] fp32, in nats; of a pipeline stage that is not the last one, [0].
    """
    stage = find_stage(model)
    device = stage.device if stage else model.get_output_embeddings().weight.device
    if device.type != "cpu":
        timer("copy")
    source = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_src, device, fused=fused)
    target = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_tgt, device, fused=fused)
    labels = batch.labels.to(device, non_blocking=True)
    shifted = shift_right_flat(batch.labels, batch.cu_seqlens_tgt, start_id=model.config.decoder_start_token_id)
    ids = torch.cat([batch.input_ids, shifted]).to(device, non_blocking=True)
    timer("forward")
    return compute_device_losses(model, ids, labels, source, target, recompute=recompute, objective=objective)


@torch.no_grad()
def compute_flat_states(model: T5Model, batch: Batch, *, fused: bool = False) -> Tensor:
    """Compute the decoder's output before every label, scaled for the head: [N_tgt, d]. For models of T5's blocks."""
    device = model.get_output_embeddings().weight.device
    source = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_src, device, fused=fused)
    target = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_tgt, device, fused=fused)
    shifted = shift_right_flat(batch.labels, batch.cu_seqlens_tgt, start_id=model.config.decoder_start_token_id)
    ids = (one.to(device, non_blocking=True) for one in (batch.input_ids, shifted))
    inputs, outputs = (embed(model.shared.weight, one, TiedGradient()).float() for one in ids)
    decoded = run_decoder(model.decoder, outputs, target, run_encoder(model.encoder, inputs, source), source)
    return decoded * compute_output_scale(model.config)


def compute_device_losses(
    model: T5Model,
    ids: Tensor,
    labels: Tensor,
    source: SequenceBounds,
    target: SequenceBounds,
    *,
    recompute: bool = False,
    objective: Objective = PLAIN,
) -> Tensor:
    """`compute_flat_losses` for tensors on the device; on CUDA without host synchronisation.

    Args:
        ids: [N_src + N_tgt], the encoder's inputs, then the decoder's.
        labels: [N_tgt].
    """
    return call_gathered(model, _compute_losses, ids, labels, source, target, recompute, objective)


def _compute_losses(
    model: T5Model,
    ids: Tensor,
    labels: Tensor,
    source: SequenceBounds,
    target: SequenceBounds,
    recompute: bool,
    objective: Objective,
) -> Tensor:
    if stage := find_stage(model):
        return _compute_stage(model, stage, ids, labels, source, target, recompute, objective)
    if not get_family(model.config).t5_blocks:
        return compute_gemma_losses(model, ids, labels, source, target, recompute, objective)
    tied_gradient = TiedGradient()
    # Gathered weights may be in bf16; the sums of the residual stream are in fp32.
    embedded = embed(model.shared.weight, ids, tied_gradient).float()
    inputs, outputs = embedded.split([len(ids) - len(labels), len(labels)])
    encoded = run_encoder(model.encoder, inputs, source, recompute=recompute)
    decoded = run_decoder(model.decoder, outputs, target, encoded, source, recompute=recompute)
    return _compute_head(model, decoded, labels, tied_gradient, objective, fused=target.fused)


def _compute_stage(
    model: T5Model,
    stage: Stage,
    ids: Tensor,
    labels: Tensor,
    source: SequenceBounds,
    target: SequenceBounds,
    recompute: bool,
    objective: Objective,
) -> Tensor:
    """Compute the blocks of a pipeline stage from the activations of the stage before, and send the results.

    Between two stages travel the encoder's tokens; behind the decoder's first block its tokens as well.
    """
    inputs, outputs = ids.split([len(ids) - len(labels), len(labels)])
    shapes = [(len(part), model.config.d_model) for part in (inputs, outputs)]
    within_decoder = bool(stage.decoder) and not stage.starts_decoder
    received = [] if stage.is_first else stage.receive(*shapes[: 1 + within_decoder])
    tied_gradient = TiedGradient()
    x = embed(model.shared.weight, inputs, TiedGradient()) if stage.is_first else received[0]
    if stage.encoder:
        x = run_encoder(model.encoder, x, source, recompute=recompute, numbers=stage.encoder)
    if not stage.decoder:
        stage.send(x)
        return x.new_zeros(0)
    y = received[1] if within_decoder else embed(model.shared.weight, outputs, tied_gradient)
    y = run_decoder(model.decoder, y, target, x, source, recompute=recompute, numbers=stage.decoder)
    if not stage.is_last:
        stage.send(x, y)
        return x.new_zeros(0)
    tied = tied_gradient if stage.starts_decoder else None
    return _compute_head(model, y, labels, tied, objective, fused=target.fused)


def _compute_head(
    model: T5Model,
    decoded: Tensor,
    labels: Tensor,
    tied_gradient: TiedGradient | None,
    objective: Objective,
    *,
    fused: bool,
) -> Tensor:
    if should_scale_output(model.config):
        decoded = decoded * compute_output_scale(model.config)
    head = model.lm_head.weight
    tied = tied_gradient if head is model.shared.weight else None
    return compute_head_losses(decoded, head, labels, tied, objective=objective, fused=fused)


def find_nonfinite_block(model: T5Model, compute_losses: Callable[[], Tensor]) -> str | None:
    """Run a forward pass and return this rank's first block with a non-finite output, or "the loss"; None if all are
    finite."""
    found: list[str] = []

    def watch(name: str, block: T5Block, run: Callable[..., Tensor], *inputs: object) -> Tensor:
        output = run(block, *inputs)
        if not output.isfinite().all():
            found.append(name)
        return output

    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    blocks = {f"{name}.block.{n}": block for name, stack in stacks.items() for n, block in enumerate(stack.block)}
    for name, block in blocks.items():
        block.__dict__[GATHER] = partial(watch, name, block)
    try:
        losses = compute_losses()
    finally:
        for block in blocks.values():
            del block.__dict__[GATHER]
    return next(iter(found), None if losses.isfinite().all() else "the loss")


def shift_right_flat(labels: Tensor, cu_seqlens: Tensor, *, start_id: int) -> Tensor:
    """Build the decoder inputs: in every sequence the start id, then the labels without the last.

    >>> shift_right_flat(torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5]), start_id=0).tolist()
    [0, 7, 8, 0, 9]
    """
    shifted = labels.roll(1)
    shifted[cu_seqlens[:-1]] = start_id
    return shifted


def run_encoder(
    stack: T5Stack, x: Tensor, bounds: SequenceBounds, *, recompute: bool = False, numbers: range | None = None
) -> Tensor:
    """Run the encoder on embedded tokens: [N, d] -> [N, d].

    Args:
        numbers: of the blocks to run, from the output of the block before; default: all.
    """
    return _run_stack(stack, x, bounds, numbers, partial(_run_block, recompute, _run_encoder_block))


def run_decoder(
    stack: T5Stack,
    x: Tensor,
    bounds: SequenceBounds,
    memory: Tensor,
    source: SequenceBounds,
    *,
    recompute: bool = False,
    numbers: range | None = None,
) -> Tensor:
    """Run the decoder on embedded tokens and the encoder's output: [Nt, d], [Ns, d] -> [Nt, d].

    Args:
        numbers: of the blocks to run, from the output of the block before; default: all.
    """
    # The last norm of the encoder returns this dtype; a pipeline stage receives the memory in fp32.
    memory = memory.to(get_matmul_dtype(memory.device))

    def run(block: T5Block, x: Tensor, bounds: SequenceBounds, table: Tensor | None) -> Tensor:
        return _run_block(recompute, _run_decoder_block, block, x, bounds, table, memory, source)

    return _run_stack(stack, x, bounds, numbers, run)


def _run_stack(
    stack: T5Stack, x: Tensor, bounds: SequenceBounds, numbers: range | None, run: Callable[..., Tensor]
) -> Tensor:
    numbers = range(len(stack.block)) if numbers is None else numbers
    if numbers.start == 0:
        x = apply_dropout_(x.clone(), _get_dropout_rate(stack.dropout), fused=bounds.fused)
    above = find_bias_block(stack, numbers.start)
    table = _build_bias_table(stack.block[above].layer[0].SelfAttention, bounds.longest, None)
    for number in numbers:
        block = stack.block[number]
        if number > above:
            table = _build_bias_table(block.layer[0].SelfAttention, bounds.longest, table)
        x = run(block, x, bounds, table)
    return _apply_final_norm(stack, x, fused=bounds.fused) if numbers.stop == len(stack.block) else x


def _apply_final_norm(stack: T5Stack, x: Tensor, *, fused: bool) -> Tensor:
    normed = _apply_norm(stack.final_layer_norm, x, fused=fused)
    return apply_dropout_(normed, _get_dropout_rate(stack.dropout), fused=fused)


def _run_block(recompute: bool, run: Callable[..., Tensor], block: T5Block, *inputs: object) -> Tensor:
    if recompute and torch.is_grad_enabled():
        return call_gathered(block, partial(checkpoint, run, use_reentrant=False), *inputs)
    return call_gathered(block, run, *inputs)


def _run_encoder_block(block: T5Block, x: Tensor, bounds: SequenceBounds, table: Tensor | None) -> Tensor:
    x = apply_self_attention(block.layer[0], x, bounds, table, causal=False)
    return apply_feed_forward(block.layer[-1], x, _get_activation(block), fused=bounds.fused)


def _run_decoder_block(
    block: T5Block, x: Tensor, bounds: SequenceBounds, table: Tensor | None, memory: Tensor, source: SequenceBounds
) -> Tensor:
    x = apply_self_attention(block.layer[0], x, bounds, table, causal=True)
    x = apply_cross_attention(block.layer[1], x, bounds, memory, source)
    return apply_feed_forward(block.layer[-1], x, _get_activation(block), fused=bounds.fused)


def apply_self_attention(
    layer: T5Layer, x: Tensor, bounds: SequenceBounds, table: Tensor | None, *, causal: bool
) -> Tensor:
    """x + dropout(o(attention(q, k, v of norm(x))))."""
    module = layer.SelfAttention
    x, normed = _begin_branch(layer.layer_norm, x, fused=bounds.fused)
    q, k, v = _split_heads(apply_projections(normed, (module.q, module.k, module.v)), module, 3)
    with draw_own_masks(module):
        out = attend(q, k, v, bounds, bounds, table=table, causal=causal, dropout=_get_attention_rate(module))
    out = apply_projections(out.flatten(1), (module.o,))
    return add_dropout_residual(x, out, _get_dropout_rate(layer.dropout), fused=bounds.fused)


def apply_cross_attention(
    layer: T5Layer, x: Tensor, bounds: SequenceBounds, memory: Tensor, source: SequenceBounds
) -> Tensor:
    """x + dropout(o(attention(q of norm(x), k and v of the encoder's output)))."""
    module = layer.EncDecAttention
    x, normed = _begin_branch(layer.layer_norm, x, fused=bounds.fused)
    (q,) = _split_heads(apply_projections(normed, (module.q,)), module, 1)
    if not needs_attention_kernel(x) and should_attend_memory(module, bounds, source):
        out = _attend_memory(module, q, memory, bounds, source)
    else:
        k, v = _split_heads(apply_projections(memory, (module.k, module.v)), module, 2)
        with draw_own_masks(module):
            out = attend(q, k, v, bounds, source, dropout=_get_attention_rate(module))
    out = apply_projections(out.flatten(1), (module.o,))
    return add_dropout_residual(x, out, _get_dropout_rate(layer.dropout), fused=bounds.fused)


def should_attend_memory(module: T5Attention, bounds: SequenceBounds, source: SequenceBounds) -> bool:
    """Whether projecting the queries into the encoder's space costs less than projecting its tokens to keys and values.

    q (M W^T)^T = (q W) M^T. The keys and values of a source cost 4 S d i operations for any target length T; the other
    order costs 4 T H S d, which is less if T is below the head size (64 in all models of the family).
    """
    if not all(is_plain_linear(linear) or find_pair(linear) for linear in (module.k, module.v)):
        return False
    pairs = sum(s * t for s, t in zip(source.lengths, bounds.lengths, strict=True))
    return 2 * pairs < source.ends[-1] * module.key_value_proj_dim


def _attend_memory(
    module: T5Attention, q: Tensor, memory: Tensor, bounds: SequenceBounds, source: SequenceBounds
) -> Tensor:
    """Cross-attention that uses the encoder's output directly as keys and values: [Nt, H, D] -> [Nt, H, D]."""
    heads, size = module.n_heads, module.key_value_proj_dim
    weights = cast_weights(module.k.weight, module.v.weight)
    of_key, of_value = weights.view(2, heads, size, -1).unbind()
    q = q.transpose(0, 1)
    projected = add_pair(torch.bmm(q, of_key), q, find_pair(module.k)).transpose(0, 1)
    rows = projected.reshape(-1, 1, memory.shape[1])
    seen = memory.unsqueeze(1)
    found = attend(rows, seen, seen, bounds.scale(heads), source, dropout=_get_attention_rate(module))
    found = found.view(q.shape[1], heads, -1).transpose(0, 1)
    out = torch.bmm(found, of_value.transpose(1, 2))
    return add_transposed_pair(out, found, find_pair(module.v)).transpose(0, 1)


def apply_feed_forward(layer: T5Layer, x: Tensor, act: str, *, fused: bool = False) -> Tensor:
    """x + dropout(wo(dropout(act(wi(norm(x)))))); gated models have wi_0 and wi_1."""
    dense = layer.DenseReluDense
    x, normed = _begin_branch(layer.layer_norm, x, fused=fused)
    rate = _get_dropout_rate(dense.dropout)
    with draw_own_masks(dense):
        if is_gated(dense):
            inner = apply_gated_dropout(apply_projections(normed, (dense.wi_0, dense.wi_1)), act, rate, fused=fused)
        elif act == "relu":
            inner = apply_relu_dropout_(apply_projections(normed, (dense.wi,)), rate, fused=fused)
        else:
            inner = apply_dropout_(dense.act(apply_projections(normed, (dense.wi,))), rate, fused=fused)
    out = apply_projections(inner, (dense.wo,))
    return add_dropout_residual(x, out, _get_dropout_rate(layer.dropout), fused=fused)


def _get_activation(block: T5Block) -> str:
    return block.layer[0].SelfAttention.config.dense_act_fn


def _apply_norm(module: T5Norm, x: Tensor, *, fused: bool) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon, fused=fused)


def _begin_branch(module: T5Norm, x: Tensor, *, fused: bool) -> tuple[Tensor, Tensor]:
    return normalize_branch(x, module.weight, module.variance_epsilon, fused=fused)


def _split_heads(merged: Tensor, module: T5Attention, count: int) -> tuple[Tensor, ...]:
    """Split the outputs of `count` projections into theirs, by head: [N, count * H * D] -> count times [N, H, D]."""
    parts = merged.view(len(merged), count, module.n_heads, module.key_value_proj_dim)
    return SplitProjections.apply(parts) if needs_attention_kernel(merged) else parts.unbind(1)


class SplitProjections(torch.autograd.Function):
    """unbind(1), whose gradient is not joined if the kernel has written its parts beside each other."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> tuple[Tensor, ...]:
        return parts.unbind(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first, count = grads[0], len(grads)
        shape = (len(first), count, *first.shape[1:])
        size = first[0].numel()
        beside = all(
            grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and grad.storage_offset() == first.storage_offset() + i * size
            and grad.stride() == (count * size, first.shape[2], 1)
            for i, grad in enumerate(grads)
        )
        if beside:
            return first.as_strided(shape, (count * size, size, first.shape[2], 1))
        return torch.stack(grads, 1)


def _get_dropout_rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def _get_attention_rate(module: T5Attention) -> float:
    return module.dropout if module.training else 0.0


def _build_bias_table(module: T5Attention, longest: int, above: Tensor | None) -> Tensor | None:
    """The bias of every distance, [H, 2 * longest - 1]; a layer without its own table uses `above`."""
    if not module.has_relative_attention_bias:
        return above
    embedding = module.relative_attention_bias
    buckets = get_relative_buckets(
        embedding.weight.device,
        longest,
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    return call_gathered(embedding, _read_biases, buckets)


def _read_biases(embedding: nn.Embedding, buckets: Tensor) -> Tensor:
    weight = get_local(embedding.weight)
    if needs_attention_kernel(weight):
        return BiasLookup.apply(weight, buckets).t().contiguous()
    return weight[buckets].t().contiguous()


class BiasLookup(torch.autograd.Function):
    """Reads the bias of each bucket [N] from a table [B, H]; the gradient is one product on the device.

    torch's own gradient of an index sorts it and walks the positions of each bucket one by one: most of a long
    sequence's distances share one bucket.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buckets: Tensor) -> Tensor:
        ctx.save_for_backward(buckets)
        ctx.num_buckets = len(weight)
        return weight[buckets]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (buckets,) = ctx.saved_tensors
        members = grad.new_zeros(len(buckets), ctx.num_buckets).scatter_(1, buckets[:, None], 1.0)
        return members.t() @ grad, None
