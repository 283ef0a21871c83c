"""The shapes of captured steps: which micro-batches share one, so that few graphs replay a run with little filler.

In: tokens and longest sequences of every micro-batch of a run, whose order is known before it begins. Out: at most K
buckets. A bucket holds a batch if its tokens, sequences and longest sequences fit; the rest is filler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivetune.model.cuda.tiles import divide_up, round_up
from fivetune.types import Batch

GRAINS = (64, 16)  # tokens that totals of inputs and targets are rounded up to
MAX_EDGES = (48, 24)  # totals that differ; the time grows with the third power of the pairs of them that occur

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
    inputs = bucket.num_inputs - num_inputs
    targets = bucket.num_targets - num_targets
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
        # A halved micro-batch may fit none. Its totals are rounded up far, so that few shapes occur.
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
    source = batch.cu_seqlens_src.diff()
    target = batch.cu_seqlens_tgt.diff()
    return batch.num_input_tokens, batch.num_target_tokens, int(source.max()), int(target.max()), len(source)


def plan_buckets(facts: Counts, *, max_buckets: int, grains: tuple[int, int] = GRAINS) -> tuple[Bucket, ...]:
    """Choose at most `max_buckets` buckets that hold all micro-batches with few positions, the largest first.

    At first every pair of rounded totals of inputs and targets is a shape of its own. Two shapes are merged into one
    that holds both, always those whose micro-batches need the least filler for it, until there are few enough.

    Args:
        facts: [n, 5] as `describe_batch`, of every micro-batch.

    >>> facts = np.array([[100, 10, 40, 5, 4], [120, 12, 50, 6, 4], [900, 15, 300, 8, 4]])
    >>> for bucket in plan_buckets(facts, max_buckets=2): print(bucket)
    Bucket(num_inputs=960, num_targets=16, num_sequences=5, longest_input=300, longest_target=8)
    Bucket(num_inputs=128, num_targets=16, num_sequences=5, longest_input=50, longest_target=6)
    """
    rounded = [_round_totals(facts[:, i], grains[i], MAX_EDGES[i]) for i in range(2)]
    # The shape of each micro-batch is shapes[owner]; a shape that was merged into another has count 0.
    shapes, owner, counts = np.unique(np.stack(rounded, 1), axis=0, return_inverse=True, return_counts=True)
    owner = owner.ravel()

    def count_filler(one: int) -> NDArray[np.float64]:
        """The filler that a merger of one shape with each of the others adds, in positions; infinite with itself."""
        merged = np.maximum(shapes[one], shapes).sum(1)
        filler = (merged - shapes[one].sum()) * counts[one] + (merged - shapes.sum(1)) * counts
        return np.where((counts > 0) & (np.arange(len(shapes)) != one), filler, np.inf)

    filler = np.array([count_filler(one) for one in range(len(shapes))])
    for _ in range(len(shapes) - max_buckets):
        one, other = np.unravel_index(filler.argmin(), filler.shape)
        shapes[one] = np.maximum(shapes[one], shapes[other])
        counts[one] += counts[other]
        counts[other] = 0
        owner[owner == other] = one
        filler[other] = filler[:, other] = np.inf
        filler[one] = filler[:, one] = count_filler(int(one))
    found = [_fit_bucket(facts[owner == one], grains) for one in np.flatnonzero(counts)]
    return tuple(sorted(found, key=lambda bucket: bucket.num_positions, reverse=True))


def _fit_bucket(facts: Counts, grains: tuple[int, int]) -> Bucket:
    """The smallest bucket that holds all of these batches."""
    most = facts.max(0).tolist()
    totals = [round_up(total, grain) for total, grain in zip(most[:2], grains, strict=True)]
    bucket = Bucket(totals[0], totals[1], 0, most[2], most[3])
    # The sequences of a batch, and the sequences of its filler.
    needed = max(row[4] + count_fillers(bucket, row[0], row[1]) for row in np.unique(facts, axis=0).tolist())
    return Bucket(totals[0], totals[1], needed, most[2], most[3])


def _round_totals(totals: Counts, grain: int, max_edges: int) -> Counts:
    """Totals rounded up to multiples of the grain, of which at most `max_edges` differ."""
    rounded = -(-totals // grain) * grain
    edges = np.unique(rounded)
    if len(edges) > max_edges:
        shares = np.arange(1, max_edges + 1) / max_edges
        edges = np.unique(np.quantile(rounded, shares, method="higher").astype(np.int64))
    return edges[np.searchsorted(edges, totals)]
