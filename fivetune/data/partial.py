"""A long build that may be stopped: who owns its folder, and how much of it is complete and on the disk.

In: the folder; facts and arrays of its progress. Out: the same facts and arrays after a restart, or None.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fivetune.rundir import fsync_folder
from fivetune.types import JsonTable

LOCK, PROGRESS = ".lock", ".progress.npz"


def lock_build_folder(folder: Path) -> IO[bytes] | None:
    """Own a folder until the file is closed or the process dies; None if another process does, or has just ended."""
    import fcntl

    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
            return file
    except OSError:
        pass
    file.close()
    return None


def save_progress(folder: Path, facts: JsonTable, **arrays: Any) -> None:
    """Note how far a build is. What it is about must be on the disk before."""
    staging = folder / f"{PROGRESS}.new"
    with staging.open("wb") as file:
        np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(folder / PROGRESS)
    fsync_folder(folder)


def load_progress(folder: Path) -> tuple[JsonTable, dict[str, NDArray[Any]]] | None:
    """The facts and arrays that were noted last; None if there are none."""
    if not (folder / PROGRESS).is_file():
        return None
    with np.load(folder / PROGRESS) as noted:
        arrays = {name: noted[name] for name in noted.files}
    return json.loads(str(arrays.pop("facts"))), arrays


def remove_progress(folder: Path) -> None:
    """Leave only what was built."""
    for name in (PROGRESS, f"{PROGRESS}.new", LOCK):
        (folder / name).unlink(missing_ok=True)
