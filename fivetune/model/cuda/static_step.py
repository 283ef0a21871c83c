"""A training step with few shapes, so that CUDA graphs can replay it: buckets of tokens, static buffers, capture.

In: flat batches of any size and a function over static buffers: forward and backward of a micro-batch, whose gradients
it adds to memory at fixed addresses. Out: the loss, on the device. The optimizer is no part of it.

Two examples of 5 + 3 inputs and 4 + 3 targets, in a bucket of 12 inputs, 8 targets and 4 sequences:
    inputs   5 | 3 | 4 filler    cu_seqlens_src  0 5 8 12 12
    targets  4 | 3 | 1 filler    cu_seqlens_tgt  0 4 7 8 8      weights  w w w w w w w 0

For a small model, the host needs longer to launch the kernels one by one than the device to run them; a graph is one
launch. NOT MEASURED: written for a GPU, tested on the CPU except for the capture itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivetune.errors import FiveTuneEnvironmentError, format_error, refuse_broken_context
from fivetune.model.attention import SequenceBounds
from fivetune.model.cuda.buckets import Bucket, Buckets
from fivetune.model.flat import compute_device_losses, shift_right_flat
from fivetune.model.modules import T5Model
from fivetune.model.objective import PLAIN, Objective
from fivetune.model.ops import FlatInputs, Ops
from fivetune.types import Batch

GraphRecorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function into one that replays its work on the device."""


class StaticBatch:
    """The buffers of a bucket at fixed addresses: one block of memory, so that a batch is one copy to the device.

    Attributes, all tensors being views of the block:
        input_ids: [num_inputs] int64. decoder_ids, labels: [num_targets] int64; 0 at filler.
        cu_seqlens_src, cu_seqlens_tgt: [num_sequences + 1, rounded up to even] int64; unused sequences are empty.
        weights: [num_targets] fp64, weight of each token loss in the loss; 0 at filler.
        longest_input, longest_target: numbers on the host, constant over all steps.
    """

    def __init__(self, bucket: Bucket, device: str) -> None:
        self.bucket = bucket
        self.longest_input = bucket.longest_input
        self.longest_target = bucket.longest_target
        self.block = torch.zeros(sum(bucket.sizes), dtype=torch.int64, device=device)
        self.input_ids, self.decoder_ids, self.labels, weights, self.cu_seqlens_src, self.cu_seqlens_tgt = (
            self.block.split(bucket.sizes)
        )
        self.weights = weights.view(torch.float64)  # elements of the same 8 bytes


def compute_static_losses(
    model: T5Model, static: StaticBatch, *, fused: bool = False, objective: Objective = PLAIN
) -> Tensor:
    """`compute_flat_losses` of static buffers: [num_targets] fp32; the losses of filler labels are meaningless.

    It reads nothing back to the host and no shape depends on the data, so that a CUDA graph can capture it.
    """
    inputs = FlatInputs(
        torch.cat([static.input_ids, static.decoder_ids]),
        static.labels,
        SequenceBounds(static.cu_seqlens_src, static.longest_input),
        SequenceBounds(static.cu_seqlens_tgt, static.longest_target),
    )
    return compute_device_losses(model, inputs, Ops(fused), objective)


def fill_block(block: Tensor, bucket: Bucket, batch: Batch, *, start_id: int, weight: float) -> None:
    """Write a batch into a block on the host, then filler sequences of zeros with weight 0.

    Args:
        block: as in StaticBatch.
        start_id: first token of decoder inputs.
        weight: weight of each token loss: 1 / (labels of the update) gives the mean over the update.
    """
    input_ids, decoder_ids, labels, weights, cu_seqlens_src, cu_seqlens_tgt = block.zero_().split(bucket.sizes)
    shifted = shift_right_flat(batch.labels, batch.cu_seqlens_tgt, start_id=start_id)
    for buffer, values in ((input_ids, batch.input_ids), (labels, batch.labels), (decoder_ids, shifted)):
        buffer[: len(values)] = values
    weights.view(torch.float64)[: len(batch.labels)] = weight
    _fill_bounds(cu_seqlens_src, cu_seqlens_tgt, bucket, batch.cu_seqlens_src, batch.cu_seqlens_tgt)


def _fill_bounds(into_src: Tensor, into_tgt: Tensor, bucket: Bucket, source: Tensor, target: Tensor) -> None:
    into_src.copy_(fill_cu_seqlens(source, bucket.num_inputs, len(into_src), bucket.longest_input))
    into_tgt.copy_(fill_cu_seqlens(target, bucket.num_targets, len(into_tgt), bucket.longest_target))


def fill_cu_seqlens(cu_seqlens: Tensor, total: int, count: int, longest: int) -> Tensor:
    """Extend cu_seqlens to `count` bounds: filler sequences of at most `longest` tokens up to `total`, then empty ones.

    >>> fill_cu_seqlens(torch.tensor([0, 5, 8]), 15, 6, 5).tolist()
    [0, 5, 8, 13, 15, 15]
    """
    assert all(length <= longest for length in cu_seqlens.diff().tolist()), (cu_seqlens.tolist(), longest)
    ends = torch.arange(1, count - len(cu_seqlens) + 1) * longest + cu_seqlens[-1]
    filled = torch.cat([cu_seqlens, ends.clamp_max(total)])
    assert len(filled) == count and int(filled[-1]) == total, (filled.tolist(), count, total)
    return filled


