"""Whole files, replaced atomically, and locks that end with their process.

In: paths and open files. Out: files that stay whole after a kill or a power cut.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO
from uuid import uuid4

from fivetune.errors import RunDirError, format_size

FREE_FILES = 256  # weights, libraries, inputs


@contextmanager
def replace_file(path: Path, *, staging_folder: Path | None = None) -> Generator[IO[bytes]]:
    """Open a temporary file that is renamed to `path` when the block ends, and removed if the block raises.

    The content is synced to disk before the rename, so that a power cut leaves the old file or the new one. Raises
    OSError.

    Args:
        staging_folder: holds the temporary file, which a killed process leaves there; on the file system of `path`.
            Default: the folder of `path`.
    """
    # Processes of several nodes or containers that share the folder may have the same number.
    staging = (staging_folder or path.parent) / f".{path.name}.{uuid4().hex[:8]}.{os.getpid()}.tmp"
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


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; after a power cut it has the old or the new content."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        advice = "Choose another run.dir."
        if error.errno == errno.ENAMETOOLONG:
            advice = "Choose a shorter name."
        elif error.errno == errno.EISDIR:
            advice = "Rename the folder of that name."
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # a disk, quota or limit is at its end
            advice = f"{advise_on_space(path.parent, len(content))} Or choose another run.dir."
        raise RunDirError(f"{path}: cannot be written: {error.strerror}. {advice}") from None


def advise_on_space(folder: Path, needed: int | None = None) -> str:
    """Return what to do about a write that found no space: bytes, inodes or a limit may be at an end.

    Args:
        folder: may be missing. needed: bytes of the write; None if they are unknown.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    limits = "look at the quota and at the limit of a file's size (ulimit -f)."
    try:
        system = os.statvfs(folder)
    except OSError:
        return f"Free disk space, or {limits}"
    if system.f_files and not system.f_favail:
        return "No more files can be created there (the file system has no free inodes). Remove files."
    free = system.f_bavail * system.f_frsize
    if needed is None:
        return f"{format_size(free)} are free. Free disk space, or {limits}"
    advice = "Free disk space." if free < 2 * needed else limits.capitalize()
    return f"It needs {format_size(needed)}, {format_size(free)} are free. {advice}"


def write_text(path: Path, text: str) -> None:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        character = f"U+{ord(text[error.start]):04X}"
        raise RunDirError(
            f"{path}: cannot be written: a setting or text holds {character}, which UTF-8 cannot express. Remove it."
        ) from None
    write_bytes(path, content)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe, a device or a folder: reading it might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """Read a file. Raises OSError, also for what is no regular file (`open_regular`)."""
    with open_regular(path) as file:
        return file.read()


def fsync_file(path: Path) -> None:
    """Make the content of a file durable that a library has written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


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

    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    return True


def extend_file_limit(num: int) -> None:
    """Let the process open this many files, and FREE_FILES more, as far as the system lets it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num + FREE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
