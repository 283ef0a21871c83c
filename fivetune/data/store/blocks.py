"""Cut the records of a source into blocks, and know which ids earlier blocks used.

In: a Source. Out: RecordBlocks in the source's order, of at most a given number of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fivetune.data.examples import Source
from fivetune.data.readers.records import (
    BadRecord,
    Item,
    UniqueIds,
    UnparsedItem,
    is_hub_name,
    iter_items,
    read_records,
    select_required_columns,
)
from fivetune.data.readers.source_files import list_local_files
from fivetune.data.store.convert import RecordBlock

BLOCK_BYTES = 4 * 2**20  # of unparsed lines and rows; a longer one is a block of its own

Hashes = NDArray[np.uint64]


class BlockReader:
    """Reads the blocks of a source.

    Args:
        num_skipped: items at the beginning that were converted before.
    """

    def __init__(self, source: Source, num_skipped: int = 0) -> None:
        self._is_normalized = not source.labelled
        self._items = _iter_normalized_items(source) if self._is_normalized else self._iter_source_items(source)
        self._num_bytes = self._bytes_before = 0
        self._file: IO[bytes] | None = None
        for _ in range(num_skipped):
            next(self._items, None)
        self._held: tuple[str, int, Item] | None = next(self._items, None)

    def read(self, size: int) -> RecordBlock | None:
        """Return the next block, of one file and at most `size` records; None at the end."""
        if self._held is None:
            return None
        stem, first, item = self._held
        items = [item]
        num_bytes = _count_bytes(item)
        while (following := next(self._items, None)) is not None:
            _, number, item = following
            num_bytes += _count_bytes(item)
            if len(items) == size or number != first + len(items) or num_bytes > BLOCK_BYTES:
                break
            items.append(item)
        self._held = following
        return RecordBlock(stem, first, items, self._is_normalized)

    def estimate_total(self, num: int) -> int | None:
        """Return about how many examples there will be, if `num` were made so far; None if the files do not show it."""
        if self._file is None or not self._num_bytes:
            return None
        try:
            position = self._bytes_before + self._file.tell()
        except ValueError:  # closed: all was read
            return num
        share = position / self._num_bytes
        return round(num / share) if share > 0 else None

    def _iter_source_items(self, source: Source) -> Iterator[tuple[str, int, Item]]:
        required = select_required_columns(source.columns, require_columns=source.labelled)
        for path in source.paths:
            if not is_hub_name(path):
                self._num_bytes += sum(file.stat().st_size for file in list_local_files(path))
        files = (iter_items(path, required, self._add_file, header=source.header) for path in source.paths)
        yield from source.shard.select(chain.from_iterable(files))

    def _add_file(self, file: IO[bytes]) -> None:
        if self._file is not None:
            self._bytes_before += Path(self._file.name).stat().st_size
        self._file = file


def _count_bytes(item: Item) -> int:
    return item.num_bytes if isinstance(item, UnparsedItem) else 0


def _iter_normalized_items(source: Source) -> Iterator[tuple[str, int, Item]]:
    """Yield the records to predict, with unique ids: a repeated id gets a number."""
    bad: list[BadRecord] = []

    def read() -> Iterator[Item]:
        for path in source.paths:
            ids = UniqueIds()
            records = read_records(
                path,
                columns=source.columns,
                header=source.header,
                require_columns=False,
                on_bad=bad.append,
                shard=source.shard,
            )
            for record in records:
                yield from _take_all(bad)  # bad records keep their place before the next good one
                yield ids.number(record)
            yield from _take_all(bad)

    for number, item in enumerate(read(), 1):
        yield "", number, item


def _take_all(bad: list[BadRecord]) -> list[BadRecord]:
    taken = bad.copy()
    bad.clear()
    return taken


class SeenIds:
    """The ids of all records so far, as 8-byte hashes with the number of the record: 16 bytes per record.

    >>> seen = SeenIds()
    >>> seen.find_and_add(np.array([7, 9], np.uint64)), seen.find_and_add(np.array([8, 9, 8], np.uint64))
    ({}, {1: 2, 2: 3})
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[Hashes, NDArray[np.int64]]] = []  # of sizes that fall by half at least
        self._num = 0

    def find_and_add(self, hashes: Hashes) -> dict[int, int]:
        """Add records; returns the positions of records with a known id, each with the number of its first record."""
        unique, first = np.unique(hashes, return_index=True)
        found: dict[int, int] = {}
        # Ids of earlier calls.
        for known, numbers in self._sorted:
            places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            for position in np.flatnonzero(known[places] == hashes).tolist():
                found[position] = min(int(numbers[places[position]]), found.get(position, self._num))
        # Ids that repeat among the new records.
        if len(unique) < len(hashes):
            places = first[np.searchsorted(unique, hashes)]
            for position in np.flatnonzero(places != np.arange(len(hashes))).tolist():
                found.setdefault(position, self._num + int(places[position]) + 1)
        is_new = np.array([position not in found for position in first.tolist()], dtype=bool)
        if is_new.any():
            self._insert(unique[is_new], self._num + first[is_new] + 1)
        self._num += len(hashes)
        return dict(sorted(found.items()))

    def _insert(self, hashes: Hashes, numbers: NDArray[np.int64]) -> None:
        # Arrays of similar size are merged, so that few remain and each hash is moved few times.
        while self._sorted and len(self._sorted[-1][0]) < 2 * len(hashes):
            known, known_numbers = self._sorted.pop()
            hashes = np.concatenate([known, hashes])
            numbers = np.concatenate([known_numbers, numbers])
            order = np.argsort(hashes, kind="stable")
            hashes = hashes[order]
            numbers = numbers[order]
        self._sorted.append((hashes, numbers))
