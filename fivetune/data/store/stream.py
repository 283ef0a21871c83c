"""The training order: the examples of each optimizer step, as a function of (seed, step) alone.

An epoch is a seeded permutation; with a window, the shards are in a seeded order, and rows are permuted among a few
shards that follow one another, so that few are on the disk at once. Pools of `bucket_pool` global batches, at most a
quarter of the epoch, are sorted by length and split into global batches, which are shuffled; each is split into
micro-batches of similar lengths. What the number of examples leaves over is a smaller batch at a random place, or two
of half the size. So a batch is a random sample of examples of similar length, another one in each epoch, every example
occurs once per epoch, and the position in the data is the step number: resuming needs no other state.

All ranks compute the same global batches. Of K copies of the model, each takes every K-th example in order of length,
so that their work is about equal; a copy without examples for a micro-batch runs a filler batch with zero loss weight,
so that every rank runs the same number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fivetune.data.store.batch import collate
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.types import Batch

Rows = NDArray[np.int64]

ORDER_VERSION = 2
"""Increase when seed, step and settings decide otherwise: on the order of the data, the questions of a subset, or the
steps of a warm-up. A run of another version is not resumed."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch sizes and length bucketing of the training order.

    Args:
        examples_per_step: global batch size.
        batch_size: examples per forward pass (micro-batch).
        bucket_pool: global batches sorted by length together.
        seed: of the permutations.
        window_shards: the most shards on the disk at once; None: all.
    """

    examples_per_step: int
    batch_size: int
    bucket_pool: int
    seed: int
    window_shards: int | None = None

    @property
    def shards_together(self) -> int | None:
        """Number of shards whose rows are shuffled together; as many are made ready for the steps that follow."""
        return None if self.window_shards is None else max(1, self.window_shards // 2)

    def count_steps_per_epoch(self, num_examples: int) -> int:
        return -(-num_examples // self.examples_per_step)

    def count_pool_steps(self, num_examples: int) -> int:
        """Return the number of global batches that are sorted by length together.

        A set of one pool would be cut into the same batches in every epoch.
        """
        return min(self.bucket_pool, max(1, self.count_steps_per_epoch(num_examples) // 4))

    def draw_sizes(self, num_examples: int, random: np.random.Generator) -> list[int]:
        """Return the size of each global batch of an epoch.

        No batch is smaller than half a global batch, unless there are no more examples: a few that train alone would
        move the weights as far as a whole batch.

        >>> sorted(BatchPlan(32, 32, 8, seed=0).draw_sizes(97, np.random.default_rng(0)))
        [16, 17, 32, 32]
        """
        whole = self.examples_per_step
        num_whole, rest = divmod(num_examples, whole)
        if not rest:
            return [whole] * num_whole
        short = [rest]
        if num_whole and 2 * rest < whole:  # two of half the size instead
            num_whole -= 1
            both = whole + rest
            short = [both // 2, both - both // 2]
        sizes = [whole] * (num_whole + len(short))
        for place, size in zip(random.choice(len(sizes), len(short), replace=False), short, strict=True):
            sizes[place] = size
        return sizes


class TrainingStream:
    """The micro-batches of every optimizer step of a store.

    Args:
        sampler: returns the rows of an epoch, the same number for each; None: all rows.
        world: this rank, whose share the micro-batches are; counts are over all ranks.
    """

    def __init__(
        self,
        store: TokenStore,
        plan: BatchPlan,
        sampler: Callable[[int], Rows] | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.store = store
        self.plan = plan
        self.world = world
        self._sampler = sampler
        self.num_starved = 0  # steps that waited for their batches to be assembled
        self.num_rows = len(store) if sampler is None else len(sampler(0))
        self._lengths = store.inputs.lengths + store.labels.lengths
        self._epoch = lru_cache(maxsize=2)(self._make_epoch_batches)
        self._seen = lru_cache(maxsize=2)(self._count_seen)
        self._pool: tuple[int, int] | None = None  # epoch and number of the pool that is read

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.count_steps_per_epoch(self.num_rows)

    def select_rows(self, step: int) -> list[Rows]:
        """Return the rows of this rank's micro-batches of a 0-based optimizer step.

        All ranks have the same number of micro-batches; the last one may be shorter or empty.
        """
        rows = self._select_global_rows(step)
        size = self.plan.batch_size
        share = rows[self.world.data_rank :: self.world.data_size]
        largest_share = -(-len(rows) // self.world.data_size)  # every rank has as many passes as the one with most
        return [share[i : i + size] for i in range(0, largest_share, size)]

    def get_lengths(self, step: int) -> tuple[Rows, Rows]:
        """Return the lengths of inputs and targets of a 0-based optimizer step, over all ranks, in tokens: [B], [B]."""
        rows = self._select_global_rows(step)
        inputs = self.store.inputs.lengths[rows]
        labels = self.store.labels.lengths[rows]
        return inputs.astype(np.int64), labels.astype(np.int64)

    def count_examples_before(self, step: int) -> int:
        """Return the number of examples before a 0-based step, over all ranks."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch * self.num_rows + int(self._seen(epoch)[index])

    def iter_micro_batches(self, first_step: int, end_step: int) -> Iterator[list[Batch]]:
        """Yield each step's micro-batches of steps [first_step, end_step), assembled one step ahead in a thread."""
        worker = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            ahead = worker.submit(self.build_micro_batches, first_step)
            for step in range(first_step, end_step):
                # The first step always waits: its batches are only begun with it.
                self.num_starved += step > first_step and not ahead.done()
                batches = ahead.result()
                if step + 1 < end_step:
                    ahead = worker.submit(self.build_micro_batches, step + 1)
                yield batches
        finally:
            # Without waiting: an iterator that a failed run has left is closed by the garbage collector, at any place,
            # and joining a thread while another one starts never ends.
            worker.shutdown(wait=False)

    def build_micro_batches(self, step: int) -> list[Batch]:
        """Assemble this rank's micro-batches of a 0-based optimizer step."""
        if self.plan.shards_together is not None:
            self._keep_shards(step, self.plan.shards_together)
        batches: list[Batch] = []
        for rows in self.select_rows(step):
            if len(rows):
                batches.append(collate(self.store, rows.tolist()))
            else:  # another rank has a pass more
                shortest = self._select_global_rows(step)[:1]
                batches.append(replace(collate(self.store, shortest.tolist()), is_filler=True))
        return batches

    def _keep_shards(self, step: int, together: int) -> None:
        """Keep the shards of a step's pool on the disk, and have the following ones copied; all others may go."""
        epoch, index = divmod(step, self.steps_per_epoch)
        pool_steps = self.plan.count_pool_steps(self.num_rows)
        pool = index // pool_steps
        if self._pool == (epoch, pool):
            return
        self._pool = epoch, pool
        first = pool * pool_steps
        rows = np.concatenate(self._epoch(epoch)[first : first + pool_steps])
        ends = self.store.shard_ends
        walk = draw_shard_order(self.plan, epoch, len(ends))
        places = np.argsort(walk)[np.unique(np.searchsorted(ends, rows, side="right"))]
        # Shards are kept in sets of `together`, as `draw_window_order` permutes their rows.
        low = int(places.min()) // together * together
        high = (int(places.max()) // together + 1) * together
        following = walk[high : high + together]
        if high - low > together:  # two sets were made ready, and with others there would be too many shards
            following = walk[:0]
        elif high >= len(walk):  # the next epoch begins
            following = draw_shard_order(self.plan, epoch + 1, len(ends))[:together]
        self.store.shards.keep(frozenset(walk[low:high].tolist()), frozenset(following.tolist()))

    def _select_global_rows(self, step: int) -> Rows:
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[index]

    def _count_seen(self, epoch: int) -> Rows:
        """Return the number of examples before each step of an epoch."""
        return np.cumsum([0, *map(len, self._epoch(epoch))])

    def _make_epoch_batches(self, epoch: int) -> list[Rows]:
        if self.plan.shards_together is None:
            rows = self._sampler and self._sampler(epoch)
            return make_length_bucketed_batches(self._lengths, self.plan, epoch, rows)
        order = draw_window_order(self.plan, epoch, self.store.shard_ends, self.plan.shards_together)
        return make_length_bucketed_batches(self._lengths, self.plan, epoch, order=order)


def draw_shard_order(plan: BatchPlan, epoch: int, num_shards: int) -> Rows:
    """Return the seeded order in which an epoch reads the shards."""
    return np.random.default_rng([plan.seed, epoch, num_shards]).permutation(num_shards)


def draw_window_order(plan: BatchPlan, epoch: int, shard_ends: NDArray[np.int64], together: int) -> Rows:
    """Return all rows in the order of an epoch: shard by shard, permuted among `together` shards.

    >>> draw_window_order(BatchPlan(2, 2, 9, seed=0, window_shards=2), 0, np.array([3, 5, 8]), 1).tolist()
    [2, 0, 1, 4, 3, 5, 7, 6]
    """
    random = np.random.default_rng([plan.seed, epoch])
    walk = draw_shard_order(plan, epoch, len(shard_ends))
    edges: list[int] = [0, *shard_ends.tolist()]
    pieces: list[Rows] = []
    for first in range(0, len(walk), together):
        rows = [np.arange(edges[shard], edges[shard + 1]) for shard in walk[first : first + together].tolist()]
        pieces.append(random.permutation(np.concatenate(rows)))
    return np.concatenate(pieces)


def make_length_bucketed_batches(
    lengths: NDArray[np.int64], plan: BatchPlan, epoch: int, rows: Rows | None = None, *, order: Rows | None = None
) -> list[Rows]:
    """Return the global batches of an epoch over `rows` (None: all), each sorted by length.

    Args:
        order: the rows in the order of the epoch; None: `rows` are permuted.

    >>> [rows.tolist() for rows in make_length_bucketed_batches(np.array([5, 1, 4, 2, 3]), BatchPlan(2, 2, 9, seed=0),
    ...     epoch=0)]
    [[2], [3, 4], [1, 0]]
    """
    random = np.random.default_rng([plan.seed, epoch])
    if order is None:
        order = random.permutation(len(lengths) if rows is None else rows)
    sizes = plan.draw_sizes(len(order), random)
    pool_steps = plan.count_pool_steps(len(order))
    batches: list[Rows] = []
    start = 0
    for first in range(0, len(sizes), pool_steps):
        ends = np.cumsum(sizes[first : first + pool_steps])
        pool = order[start : start + int(ends[-1])]
        start += len(pool)
        # Sorted, then divided: a batch has examples of similar length. Shuffled: not the short ones first.
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        cut = np.split(pool, ends[:-1])
        batches.extend(cut[i] for i in random.permutation(len(cut)))
    return batches
