"""Parser of other tools' utilisation logs.

In: a CSV file, plain or gzipped, of log_gpu_cpu_stats.py (a row per moment, columns per device) or of `nvidia-smi
--query-gpu=... --format=csv` (a row per moment and device). Out: TelemetryRecords; a figure without a column is None.
Several runs can append to one log, so the header may recur and change inside the file.
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

from fivetune.data.readers.source_files import open_bytes, quote_value
from fivetune.errors import DataError
from fivetune.machine.telemetry.nvml import decode_throttle_reasons
from fivetune.rundir.records import DeviceSample, TelemetryRecord

HOST_COLUMNS = {"cpu": ("cpu_utilisation", "%"), "ram": ("ram_share", "%"), "swap": ("swap_share", "%")}
DEVICE_COLUMNS = {
    "gpu": ("utilisation", "%"),
    "mem": ("memory_busy", "%"),
    "temp": ("temperature_celsius", "C"),
}  # 0:gpu
QUERY_COLUMNS = {
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
TIME_COLUMNS = ("timestamp", "time")
ID_COLUMNS = (
    "index",
    "uuid",
    "gpu_uuid",
    "pci.bus_id",
    "gpu_bus_id",
)  # the first that is present identifies the device
UNITS: dict[str, dict[str, float]] = {  # unit of the field -> accepted units and their size in it
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
PAUSE_FACTOR = 3  # length of a pause, in median intervals
BUNCH_FRACTION = 0.1  # of the long intervals
MAX_SECONDS = 1e11  # seconds since 1970, in the year 5138: larger values are milliseconds


@dataclass(frozen=True, slots=True)
class _Column:
    """Meaning of the cells of one column.

    Args:
        field: name in TelemetryRecord if `device` is None, else in the DeviceSample of that device.
        kind: text, bits, or a key of UNITS.
        unit: unit of cells that do not state one.
        device: index of the device; "row" if each row names its own.
    """

    field: str
    kind: str
    unit: str
    device: int | Literal["row"] | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """One header: columns by position, position of the time, position of the device id (None if there is none)."""

    columns: Mapping[int, _Column]
    time: int
    identity: int | None
    num_cells: int


@dataclass(slots=True)
class _Row:
    """Figures of one moment: fields of the host, fields of each device."""

    seconds: float
    host: dict[str, Any] = field(default_factory=dict[str, Any])
    devices: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])


class _RowError(ValueError):
    """A row cannot be parsed; the message is the reason."""


def read_log(
    path: str | Path, *, columns: str = "", warn: Callable[[str], object] = warnings.warn
) -> list[TelemetryRecord]:
    """Read the records of a CSV log, in file order; `find_run_starts` splits them into runs.

    Args:
        columns: column names, as given to `--query-gpu=`, of a file written with `noheader`.
        warn: called once with the number of unreadable rows and the first of them.

    Times without a zone are UTC. Raises DataError if the columns are unknown or no row can be parsed.
    """
    layout = _parse_header(columns.split(",")) if columns else None
    if columns and layout is None:
        raise _build_header_error(f"columns {columns!r}")
    groups: list[tuple[_Layout, list[_Row]]] = [(layout, [])] if layout else []
    bad: list[str] = []
    order: dict[str, int] = {}
    for number, cells in _read_table(Path(path)):
        header = _parse_header(cells)
        if header:
            groups.append((header, []))
            continue
        if not groups:
            raise _build_header_error(f"{path}:{number}: {quote_value(', '.join(cells), limit=100)}")
        try:
            groups[-1][1].append(_parse_row(cells, groups[-1][0], order))
        except _RowError as error:
            bad.append(f"line {number}: {error}")
    rows: list[_Row] = []
    for header, group in groups:
        rows += _merge_device_rows(group, header, path)
    if not rows:
        reason = f" ({bad[0]})" if bad else ""
        raise DataError(f"{path}: no row of figures{reason}. Give a log with at least one row.")
    if bad:
        warn(f"{path}: skipped {len(bad)} unreadable rows. The first is {bad[0]}.")
    records: list[TelemetryRecord] = []
    for row in rows:
        devices = tuple(DeviceSample(index=index, **fields) for index, fields in sorted(row.devices.items()))
        records.append(TelemetryRecord(seconds=row.seconds, devices=devices, **row.host))
    return records


def find_run_starts(records: Sequence[TelemetryRecord]) -> list[int]:
    """Return the indices at which a run begins: 0, and each record after a pause or with an earlier time.

    >>> find_run_starts([TelemetryRecord(seconds=second) for second in (0, 30, 60, 300, 330, 10, 40)])
    [0, 3, 5]
    """
    if not records:
        return []
    steps = [after.seconds - before.seconds for before, after in pairwise(records)]
    usual = statistics.median([step for step in steps if step > 0] or [0.0])
    later = [place for place, step in enumerate(steps, start=1) if step < 0 or step > PAUSE_FACTOR * usual]
    return [0, *later]


def _read_table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each non-blank line. Raises DataError for a file that is not text."""
    with open_bytes(path) as file:
        content = file.read()
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")  # PowerShell's `>` writes UTF-16
    if b"\0" in content and not wide:
        raise DataError(f"{path}: binary file, not a CSV log. Give a CSV file, plain or gzipped.")
    # backslashreplace: a message that quotes a cell never prints raw bytes
    lines = content.decode("utf-16" if wide else "utf-8-sig", errors="backslashreplace").split("\n")
    first = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t", key=first.count)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, [cell.strip(' "\r') for cell in line.split(delimiter)]


