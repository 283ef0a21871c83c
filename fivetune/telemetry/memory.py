"""How much memory may still be taken, and how much a piece of work takes at most.

In: a device, a function to run. Out: bytes. On the CPU the process is looked at a few hundred times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import psutil
import torch

SECONDS_BETWEEN_LOOKS = 0.003
CONTAINER = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Memory that a CPU process may still take: of the machine, or of its container where that has less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        cached = int((CONTAINER / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
    except (OSError, ValueError, IndexError):  # no container, or one without a limit
        return free
    return min(free, limit - used + cached)


def used_bytes(device: str) -> int:
    """Memory in use now: allocated on a CUDA device, resident for a CPU process."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak_during(work: Callable[[], None], device: str) -> int:
    """Most bytes in use while `work` runs."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device)
    seen, done = [used_bytes(device)], Event()

    def look() -> None:
        while not done.wait(SECONDS_BETWEEN_LOOKS):
            seen.append(used_bytes(device))

    watcher = Thread(target=look, name="memory", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(*seen, used_bytes(device))
