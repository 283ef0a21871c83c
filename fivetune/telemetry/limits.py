"""Memory of the host that this process may use, without torch: a container's limit counts where it is lower.

In: the control group of the container (cgroup v2), the host's counters. Out: bytes.
"""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_DIR = Path("/sys/fs/cgroup")


def get_host_memory() -> tuple[int, int]:
    """Bytes of the host's memory, and those that can still be allocated, by the machine or by the container's limit."""
    host = psutil.virtual_memory()
    try:
        limit = int((CGROUP_DIR / "memory.max").read_text())
        used = int((CGROUP_DIR / "memory.current").read_text())
        cached = int((CGROUP_DIR / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
    except (OSError, ValueError, IndexError):  # no container, or no limit
        return host.total, host.available
    return min(host.total, limit), min(host.available, limit - used + cached)
