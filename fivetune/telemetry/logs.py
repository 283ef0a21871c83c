"""Utilisation logs of other tools, as telemetry.

In: a CSV file of log_gpu_cpu_stats.py (a row per moment, columns per device) or of `nvidia-smi --query-gpu=...
--format=csv` (a row per moment and device). Out: TelemetryRecords. Headers may recur and change in the middle, as they
do where runs append to one file. What a column does not hold is None.
"""

from __future__ import annotations

import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fivetune.data.source_files import shown
from fivetune.errors import DataError
from fivetune.telemetry.nvml import reasons_of
from fivetune.types import DeviceSample, TelemetryRecord

HOST = {"cpu": ("cpu_utilisation", "%"), "ram": ("ram_share", "%"), "swap": ("swap_share", "%")}
NUMBERED = {"gpu": ("utilisation", "%"), "mem": ("memory_busy", "%"), "temp": ("temperature_celsius", "C")}  # 0:gpu
QUERY = {
    "utilization.gpu": ("utilisation", "%"),
    "utilization.memory": ("memory_busy", "%"),
    "memory.used": ("memory_used_bytes", "MiB"),
    "memory.total": ("memory_total_bytes", "MiB"),
    "temperature.gpu": ("temperature_celsius", "C"),
    "power.draw": ("power_watts", "W"),
    "power.draw.instant": ("power_watts", "W"),
    "power.limit": ("power_limit_watts", "W"),
    "enforced.power.limit": ("power_limit_watts", "W"),
    "clocks.sm": ("sm_clock_mhz", "MHz"),
    "clocks.current.sm": ("sm_clock_mhz", "MHz"),
    "clocks.mem": ("memory_clock_mhz", "MHz"),
    "clocks.current.memory": ("memory_clock_mhz", "MHz"),
    "clocks_throttle_reasons.active": ("throttle_reasons", "bits"),
    "clocks_event_reasons.active": ("throttle_reasons", "bits"),
    "name": ("name", "text"),
    "gpu_name": ("name", "text"),
}
TIME = ("timestamp", "time")
IDENTITY = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id")  # the first of them tells devices apart
UNITS: dict[str, dict[str, float]] = {  # what else may stand in the place of a unit, and how much of the field's it is
    "%": {"%": 0.01},
    "MiB": {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
    "C": {"C": 1},
    "W": {"W": 1, "mW": 0.001},
    "MHz": {"MHz": 1},
}

HEADING = re.compile(r"(.*?)\s*(?:[(\[](.*)[)\]])?")  # utilization.gpu [%], CPU (%)
NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?")
CELL = re.compile(rf"({NUMBER.pattern})\s*([%A-Za-z]*)")
BITS = re.compile(r"0x[0-9a-fA-F]+")
ABSENT = re.compile(r"\[.*\]|n/?a|nan|none|-*", re.IGNORECASE)  # [N/A], [Not Supported], [Unknown Error]
PAUSE = 3  # times the usual step
TOGETHER = 0.1  # of the long steps
LATEST = 1e11  # seconds since 1970, in the year 5138: larger ones are milliseconds


@dataclass(frozen=True, slots=True)
class _Column:
    """What the cells of a column are.

    Args:
        field: of TelemetryRecord where `device` is None; otherwise of the DeviceSample of that number, or of the row's.
        kind: text, bits, or the unit that UNITS knows it by.
        unit: of cells that give none themselves.
    """

    field: str
    kind: str
    unit: str
    device: int | Literal["row"] | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a header says: the columns by place, where the time stands, and where what tells devices apart."""

    columns: Mapping[int, _Column]
    time: int
    identity: int | None
    num_cells: int


@dataclass(slots=True)
class _Row:
    """The figures of one moment: fields of the host, fields of each device."""

    seconds: float
    host: dict[str, Any] = field(default_factory=dict)
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)


class _BadRow(ValueError):
    """What is wrong with a row, in words."""


def read_log(
    path: str | Path, *, columns: str = "", warn: Callable[[str], None] = warnings.warn
) -> list[TelemetryRecord]:
    """The telemetry that a CSV log holds, in the order of the file; `segments` tells where other runs begin in it.

    Args:
        columns: their names, as behind `--query-gpu=`, of a file that was written with `noheader`.
        warn: told once how many rows could not be read, and which was the first.

    Times without a zone are taken as UTC. Raises DataError if the columns are unknown, or no row can be read.
    """
    layout = _layout(columns.split(",")) if columns else None
    if columns and layout is None:
        raise _unknown(f"columns {columns!r}")
    groups: list[tuple[_Layout, list[_Row]]] = [(layout, [])] if layout else []
    bad: list[str] = []
    order: dict[str, int] = {}
    for number, cells in _table(Path(path)):
        if header := _layout(cells):
            groups.append((header, []))
            continue
        if not groups:
            raise _unknown(f"{path}:{number}: {shown(', '.join(cells), limit=100)}")
        try:
            groups[-1][1].append(_row(cells, groups[-1][0], order))
        except _BadRow as error:
            bad.append(f"line {number}: {error}")
    rows = [row for layout, group in groups for row in _moments(group, layout, path)]
    if not rows:
        raise DataError(f"{path}: has no row of figures{f' ({bad[0]})' if bad else ''}. Give a log that has some.")
    if bad:
        warn(f"{path}: rows that cannot be read and are left out: {len(bad)}. The first is {bad[0]}.")
    return [_record(row) for row in rows]


def segments(records: Sequence[TelemetryRecord]) -> list[int]:
    """Where in `records` a run begins: at the first, and wherever the time goes back or pauses.

    >>> segments([TelemetryRecord(seconds=second) for second in (0, 30, 60, 300, 330, 10, 40)])
    [0, 3, 5]
    """
    steps = [after.seconds - before.seconds for before, after in pairwise(records)]
    usual = _usual(steps)
    later = [place for place, step in enumerate(steps, start=1) if step < 0 or step > PAUSE * usual]
    return [0, *later] if records else []


def _usual(steps: Sequence[float]) -> float:
    return statistics.median([step for step in steps if step > 0] or [0.0])


def _table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line that is not blank."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Give a CSV file.") from None
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")  # what `>` of PowerShell writes
    lines = content.decode("utf-16" if wide else "utf-8-sig", errors="replace").split("\n")
    delimiter = max(",;\t", key=next(filter(str.strip, lines), "").count)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, [cell.strip(' "\r') for cell in line.split(delimiter)]


def _layout(headings: Sequence[str]) -> _Layout | None:
    """What a header says; None if these cells are none that is understood."""
    columns: dict[int, _Column] = {}
    places: dict[str, int] = {}
    for place, heading in enumerate(headings):
        found = HEADING.fullmatch(heading.strip())
        name, unit = (found[1].lower(), found[2]) if found else ("", None)
        places.setdefault(name, place)
        if column := _column(name, unit):
            columns[place] = column
    time = next((places[name] for name in TIME if name in places), None)
    if time is None or not columns:
        return None
    identity = next((places[name] for name in IDENTITY if name in places), None)
    return _Layout(columns, time, identity, len(headings))


def _column(name: str, unit: str | None) -> _Column | None:
    """What a column is by its name and, where it gives one, the unit of its figures."""
    number, _, rest = name.partition(":")
    if name in HOST:
        what, kind = HOST[name]
        return _Column(what, kind, unit or kind, None)
    if number.isdecimal() and rest in NUMBERED:
        what, kind = NUMBERED[rest]
        return _Column(what, kind, unit or kind, int(number))
    if name in QUERY:
        what, kind = QUERY[name]
        return _Column(what, kind, unit or kind, "row")
    return None


def _row(cells: Sequence[str], layout: _Layout, order: dict[str, int]) -> _Row:
    """One line as a row; `order` numbers the devices that are known by another name than a number. Raises _BadRow."""
    if len(cells) != layout.num_cells:
        raise _BadRow(f"{len(cells)} cells, its header has {layout.num_cells}")
    row = _Row(_seconds(cells[layout.time]))
    name = cells[layout.identity] if layout.identity is not None else "0"
    own = int(name) if name.isdecimal() else order.setdefault(name, len(order))
    for place, column in layout.columns.items():
        value = _value(cells[place], column)
        if column.device is None:
            row.host[column.field] = value
        else:
            device = row.devices.setdefault(column.device if isinstance(column.device, int) else own, {})
            if device.get(column.field) is None:
                device[column.field] = value
    return row


def _seconds(text: str) -> float:
    """Seconds since 1970, of such a number or of a date and time. Raises _BadRow."""
    if NUMBER.fullmatch(text):
        seconds = float(text)
        if 0 <= seconds < LATEST:
            return seconds
        raise _BadRow(f"{shown(text)} are no seconds since 1970")
    try:
        moment = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        raise _BadRow(f"{shown(text)} is no time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _value(text: str, column: _Column) -> Any:
    """A cell in the unit of its field; None where the tool had none. Raises _BadRow."""
    if ABSENT.fullmatch(text):
        return None
    if column.kind == "text":
        return text
    if column.kind == "bits" and BITS.fullmatch(text):
        return reasons_of(int(text, 16))
    found = CELL.fullmatch(text)
    scale = UNITS.get(column.kind, {}).get(found[2] or column.unit) if found else None
    if found is None or scale is None:
        raise _BadRow(f"{shown(text)} is no figure in {column.unit}")
    value = round(float(found[1]) * scale, 6)
    if value < 0 or (column.kind == "%" and value > 1):
        raise _BadRow(f"{shown(text)} is out of range")
    return int(value) if column.kind == "MiB" else value


def _moments(rows: Sequence[_Row], layout: _Layout, path: str | Path) -> list[_Row]:
    """Rows of single devices, which follow each other by number at each moment, joined to a row per moment."""
    if all(column.device != "row" for column in layout.columns.values()):
        return list(rows)
    if layout.identity is None:
        if _in_bunches([row.seconds for row in rows]):
            raise DataError(
                f"{path}: has rows of several devices, and no column that tells them apart. "
                f"Allowed: {', '.join(IDENTITY)}. Log again with --query-gpu=timestamp,index,..."
            )
        return list(rows)
    joined: list[_Row] = []
    for row in rows:
        if joined and max(joined[-1].devices) < min(row.devices):
            joined[-1].devices |= row.devices
        else:
            joined.append(row)
    return joined


def _in_bunches(times: Sequence[float]) -> bool:
    """Whether every fourth time or more comes at once after another, measured by the long steps (not by pauses).

    >>> _in_bunches([0, 1, 2, 3, 1000, 1001]), _in_bunches([0, 0.01, 1, 1.01, 2, 2.01])
    (False, True)
    """
    steps = sorted(after - before for before, after in pairwise(times) if after >= before)
    long = steps[int(0.95 * (len(steps) - 1))] if steps else 0.0
    return sum(step < TOGETHER * long for step in steps) * 4 > len(steps)


def _record(row: _Row) -> TelemetryRecord:
    devices = [DeviceSample(index=index, **fields) for index, fields in sorted(row.devices.items())]
    return TelemetryRecord(seconds=row.seconds, devices=tuple(devices), **row.host)


def _unknown(where: str) -> DataError:
    return DataError(
        f"{where}: no header of a utilisation log. Understood are, beside timestamp, the columns of "
        "log_gpu_cpu_stats.py (CPU (%), RAM (%), Swap (%), and per device 0:GPU (%), 0:Mem (%), 0:Temp (C)) "
        f"and of nvidia-smi --query-gpu ({', '.join([*IDENTITY, *QUERY])}). Rename the columns, "
        "or log again with a header."
    )
