"""What the benchmarks share: windows of several sides, interleaved A B B A in one run, and ratios of their medians.

In: sides, each of which can do a number of units of work when asked. Out: a table for people, a JSON file for later.
Two sides are compared by windows that stood next to each other in time, never by figures of different runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from fivetune.machine.telemetry.devices import collect_machine_info

RESULTS = Path(__file__).parent / "results"


class UnequalWork(Exception):
    """Two sides did not do the same work, so that their times say nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """What was done in a window: units (updates, batches, questions), and by name what else is counted in them."""

    num_units: int
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """Work and the seconds it took."""

    work: Work
    seconds: float

    def rate(self, name: str) -> float:
        """`name` per second; "units" are the units themselves."""
        return (self.work.num_units if name == "units" else self.work.counts[name]) / self.seconds


class Side(Protocol):
    """One of the things that are compared."""

    name: str

    def work(self, num_units: int) -> Work:
        """Do so many units, and say what was in them."""
        ...


def abba(names: Sequence[str], num_windows: int) -> list[str]:
    """The order of `num_windows` windows of each side: there and back, so that a drift meets all alike.

    >>> "".join(abba("AB", 4)), "".join(abba("ABC", 2))
    ('ABBAABBA', 'ABCCBA')
    """
    rounds = [list(names) if i % 2 == 0 else list(names)[::-1] for i in range(num_windows)]
    return [name for one in rounds for name in one]


def timed_window(side: Side, num_units: int, *, device: str = "cpu") -> Window:
    """One window with the garbage collector off; on a GPU until the device has finished.

    Raises UnequalWork if the side did another number of units than it was asked for.
    """
    gc.collect()
    gc.disable()
    try:
        _finish(device)
        started = time.perf_counter()
        work = side.work(num_units)
        _finish(device)
        seconds = time.perf_counter() - started
    finally:
        gc.enable()
    if work.num_units != num_units:
        raise UnequalWork(f"{side.name}: did {work.num_units} units, {num_units} were asked for.")
    return Window(work, seconds)


def interleaved(
    sides: Sequence[Side], num_units: int, num_windows: int, *, device: str = "cpu"
) -> dict[str, list[Window]]:
    """`num_windows` windows of `num_units` of each side, in ABBA order."""
    by_name = {side.name: side for side in sides}
    windows: dict[str, list[Window]] = {name: [] for name in by_name}
    for name in abba(list(by_name), num_windows):
        windows[name].append(timed_window(by_name[name], num_units, device=device))
    return windows


def same_totals(windows: dict[str, list[Window]], count: str) -> None:
    """Raises UnequalWork unless every side has the same total of a count."""
    totals = {name: sum(w.work.counts[count] for w in each) for name, each in windows.items()}
    if len(set(totals.values())) > 1:
        raise UnequalWork(f"{count}: the sides did not do the same: {totals}.")


def num_units_in(seconds: float, per_unit: Sequence[float], num_windows: int, *, most: int) -> int:
    """Units per window, so that `num_windows` windows of all sides take about so many seconds: 1 to `most`.

    >>> num_units_in(120, [1.0, 3.0], 6, most=10), num_units_in(1, [1.0], 6, most=10)
    (5, 1)
    """
    return min(most, max(1, math.floor(seconds / (num_windows * sum(per_unit)))))


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several windows."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """
        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, least=1.0, most=3.0)
        """
        return cls(median(values), min(values), max(values))

    def as_list(self) -> list[float]:
        return [self.median, self.least, self.most]


def rates(windows: Sequence[Window], name: str) -> Spread:
    """`name` per second over windows."""
    return Spread.of([window.rate(name) for window in windows])


def ratio(ours: Sequence[Window], theirs: Sequence[Window], name: str) -> Spread:
    """How many times faster ours is: the ratio of the medians; least and most of the pairs of neighbouring windows.

    >>> fast, slow = [Window(Work(4), 1.0), Window(Work(4), 2.0)], [Window(Work(4), 2.0), Window(Work(4), 5.0)]
    >>> ratio(fast, slow, "units").as_list()
    [2.142857142857143, 2.0, 2.5]
    """
    pairs = [a.rate(name) / b.rate(name) for a, b in zip(ours, theirs, strict=True)]
    return Spread(rates(ours, name).median / rates(theirs, name).median, min(pairs), max(pairs))


def peak_resident() -> int | None:
    """Most bytes of memory that this process had at once since its program began; None where that is not told.

    getrusage tells more: a child begins with the peak of the process that started it.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def facts(device: str) -> dict[str, Any]:
    """The machine, its versions, its threads, and how busy it was."""
    return {
        **collect_machine_info(device),
        "num_threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_result(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json`, with the name made fit for a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def make_parser(description: str | None, results: Path | None = RESULTS) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks.

    Args:
        results: default folder of the JSON file; None for a program that writes none.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object too, in the last line")
    if results is not None:
        parser.add_argument("--results", type=Path, default=results, help="folder of the JSON file")
    return parser


def publish_result(args: argparse.Namespace, name: str, content: dict[str, Any]) -> None:
    """Write the result as `write_result`, and print it in the last line if --json asks for it."""
    print(f"written to {write_result(name, content, args.results)}")
    if args.json:
        print(json.dumps(content))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of a table that is Markdown and readable as it is; the first row is the head, numbers stand right.

    >>> print(table([["side", "speed"], ["ours", "12.5"]]))
    | side | speed |
    |:-----|------:|
    | ours |  12.5 |
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return " | ".join(["| " + first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|:" + "-" * (widths[0] + 1) + "|" + "".join("-" * (width + 1) + ":|" for width in widths[1:])
    return "\n".join([line(rows[0]), rule, *(line(row) for row in rows[1:])])


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
