"""Memory of the host that this process may use, without torch: the limit of a container or a job counts if it is lower.

In: the control groups of the process (cgroup v1 and v2), the host's counters. Out: bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_DIR = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
V2 = ("memory.max", "memory.current", "inactive_file ")
"""Files of the limit and the use, and the line of memory.stat with the cache that the system gives back."""


def get_host_memory() -> tuple[int, int]:
    """Bytes of the host's memory, and those that can still be allocated, by the machine or by the lowest limit."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for folder, (limit_file, usage_file, cache_line) in _iter_groups():
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text())
            statistics = "\n" + (folder / "memory.stat").read_text()
            cached = int(statistics.partition("\n" + cache_line)[2].split()[0])
        except (OSError, ValueError, IndexError):  # no such group here, or no limit
            continue
        total = min(total, limit)
        available = min(available, max(0, limit - used + cached))
    return total, available


def _iter_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder of each control group that the process belongs to, outermost first, with the names in it.

    In a container the outermost group is the container's own; jobs of a cluster are groups below it.
    """
    yield CGROUP_DIR, V2
    yield CGROUP_DIR / "memory", V1
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        folder = CGROUP_DIR / "memory" if is_v1 else CGROUP_DIR
        for part in path.strip("/").split("/"):
            folder = folder / part
            yield folder, V1 if is_v1 else V2
