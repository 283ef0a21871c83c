"""The shapes of captured steps: which micro-batches share one, so that few graphs replay a run with little filler.

In: tokens and longest sequences of every micro-batch of a run, whose order is known before it begins. Out: at most K
buckets. A bucket holds a batch if its tokens, sequences and longest sequences fit; the rest is filler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivetune.model.cuda.tiles import divide_up, round_up
from fivetune.types import Batch

GRAINS = (64, 16)  # tokens that totals of inputs and targets are rounded up to
MAX_EDGES = (64, 24)  # candidates for a bucket's totals; between them, totals are rounded up
MAX_SPLITS = 4  # buckets with different targets among inputs of one range

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a step, filler included.

    Args:
        num_inputs, num_targets: tokens. num_sequences: sequences.
        longest_input, longest_target: most tokens of a sequence, filler sequences included.
    """

    num_inputs: int
    num_targets: int
    num_sequences: int
    longest_input: int
    longest_target: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of input_ids, decoder_ids, labels, weights, cu_seqlens_src, cu_seqlens_tgt.

        The bounds are even in number, by an empty sequence more: each buffer then begins at a multiple of 16 bytes, and
        a kernel is not compiled again for another alignment.
        """
        return self.num_inputs, *[self.num_targets] * 3, *[round_up(self.num_sequences + 1, 2)] * 2

    @property
    def num_positions(self) -> int:
        return self.num_inputs + self.num_targets

    def can_hold(self, num_inputs: int, num_targets: int, longest_input: int, longest_target: int, num: int) -> bool:
        """Whether a batch of `num` sequences fits, with the sequences that its filler takes."""
        if longest_input > self.longest_input or longest_target > self.longest_target:
            return False
        if num_inputs > self.num_inputs or num_targets > self.num_targets:
            return False
        fillers = count_fillers(self, num_inputs, num_targets)
        return num + fillers <= self.num_sequences


def count_fillers(bucket: Bucket, num_inputs: int, num_targets: int) -> int:
    """The filler sequences of a batch: enough for the tokens that are missing on either side."""
    inputs, targets = bucket.num_inputs - num_inputs, bucket.num_targets - num_targets
    return max(divide_up(inputs, bucket.longest_input), divide_up(targets, bucket.longest_target))


@dataclass(frozen=True, slots=True)
class Buckets:
    """Assigns batches to buckets: the smallest planned one that holds a batch, else its totals rounded up.

    Args:
        batch_size: most sequences of a batch.
        longest_input, longest_target: most tokens of a sequence.
        planned: the buckets of a run, from `plan_buckets`; micro-batches that are halved later may fit none.
        input_grain, target_grain: totals of other batches are multiples of this number of tokens.
    """

    batch_size: int
    longest_input: int
    longest_target: int
    planned: tuple[Bucket, ...] = ()
    input_grain: int = 512
    target_grain: int = 128

    def find_bucket(self, batch: Batch) -> Bucket:
        facts = describe_batch(batch)
        held = [bucket for bucket in self.planned if bucket.can_hold(*facts)]
        if held:
            return min(held, key=lambda bucket: bucket.num_positions)
        fillers = max(
            divide_up(self.input_grain, self.longest_input), divide_up(self.target_grain, self.longest_target)
        )
        return Bucket(
            round_up(facts[0], self.input_grain),
            round_up(facts[1], self.target_grain),
            self.batch_size + fillers,
            self.longest_input,
            self.longest_target,
        )


def describe_batch(batch: Batch) -> tuple[int, int, int, int, int]:
    """Tokens of inputs and targets, longest input and target, sequences."""
    source, target = batch.cu_seqlens_src.diff(), batch.cu_seqlens_tgt.diff()
    return batch.num_input_tokens, batch.num_target_tokens, int(source.max()), int(target.max()), len(source)


def plan_buckets(facts: Counts, *, max_buckets: int, grains: tuple[int, int] = GRAINS) -> tuple[Bucket, ...]:
    """Choose at most `max_buckets` buckets that hold all micro-batches with the fewest positions, the largest first.

    Totals of inputs are divided into ranges, and those of the targets within a range into up to MAX_SPLITS; both by
    dynamic programming over rounded totals.

    Args:
        facts: [n, 5] as `describe_batch`, of every micro-batch.

    >>> facts = np.array([[100, 10, 40, 5, 4], [120, 12, 50, 6, 4], [900, 15, 300, 8, 4]])
    >>> for bucket in plan_buckets(facts, max_buckets=2): print(bucket)
    Bucket(num_inputs=960, num_targets=16, num_sequences=5, longest_input=300, longest_target=8)
    Bucket(num_inputs=128, num_targets=16, num_sequences=5, longest_input=50, longest_target=6)
    """
    edges, places = zip(*(_round_totals(facts[:, i], grains[i], MAX_EDGES[i]) for i in range(2)), strict=True)
    counts = np.zeros((len(edges[0]), len(edges[1])), np.int64)
    np.add.at(counts, places, 1)
    found: list[Bucket] = []
    for first, end, splits in _divide_inputs(counts, edges[0], edges[1], max_buckets):
        rows = (places[0] >= first) & (places[0] < end)
        low = 0
        for high in _divide_targets(counts[first:end].sum(0), edges[1], splits):
            own = facts[rows & (places[1] >= low) & (places[1] < high)]
            low = high
            if len(own):
                found.append(_fit_bucket(own, grains))
    return tuple(sorted(found, key=lambda bucket: bucket.num_positions, reverse=True))


def _fit_bucket(facts: Counts, grains: tuple[int, int]) -> Bucket:
    """The smallest bucket that holds all of these batches."""
    most = facts.max(0).tolist()
    totals = [round_up(total, grain) for total, grain in zip(most[:2], grains, strict=True)]
    bucket = Bucket(totals[0], totals[1], 0, most[2], most[3])
    needed = max(row[4] + count_fillers(bucket, row[0], row[1]) for row in np.unique(facts, axis=0).tolist())
    return Bucket(totals[0], totals[1], needed, most[2], most[3])


def _round_totals(totals: Counts, grain: int, max_edges: int) -> tuple[Counts, Counts]:
    """At most `max_edges` multiples of the grain, the largest total's among them; and the edge of each total."""
    rounded = -(-totals // grain) * grain
    edges = np.unique(rounded)
    if len(edges) > max_edges:
        shares = np.arange(1, max_edges + 1) / max_edges
        edges = np.unique(np.quantile(rounded, shares, method="higher").astype(np.int64))
    return edges, np.searchsorted(edges, totals)


def _divide_inputs(counts: Counts, inputs: Counts, targets: Counts, max_buckets: int) -> list[tuple[int, int, int]]:
    """The ranges of input edges: first, end, and how many buckets the targets of the range are divided into."""
    num, splits = len(inputs), min(MAX_SPLITS, len(targets))
    cost = np.full((splits + 1, num + 1, num + 1), np.inf)  # of a range with so many buckets
    below = np.vstack([np.zeros_like(counts[:1]), counts.cumsum(0)])
    for end in range(1, num + 1):
        within = below[end] - below[:end]  # [first, target edge]
        cost[1:, :end, end] = _sum_target_edges(within, targets, splits) + inputs[end - 1] * within.sum(1)
    best = np.full((max_buckets + 1, num + 1), np.inf)
    best[0, 0] = 0.0
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    for used in range(1, max_buckets + 1):
        for end in range(1, num + 1):
            options = [(best[used - split] + cost[split, :, end])[:end] for split in range(1, min(splits, used) + 1)]
            split, first = np.unravel_index(np.argmin(options), (len(options), end))
            best[used, end] = options[int(split)][first]
            chosen[used, end] = int(split) + 1, int(first)
    used, end, ranges = int(np.argmin(best[:, num])), num, list[tuple[int, int, int]]()
    while end:
        split, first = chosen[used, end]
        ranges.append((first, end, split))
        used, end = used - split, first
    return ranges


def _sum_target_edges(counts: Counts, edges: Counts, splits: int) -> NDArray[np.float64]:
    """The least sum of the targets' edges with 1, 2 ... `splits` of them: [splits, n], of n rows of counts."""
    upto = counts.cumsum(1)
    held = np.where(upto == upto[:, -1:], 0.0, np.inf)  # the last edge holds all
    best = upto * edges
    sums = [(best + held).min(1)]
    for _ in range(1, splits):
        last = (upto[:, None, :] - upto[:, :, None]) * edges  # [n, edge before, last edge]
        last = np.where(last < 0, np.inf, last)
        best = np.minimum(best, (best[:, :, None] + last).min(1))
        sums.append((best + held).min(1))
    return np.array(sums)


def _divide_targets(counts: Counts, edges: Counts, splits: int) -> Sequence[int]:
    """The ends of the ranges of target edges with the least sum of edges."""
    num, upto = len(edges), np.concatenate([[0], counts.cumsum()])
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for _ in range(splits):
        ends: dict[int, tuple[float, list[int]]] = {}
        for first, (cost, path) in best[-1].items():
            for end in range(first + 1, num + 1):
                total = cost + float((upto[end] - upto[first]) * edges[end - 1])
                if end not in ends or total < ends[end][0]:
                    ends[end] = total, [*path, end]
        best.append(ends)
    whole = [ends[end] for ends in best[1:] for end in ends if upto[end] == upto[num]]
    return min(whole)[1]
