"""Free memory, and the peak memory of a function.

In: a device, a function to run. Out: bytes. On a CPU, a thread polls the process a few hundred times per second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import psutil
import torch

POLL_INTERVAL_SECONDS = 0.003
CGROUP_DIR = Path("/sys/fs/cgroup")


def get_free_bytes() -> int:
    """Bytes that a CPU process can still allocate, by the machine or, if that is less, by the container's limit."""
    free = psutil.virtual_memory().available
    try:
        limit = int((CGROUP_DIR / "memory.max").read_text())
        used = int((CGROUP_DIR / "memory.current").read_text())
        cached = int((CGROUP_DIR / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
    except (OSError, ValueError, IndexError):  # no container, or no limit
        return free
    return min(free, limit - used + cached)


def get_used_bytes(device: str) -> int:
    """Bytes in use now: allocated on a CUDA device, resident for a CPU process."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def measure_peak_bytes(work: Callable[[], object], device: str) -> int:
    """Run `work` and measure the peak of the bytes in use."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device)
    seen, done = [get_used_bytes(device)], Event()

    def look() -> None:
        while not done.wait(POLL_INTERVAL_SECONDS):
            seen.append(get_used_bytes(device))

    watcher = Thread(target=look, name="memory", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(*seen, get_used_bytes(device))
