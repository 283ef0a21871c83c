"""Counters of the host and of this process, by psutil: processors, memory, disk, network.

In: nothing; rates are relative to the previous sample. Out: the host fields of a TelemetryRecord, as a dict; a value
that cannot be read, as often in a container, is None.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import psutil

from fivetune.types import JsonTable

RESCAN_FACTOR = 500  # interval in durations of the last scan for children: scans take 0.2 % of a core
LOOPBACK = ("lo", "lo0")
VIRTUAL_DISK_PREFIXES = ("loop", "ram", "zram", "dm-", "md")
PARTITION = re.compile(r"(?<=\d)p\d+$|(?<=[a-z])\d+$")  # nvme0n1p2, sda1

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def call_or_none(
    call: Callable[Parameters, Result], *values: Parameters.args, **named: Parameters.kwargs
) -> Result | None:
    """The result of a call; None if it raises anything, because systems and drivers fail in many ways.

    >>> call_or_none(int, "3"), call_or_none(int, "three")
    (3, None)
    """
    try:
        return call(*values, **named)
    except Exception:
        return None


class ProcessTree:
    """A process and all its children; scans for children are rare, because each reads every process of the host."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._children: list[psutil.Process] = []
        self._next_look = 0.0

    def list_processes(self) -> list[psutil.Process]:
        started = time.monotonic()
        if started >= self._next_look:
            self._children = call_or_none(self._root.children, recursive=True) or []
            now = time.monotonic()
            self._next_look = now + RESCAN_FACTOR * (now - started)
        return [self._root, *self._children]


class HostCounters:
    """The counters of the host and of this process with its children."""

    def __init__(self) -> None:
        self._tree = ProcessTree(psutil.Process())
        self._siblings: ProcessTree | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ and (launcher := call_or_none(psutil.Process().parent)):
            self._siblings = ProcessTree(launcher)
        self._before: dict[str, tuple[float, float]] = {}
        self._seconds_of: dict[int, float] = {}
        self._time: float | None = None

    def list_pids(self) -> frozenset[int]:
        """The processes of this run on this host: this one, its children, and those of the same torchrun."""
        members = self._tree.list_processes() + (self._siblings.list_processes() if self._siblings else [])
        return frozenset(process.pid for process in members)

    def sample(self) -> JsonTable:
        """Fields of a TelemetryRecord. Rates and shares of processor time are None in the first sample."""
        now = time.monotonic()
        found: JsonTable = {"core_utilisation": None, "cpu_utilisation": None}
        # Utilisation since the last call in this thread: the first call has no beginning.
        percent = call_or_none(psutil.cpu_percent, percpu=True)
        if percent and self._time is not None:
            cores = tuple(round(core / 100, 4) for core in percent)
            found["core_utilisation"] = cores
            found["cpu_utilisation"] = round(sum(cores) / len(cores), 4)
        found["process_cores"], found["process_ram_bytes"] = self._read_process_usage(now)
        found |= dict.fromkeys(("ram_used_bytes", "ram_total_bytes", "ram_share", "swap_used_bytes", "swap_share"))
        ram = call_or_none(psutil.virtual_memory)
        if ram:
            used = ram.total - ram.available  # what programs hold: caches can be freed
            found["ram_used_bytes"] = used
            found["ram_total_bytes"] = ram.total
            found["ram_share"] = _compute_share(used, ram.total)
        swap = call_or_none(psutil.swap_memory)
        if swap:
            found["swap_used_bytes"] = swap.used
            found["swap_share"] = _compute_share(swap.used, swap.total)
        found |= self._read_io_rates(now)
        self._time = now
        return found

    def _read_process_usage(self, now: float) -> tuple[float | None, int | None]:
        """Busy cores since the previous sample, of processes in both samples; sum of resident bytes."""
        seconds_of: dict[int, float] = {}
        worked: float | None = None
        resident_bytes: int | None = None
        for process in self._tree.list_processes():
            reading = call_or_none(_read_process, process)
            if reading is None:  # it has ended, or belongs to another user
                continue
            seconds, resident = reading
            seconds_of[process.pid] = seconds
            resident_bytes = (resident_bytes or 0) + resident
            if process.pid in self._seconds_of:
                worked = (worked or 0.0) + max(0.0, seconds - self._seconds_of[process.pid])
        self._seconds_of = seconds_of
        if worked is None or self._time is None or now == self._time:
            return None, resident_bytes
        return round(worked / (now - self._time), 4), resident_bytes

    def _read_io_rates(self, now: float) -> dict[str, float | None]:
        disks = call_or_none(psutil.disk_io_counters, perdisk=True, nowrap=False) or {}
        cards = call_or_none(psutil.net_io_counters, pernic=True, nowrap=False) or {}
        totals = dict.fromkeys(("disk_read", "disk_written", "network_sent", "network_received"), 0)
        for name in select_physical_disks(disks):
            totals["disk_read"] += disks[name].read_bytes
            totals["disk_written"] += disks[name].write_bytes
        for name, card in cards.items():
            if name not in LOOPBACK:
                totals["network_sent"] += card.bytes_sent
                totals["network_received"] += card.bytes_recv
        return {f"{name}_bytes_per_second": self._compute_rate(name, total, now) for name, total in totals.items()}

    def _compute_rate(self, name: str, total: float, now: float) -> float | None:
        """Growth of a counter per second since the last reading; None if it decreased."""
        if not total:  # no such device, or always 0: a container that does not maintain the counter
            return None
        time_before, total_before = self._before.get(name, (now, total))
        self._before[name] = (now, total)
        if now <= time_before or total < total_before:
            return None
        return round((total - total_before) / (now - time_before), 1)


def select_physical_disks(names: Iterable[str]) -> list[str]:
    """The disks among block devices: partitions, volumes and loop devices on them would count twice.

    >>> select_physical_disks(["sda", "sda1", "sdaa", "nvme0n1", "nvme0n1p2", "dm-0", "loop1"])
    ['sda', 'sdaa', 'nvme0n1']
    """
    real = [name for name in names if not name.startswith(VIRTUAL_DISK_PREFIXES)]
    disks: list[str] = []
    for name in real:
        whole = PARTITION.sub("", name)
        if whole == name or whole not in real:
            disks.append(name)
    return disks


def _read_process(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds so far, resident bytes."""
    with process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss


def _compute_share(used: int, total: int) -> float | None:
    return round(used / total, 4) if total else None
