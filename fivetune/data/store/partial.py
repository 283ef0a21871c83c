"""Resumable builds: an exclusive lock on the build's folder, and the progress after each of its parts.

In: a location; facts and arrays of a part. Out: the same facts and arrays after a restart, or None.
"""

from __future__ import annotations

import errno
import io
import json
import os
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fivetune.data.storage import delete_object, get_object, join_location, list_objects, put_object
from fivetune.rundir import lock_file
from fivetune.types import JsonTable

LOCK = ".lock"
PROGRESS = "progress-"


def lock_build_folder(folder: Path, name: str = LOCK, *, waits: bool = False) -> IO[bytes] | None:
    """Lock a folder until the file is closed or the process ends; None if another process holds it or just finished.

    Args:
        name: of the lock's file.
        waits: wait for another process that holds it.

    Raises OSError where files cannot be locked.
    """
    try:
        file = (folder / name).open("ab")
    except FileNotFoundError:  # the folder has its final name
        return None
    try:
        # The process that had the lock may have renamed or removed the folder meanwhile.
        if lock_file(file, wait=waits) and os.path.samestat(os.fstat(file.fileno()), (folder / name).stat()):
            return file
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: another machine has removed it, on NFS
            file.close()
            raise
    file.close()
    return None


def name_progress(number: int, prefix: str = "") -> str:
    """Return the name of the file with the progress of a part.

    Args:
        prefix: of the parts of a job, where several jobs build.
    """
    return f"{PROGRESS}{prefix}{number:05d}.npz"


def save_progress(location: str, name: str, facts: JsonTable, arrays: dict[str, NDArray[Any]]) -> None:
    """Save the progress after a part atomically. The data that it describes must be there before."""
    held = io.BytesIO()
    np.savez(held, facts=np.array(json.dumps(facts)), **arrays)  # pyright: ignore[reportArgumentType]
    content = held.getvalue()
    put_object(join_location(location, name), zlib.crc32(content).to_bytes(4, "little") + content)


def load_progress(location: str, name: str) -> tuple[JsonTable, dict[str, NDArray[Any]]] | None:
    """Return the facts and arrays of a part; None if the file is damaged."""
    content = get_object(join_location(location, name))
    if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4]:
        return None
    with np.load(io.BytesIO(content[4:])) as noted:
        arrays = {name: noted[name] for name in noted.files}
    return json.loads(str(arrays.pop("facts"))), arrays


def remove_files(location: str, *starts: str) -> None:
    """Delete the files whose names have one of these beginnings."""
    for name in list_objects(location):
        if name.startswith(starts):
            delete_object(join_location(location, name))
