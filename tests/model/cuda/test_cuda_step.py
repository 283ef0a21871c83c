"""Buckets, static buffers and warm-up of the captured step, on the CPU: everything but the capture."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.shapes import MAX_BUCKETS, measure_filler
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.model.cuda.buckets import Bucket, Buckets, describe_batch, plan_buckets
from fivetune.model.cuda.static_step import (
    CapturedStep,
    PinnedPair,
    StaticBatch,
    fill_block,
    make_graph_recorder,
)
from fivetune.types import Batch

BUCKETS = Buckets(batch_size=3, longest_input=6, longest_target=5, input_grain=12, target_grain=8)


def batch_of(inputs: list[int], targets: list[int]) -> Batch:
    """Sequences of these lengths, of the ids 2, 3, 4 ..."""
    spans = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (inputs, targets)]
    return Batch(torch.arange(sum(inputs)) + 2, torch.arange(sum(targets)) + 2, *spans, tuple(map(str, inputs)))


def test_buckets_round_up_and_have_room_for_what_fills_them():
    assert BUCKETS.find_bucket(batch_of([5, 3], [4, 3])) == Bucket(12, 8, 5, 6, 5)
    assert BUCKETS.find_bucket(batch_of([6, 6, 1], [5, 5, 5])) == Bucket(24, 16, 5, 6, 5)
    assert BUCKETS.find_bucket(batch_of([1], [1])) == Bucket(
        12, 8, 5, 6, 5
    )  # 11 and 7 tokens of filling: two sequences each


def test_a_batch_is_written_with_sequences_behind_it_that_score_nothing():
    batch = batch_of([5, 3], [4, 3])
    static = StaticBatch(BUCKETS.find_bucket(batch), "cpu")
    fill_block(static.block.fill_(9), static.bucket, batch, start_id=1, weight=0.5)
    assert static.input_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0]
    assert static.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 0]
    assert static.decoder_ids.tolist() == [1, 2, 3, 4, 1, 6, 7, 0]
    assert static.weights.tolist() == [0.5] * 7 + [0.0]
    assert static.cu_seqlens_src.tolist() == [0, 5, 8, 12, 12, 12]
    assert static.cu_seqlens_tgt.tolist() == [0, 4, 7, 8, 8, 8]


def test_every_buffer_is_aligned_alike():
    """Triton compiles a kernel for pointers that are multiples of 16 bytes, and again for others."""
    for num_sequences in (4, 5):
        static = StaticBatch(replace(BUCKETS.find_bucket(batch_of([5], [4])), num_sequences=num_sequences), "cpu")
        buffers = (static.input_ids, static.weights, static.labels, static.cu_seqlens_src, static.cu_seqlens_tgt)
        assert [each.data_ptr() % 16 for each in buffers] == [0] * 5


@pytest.mark.parametrize("lengths", [[1], [6, 6, 6], [6, 6], [2, 2, 2]])
def test_every_token_has_a_sequence_that_is_not_too_long(lengths):
    batch = batch_of(lengths, [1] * len(lengths))
    static = StaticBatch(BUCKETS.find_bucket(batch), "cpu")
    fill_block(static.block, static.bucket, batch, start_id=0, weight=1.0)
    assert static.cu_seqlens_src[-1] == len(static.input_ids) and static.cu_seqlens_src.diff().max() <= 6
    assert static.cu_seqlens_tgt[-1] == len(static.labels) and static.cu_seqlens_tgt.diff().max() <= 5


def test_a_sequence_above_the_longest_is_refused():
    batch = batch_of([7], [1])
    static = StaticBatch(BUCKETS.find_bucket(batch), "cpu")
    with pytest.raises(AssertionError):
        fill_block(static.block, static.bucket, batch, start_id=0, weight=1.0)


def test_host_blocks_take_turns():
    pair, target = PinnedPair(Bucket(1, 1, 1, 1, 1), pinned=False), torch.zeros(8, dtype=torch.int64)
    seen = []
    for value in range(3):
        pair.send(lambda block, value=value: seen.append(block.fill_(value).data_ptr()), target)
        assert target.tolist() == [value] * 8
    assert seen[0] == seen[2] != seen[1]


class Recorder:
    """Stands in for CUDA graphs: replays by calling."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, function):
        self.num_recorded += 1
        return function


def weigh(static: StaticBatch) -> Tensor:
    return (static.labels * static.weights).sum()


