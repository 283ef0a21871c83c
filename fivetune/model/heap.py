"""The C library's heap: memory that a step has freed stays with the process, because the next step needs it again.

In: nothing. Out: whether the setting was made. Without it, glibc gives buffers above 128 KiB to 32 MiB back to the
system and gets them again as new pages, each of which costs a fault: on two cores a sixth of a training step.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of mallopt in glibc's malloc.h
LARGEST = 2**30  # bytes; larger blocks than that are still mapped by themselves


def keep_heap() -> bool:
    """Ask glibc to keep freed memory for reuse; for the whole process. False where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(MMAP_THRESHOLD, LARGEST) and library.mallopt(TRIM_THRESHOLD, 2**31 - 1))
