"""A training step with few shapes, so that CUDA graphs can replay it: buckets of tokens, static buffers, capture.

In: flat batches of any size and a step function over static buffers. Out: the step's loss, on the device.

Two examples of 5 + 3 inputs and 4 + 3 targets, in a bucket of 12 inputs, 8 targets and 4 sequences:
    inputs   5 | 3 | 4 filler    cu_seqlens_src  0 5 8 12 12
    targets  4 | 3 | 1 filler    cu_seqlens_tgt  0 4 7 8 8      weights  w w w w w w w 0

For a small model, the host needs longer to launch the kernels one by one than the device to run them; a graph is one
launch. NOT MEASURED: written for a GPU, tested on the CPU except for the capture itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.model.attention import SequenceBounds
from fivetune.model.flat import compute_device_losses, shift_right_flat
from fivetune.model.objective import PLAIN, Objective
from fivetune.types import Batch

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model

GraphRecorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function into one that replays its work on the device."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a step: numbers of tokens and sequences, filler included."""

    num_inputs: int
    num_targets: int
    num_sequences: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of input_ids, decoder_ids, labels, weights, cu_seqlens_src, cu_seqlens_tgt."""
        return self.num_inputs, *[self.num_targets] * 3, *[self.num_sequences + 1] * 2


@dataclass(frozen=True, slots=True)
class Buckets:
    """Assigns batches to buckets by rounding token totals up.

    Rounding to 512 tokens wastes 4 % of 32 question answering inputs, 1 % of 128.

    Args:
        batch_size: most sequences of a batch.
        longest_input, longest_target: most tokens of a sequence, filler sequences included.
        input_grain, target_grain: totals are multiples of this number of tokens.
    """

    batch_size: int
    longest_input: int
    longest_target: int
    input_grain: int = 512
    target_grain: int = 128

    def find_bucket(self, batch: Batch) -> Bucket:
        """The smallest bucket that holds a batch.

        >>> Buckets(2, 6, 6, input_grain=12, target_grain=8).find_bucket(Batch(*[torch.ones(8)] * 2,
        ...     *[torch.ones(3)] * 2, ()))
        Bucket(num_inputs=12, num_targets=8, num_sequences=4)
        """
        fillers = max(-(-self.input_grain // self.longest_input), -(-self.target_grain // self.longest_target))
        return Bucket(
            -(-batch.num_input_tokens // self.input_grain) * self.input_grain,
            -(-batch.num_target_tokens // self.target_grain) * self.target_grain,
            self.batch_size + fillers,
        )


class StaticBatch:
    """The buffers of a bucket at fixed addresses: one block of memory, so that a batch is one copy to the device.

    Attributes, all tensors being views of the block:
        input_ids: [num_inputs] int64. decoder_ids, labels: [num_targets] int64; 0 at filler.
        cu_seqlens_src, cu_seqlens_tgt: [num_sequences + 1] int64; unused sequences are empty.
        weights: [num_targets] fp64, weight of each token loss in the loss; 0 at filler.
        longest_input, longest_target: numbers on the host, constant over all steps.
    """

    def __init__(self, bucket: Bucket, buckets: Buckets, device: str) -> None:
        self.bucket = bucket
        self.longest_input, self.longest_target = buckets.longest_input, buckets.longest_target
        self.block = torch.zeros(sum(bucket.sizes), dtype=torch.int64, device=device)
        self.input_ids, self.decoder_ids, self.labels, weights, self.cu_seqlens_src, self.cu_seqlens_tgt = (
            self.block.split(bucket.sizes)
        )
        self.weights = weights.view(torch.float64)


def compute_static_losses(
    model: T5Model, static: StaticBatch, *, fused: bool = False, objective: Objective = PLAIN
) -> Tensor:
    """`compute_flat_losses` of static buffers: [num_targets] fp32; the losses of filler labels are meaningless.

    It reads nothing back to the host and no shape depends on the data, so that a CUDA graph can capture it.
    """
    source = SequenceBounds(static.cu_seqlens_src, static.longest_input, fused=fused)
    target = SequenceBounds(static.cu_seqlens_tgt, static.longest_target, fused=fused)
    return compute_device_losses(
        model,
        torch.cat([static.input_ids, static.decoder_ids]),
        static.labels,
        source,
        target,
        objective=objective,
    )


def fill_block(block: Tensor, bucket: Bucket, buckets: Buckets, batch: Batch, *, start_id: int, weight: float) -> None:
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
    cu_seqlens_src.copy_(
        fill_cu_seqlens(batch.cu_seqlens_src, bucket.num_inputs, len(cu_seqlens_src), buckets.longest_input)
    )
    cu_seqlens_tgt.copy_(
        fill_cu_seqlens(batch.cu_seqlens_tgt, bucket.num_targets, len(cu_seqlens_tgt), buckets.longest_target)
    )


def fill_cu_seqlens(cu_seqlens: Tensor, total: int, count: int, longest: int) -> Tensor:
    """Extend cu_seqlens to `count` bounds: filler sequences of at most `longest` tokens up to `total`, then empty ones.

    >>> fill_cu_seqlens(torch.tensor([0, 5, 8]), 15, 6, 5).tolist()
    [0, 5, 8, 13, 15, 15]
    """
    assert int(cu_seqlens.diff().max()) <= longest, (cu_seqlens.tolist(), longest)
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
        block, copied = self.blocks[self.turn], self.copied[self.turn]
        if copied is not None:
            copied.synchronize()
        write(block)
        target.copy_(block, non_blocking=True)
        if copied is not None:
            copied.record()
        self.turn = 1 - self.turn


@dataclass(slots=True)
class BucketState:
    """State of a bucket: its buffers, number of runs and graphs; by whether a batch is the last of its group."""

    static: StaticBatch
    pair: PinnedPair
    num_runs: dict[bool, int]
    graphs: dict[bool, Callable[[], Tensor]]


class CapturedStep:
    """Runs a step by its bucket's graph, or by launching each kernel while the bucket is new.

    The first runs of a bucket are real steps: they compile the kernels and let libraries allocate, which a capture
    must not do. The next run records a graph and replays it. A recording executes nothing, so no step runs twice.

    Args:
        step: (static, last) -> loss [], detached: forward and backward on the buffers; clip and optimizer if `last`.
            It must not read from the device, and must add gradients in place (as FlatAdamW's views do).
        buckets: assigns batches to shapes.
        start_id: first token of decoder inputs.
        device: device of the model.
        record: turns a function into one that replays it (`make_graph_recorder`); None launches every step.
        warm_up: runs of a bucket before it is recorded.
        max_graphs: most graphs, because each holds memory; other buckets are launched.

    Attributes:
        num_replayed, num_launched: number of batches of each kind.
        failure: the reason why no more graphs are recorded; empty if there is none.
    """

    def __init__(
        self,
        step: Callable[[StaticBatch, bool], Tensor],
        buckets: Buckets,
        *,
        start_id: int,
        device: str,
        record: GraphRecorder | None,
        warm_up: int = 3,
        max_graphs: int = 24,
    ) -> None:
        self.step, self.buckets, self.start_id, self.device = step, buckets, start_id, device
        self.record, self.warm_up, self.max_graphs = record, warm_up, max_graphs
        self.shapes: dict[Bucket, BucketState] = {}
        self.num_replayed = self.num_launched = 0
        self.failure = ""

    def update(self, group: Sequence[Batch]) -> Tensor:
        """Run one optimizer step over a group of batches. Returns: the mean token loss, [] on the device."""
        weight = 1 / sum(batch.num_target_tokens for batch in group)
        losses = [self._run(batch, weight, last=batch is group[-1]) for batch in group]
        return torch.stack(losses).sum()

    def _run(self, batch: Batch, weight: float, *, last: bool) -> Tensor:
        bucket = self.buckets.find_bucket(batch)
        shape = self.shapes.get(bucket) or self.shapes.setdefault(bucket, self._allocate_state(bucket))
        shape.pair.send(
            lambda block: fill_block(block, bucket, self.buckets, batch, start_id=self.start_id, weight=weight),
            shape.static.block,
        )
        shape.num_runs[last] += 1
        if last not in shape.graphs and self._can_record(shape, last):
            self._record(shape, last)
        if last in shape.graphs:
            self.num_replayed += 1
            return shape.graphs[last]().clone()  # the next replay writes the same address
        self.num_launched += 1
        return self.step(shape.static, last)

    def _record(self, shape: BucketState, last: bool) -> None:
        """Record a graph. If that fails, nothing was executed: this step and all further buckets are launched."""
        assert self.record is not None
        try:
            shape.graphs[last] = self.record(lambda: self.step(shape.static, last))
        except Exception as error:
            self.record, self.failure = None, f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"

    def _can_record(self, shape: BucketState, last: bool) -> bool:
        num_graphs = sum(len(other.graphs) for other in self.shapes.values())
        return self.record is not None and shape.num_runs[last] > self.warm_up and num_graphs < self.max_graphs

    def _allocate_state(self, bucket: Bucket) -> BucketState:
        static = StaticBatch(bucket, self.buckets, self.device)
        pair = PinnedPair(bucket, pinned=self.device.startswith("cuda"))
        return BucketState(static, pair, num_runs={False: 0, True: 0}, graphs={})


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
