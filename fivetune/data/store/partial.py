"""Resumable builds: an exclusive lock on the build's folder, and the progress after each of its parts.

In: a location; facts and arrays of a part. Out: the same facts and arrays after a restart, or None.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fivetune.data.storage import delete_object, get_object, join_location, put_object
from fivetune.rundir import lock_file
from fivetune.types import JsonTable

LOCK = ".lock"


def lock_build_folder(folder: Path) -> IO[bytes] | None:
    """Lock a folder until the file is closed or the process ends; None if another process holds it or just finished.

    Raises OSError where files cannot be locked.
    """
    try:
        file = (folder / LOCK).open("ab")
    except FileNotFoundError:  # the folder has its final name
        return None
    try:
        # The process that had the lock may have renamed or removed the folder meanwhile.
        if lock_file(file) and os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
            return file
    except FileNotFoundError:
        pass
    except OSError:
        file.close()
        raise
    file.close()
    return None


def name_progress(number: int) -> str:
    """Return the name of the file with the progress of a part."""
    return f"progress-{number:05d}.npz"


def save_progress(location: str, number: int, facts: JsonTable, arrays: dict[str, NDArray[Any]]) -> None:
    """Save the progress after a part atomically. The data that it describes must be there before."""
    held = io.BytesIO()
    np.savez(held, facts=np.array(json.dumps(facts)), **arrays)  # pyright: ignore[reportArgumentType]
    content = held.getvalue()
    put_object(join_location(location, name_progress(number)), zlib.crc32(content).to_bytes(4, "little") + content)


def load_progress(location: str, number: int) -> tuple[JsonTable, dict[str, NDArray[Any]]] | None:
    """Return the facts and arrays of a part; None if the file is damaged."""
    content = get_object(join_location(location, name_progress(number)))
    if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4]:
        return None
    with np.load(io.BytesIO(content[4:])) as noted:
        arrays = {name: noted[name] for name in noted.files}
    return json.loads(str(arrays.pop("facts"))), arrays


def remove_progress(location: str, num_parts: int) -> None:
    """Delete the progress of a finished build."""
    for number in range(num_parts):
        delete_object(join_location(location, name_progress(number)))
