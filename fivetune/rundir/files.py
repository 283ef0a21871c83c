"""Atomic file replacement, and locks that end with their process.

In: paths and open files. Out: files that stay whole after a kill or a power cut.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4


@contextmanager
def replace_file(path: Path) -> Generator[IO[bytes]]:
    """Open a temporary file that is renamed to `path` when the block ends, and removed if the block raises.

    The content is synced to disk before the rename, so that a power cut leaves the old file or the new one. Raises
    OSError.
    """
    # Processes of several nodes or containers that share the folder may have the same number.
    staging = path.with_name(f".{path.name}.{uuid4().hex[:8]}.{os.getpid()}.tmp")
    try:
        with staging.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except BaseException:
        with suppress(OSError):
            staging.unlink()
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make a rename inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(file: IO[Any], *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends; return False if another process holds the lock.

    Args:
        shared: take a shared lock, which several processes can hold at once.
        wait: block until the lock is free.

    Raises OSError where files cannot be locked.
    """
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
