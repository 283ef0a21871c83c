"""Mix several stores: mixing rates, the rows of each epoch, and a concatenated view of the stores.

In: the stores of the parts and their rates. Out: rows of an epoch as a function of (seed, epoch) alone.

An epoch has as many examples as all parts together, each part counted up to the limit. A part with rate r contributes
round(r * num_examples) of them, at least one, from an endless sequence of seeded permutations of its rows. Each epoch
takes the next piece of the sequence, so that no example repeats before all others of its part were seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivetune.data.store.ragged import ShardedRagged, concatenate_rows, find_part
from fivetune.data.store.token_store import NUM_BINS, TokenStore
from fivetune.types import JsonTable, TextExample

Rows = NDArray[np.int64]


def compute_mixing_rates(sizes: Sequence[int], *, limit: int | None = None, temperature: float = 1.0) -> list[float]:
    """Return each part's share: min(n, limit)^(1 / temperature) over the sum of all (Raffel et al. 2020, 3.5.2).

    >>> (compute_mixing_rates([900, 100]), compute_mixing_rates([900, 100], temperature=2),
    ...  compute_mixing_rates([900, 100], limit=300))
    ([0.9, 0.1], [0.75, 0.25], [0.75, 0.25])
    """
    weights = [min(size, limit or size) ** (1 / temperature) for size in sizes]
    return [weight / sum(weights) for weight in weights]


class MixtureSampler:
    """Samples the rows of each epoch from the concatenated stores.

    Args:
        sizes: examples of each part; their rows follow one another.
        rates: share of each part, summing to 1.
        num_examples: examples of an epoch, before the shares are rounded.
    """

    def __init__(self, sizes: Sequence[int], rates: Sequence[float], num_examples: int, *, seed: int) -> None:
        self.shares = [max(1, round(rate * num_examples)) for rate in rates]
        self._sizes = sizes
        self._seed = seed

    def __len__(self) -> int:
        return sum(self.shares)

    def __call__(self, epoch: int) -> Rows:
        """Return the [len(self)] rows of an epoch, part after part.

        >>> draw = MixtureSampler([4, 2], [0.5, 0.5], 6, seed=0)
        >>> [sorted(draw(epoch).tolist()) for epoch in range(2)]
        [[0, 1, 2, 4, 5, 5], [1, 3, 3, 4, 4, 5]]
        """
        first = 0
        pieces: list[Rows] = []
        for part, size in enumerate(self._sizes):
            start = epoch * self.shares[part]
            pieces.append(first + self._draw_range(part, size, start, start + self.shares[part]))
            first += size
        return np.concatenate(pieces)

    def _draw_range(self, part: int, size: int, start: int, stop: int) -> Rows:
        """Return rows [start, stop) of a part's endless sequence of permutations."""
        first_round = start // size
        drawn: list[Rows] = []
        for number in range(first_round, -(-stop // size)):
            drawn.append(np.random.default_rng([self._seed, part, number]).permutation(size))
        skipped = first_round * size
        return np.concatenate(drawn)[start - skipped : stop - skipped]


class _ConcatRows:
    """A concatenated view of the rows of several stores."""

    def __init__(self, parts: Sequence[ShardedRagged]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.lengths = np.concatenate([part.lengths for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> NDArray[Any]:
        part, inner = _locate_in_parts(self._ends, row)
        return self._parts[part][inner]

    def gather(self, rows: Sequence[int] | Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return concatenate_rows([self[row] for row in rows])


def _locate_in_parts(ends: NDArray[np.int64], row: int) -> tuple[int, int]:
    """Return the part that a row belongs to, and its row within the part."""
    part = find_part(ends, row)
    return part, int(row - (ends[part - 1] if part else 0))


class ConcatStore(TokenStore):
    """A concatenated view of several stores; ids begin with the name of the part.

    `summary` has the counts over all parts, and the summary of each part under `parts`.
    """

    def __init__(self, parts: Mapping[str, TokenStore]) -> None:
        self.parts = dict(parts)
        stores = list(self.parts.values())
        self.inputs: Any = _ConcatRows([store.inputs for store in stores])
        self.labels: Any = _ConcatRows([store.labels for store in stores])
        self._ends = np.cumsum([len(store) for store in stores], dtype=np.int64)
        self.shard_ends = self._ends
        self.window_shards = None
        # Groups are numbered on: questions of two parts are never one.
        groups: list[NDArray[np.int64]] = []
        num_groups = 0
        for store in stores:
            groups.append(store.groups + num_groups)
            num_groups += store.num_groups
        self.groups = np.concatenate(groups)
        self.num_clipped = np.concatenate([store.num_clipped for store in stores])
        self.given_ids = np.concatenate([store.given_ids for store in stores])
        # Without the hashes of one part, inputs cannot be compared.
        hashes = [store.input_hashes for store in stores if store.input_hashes is not None]
        self.input_hashes = np.concatenate(hashes) if len(hashes) == len(stores) else None
        self.answer_clipped = np.concatenate([store.answer_clipped for store in stores])
        self.is_new = any(store.is_new for store in stores)
        self.rebuilt = " ".join(store.rebuilt for store in stores if store.rebuilt)
        self.summary = merge_summaries({name: store.summary for name, store in self.parts.items()})

    def get_id(self, row: int) -> str:
        name, store, inner = self._locate_row(row)
        return f"{name}/{store.get_id(inner)}"

    def read_example(self, row: int) -> TextExample:
        _, store, inner = self._locate_row(row)
        return store.read_example(inner)

    def _locate_row(self, row: int) -> tuple[str, TokenStore, int]:
        part, inner = _locate_in_parts(self._ends, row)
        name = list(self.parts)[part]
        return name, self.parts[name], inner


def merge_summaries(summaries: Mapping[str, JsonTable]) -> JsonTable:
    """Merge summaries: sums of counts, maxima of limits and percentiles, and every part's summary under `parts`."""
    every = list(summaries.values())
    joined: JsonTable = {}
    for name in every[0]:
        if name.startswith("num_"):
            joined[name] = sum(one[name] for one in every)
    for name in ("input", "target"):
        limits = [one[f"max_{name}_tokens"] for one in every]
        joined[f"max_{name}_tokens"] = None if None in limits else max(limits)
        longest = f"longest_{name}"
        for key in (f"{name}_p99", f"whole_{name}_p99", longest):
            joined[key] = max(one.get(key, one[longest]) for one in every)
        joined[f"{name}_lengths"] = _merge_histograms([one[f"{name}_lengths"] for one in every])
    digest = blake2b(digest_size=16)  # of the names too, with which ids begin
    for name, one in summaries.items():
        digest.update(f"{name} {one['fingerprint']} ".encode())
    joined |= {
        "fingerprint": digest.hexdigest(),
        "dtype": np.result_type(*(one["dtype"] for one in every)).name,
        "skips": [],
        "first_bad": None,
        "source": [],
        "parts": {},
    }
    for name, one in summaries.items():
        joined["skips"] += one["skips"]
        joined["first_bad"] = joined["first_bad"] or one["first_bad"]
        joined["source"] += one["source"]
        joined["parts"][name] = dict(one)
    return joined


def _merge_histograms(histograms: Sequence[Mapping[str, Any]]) -> dict[str, list[float] | list[int]]:
    """Merge histograms into common bins; a bin of a part counts at its midpoint."""
    edges = np.linspace(0, max(one["edges"][-1] for one in histograms), NUM_BINS + 1)
    counts = np.zeros(NUM_BINS, dtype=int)
    for one in histograms:
        own = np.array(one["edges"])
        middles = (own[1:] + own[:-1]) / 2
        weighed, _ = np.histogram(middles, bins=edges, weights=one["counts"])
        counts += weighed.astype(int)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
