"""Ragged arrays: rows of different lengths in one flat array, with offsets.

rows [[7, 8], [9]]  ->  values 7 8 9,  offsets 0 2 3
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivetune.data.store.arrays import ArrayFile, build_lost_error

OFFSETS = struct.Struct("<qq")  # of a row and of the next
Values = NDArray[Any]


class Ragged:
    """Rows of one array. Raises ValueError if values and offsets do not match.

    Args:
        values: [num_values].
        offsets: [n + 1] int64.
    """

    def __init__(self, values: Values, offsets: NDArray[np.int64]) -> None:
        promised = int(offsets[-1]) if len(offsets) else -1
        if len(values) != promised:
            raise ValueError(f"{len(values)} values, the offsets require {promised}")
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], dtype: type[np.generic]) -> Ragged:
        values = np.fromiter(chain.from_iterable(rows), dtype)
        return cls(values, compute_offsets([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Values:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def gather(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Concatenate the given rows as in `concatenate_rows`."""
        chosen = np.asarray(rows, dtype=np.int64)
        starts = self.offsets[chosen].tolist()
        ends = self.offsets[chosen + 1].tolist()
        return concatenate_rows([self.values[start:end] for start, end in zip(starts, ends, strict=True)])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of every row."""
        return np.diff(self.offsets)


class FileRagged:
    """The rows of one ragged array in an open file, each read from there. Raises KeyError for an array that it lacks.

    Args:
        kind: the file holds the arrays `kind.values` and `kind.offsets`.
    """

    def __init__(self, file: ArrayFile, kind: str) -> None:
        values = file.places[f"{kind}.values"]
        self._file = file
        self._values = values
        self._first_offset = file.places[f"{kind}.offsets"].start
        self._num_values = (values.stop - values.start) // values.dtype.itemsize

    def __getitem__(self, row: int) -> Values:
        return np.frombuffer(self._read(row), self._values.dtype)

    def _read(self, row: int) -> bytes:
        """Return the bytes of a row. Raises DamagedStoreError."""
        place = self._first_offset + 8 * row
        start, stop = OFFSETS.unpack(self._file.read(place, place + OFFSETS.size))
        if not 0 <= start <= stop <= self._num_values:
            raise build_lost_error(self._file.path, "is damaged")
        size = self._values.dtype.itemsize
        first = self._values.start
        return self._file.read(first + size * start, first + size * stop)

    def gather(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Concatenate the given rows as in `concatenate_rows`."""
        pieces = [self._read(row) for row in rows.tolist()]
        ends = np.cumsum([0, *map(len, pieces)]) // self._values.dtype.itemsize
        return np.frombuffer(b"".join(pieces), self._values.dtype).astype(np.int64), ends


class ShardedRagged:
    """The rows of several ragged arrays, one after another; an array is opened when one of its rows is read.

    Args:
        ends: [number of arrays] rows of all arrays up to each.
        open_part: returns the array of a number.
        lengths: [n] length of every row.
    """

    def __init__(
        self,
        ends: NDArray[np.int64],
        open_part: Callable[[int], Ragged | FileRagged],
        lengths: NDArray[np.integer[Any]],
    ) -> None:
        self.lengths = lengths
        self._ends = ends
        self._starts = np.concatenate([[0], ends[:-1]])
        self._open_part = open_part

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Values:
        part = find_part(self._ends, row)
        return self._open_part(part)[row - int(self._starts[part])]

    def gather(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Concatenate the given rows as in `concatenate_rows`."""
        chosen = np.asarray(rows, dtype=np.int64)
        parts = np.searchsorted(self._ends, chosen, side="right")
        inner = chosen - self._starts[parts]
        if len(chosen) and (parts == parts[0]).all():
            return self._open_part(int(parts[0])).gather(inner)
        places = zip(parts.tolist(), inner.tolist(), strict=True)
        return concatenate_rows([self._open_part(part)[row] for part, row in places])


def compute_offsets(lengths: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the [n + 1] offsets of rows of the given lengths.

    >>> compute_offsets([2, 1]).tolist()
    [0, 2, 3]
    """
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def find_part(ends: NDArray[np.int64], row: int) -> int:
    """Return the number of the part that a row belongs to; parts end before the rows `ends`.

    >>> find_part(np.array([2, 5]), 1), find_part(np.array([2, 5]), 2)
    (0, 1)
    """
    return int(np.searchsorted(ends, row, side="right"))


def concatenate_rows(rows: Sequence[Values]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows concatenated as int64, and their [n + 1] offsets.

    >>> values, ends = concatenate_rows([np.array([9], np.uint16), np.array([7, 8], np.uint16)])
    >>> values.tolist(), ends.tolist()
    ([9, 7, 8], [0, 1, 3])
    """
    ends = np.cumsum([0, *map(len, rows)])
    return np.concatenate(rows, dtype=np.int64, casting="unsafe"), ends
