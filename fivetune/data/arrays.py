"""Named arrays in one file, in the layout of safetensors, with a checksum.

In: arrays of one dimension. Out: the file, its size and CRC-32; memory-mapped arrays.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivetune.rundir import replace_file
from fivetune.rundir.checksums import compute_crc32
from fivetune.types import JsonTable

Array = NDArray[Any]

DTYPES = {"U8": np.uint8, "U16": np.uint16, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64}
_NAMES = {np.dtype(kind).name: name for name, kind in DTYPES.items()}
ALIGNMENT = 64  # of the first array; those with larger items precede, so that all are aligned


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> JsonTable:
    """Write arrays to a file, atomically; returns its size and crc32. Raises OSError."""
    ordered = sorted(arrays.items(), key=lambda named: (-named[1].dtype.itemsize, named[0]))
    header: JsonTable = {}
    end = 0
    for name, array in ordered:
        shape = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape)}
        header[name] = {**shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    crc32 = zlib.crc32(head)
    with replace_file(path) as file:
        file.write(head)
        for _, array in ordered:
            content = np.ascontiguousarray(array).view(np.uint8).data
            crc32 = zlib.crc32(content, crc32)
            file.write(content)
    return {"size": len(head) + end, "crc32": crc32}


def map_arrays(path: Path) -> dict[str, Array]:
    """Memory-map the arrays of a file. Raises OSError; ValueError or KeyError for a file that is not one of these."""
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    plain = np.asarray(whole)  # the same pages as a plain array, which slices far faster
    start = 8 + int.from_bytes(plain[:8].tobytes(), "little")
    if start > len(plain):
        raise ValueError("the header is cut off")
    found: dict[str, Array] = {}
    for name, entry in json.loads(plain[8:start].tobytes()).items():
        low, high = (start + offset for offset in entry["data_offsets"])
        if high > len(plain):
            raise ValueError(f"{name} is cut off")
        found[name] = plain[low:high].view(DTYPES[entry["dtype"]])
    return found


def find_fault(path: Path, entry: Mapping[str, Any], *, whole: bool = True) -> str | None:
    """Describe how a file differs from its entry in an index (size, crc32); None if it does not.

    Args:
        whole: compute the checksum; else compare the size only.
    """
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"holds {size:,} bytes instead of {entry['size']:,}"
        if not whole:
            return None
        value = compute_crc32(path)
    except FileNotFoundError:
        return "is missing"
    return None if value == entry["crc32"] else f"has the checksum {value:08x} instead of {entry['crc32']:08x}"
