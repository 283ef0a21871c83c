"""The cores that a process may use."""

from __future__ import annotations

import os

import psutil


def count_cores() -> int:
    """Physical cores that this process may use; OMP_NUM_THREADS overrides it."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal():
        return max(1, int(given))
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
