"""Ragged arrays on disk: rows of different lengths in one flat file, with offsets.

rows [[7, 8], [9]]  ->  values 7 8 9,  offsets 0 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray


class RaggedWriter:
    """Appends rows to `<folder>/<name>.values` and `<name>.offsets`."""

    def __init__(self, folder: Path, name: str, dtype: type[np.generic]) -> None:
        self._values: IO[bytes] = (folder / f"{name}.values").open("wb")
        self._offsets: IO[bytes] = (folder / f"{name}.offsets").open("wb")
        self._dtype = dtype
        self._end = 0
        self._offsets.write(np.int64(0).tobytes())

    def append(self, row: Sequence[int] | bytes) -> None:
        """Append one row: ids that fit the dtype, or bytes for a uint8 array."""
        self._values.write(row if isinstance(row, bytes) else np.asarray(row, dtype=self._dtype).tobytes())
        self._end += len(row)
        self._offsets.write(np.int64(self._end).tobytes())

    def close(self) -> None:
        self._values.close()
        self._offsets.close()


class Ragged:
    """Rows of a file that RaggedWriter wrote, memory-mapped."""

    def __init__(self, folder: Path, name: str, dtype: type[np.generic]) -> None:
        self.offsets: NDArray[np.int64] = np.fromfile(folder / f"{name}.offsets", dtype=np.int64)
        empty = self.offsets[-1] == 0
        path = folder / f"{name}.values"
        self._values = np.empty(0, dtype) if empty else np.memmap(path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.generic]:
        return self._values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of every row."""
        return np.diff(self.offsets)
