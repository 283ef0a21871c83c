"""Resumable builds: an exclusive lock on the build's folder, and its progress on disk.

In: the folder; facts and arrays of its progress. Out: the same facts and arrays after a restart, or None.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fivetune.rundir import lock_file, replace_file
from fivetune.types import JsonTable

LOCK, PROGRESS = ".lock", ".progress.npz"


def lock_build_folder(folder: Path) -> IO[bytes] | None:
    """Lock a folder until the file is closed or the process ends; None if another process holds it or just finished.

    Raises OSError where files cannot be locked.
    """
    file = (folder / LOCK).open("ab")
    try:
        if lock_file(file) and os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
            return file
    except FileNotFoundError:
        pass
    except OSError:
        file.close()
        raise
    file.close()
    return None


def save_progress(folder: Path, facts: JsonTable, **arrays: Any) -> None:
    """Save the progress of a build atomically. The data that it describes must be synced before."""
    with replace_file(folder / PROGRESS) as file:
        np.savez(file, facts=np.array(json.dumps(facts)), **arrays)


def load_progress(folder: Path) -> tuple[JsonTable, dict[str, NDArray[Any]]] | None:
    """Return the facts and arrays saved last; None if there are none."""
    if not (folder / PROGRESS).is_file():
        return None
    with np.load(folder / PROGRESS) as noted:
        arrays = {name: noted[name] for name in noted.files}
    return json.loads(str(arrays.pop("facts"))), arrays


def remove_progress(folder: Path) -> None:
    """Delete the progress and the lock of a finished build."""
    for path in (folder / PROGRESS, folder / LOCK, *folder.glob(".*.tmp")):
        path.unlink(missing_ok=True)