SMALL, LARGE = batch_of([5, 3], [4, 3]), batch_of([6, 6, 1], [5, 5, 5])


def test_planned_buckets_are_replayed_and_others_launched():
    recorder = Recorder()
    planned = plan_buckets(np.array([describe_batch(SMALL)]), max_buckets=3)
    step = CapturedStep(weigh, replace(BUCKETS, planned=planned), start_id=0, device="cpu")
    step.record(recorder)
    losses = [step.run(SMALL, weight=1 / 7)[0].item() for _ in range(2)]
    assert losses == pytest.approx([5.0] * 2)  # the mean of 2 .. 8: filler does not count
    assert (recorder.num_recorded, step.num_replayed, step.num_launched) == (1, 2, 0)
    loss, positions = step.run(LARGE, weight=1.0)  # its longest sequences are longer than the plan's
    assert (loss, positions, step.num_replayed, step.num_launched) == (135, 24 + 16, 2, 1)


def test_all_buckets_are_launched_on_filler_before_the_largest_is_recorded():
    """A launch between two recordings would need activations beside those of the pool."""
    seen: list[tuple[object, ...]] = []

    def step(static: StaticBatch) -> Tensor:
        seen.append((len(static.input_ids), int(static.cu_seqlens_src[-1]), float(static.weights.sum())))
        return weigh(static)

    def record(function):
        seen.append(("record",))
        function()
        return function

    planned = plan_buckets(np.array([describe_batch(batch) for batch in (SMALL, LARGE)]), max_buckets=2, grains=(4, 4))
    captured = CapturedStep(step, replace(BUCKETS, planned=planned), start_id=0, device="cpu")
    captured.record(record)
    large, small = (16, 16, 0.0), (8, 8, 0.0)
    assert seen == [large, small, ("record",), large, ("record",), small] and captured.num_graphs == 2


def test_where_recording_fails_the_rest_is_launched_and_why_is_kept():
    recorded: list[object] = []

    def fail(function):
        if recorded:
            raise RuntimeError("out of memory\nmore")
        recorded.append(function)
        return function

    planned = plan_buckets(np.array([describe_batch(batch) for batch in (SMALL, LARGE)]), max_buckets=2, grains=(4, 4))
    step = CapturedStep(weigh, replace(BUCKETS, planned=planned), start_id=0, device="cpu")
    step.record(fail)
    assert step.failure == "RuntimeError: out of memory" and step.num_graphs == 1
    losses = [step.run(batch, weight=1.0)[0].item() for batch in (LARGE, SMALL)]
    assert losses == [135.0, 35.0] and (step.num_launched, step.num_replayed) == (1, 1)


# most filler of inputs and targets, in percent
RUNS = {("squad", 10_000, 128): (3, 15), ("translation", 20_000, 128): (8, 8)}


@pytest.mark.parametrize("run", RUNS)
def test_few_buckets_hold_a_whole_run_with_little_filler(run):
    filler = measure_filler(*run)
    most_inputs, most_targets = RUNS[run]
    assert filler["inputs"] < most_inputs and filler["targets"] < most_targets
    assert filler["graphs"] <= MAX_BUCKETS


def test_planned_buckets_are_the_best_of_all():
    """Of few totals, every division is tried."""
    random = np.random.default_rng(0)
    facts = np.stack(
        [random.integers(1, 7, 30) * 8, random.integers(1, 4, 30) * 8, *[np.full(30, 8)] * 2, np.full(30, 9)], 1
    )

    def count(buckets) -> int:
        return sum(min(b.num_positions for b in buckets if b.can_hold(*row)) for row in facts.tolist())

    exact = plan_buckets(facts, max_buckets=10**3, grains=(8, 8))
    assert count(exact) == facts[:, :2].sum()
    few = plan_buckets(facts, max_buckets=3, grains=(8, 8))
    edges = [(x, y) for x in sorted({*facts[:, 0].tolist()}) for y in sorted({*facts[:, 1].tolist()})]
    best = min(
        sum(min((x + y for x, y in chosen if row[0] <= x and row[1] <= y), default=10**9) for row in facts.tolist())
        for chosen in combinations(edges, 3)
    )
    assert len(few) <= 3 and best <= count(few) <= 1.05 * best  # ranges of inputs, not any rectangles


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_need_cuda():
    with pytest.raises(FiveTuneEnvironmentError, match="no CUDA device"):
        make_graph_recorder()
