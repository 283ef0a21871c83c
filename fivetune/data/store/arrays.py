"""Named arrays in one file, in the layout of safetensors, with a checksum.

In: arrays of one dimension. Out: the file, its size and CRC-32; arrays in memory, or pieces of them from the open file.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.rundir import replace_file
from fivetune.rundir.checksums import compute_crc32
from fivetune.types import JsonTable

Array = NDArray[Any]

DTYPES = {"U8": np.uint8, "U16": np.uint16, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64}
_NAMES = {np.dtype(kind).name: name for name, kind in DTYPES.items()}
HEAD_BYTES = 2**12  # of a file, which its header fits into
MISSING = "is missing"
ALIGNMENT = 64  # of the first array; those with larger items precede, so that all are aligned


class DamagedStoreError(FiveTuneEnvironmentError):
    """Raised for a folder that is not complete prepared data, or no longer."""


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> JsonTable:
    """Write arrays to a file, atomically; returns its size and crc32. Raises OSError."""
    # Larger items first, so that every array is aligned; then by name, so that equal data gives equal files.
    ordered = sorted(arrays.items(), key=lambda named: (-named[1].dtype.itemsize, named[0]))
    header: JsonTable = {}
    end = 0
    for name, array in ordered:
        shape = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape)}
        header[name] = {**shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # the header's length is in the 8 bytes before it
    head = len(text).to_bytes(8, "little") + text
    crc32 = zlib.crc32(head)
    with replace_file(path) as file:
        file.write(head)
        for _, array in ordered:
            content = np.ascontiguousarray(array).view(np.uint8).data
            crc32 = zlib.crc32(content, crc32)
            file.write(content)
    return {"size": len(head) + end, "crc32": crc32}


def read_arrays(path: Path, entry: Mapping[str, Any] | None = None) -> dict[str, Array]:
    """Read the arrays of a file into memory, and compare it with its entry in an index (size, crc32), if one is given.

    Raises OSError; ValueError or KeyError for another file.
    """
    content = path.read_bytes()
    if entry and (fault := _describe_fault(len(content), entry, zlib.crc32(content))):
        raise ValueError(f"{path.name} {fault}")
    arrays: dict[str, Array] = {}
    for name, place in _parse_header(content, len(content)).items():
        count = (place.stop - place.start) // place.dtype.itemsize
        arrays[name] = np.frombuffer(content, place.dtype, count, place.start)
    return arrays


class ArrayPlace(NamedTuple):
    """The type of an array, and its first byte and end in a file."""

    dtype: np.dtype[Any]
    start: int
    stop: int


class ArrayFile:
    """A file of arrays that stays open, of which pieces are read.

    It is not memory-mapped: a mapped file that is cut off while a process uses it ends that process by SIGBUS, without
    a word. A piece that cannot be read is an error instead, and a file that was deleted stays readable. Raises
    OSError; ValueError or KeyError for a file in another layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._handle)
        head = os.pread(self._handle, HEAD_BYTES, 0)
        self.places = _parse_header(head, os.fstat(self._handle).st_size)

    def read(self, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop) of the file. Raises DamagedStoreError if it ends before."""
        try:
            content = os.pread(self._handle, stop - start, start)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise build_lost_error(self.path, f"cannot be read ({error})") from None
        if len(content) != stop - start:
            raise build_lost_error(self.path, "ends too early")
        return content


def build_lost_error(path: Path, fault: str) -> DamagedStoreError:
    """Return the error for a file of tokenised data that was whole when the process began to read it."""
    return DamagedStoreError(
        f"{path}: {fault}: the tokenised data were changed or removed while they were in use. Run the same command "
        "again, a run with --resume: they are checked and built again."
    )


def _parse_header(head: bytes, size: int) -> dict[str, ArrayPlace]:
    """Return where the arrays are in a file of `size` bytes that begins with `head`."""
    start = 8 + int.from_bytes(head[:8], "little")
    if not 8 < start <= min(len(head), size):
        raise ValueError("the header is cut off")
    found: dict[str, ArrayPlace] = {}
    for name, entry in json.loads(head[8:start]).items():
        low, high = (start + offset for offset in entry["data_offsets"])
        if high > size:
            raise ValueError(f"{name} is cut off")
        found[name] = ArrayPlace(np.dtype(DTYPES[entry["dtype"]]), low, high)
    return found


def find_fault(path: Path, entry: Mapping[str, Any], *, whole: bool = True) -> str | None:
    """Describe how a file differs from its entry in an index (size, crc32); None if it does not.

    Args:
        whole: compute the checksum; else compare the size only.
    """
    try:
        size = path.stat().st_size
        fault = _describe_fault(size, entry)
        if fault is None and whole:  # the size first: it costs nothing
            fault = _describe_fault(size, entry, compute_crc32(path))
        return fault
    except FileNotFoundError:
        return MISSING


def _describe_fault(size: int, entry: Mapping[str, Any], crc32: int | None = None) -> str | None:
    if size != entry["size"]:
        return f"holds {size:,} bytes instead of {entry['size']:,}"
    if crc32 in (None, entry["crc32"]):
        return None
    return f"has the checksum {crc32:08x} instead of {entry['crc32']:08x}"
