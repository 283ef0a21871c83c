"""Ragged arrays on disk: rows of different lengths in one flat file, with offsets.

rows [[7, 8], [9]]  ->  values 7 8 9,  offsets 0 2 3
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray


class RaggedWriter:
    """Appends rows to `<folder>/<name>.values` and `<name>.offsets`.

    Args:
        num_rows: rows of existing files to keep and append to; later rows are truncated. 0 starts new files.
    """

    def __init__(self, folder: Path, name: str, dtype: type[np.generic], num_rows: int = 0) -> None:
        mode = "r+b" if num_rows else "wb"
        self._values: IO[bytes] = (folder / f"{name}.values").open(mode)
        self._offsets: IO[bytes] = (folder / f"{name}.offsets").open(mode)
        self._dtype = dtype
        self._end = 0
        if num_rows:
            self._offsets.seek(8 * num_rows)
            self._end = int(np.frombuffer(self._offsets.read(8), dtype=np.int64)[0])
            self._offsets.truncate(8 * (num_rows + 1))
            self._values.truncate(self._end * np.dtype(dtype).itemsize)
            for file in (self._values, self._offsets):
                file.seek(0, os.SEEK_END)
        else:
            self._offsets.write(np.int64(0).tobytes())

    def append(self, row: Sequence[int] | bytes) -> None:
        """Append one row: ids that fit the dtype, or bytes for a uint8 array."""
        self._values.write(row if isinstance(row, bytes) else np.asarray(row, dtype=self._dtype).tobytes())
        self._end += len(row)
        self._offsets.write(np.int64(self._end).tobytes())

    def sync(self) -> None:
        """Flush and fsync both files, so that all rows survive a power failure."""
        for file in (self._values, self._offsets):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        try:
            self._values.close()
        finally:
            self._offsets.close()


class Ragged:
    """Memory-mapped rows written by RaggedWriter. Raises ValueError if values and offsets do not match."""

    def __init__(self, folder: Path, name: str, dtype: type[np.generic]) -> None:
        path = folder / f"{name}.values"
        self.offsets: NDArray[np.int64] = np.fromfile(folder / f"{name}.offsets", dtype=np.int64)
        promised = int(self.offsets[-1]) if len(self.offsets) else -1
        num_values, rest = divmod(path.stat().st_size, np.dtype(dtype).itemsize)
        if rest or num_values != promised:
            raise ValueError(f"{path.name} holds {num_values} values, its offsets require {promised}")
        self._values = np.memmap(path, dtype=dtype, mode="r") if promised else np.empty(0, dtype)
        self._plain = np.asarray(self._values)  # the same pages as a plain array, which slices far faster

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.generic]:
        return self._plain[self.offsets[row] : self.offsets[row + 1]]

    def gather(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Concatenate the given rows as in `concatenate_rows`."""
        chosen = np.asarray(rows, dtype=np.int64)
        starts, ends = self.offsets[chosen].tolist(), self.offsets[chosen + 1].tolist()
        return concatenate_rows([self._plain[start:end] for start, end in zip(starts, ends, strict=True)])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of every row."""
        return np.diff(self.offsets)


def concatenate_rows(rows: Sequence[NDArray[np.generic]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows concatenated as int64, and their [n + 1] offsets.

    >>> values, ends = concatenate_rows([np.array([9], np.uint16), np.array([7, 8], np.uint16)])
    >>> values.tolist(), ends.tolist()
    ([9, 7, 8], [0, 1, 3])
    """
    ends = np.cumsum([0, *map(len, rows)])
    return np.concatenate(rows, dtype=np.int64, casting="unsafe"), ends
