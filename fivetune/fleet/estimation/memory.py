"""Memory of one rank during an optimizer step, from the tensors that FiveTune's flat forward keeps.

In: a Workload and a Layout. Out: a Memory: bytes by kind at the moment of the largest sum.

The model is a row of parts: embedding, blocks, the final norm of each stack, head. A part has weights, bytes that its
forward pass saves for the backward pass, and temporary bytes of its backward pass. The step is a row of moments: the
end of the forward pass, the backward pass of each part from the last to the first, the optimizer; the peak is at the
largest. Per token of a stack, with d = d_model, i = inner size, f = d_ff, h heads, e bytes of a number in matrix
products (4, or 2 in 16 bits), P bytes for a dropped position times the rate (8 on a CPU: int64; 0 on a GPU, where masks
are drawn again), the bytes that are saved:

    norm                    4 d + 4       its input, a sum of the residual stream in fp32, and a factor in fp32
    products of the norm    e d           the input of q, k, v (self), q (cross) or wi
    self-attention          4 e i         q, k, v, and the input of o
    cross-attention         2 e i         q and the input of o; per source token 2 e i for k and v (+ 2 d in 16 bits:
                                          the encoder's output, cast for every block)
    attention weights       (4 + P) h     per pair of tokens, on a CPU; on a GPU 4 h per token (log-sum-exp)
    feed-forward, relu      e f           the input of wo, which its ReLU needs too; on a GPU 2 e f
    feed-forward, gated     (3 e + P) f   both inputs of the gate and the input of wo
    residual dropout        P d           at the end of each layer

Weights that one product reads together (q, k, v; k, v; wi_0, wi_1) are concatenated, which saves a copy of them; under
autocast all weights of the blocks have a 16-bit copy. With recomputation only the input of each block is saved.
Sources: `fivetune/model/flat.py`, `layers.py`, `attention.py`, `loss.py`, which hold these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivetune.distributed.pipeline import divide_costs
from fivetune.fleet.estimation.workload import FP32, Workload
from fivetune.model.shapes import NUM_BUCKETS
from fivetune.types import Layout

CHUNK_LOGITS = 2**24  # as model/loss.py: most logits that are saved, and those of a chunk
CUDA_CHUNKS = 8  # as model/loss.py: chunks that CUDA computes at once
CHUNK_TILE = 128  # as model/loss.py: what the rows of a chunk are rounded to on CUDA
BLOCK_ROWS = 64  # as model/attention.py: rows of short sequences that share a block
POSITION = 8  # bytes of a dropped position on a CPU


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of the model, as one rank computes them.

    Args:
        sizes: numbers of elements of each weight.
        copies: bytes of the copies of weights that are saved.
        cached: bytes of 16-bit copies that autocast keeps until the end of the forward pass, if nothing is saved.
        saved: bytes of activations that are saved.
        inputs: bytes of the input, which is all that recomputation saves.
        temporary: bytes of the backward pass.
        forward: bytes of temporary tensors at the end of the forward pass.
        is_block: whether it is a block, which recomputation repeats and whose weights FSDP2 gathers alone.
    """

    name: str
    sizes: tuple[int, ...]
    copies: float = 0.0
    cached: float = 0.0
    saved: float = 0.0
    inputs: float = 0.0
    temporary: float = 0.0
    forward: float = 0.0
    is_block: bool = False

    @property
    def num_weights(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank at one moment of a step.

    Args:
        moment: what is computed.
        weights: bytes of weights, including gathered shards.
        buffers: temporary tensors, copies of weights, and gradients that are being sent.
    """

    moment: str
    weights: float
    gradients: float
    state: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.state + self.activations + self.buffers


def estimate_memory(work: Workload, layout: Layout) -> Memory:
    """Estimate the peak of the rank that needs most."""
    num_micro_batches = work.count_micro_batches(layout)
    peaks: list[Memory] = []
    for number, parts in enumerate(list_stages(work, layout)):
        # a stage computes ahead until its first micro-batch comes back from the last stage
        in_flight = min(layout.stages - number, num_micro_batches)
        peaks.append(_find_peak(work, layout, parts, in_flight=in_flight))
    return max(peaks, key=lambda memory: memory.peak)


def list_stages(work: Workload, layout: Layout) -> list[list[Part]]:
    """List the parts that a rank computes, for each pipeline stage; without a pipeline there is one, the model.

    Weights that the ranks of a tensor-parallel group or several stages replicate belong to each of them.
    """
    parts = list_parts(work, layout)
    if layout.stages == 1:
        return [parts]
    return [_select_stage(work, parts, blocks) for blocks in divide_costs(work.list_block_flops(), layout.stages)]


def _find_peak(work: Workload, layout: Layout, parts: Sequence[Part], *, in_flight: int) -> Memory:
    """The largest moment of a step.

    Args:
        in_flight: micro-batches of which a pipeline stage holds activations.
    """
    num_weights = sum(part.num_weights for part in parts)
    num_root = sum(part.num_weights for part in parts if not part.is_block)
    largest_block = max(part.num_weights for part in parts if part.is_block)
    is_sharded = layout.shards > 1
    several = work.count_micro_batches(layout) > 1
    accumulates = several and (layout.reduce_once or not is_sharded)  # whole gradients
    held = 0.0 if layout.offload else FP32 / layout.shards  # bytes for each weight
    state = 0.0
    if not layout.offload:
        state = num_weights * work.state_bytes / (1 if work.gathers_state else layout.shards)
    constant = held * num_weights
    if work.teacher:
        constant += FP32 * work.teacher.num_weights

    # bytes of activations and of copied weights that each part saves
    saved: list[float] = []
    copies: list[float] = []
    cached = 0.0
    for part in parts:
        repeats = work.recompute and part.is_block
        saved.append(part.inputs if repeats else part.saved)
        copies.append(0.0 if repeats else part.copies)
        if work.recompute and not is_sharded:
            cached += part.cached
    other_batches = (in_flight - 1) * (sum(saved) + sum(copies))

    def build(moment: str, num_active: int, finished: int, reduced: int, buffers: float, num_gathered: int) -> Memory:
        """The moment when `num_active` parts hold activations, `finished` weights have gradients, `reduced` of them
        reduced, and FSDP2 holds whole weights of `num_gathered` blocks; -1: none, nor embedding, norms and head."""
        gathered = 0
        if is_sharded and num_gathered >= 0:
            gathered = work.matmul_bytes * (num_root + num_gathered * largest_block)
        if accumulates:
            gradients = FP32 * (num_weights - reduced) + held * reduced
        elif is_sharded:
            gradients = held * (num_weights if several else reduced)
        else:
            gradients = FP32 * finished
        return Memory(
            moment,
            weights=constant + gathered,
            gradients=gradients,
            state=state,
            activations=sum(saved[:num_active]) + other_batches,
            buffers=buffers + sum(copies[:num_active]),
        )

    # Forward: all activations, and the largest temporary tensors of a part.
    buffers = max(part.forward for part in parts) + cached
    moments = [build("end of forward", len(parts), 0, 0, buffers, 0)]

    # Backward, from the last part: activations go, gradients come.
    finished = reduced = 0
    pending = 0.0  # gradients of embedding and head that are not in the sums yet
    for number, part in reversed(list(enumerate(parts))):
        finished += part.num_weights
        own = 0
        if is_sharded:
            own = work.matmul_bytes * part.num_weights
        elif accumulates:
            own = FP32 * part.num_weights
        buffers = part.temporary + pending + own
        if part.is_block:
            if is_sharded:
                buffers += FP32 * part.num_weights  # of the reduction
            if work.recompute:
                buffers += part.saved + part.copies
        num_gathered = 2 if part.is_block else 1  # FSDP2 gathers a block ahead
        moments.append(build(f"backward of {part.name}", number + 1, finished, reduced, buffers, num_gathered))
        if part.is_block and is_sharded:
            reduced += part.num_weights
        if not part.is_block and (work.shape.is_tied or not accumulates):
            pending += own

    # Embedding and head are gathered until here, so they are reduced last.
    if is_sharded:
        buffers = FP32 * num_root
        if not accumulates:
            buffers += pending
        moments.append(build("reduction of embedding and head", 0, num_weights, reduced, buffers, 0))

    # Optimizer: one that needs whole weights gathers the largest, and its gradient.
    buffers = 0
    if work.gathers_state and is_sharded:
        buffers = 2 * FP32 * max(max(part.sizes, default=0) for part in parts)
    moments.append(build("optimizer", 0, num_weights, num_weights if is_sharded else 0, buffers, -1))
    return max(moments, key=lambda memory: memory.peak)


def _select_stage(work: Workload, parts: Sequence[Part], blocks: range) -> list[Part]:
    """The parts of a pipeline stage; the embedding is held by the first blocks of both stacks."""
    num_encoder = work.shape.num_layers
    last = num_encoder + work.shape.num_decoder_layers - 1
    by_name = {part.name: part for part in parts}
    all_blocks = [part for part in parts if part.is_block]
    selected: list[Part] = []
    if {0, num_encoder} & set(blocks):
        embedding = by_name["embedding"]
        if work.shape.is_tied and last not in blocks:  # else the head has the table
            embedding = replace(embedding, sizes=(work.shape.table_size,))
        selected.append(embedding)
    for number in blocks:
        selected.append(all_blocks[number])
        if number == num_encoder - 1:
            selected.append(by_name["the encoder's norm"])
    if last in blocks:
        selected += [by_name["the decoder's norm"], by_name["head"]]
    return selected


def list_parts(work: Workload, layout: Layout) -> list[Part]:
    """List the parts of the whole model in the order of the forward pass, with one rank's share of heads and features.

    The weights of a tied embedding belong to the head, whose gradient is the first.
    """
    shape = work.shape
    batch = work.passes * work.get_batch_size(layout)
    inputs = batch * work.num_inputs
    targets = batch * work.num_targets
    d = shape.d_model
    dropped = _count_position_bytes(work)
    embedded = FP32 * d * (inputs + targets)
    table = () if shape.is_tied else (shape.table_size,)
    parts = [Part("embedding", table, saved=dropped * d * (inputs + targets), temporary=2 * embedded)]
    for number in range(shape.num_layers):
        parts.append(_build_block(work, layout, number, batch, is_decoder=False))

    # The last norm of a stack: its input, its output in fp32, and the dropout of that.
    norm = 4 * d + 4 + FP32 * d + dropped * d
    parts.append(Part("the encoder's norm", (d,), saved=norm * inputs, temporary=8 * d * inputs))
    for number in range(shape.num_decoder_layers):
        parts.append(_build_block(work, layout, number, batch, is_decoder=True))
    if work.matmul_bytes < FP32:
        norm += work.matmul_bytes * d  # the head multiplies a copy of the decoder's output in 16 bits
    parts.append(Part("the decoder's norm", (d,), saved=norm * targets, temporary=8 * d * targets))
    parts.append(_build_head(work, layout, targets, embedded))
    return parts


def _build_block(work: Workload, layout: Layout, number: int, batch: int, *, is_decoder: bool) -> Part:
    shape = work.shape
    e = work.matmul_bytes
    dropped = _count_position_bytes(work)
    inputs = batch * work.num_inputs
    targets = batch * work.num_targets
    tokens, length = (targets, work.num_targets) if is_decoder else (inputs, work.num_inputs)
    d = shape.d_model
    # one rank's share of heads and features
    inner = shape.inner_size // layout.heads
    width = shape.d_ff // layout.heads
    heads = shape.num_heads / layout.heads

    # self-attention
    layer = 4 * d + 4 + e * d + dropped * d  # norm, input of the products, residual dropout
    saved = tokens * layer + 4 * e * inner * tokens
    saved += _count_attention_bytes(work, batch, length, length, heads)
    sizes = [inner * d] * 4
    joined = 3 * inner * d  # elements of weights that one product reads together
    temporary = (8 * d + 8 * e * inner) * tokens
    if not work.on_gpu:
        temporary += 4 * FP32 * heads * length**2  # gradients of the relative bias

    # cross-attention
    if is_decoder:
        sizes += [inner * d] * 4
        saved += tokens * layer + 2 * e * inner * tokens
        # As `should_attend_memory`: the encoder's output is read in place of keys and values.
        if not work.on_gpu and layout.heads == 1 and 2 * work.num_targets < shape.d_kv:
            saved += _count_attention_bytes(work, batch, work.num_targets * shape.num_heads, work.num_inputs, 1)
            saved += 2 * FP32 * shape.num_heads * d * tokens
            temporary = max(temporary, 4 * FP32 * shape.num_heads * d * tokens + 2 * FP32 * d * inputs)
        else:
            saved += _count_attention_bytes(work, batch, work.num_targets, work.num_inputs, heads)
            saved += 2 * e * inner * inputs
            if e < FP32:
                saved += e * d * inputs
            joined += 2 * inner * d
            temporary = max(temporary, (4 * e * inner + FP32 * d) * inputs)
        temporary += FP32 * d * inputs  # the gradient of the encoder's output

    # feed-forward
    saved += tokens * layer
    if shape.is_gated_act:
        saved += (3 * e + dropped) * width * tokens
        sizes += [width * d] * 3
        joined += 2 * width * d
        dense = (8 * d + 6 * e * width) * tokens
    else:
        saved += (2 if work.on_gpu else 1) * e * width * tokens
        sizes += [width * d] * 2
        dense = (8 * d + 2 * e * width) * tokens

    sizes += [d] * (3 if is_decoder else 2)  # norms
    num_copied = sum(sizes)  # the bias is no factor of a product
    if number == 0 or shape.has_bias_per_layer:
        sizes.append(int(NUM_BUCKETS * heads))
    copies, cached = e * joined, 0.0
    if e < FP32 and layout.shards == 1:  # autocast keeps a copy of all, FSDP2 casts what it gathers
        copies = e * num_copied
        cached = e * (num_copied - joined)
    return Part(
        f"{'decoder' if is_decoder else 'encoder'} block {number}",
        tuple(sizes),
        copies=copies,
        cached=cached,
        saved=saved,
        inputs=FP32 * d * tokens,
        temporary=max(temporary, dense),
        is_block=True,
    )


def count_stored_pairs(batch: int, queries: int, keys: int) -> int:
    """Pairs of tokens whose attention weights are stored for one head: short sequences share blocks of 64 rows.

    >>> count_stored_pairs(4, 128, 128), count_stored_pairs(4, 16, 32), count_stored_pairs(3, 32, 32)
    (65536, 4096, 5120)
    """
    together = max(1, BLOCK_ROWS // max(queries, keys))
    whole, rest = divmod(batch, together)
    return (whole * together**2 + rest**2) * queries * keys


def _count_attention_bytes(work: Workload, batch: int, queries: int, keys: int, heads: float) -> float:
    if work.on_gpu:
        return FP32 * heads * batch * queries
    return (FP32 + _count_position_bytes(work)) * heads * count_stored_pairs(batch, queries, keys)


def _count_position_bytes(work: Workload) -> float:
    """Bytes that remember a dropped value, per value."""
    return 0.0 if work.on_gpu else POSITION * work.dropout


def _build_head(work: Workload, layout: Layout, targets: int, embedded: float) -> Part:
    """The output head: logits are saved if they are few, else computed again, in chunks of rows.

    Bytes per logit of a chunk: the logits, unless they are saved (e); those or the softmax of the chunk before (e); the
    softmax, in the forward pass the exponentials, in fp32 (4; in 16 bits 8, because the logits are cast first).
    """
    shape = work.shape
    e = work.matmul_bytes
    num_logits = targets * shape.vocab_size
    limit, tile = (CUDA_CHUNKS * CHUNK_LOGITS, CHUNK_TILE) if work.on_gpu else (CHUNK_LOGITS, 1)
    rows = max(1, limit // shape.vocab_size // tile) * tile
    chunk = min(num_logits, rows * shape.vocab_size)
    per_logit = FP32 if e == FP32 else 2 * FP32
    saved = 0
    if num_logits <= CHUNK_LOGITS:
        saved = e * num_logits
    else:
        per_logit += e
    if chunk < num_logits:
        per_logit += e
    copies = 0
    if e < FP32 and layout.shards == 1:
        copies = e * shape.table_size
    return Part(
        "head",
        (shape.table_size,),
        copies=copies,
        saved=saved,
        temporary=per_logit * chunk + e * shape.d_model * targets + copies,
        forward=embedded + per_logit * chunk,
    )