def _parse_header(headings: Sequence[str]) -> _Layout | None:
    """Return the layout of a header; None if the cells are not a known header."""
    columns: dict[int, _Column] = {}
    places: dict[str, int] = {}
    for place, heading in enumerate(headings):
        found = HEADING.fullmatch(heading.strip())
        name, unit = (found[1].lower(), found[2]) if found else ("", None)
        places.setdefault(name, place)
        number, _, rest = name.partition(":")
        if name in HOST_COLUMNS:
            (what, kind), device = HOST_COLUMNS[name], None
        elif number.isdecimal() and rest in DEVICE_COLUMNS:
            (what, kind), device = DEVICE_COLUMNS[rest], int(number)
        elif name in QUERY_COLUMNS:
            (what, kind), device = QUERY_COLUMNS[name], "row"
        else:
            continue
        columns[place] = _Column(what, kind, unit or kind, device)
    times = [places[name] for name in TIME_COLUMNS if name in places]
    identities = [places[name] for name in ID_COLUMNS if name in places]
    if not times or not columns:
        return None
    return _Layout(columns, times[0], identities[0] if identities else None, len(headings))


def _parse_row(cells: Sequence[str], layout: _Layout, order: dict[str, int]) -> _Row:
    """Parse one line; `order` numbers devices that are identified by a uuid or bus id. Raises _RowError."""
    if len(cells) != layout.num_cells:
        raise _RowError(f"{len(cells)} cells, the header has {layout.num_cells}")
    row = _Row(_parse_timestamp(cells[layout.time]))
    name = cells[layout.identity] if layout.identity is not None else "0"
    own = int(name) if name.isdecimal() else order.setdefault(name, len(order))
    for place, column in layout.columns.items():
        value = _parse_cell(cells[place], column)
        if column.device is None:
            row.host[column.field] = value
            continue
        device = row.devices.setdefault(own if column.device == "row" else column.device, {})
        if device.get(column.field) is None:
            device[column.field] = value
    return row


def _parse_timestamp(text: str) -> float:
    """Parse seconds since 1970, or a date and time, to seconds since 1970. Raises _RowError."""
    if NUMBER.fullmatch(text):
        seconds = float(text)
        if 0 <= seconds < MAX_SECONDS:
            return seconds
        raise _RowError(f"{quote_value(text)} is not in seconds since 1970")
    try:
        moment = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        raise _RowError(f"{quote_value(text)} is not a time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _parse_cell(text: str, column: _Column) -> Any:
    """Parse a cell to the unit of its field; None for "not available". Raises _RowError."""
    if ABSENT.fullmatch(text):
        return None
    if column.kind == "text":
        return text
    if column.kind == "bits" and BITS.fullmatch(text):
        return decode_throttle_reasons(int(text, 16))
    found = CELL.fullmatch(text)
    scale = UNITS.get(column.kind, {}).get(found[2] or column.unit) if found else None
    if found is None or scale is None:
        raise _RowError(f"{quote_value(text)} is not a number in {column.unit}")
    value = round(float(found[1]) * scale, 6)
    if value < 0 or (column.kind == "%" and value > 1):
        raise _RowError(f"{quote_value(text)} is out of range")
    return int(value) if column.kind == "MiB" else value


def _merge_device_rows(rows: Sequence[_Row], layout: _Layout, path: str | Path) -> list[_Row]:
    """Merge consecutive rows of single devices with rising index into one row per moment."""
    is_by_row = any(column.device == "row" for column in layout.columns.values())
    if is_by_row and layout.identity is None and _has_bunched_times([row.seconds for row in rows]):
        raise DataError(
            f"{path}: rows of several devices, and no column that identifies the device. "
            f"Allowed: {', '.join(ID_COLUMNS)}. Record it again with --query-gpu=timestamp,index,..."
        )
    if not is_by_row or layout.identity is None:
        return list(rows)
    joined: list[_Row] = []
    for row in rows:
        if joined and max(joined[-1].devices) < min(row.devices):
            joined[-1].devices |= row.devices
        else:
            joined.append(row)
    return joined


def _has_bunched_times(times: Sequence[float]) -> bool:
    """Whether a quarter of the intervals or more is much shorter than the long ones (pauses excluded).

    >>> _has_bunched_times([0, 1, 2, 3, 1000, 1001]), _has_bunched_times([0, 0.01, 1, 1.01, 2, 2.01])
    (False, True)
    """
    steps = sorted(after - before for before, after in pairwise(times) if after >= before)
    long = steps[int(0.95 * (len(steps) - 1))] if steps else 0.0
    return sum(step < BUNCH_FRACTION * long for step in steps) * 4 > len(steps)


def _build_header_error(where: str) -> DataError:
    return DataError(
        f"{where}: not the header of a utilisation log. Allowed, beside timestamp: the columns of "
        "log_gpu_cpu_stats.py (CPU (%), RAM (%), Swap (%), and per device 0:GPU (%), 0:Mem (%), 0:Temp (C)) "
        f"and of nvidia-smi --query-gpu ({', '.join([*ID_COLUMNS, *QUERY_COLUMNS])}). Rename the columns, "
        "or record the log again with a header."
    )
