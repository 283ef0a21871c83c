"""The order of training: each example once an epoch, decided by (seed, step) alone, with little padding."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivetune.data.store.batch import pad
from fivetune.data.store.ragged import Ragged
from fivetune.data.store.stream import BatchPlan, TrainingStream, make_length_bucketed_batches
from fivetune.distributed.world import World

ORDERS = st.builds(
    BatchPlan,
    examples_per_step=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    bucket_pool=st.integers(1, 4),
    seed=st.integers(0, 9),
)
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


class Lengths:
    """What a stream needs of a store, for rows of these lengths: row i holds the id i + 1 that often."""

    def __init__(self, folder: Path, lengths: Sequence[int]) -> None:
        self.inputs = Ragged.from_rows([[row + 1] * length for row, length in enumerate(lengths)], np.uint16)
        self.labels = Ragged.from_rows([[row + 1] for row in range(len(lengths))], np.uint16)

    def __len__(self) -> int:
        return len(self.inputs)

    def get_id(self, row: int) -> str:
        return str(row)


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    """Lengths as real contexts have them: many short ones, a long tail."""
    return np.random.default_rng(3).gamma(3.0, 20.0, 600).astype(int).clip(4, 400).tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory, lengths) -> Lengths:
    return Lengths(tmp_path_factory.mktemp("store"), lengths)


def stream(store: Lengths, **changes: int) -> TrainingStream:
    defaults = {"examples_per_step": 16, "batch_size": 4, "bucket_pool": 8, "seed": 0}
    return TrainingStream(store, BatchPlan(**{**defaults, **changes}))  # type: ignore[arg-type]


@given(order=ORDERS, lengths=LENGTHS, epoch=st.integers(0, 3))
def test_every_example_comes_once_an_epoch(order, lengths, epoch):
    batches = make_length_bucketed_batches(np.array(lengths), order, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert len(batches) == order.count_steps_per_epoch(len(lengths))
    sizes = sorted(map(len, batches))
    assert sizes[2:] == [order.examples_per_step] * (len(sizes) - 2) and sizes[-1] <= order.examples_per_step
    assert sizes[0] >= min(len(lengths), order.examples_per_step / 2)  # nobody trains alone
    for batch in batches:
        assert np.all(np.diff(np.array(lengths)[batch]) >= 0)


def list_batches(num: int, size: int, num_epochs: int, **changes: int) -> list[tuple[int, ...]]:
    """The global batches of several epochs, each as a sorted tuple; row 7 is the longest example."""
    lengths = np.random.default_rng(0).permutation(num) + 3
    lengths[7] = 400
    plan = BatchPlan(size, size, 8, seed=0, **changes)
    epochs = [make_length_bucketed_batches(lengths, plan, epoch) for epoch in range(num_epochs)]
    return [tuple(sorted(rows.tolist())) for batches in epochs for rows in batches]


@pytest.mark.parametrize(("num", "size"), [(33, 32), (45, 6), (64, 32), (100, 32), (256, 32), (300, 32), (1000, 100)])
def test_small_sets_get_new_batches_in_every_epoch(num, size):
    batches = list_batches(num, size, 40)
    assert len({*batches}) == len(batches)
    assert min(map(len, batches)) >= size / 2
    beside = {row for batch in batches if 7 in batch for row in batch}
    assert len(beside) > num / 2  # the longest example meets most of the others


@settings(max_examples=30)
@given(order=ORDERS, lengths=LENGTHS)
def test_the_order_is_a_function_of_seed_and_epoch(order, lengths):
    first, again = (
        make_length_bucketed_batches(np.array(lengths), order, 1),
        make_length_bucketed_batches(np.array(lengths), order, 1),
    )
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in again]


def test_seeds_and_epochs_differ(store):
    orders = [
        np.concatenate(stream(store, seed=seed).select_rows(step)).tolist() for seed in (0, 1) for step in (0, 38)
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_steps_can_be_asked_for_in_any_order(store):
    ahead, back = stream(store), stream(store)
    steps = range(0, 90, 7)
    forwards = {step: [rows.tolist() for rows in ahead.select_rows(step)] for step in steps}
    assert forwards == {step: [rows.tolist() for rows in back.select_rows(step)] for step in reversed(steps)}


def test_going_on_in_the_middle_gives_the_same_steps(store):
    full = [[batch.ids for batch in group] for group in stream(store).iter_micro_batches(0, 80)]
    middle = [[batch.ids for batch in group] for group in stream(store).iter_micro_batches(45, 80)]
    assert (len(full), middle) == (80, full[45:])
    assert list(stream(store).iter_micro_batches(80, 80)) == []


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_every_global_batch(store, size):
    """600 examples in steps of 54: two of an epoch have 30."""
    order = BatchPlan(examples_per_step=54, batch_size=4, bucket_pool=2, seed=0)
    alone = TrainingStream(store, order)
    shares = [TrainingStream(store, order, world=World(rank, size)) for rank in range(size)]
    for step in range(24):
        rows = [np.concatenate(share.select_rows(step)) for share in shares]
        assert sorted(np.concatenate(rows).tolist()) == sorted(np.concatenate(alone.select_rows(step)).tolist())
        assert len({len(share.select_rows(step)) for share in shares}) == 1
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
        assert {share.count_examples_before(step) for share in shares} == {alone.count_examples_before(step)}


def test_a_process_without_examples_runs_a_filler_batch(store):
    order = BatchPlan(examples_per_step=1, batch_size=300, bucket_pool=1, seed=0)
    streams, step = [TrainingStream(store, order, world=World(rank, 2)) for rank in (0, 1)], 3
    (own,), (filler,) = (each.build_micro_batches(step) for each in streams)
    assert (own.ids, own.is_filler, filler.is_filler) == (filler.ids, False, True)
    assert [len(lengths) for lengths in streams[1].get_lengths(step)] == [1, 1]


def test_a_reader_that_stops_early_waits_for_no_thread_and_leaves_none(store, monkeypatch):
    released, threads = threading.Event(), []
    build = TrainingStream.build_micro_batches

    def wait_and_build(self, step):
        threads.append(threading.current_thread())
        if step > 0:
            released.wait(10)
        return build(self, step)

    monkeypatch.setattr(TrainingStream, "build_micro_batches", wait_and_build)
    groups = stream(store).iter_micro_batches(0, 1000)
    next(groups)
    groups.close()
    assert threads[0].is_alive()  # it assembles the next step, for which nobody waits
    released.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_micro_batches(store):
    one = stream(store, examples_per_step=16, batch_size=5)
    assert [len(rows) for rows in one.select_rows(0)] == [5, 5, 5, 1]
    sizes = [sum(map(len, one.select_rows(step))) for step in range(38)]
    assert (sum(sizes), sorted(sizes)[0]) == (600, 600 - 37 * 16)
    assert [one.count_examples_before(step) for step in (0, 1, 38, 39)] == [0, sizes[0], 600, 600 + sizes[0]]
    assert one.count_examples_before(38 + 20) == 600 + sum(
        len(rows) for step in range(38, 58) for rows in one.select_rows(step)
    )


def test_accumulation_only_cuts_the_same_batch(store):
    whole = stream(store, batch_size=16)
    for batch_size in (1, 2, 8):
        cut = stream(store, batch_size=batch_size)
        assert np.array_equal(np.concatenate(cut.select_rows(5)), np.concatenate(whole.select_rows(5)))


def test_bucketing_saves_padding_and_keeps_the_order_random(store, lengths):
    plain, bucketed = padding(stream(store, bucket_pool=1)), padding(stream(store, bucket_pool=8))
    assert bucketed < plain / 2
    assert plain < 0.25
    means = [np.mean([lengths[row] for rows in stream(store).select_rows(step) for row in rows]) for step in range(38)]
    assert abs(np.corrcoef(means, np.arange(38))[0, 1]) < 0.3  # short and long batches are mixed over the epoch


def padding(training: TrainingStream) -> float:
    """Share of padded input positions in one epoch."""
    real = computed = 0
    for group in training.iter_micro_batches(0, 38):
        for batch in group:
            real += batch.num_input_tokens
            computed += pad(batch, pad_id=0).input_ids.numel()
    return 1 - real / computed


def test_a_slow_assembly_is_counted(store, monkeypatch):
    stream = TrainingStream(store, BatchPlan(4, 4, 2, seed=0))
    whole = stream.build_micro_batches
    assert len(list(stream.iter_micro_batches(0, 4))) == 4
    stream.num_starved = 0
    monkeypatch.setattr(stream, "build_micro_batches", lambda step: time.sleep(0.05) or whole(step))
    assert len(list(stream.iter_micro_batches(0, 4))) == 4
    assert stream.num_starved == 3  # the first step of a run always waits