class PinnedPair:
    """Two alternating host blocks: one is filled while the other is copied to the device."""

    def __init__(self, bucket: Bucket, *, pinned: bool) -> None:
        self.blocks = [torch.zeros(sum(bucket.sizes), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self.copied = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self.turn = 0

    def send(self, write: Callable[[Tensor], None], target: Tensor) -> None:
        """Fill a host block by `write` and start its copy to `target`; waits only for the last but one copy."""
        block = self.blocks[self.turn]
        copied = self.copied[self.turn]
        if copied is not None:
            copied.synchronize()
        write(block)
        target.copy_(block, non_blocking=True)
        if copied is not None:
            copied.record()
        self.turn = 1 - self.turn


@dataclass(slots=True)
class BucketState:
    """State of a bucket: its buffers, and its graph if one is recorded."""

    static: StaticBatch
    pair: PinnedPair
    replay: Callable[[], Tensor] | None = None


class CapturedStep:
    """Runs a micro-batch by its bucket's graph, or by launching each kernel where there is none.

    Args:
        step: adds the gradients of the buffers to fixed addresses; returns the loss [], detached.
        buckets: assign batches to buckets.
        start_id: first token of decoder inputs.
        device: place of the buffers.

    Attributes:
        num_replayed, num_launched: number of batches of each kind.
        failure: the reason why not every planned bucket has a graph; empty if there is none.
    """

    def __init__(self, step: Callable[[StaticBatch], Tensor], buckets: Buckets, *, start_id: int, device: str) -> None:
        self.step = step
        self.buckets = buckets
        self.start_id = start_id
        self.device = device
        self.states: dict[Bucket, BucketState] = {}
        self.num_replayed = self.num_launched = 0
        self.failure = ""

    @property
    def num_graphs(self) -> int:
        return sum(state.replay is not None for state in self.states.values())

    def record(self, record: GraphRecorder) -> None:
        """Record the graph of every planned bucket, the largest first, so that the pool is sized once.

        All are launched once before, on filler of weight 0: this compiles kernels, loads the kernels that cuBLAS
        chooses for their shapes and lets libraries allocate, which a capture must not do. A recording frees the memory
        of launched kernels, so activations exist once, not outside of the pool too. The caller clears the gradients. If
        a recording fails, nothing was executed, and the batches of this and all further buckets are launched.
        """
        nothing = torch.zeros(1, dtype=torch.int64)
        try:
            states = [self._get_state(bucket) for bucket in self.buckets.planned]
            for state in states:
                static = state.static
                _fill_bounds(static.cu_seqlens_src, static.cu_seqlens_tgt, static.bucket, nothing, nothing)
                self.step(static)
            for state in states:
                state.replay = record(partial(self.step, state.static))
        except Exception as error:  # of any class: drivers and kernels raise many
            refuse_broken_context(error, "--train.capture off")
            self.failure = format_error(error)

    def run(self, batch: Batch, *, weight: float) -> tuple[Tensor, int]:
        """Add a batch's gradients. Returns: its share of the loss, [] on the device, and the positions computed.

        Args:
            weight: factor of each token loss.
        """
        bucket = self.buckets.find_bucket(batch)
        state = self._get_state(bucket)

        def write(block: Tensor) -> None:
            fill_block(block, bucket, batch, start_id=self.start_id, weight=weight)

        state.pair.send(write, state.static.block)
        if state.replay is not None:
            self.num_replayed += 1
            return state.replay().clone(), bucket.num_positions  # the next replay writes the same address
        self.num_launched += 1
        return self.step(state.static), bucket.num_positions

    def _get_state(self, bucket: Bucket) -> BucketState:
        if bucket not in self.states:
            pair = PinnedPair(bucket, pinned=self.device.startswith("cuda"))
            self.states[bucket] = BucketState(StaticBatch(bucket, self.device), pair)
        return self.states[bucket]


def refuse_broken_generator(device: str) -> None:
    """Raise FiveTuneEnvironmentError if a failed capture has left the device without random numbers."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    try:
        torch.randint(2, (1,), device=device)
    except RuntimeError as error:
        raise FiveTuneEnvironmentError(
            "train.capture: a capture failed and has left torch's generator unusable for this process: "
            f"{str(error).splitlines()[0]}. Start again with --train.capture off."
        ) from error


def make_graph_recorder() -> GraphRecorder:
    """Make the `record` of a CapturedStep; its graphs share one memory pool, because only one replays at a time.

    This thread then uses a CUDA stream of its own: gradients are accumulated in the stream of the first backward pass,
    and a capture must not use the default stream. Raises FiveTuneEnvironmentError without CUDA.
    """
    if not torch.cuda.is_available():
        raise FiveTuneEnvironmentError(
            "cuda graphs: torch sees no CUDA device. Graphs need one. Train with another backend, or fix the driver."
        )
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    pool: Any = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            loss = function()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

    return record
