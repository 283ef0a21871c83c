"""What the host and this process do: processors, memory, disk, network, by psutil.

In: nothing; rates are taken against the sample before. Out: the counters of a TelemetryRecord, as a dict. What cannot
be read, as much in a container, is None.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

LOOK_AGAIN_AFTER = 500  # times what the last look for children took: 0.2 % of a core, however many processes there are
LOOPBACK = ("lo", "lo0")
UPON_OTHERS = ("loop", "ram", "zram", "dm-", "md")
PARTITION = re.compile(r"(?<=\d)p\d+$|(?<=[a-z])\d+$")  # nvme0n1p2, sda1


def ask(call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """What a call returns; None if it fails, in whatever way a system or a driver has of failing.

    >>> ask(int, "3"), ask(int, "three")
    (3, None)
    """
    try:
        return call(*values, **named)
    except Exception:
        return None


class Tree:
    """A process and all its children; children are looked for seldom, since that reads every process of the host."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._children: list[psutil.Process] = []
        self._next_look = 0.0

    def members(self) -> list[psutil.Process]:
        started = time.monotonic()
        if started >= self._next_look:
            self._children = ask(self._root.children, recursive=True) or []
            now = time.monotonic()
            self._next_look = now + LOOK_AGAIN_AFTER * (now - started)
        return [self._root, *self._children]


class Host:
    """The counters of the host and of this process with its children."""

    def __init__(self) -> None:
        self._tree = Tree(psutil.Process())
        self._siblings: Tree | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ and (launcher := ask(psutil.Process().parent)):
            self._siblings = Tree(launcher)
        self._before: dict[str, tuple[float, float]] = {}
        self._seconds_of: dict[int, float] = {}
        self._time: float | None = None

    def pids(self) -> frozenset[int]:
        """The processes of this run on this host: own ones, and those that the same torchrun started."""
        members = self._tree.members() + (self._siblings.members() if self._siblings else [])
        return frozenset(process.pid for process in members)

    def sample(self) -> dict[str, Any]:
        """Fields of a TelemetryRecord. Rates and shares of processor time are None in the first sample."""
        now = time.monotonic()
        cores = self._cores()
        ram, swap = ask(psutil.virtual_memory), ask(psutil.swap_memory)
        process_cores, process_ram = self._process(now)
        self._time = now
        return {
            "core_utilisation": cores,
            "cpu_utilisation": round(sum(cores) / len(cores), 4) if cores else None,
            "process_cores": process_cores,
            "process_ram_bytes": process_ram,
            "ram_used_bytes": ram.total - ram.available if ram else None,
            "ram_total_bytes": ram.total if ram else None,
            "ram_share": _share(ram.total - ram.available, ram.total) if ram else None,
            "swap_used_bytes": swap.used if swap else None,
            "swap_share": _share(swap.used, swap.total) if swap else None,
            **self._traffic(now),
        }

    def _cores(self) -> tuple[float, ...] | None:
        percent = ask(psutil.cpu_percent, percpu=True)  # since the last call in this thread; the first says nothing
        return tuple(round(core / 100, 4) for core in percent) if percent and self._time is not None else None

    def _process(self, now: float) -> tuple[float | None, int | None]:
        """Cores kept busy since the sample before, by the processes that both samples saw; resident bytes, summed."""
        readings = {process.pid: reading for process in self._tree.members() if (reading := ask(_reading, process))}
        before, self._seconds_of = self._seconds_of, {pid: seconds for pid, (seconds, _) in readings.items()}
        worked = [seconds - before[pid] for pid, seconds in self._seconds_of.items() if pid in before]
        passed = now - self._time if self._time is not None else 0.0
        cores = round(sum(max(0.0, seconds) for seconds in worked) / passed, 4) if worked and passed else None
        return cores, sum(resident for _, resident in readings.values()) if readings else None

    def _traffic(self, now: float) -> dict[str, float | None]:
        disks = ask(psutil.disk_io_counters, perdisk=True, nowrap=False) or {}
        cards = ask(psutil.net_io_counters, pernic=True, nowrap=False) or {}
        whole = [disks[name] for name in whole_disks(disks)]
        outside = [card for name, card in cards.items() if name not in LOOPBACK]
        totals = {
            "disk_read": sum(disk.read_bytes for disk in whole),
            "disk_written": sum(disk.write_bytes for disk in whole),
            "network_sent": sum(card.bytes_sent for card in outside),
            "network_received": sum(card.bytes_recv for card in outside),
        }
        return {f"{name}_bytes_per_second": self._rate(name, total, now) for name, total in totals.items()}

    def _rate(self, name: str, total: float, now: float) -> float | None:
        """Growth of a counter per second since it was read last; None where it went back."""
        if not total:  # none that count, or 0 since the host was started: a container that shows the counter only
            return None
        before, self._before[name] = self._before.get(name), (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return round((total - before[1]) / (now - before[0]), 1)


def whole_disks(names: Iterable[str]) -> list[str]:
    """The disks among block devices: what stands upon them (partitions, volumes, loops) would count again.

    >>> whole_disks(["sda", "sda1", "sdaa", "nvme0n1", "nvme0n1p2", "dm-0", "loop1"])
    ['sda', 'sdaa', 'nvme0n1']
    """
    there = [name for name in names if not name.startswith(UPON_OTHERS)]
    return [name for name in there if PARTITION.sub("", name) == name or PARTITION.sub("", name) not in there]


def _reading(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds so far, resident bytes."""
    with process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss


def _share(used: int, total: int) -> float | None:
    return round(used / total, 4) if total else None
