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
        cores = self._read_core_utilisation()
        ram, swap = call_or_none(psutil.virtual_memory), call_or_none(psutil.swap_memory)
        process_cores, process_ram = self._read_process_usage(now)
        self._time = now
        return {
            "core_utilisation": cores,
            "cpu_utilisation": round(sum(cores) / len(cores), 4) if cores else None,
            "process_cores": process_cores,
            "process_ram_bytes": process_ram,
            "ram_used_bytes": ram.total - ram.available if ram else None,
            "ram_total_bytes": ram.total if ram else None,
            "ram_share": _compute_share(ram.total - ram.available, ram.total) if ram else None,
            "swap_used_bytes": swap.used if swap else None,
            "swap_share": _compute_share(swap.used, swap.total) if swap else None,
            **self._read_io_rates(now),
        }

    def _read_core_utilisation(self) -> tuple[float, ...] | None:
        percent = call_or_none(
            psutil.cpu_percent, percpu=True
        )  # since the last call in this thread; the first is meaningless
        return tuple(round(core / 100, 4) for core in percent) if percent and self._time is not None else None

    def _read_process_usage(self, now: float) -> tuple[float | None, int | None]:
        """Busy cores since the previous sample, of processes in both samples; sum of resident bytes."""
        readings = {
            process.pid: reading
            for process in self._tree.list_processes()
            if (reading := call_or_none(_read_process, process))
        }
        before, self._seconds_of = self._seconds_of, {pid: seconds for pid, (seconds, _) in readings.items()}
        worked = [seconds - before[pid] for pid, seconds in self._seconds_of.items() if pid in before]
        passed = now - self._time if self._time is not None else 0.0
        cores = round(sum(max(0.0, seconds) for seconds in worked) / passed, 4) if worked and passed else None
        return cores, sum(resident for _, resident in readings.values()) if readings else None

    def _read_io_rates(self, now: float) -> dict[str, float | None]:
        disks = call_or_none(psutil.disk_io_counters, perdisk=True, nowrap=False) or {}
        cards = call_or_none(psutil.net_io_counters, pernic=True, nowrap=False) or {}
        whole = [disks[name] for name in select_physical_disks(disks)]
        outside = [card for name, card in cards.items() if name not in LOOPBACK]
        totals = {
            "disk_read": sum(disk.read_bytes for disk in whole),
            "disk_written": sum(disk.write_bytes for disk in whole),
            "network_sent": sum(card.bytes_sent for card in outside),
            "network_received": sum(card.bytes_recv for card in outside),
        }
        return {f"{name}_bytes_per_second": self._compute_rate(name, total, now) for name, total in totals.items()}

    def _compute_rate(self, name: str, total: float, now: float) -> float | None:
        """Growth of a counter per second since the last reading; None if it decreased."""
        if not total:  # no such device, or always 0: a container that does not maintain the counter
            return None
        before, self._before[name] = self._before.get(name), (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return round((total - before[1]) / (now - before[0]), 1)


def select_physical_disks(names: Iterable[str]) -> list[str]:
    """The disks among block devices: partitions, volumes and loop devices on them would count twice.

    >>> select_physical_disks(["sda", "sda1", "sdaa", "nvme0n1", "nvme0n1p2", "dm-0", "loop1"])
    ['sda', 'sdaa', 'nvme0n1']
    """
    there = [name for name in names if not name.startswith(VIRTUAL_DISK_PREFIXES)]
    return [name for name in there if PARTITION.sub("", name) == name or PARTITION.sub("", name) not in there]


def _read_process(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds so far, resident bytes."""
    with process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss


def _compute_share(used: int, total: int) -> float | None:
    return round(used / total, 4) if total else None
