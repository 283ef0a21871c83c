"""Append-only files, line by line: steps, evaluations, telemetry, the log.

In: a path inside a run directory. Out: a file in which every line is whole or absent, also after a kill or on a full
disk. Symbolic links are refused, because a run directory may come from an untrusted source.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fivetune.types import JsonTable

BLOCK = 2**16


def open_for_append(path: Path) -> FileIO:
    """Open a regular file for reading and appending, unbuffered; create it if it is missing.

    Raises OSError, also for a symbolic link, a folder, or a device.
    """
    try:
        # O_NONBLOCK: opening a named pipe would wait for its reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file; remove it")
    return FileIO(handle, "a+b")


def append_line(file: FileIO, line: bytes) -> None:
    """Append a line, whole or not at all. Raises OSError, also if the disk takes only a part of it."""
    end = file.seek(0, os.SEEK_END)
    try:
        # The file is unbuffered: a disk that becomes full takes a part of the line without an error.
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


class JsonlFile:
    """An append-only JSONL file; a partial last line of a killed process is truncated before the first append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(self, record: JsonTable) -> None:
        """Append one line. Raises OSError if it cannot be written, ValueError for values that JSON cannot express."""
        line = format_json_line(record).encode()
        if self._file is None:
            self._file = open_for_append(self._path)
            truncate_partial_line(self._file)
        append_line(self._file, line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def format_json_line(record: JsonTable) -> str:
    """Format one line of a JSONL file. Raises ValueError for values that are not finite.

    >>> format_json_line({"step": 1, "word": "é"})
    '{"step": 1, "word": "é"}\\n'
    """
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def truncate_partial_line(file: FileIO) -> None:
    """Truncate a last line of any length that has no line end."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        found = (file.read(end - start) or b"").rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    file.truncate(end)
