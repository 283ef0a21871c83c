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

    def sync(self) -> None:
        """Put everything on the disk itself, so that a power cut cannot take it."""
        for file in (self._values, self._offsets):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        try:
            self._values.close()
        finally:
            self._offsets.close()


class Ragged:
    """Rows of a file that RaggedWriter wrote, memory-mapped. Raises ValueError if the two files do not fit."""

    def __init__(self, folder: Path, name: str, dtype: type[np.generic]) -> None:
        path = folder / f"{name}.values"
        self.offsets: NDArray[np.int64] = np.fromfile(folder / f"{name}.offsets", dtype=np.int64)
        promised = int(self.offsets[-1]) if len(self.offsets) else -1
        num_values, rest = divmod(path.stat().st_size, np.dtype(dtype).itemsize)
        if rest or num_values != promised:
            raise ValueError(f"{path.name} holds {num_values} values, its offsets say {promised}")
        self._values = np.memmap(path, dtype=dtype, mode="r") if promised else np.empty(0, dtype)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.generic]:
        return self._values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of every row."""
        return np.diff(self.offsets)
