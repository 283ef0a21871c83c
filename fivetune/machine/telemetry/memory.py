"""Memory in use, and the peak memory of a function.

In: a device, a function to run. Out: bytes. On a CPU, a thread polls the process a few hundred times per second.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

import psutil
import torch

from fivetune.machine.telemetry.limits import get_host_memory

POLL_INTERVAL_SECONDS = 0.003


def get_free_bytes() -> int:
    """Bytes that a CPU process can still allocate."""
    return get_host_memory()[1]


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
    peak = get_used_bytes(device)
    done = Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(POLL_INTERVAL_SECONDS):
            peak = max(peak, get_used_bytes(device))

    watcher = Thread(target=look, name="memory", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak, get_used_bytes(device))
