"""Buckets, static buffers and warm-up of the captured step, on the CPU: everything but the capture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.model.cuda.static_step import (
    Bucket,
    Buckets,
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
    assert BUCKETS.find_bucket(batch_of([5, 3], [4, 3])) == Bucket(12, 8, 5)
    assert BUCKETS.find_bucket(batch_of([6, 6, 1], [5, 5, 5])) == Bucket(24, 16, 5)
    assert BUCKETS.find_bucket(batch_of([1], [1])) == Bucket(12, 8, 5)  # 11 and 7 tokens of filling: two sequences each


def test_a_batch_is_written_with_sequences_behind_it_that_score_nothing():
    batch = batch_of([5, 3], [4, 3])
    static = StaticBatch(BUCKETS.find_bucket(batch), BUCKETS, "cpu")
    fill_block(static.block.fill_(9), static.bucket, BUCKETS, batch, start_id=1, weight=0.5)
    assert static.input_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0]
    assert static.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 0]
    assert static.decoder_ids.tolist() == [1, 2, 3, 4, 1, 6, 7, 0]
    assert static.weights.tolist() == [0.5] * 7 + [0.0]
    assert static.cu_seqlens_src.tolist() == [0, 5, 8, 12, 12, 12]
    assert static.cu_seqlens_tgt.tolist() == [0, 4, 7, 8, 8, 8]


@pytest.mark.parametrize("lengths", [[1], [6, 6, 6], [6, 6], [2, 2, 2]])
def test_every_token_has_a_sequence_that_is_not_too_long(lengths):
    batch = batch_of(lengths, [1] * len(lengths))
    static = StaticBatch(BUCKETS.find_bucket(batch), BUCKETS, "cpu")
    fill_block(static.block, static.bucket, BUCKETS, batch, start_id=0, weight=1.0)
    assert static.cu_seqlens_src[-1] == len(static.input_ids) and static.cu_seqlens_src.diff().max() <= 6
    assert static.cu_seqlens_tgt[-1] == len(static.labels) and static.cu_seqlens_tgt.diff().max() <= 5


def test_a_sequence_above_the_longest_is_refused():
    batch = batch_of([7], [1])
    static = StaticBatch(BUCKETS.find_bucket(batch), BUCKETS, "cpu")
    with pytest.raises(AssertionError):
        fill_block(static.block, static.bucket, BUCKETS, batch, start_id=0, weight=1.0)


def test_host_blocks_take_turns():
    pair, target = PinnedPair(Bucket(1, 1, 1), pinned=False), torch.zeros(8, dtype=torch.int64)
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


def weigh(static: StaticBatch, last: bool) -> Tensor:
    return (static.labels * static.weights).sum()


def test_a_bucket_is_launched_until_it_is_warm_and_replayed_after_that():
    recorder = Recorder()
    step = CapturedStep(weigh, BUCKETS, start_id=0, device="cpu", record=recorder, warm_up=2, max_graphs=1)
    small, large = batch_of([5, 3], [4, 3]), batch_of([6, 6, 1], [5, 5, 5])
    losses = [step.update([small]).item() for _ in range(4)]
    assert losses == pytest.approx([5.0] * 4)  # the mean of 2 .. 8: what fills up does not count
    assert (recorder.num_recorded, step.num_launched, step.num_replayed) == (1, 2, 2)
    for _ in range(4):
        step.update([large])
    assert (recorder.num_recorded, step.num_launched, step.num_replayed) == (1, 6, 2)  # max_graphs


def test_where_recording_fails_the_steps_are_launched_and_why_is_kept():
    def fail(function):
        raise RuntimeError("out of memory\nmore")

    step = CapturedStep(weigh, BUCKETS, start_id=0, device="cpu", record=fail, warm_up=1)
    losses = [step.update([batch_of([5, 3], [4, 3])]).item() for _ in range(4)]
    assert losses == pytest.approx([5.0] * 4) and (step.num_launched, step.num_replayed) == (4, 0)
    assert step.failure == "RuntimeError: out of memory"


def test_only_the_last_batch_of_a_group_updates_and_labels_weigh_the_same():
    lasts = []

    def step(static: StaticBatch, last: bool) -> Tensor:
        lasts.append(last)
        return weigh(static, last)

    captured = CapturedStep(step, BUCKETS, start_id=0, device="cpu", record=None)
    loss = captured.update([batch_of([5, 3], [4, 3]), batch_of([1], [1])])
    assert lasts == [False, True] and loss.item() == pytest.approx((35 + 2) / 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_need_cuda():
    with pytest.raises(FiveTuneEnvironmentError, match="no CUDA device"):
        make_graph_recorder()
