"""Summary of an Nsight Systems capture exported as SQLite, without torch.

In: the SQLite file. Out: a TraceSummary. Times in the capture are nanoseconds, in the summary seconds. SQLite counts
and sorts in temporary files: a capture of millions of kernels takes disk space and time, not memory. Tables exist only
for traced activities, and columns differ between versions of Nsight Systems, so both are looked up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fivetune.errors import DataError
from fivetune.machine.profiling.chrome import LAUNCH, SYNCHRONISE
from fivetune.machine.profiling.kernels import classify_kernel
from fivetune.machine.profiling.summary import GAP_BOUNDS, NUM_TOP, sum_by_class, sum_work
from fivetune.rundir.trace import DeviceTime, Phase, TraceSummary, Transfer, Work

NANO = 1e-9
CACHE_KIB = 64 * 1024
ACTIVITIES = ("KERNEL", "RUNTIME", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "GRAPH_TRACE")
KERNEL, CALL, COPY, SET, SYNC, GRAPH = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ACTIVITIES)
DEVICE_TABLES = (KERNEL, COPY, SET, GRAPH)
NAMES = ("demangledName", "shortName", "mangledName")
DIRECTIONS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
}  # fmt: skip
"""CUpti_ActivityMemcpyKind; the table ENUM_CUDA_MEMCPY_OPER, where present, uses the same numbers."""
PROCESS = 1 << 24  # globalPid and globalTid hold the process above their lowest 24 bits
CAPTURE_COMMAND = "nsys profile --trace cuda,nvtx COMMAND, then nsys export --type sqlite REPORT.nsys-rep"


def summarise_capture(path: Path, *, num_steps: int | None = None) -> TraceSummary:
    """Summarise a capture.

    Args:
        num_steps: training steps in the capture; None leaves out figures per step.

    Raises DataError if the file is not a capture or holds no kernels.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file. Give a capture exported as SQLite ({CAPTURE_COMMAND}).")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            base.execute("PRAGMA temp_store = FILE")
            base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            return _summarise(NsightCapture(path, base), num_steps)
    except sqlite3.DatabaseError as error:
        raise DataError(
            f"{path}: cannot be read as an SQLite file: {error}. Export the capture again ({CAPTURE_COMMAND})."
        ) from None


class NsightCapture:
    """An open capture and its tables."""

    def __init__(self, path: Path, base: sqlite3.Connection) -> None:
        self.path = path
        self.base = base

    def list_columns(self, table: str) -> set[str]:
        """Columns of a table; empty if the table does not exist."""
        return {row[1] for row in self.base.execute(f"PRAGMA table_info({table})")}

    def has_columns(self, table: str, *columns: str) -> bool:
        return {"start", "end", *columns} <= self.list_columns(table)

    def find_column(self, table: str, *names: str) -> str:
        """The first of `names` that is a column of the table, NULL if none is."""
        columns = self.list_columns(table)
        for name in names:
            if name in columns:
                return name
        return "NULL"

    def fetch_rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.base.execute(query).fetchall()


def _summarise(capture: NsightCapture, num_steps: int | None) -> TraceSummary:
    if not capture.has_columns(KERNEL):
        raise DataError(
            f"{capture.path}: no kernels (no table {KERNEL}). The capture was made without CUDA tracing or on "
            f"a machine without a GPU. Capture again: {CAPTURE_COMMAND}."
        )
    rows: list[tuple[str, str, float, int]] = []
    for name, seconds, num in _sum_by_name(capture, KERNEL, capture.find_column(KERNEL, *NAMES)):
        rows.append((name, classify_kernel(name), seconds, num))
    if not rows:
        raise DataError(
            f"{capture.path}: {KERNEL} is empty: no kernel ran during the capture. Capture again during "
            f"training steps: {CAPTURE_COMMAND}."
        )
    transfers = _read_transfers(capture)
    for transfer in transfers:
        kind = "memory set" if transfer.direction == "memory set" else "copy"
        rows.append((transfer.direction, kind, transfer.seconds, transfer.num))
    works = sum_work(rows)
    devices, seconds = _read_device_times(capture)
    calls = _sum_calls(capture)
    num_synchronisations, waited = _count_synchronisations(capture, calls)
    return TraceSummary(
        source="Nsight Systems",
        measures="kernels",
        window_seconds=seconds,
        num_steps=num_steps,
        classes=sum_by_class(works),
        top=works[:NUM_TOP],
        devices=devices,
        phases=tuple(_read_ranges(capture)),
        calls=calls[:NUM_TOP],
        transfers=transfers,
        num_launches=sum(call.num for call in calls if LAUNCH.search(call.name)) if calls else None,
        num_synchronisations=num_synchronisations,
        synchronisation_seconds=waited,
        notes=tuple(_list_notes(capture)),
    )


def _sum_by_name(capture: NsightCapture, table: str, column: str) -> list[tuple[str, float, int]]:
    """Name, seconds and number of the rows of a table, summed by name.

    An upsert adds each row to the total of its name; GROUP BY would sort all rows.
    """
    capture.base.execute("DROP TABLE IF EXISTS temp.total")
    capture.base.execute("CREATE TEMP TABLE total (id INTEGER PRIMARY KEY, length INTEGER, num INTEGER)")
    capture.base.execute(f"""
        INSERT INTO total SELECT COALESCE({column}, -1), "end" - start, 1 FROM {table} WHERE true
        ON CONFLICT (id) DO UPDATE SET length = length + excluded.length, num = num + 1""")
    names = "NULL"
    if capture.list_columns("StringIds"):
        names = "(SELECT value FROM StringIds s WHERE s.id = total.id)"
    return capture.fetch_rows(f"SELECT COALESCE({names}, 'unnamed'), length * {NANO}, num FROM total")


def _read_transfers(capture: NsightCapture) -> tuple[Transfer, ...]:
    """Memory operations by direction, longest first."""
    found: list[Transfer] = []
    for table, kind in ((COPY, capture.find_column(COPY, "copyKind")), (SET, "NULL")):
        if not capture.has_columns(table):
            continue
        size = capture.find_column(table, "bytes")
        rows = capture.fetch_rows(f'SELECT {kind}, COUNT(*), SUM("end" - start), SUM({size}) FROM {table} GROUP BY 1')
        for number, num, nanoseconds, num_bytes in rows:
            direction = "memory set" if table == SET else DIRECTIONS.get(number, "other directions")
            found.append(Transfer(direction, num, nanoseconds * NANO, num_bytes))
    return tuple(sorted(found, key=lambda transfer: -transfer.seconds))


def _read_device_times(capture: NsightCapture) -> tuple[tuple[DeviceTime, ...], float]:
    """Work and gaps of each device, and the seconds from the first work of any device to the end of the last."""
    _collect_gaps(capture)
    work = _build_work_query(capture)
    extents: list[tuple[int, int, int]] = []
    for (device,) in sorted(capture.fetch_rows(f"SELECT DISTINCT device FROM ({work})")):
        # one pass per device: GROUP BY would sort everything
        ((first, last),) = capture.fetch_rows(f"SELECT MIN(start), MAX(stop) FROM ({work}) WHERE device = {device}")
        extents.append((device, first, last))
    begin = min(first for _, first, _ in extents)
    end = max(last for _, _, last in extents)

    bounds = " ".join(f"WHEN stop - start <= {bound / NANO:.0f} THEN {i}" for i, bound in enumerate(GAP_BOUNDS))
    place = f"CASE {bounds} ELSE {len(GAP_BOUNDS)} END"
    query = f"SELECT device, {place}, COUNT(*), SUM(stop - start), MAX(stop - start) FROM gap GROUP BY 1, 2"
    counted = {(device, place): row for device, place, *row in capture.fetch_rows(query)}
    names: dict[int, str] = {}
    if {"id", "name"} <= capture.list_columns("TARGET_INFO_GPU"):
        names = dict(capture.fetch_rows("SELECT id, name FROM TARGET_INFO_GPU"))
    host_bound = _sum_host_bound_gaps(capture)
    devices: list[DeviceTime] = []
    for device, first, last in extents:
        gaps: list[tuple[float | None, int, float]] = []
        busy, longest = last - first, 0
        for place, bound in enumerate((*GAP_BOUNDS, None)):
            num, length, longest_of_class = counted.get((device, place), (0, 0, 0))
            gaps.append((bound, num, length * NANO))
            busy -= length
            longest = max(longest, longest_of_class)
        late = None if host_bound is None else host_bound.get(device, 0) * NANO
        devices.append(DeviceTime(device, names.get(device), busy * NANO, tuple(gaps), longest * NANO, late))
    return tuple(devices), (end - begin) * NANO


def _build_work_query(capture: NsightCapture) -> str:
    """A query of all device work: device, start, stop, call, process; NULL for a column that does not exist."""
    queries: list[str] = []
    for table in DEVICE_TABLES:
        if not capture.has_columns(table):
            continue
        device = capture.find_column(table, "deviceId")
        call = capture.find_column(table, "correlationId")
        process = f"globalPid / {PROCESS}" if capture.has_columns(table, "globalPid") else "NULL"
        queries.append(
            f'SELECT COALESCE({device}, 0) AS device, start, "end" AS stop, {call} AS call, '
            f"{process} AS process FROM {table}"
        )
    return " UNION ALL ".join(queries)


def _collect_gaps(capture: NsightCapture) -> None:
    """Create the temporary table `gap`: device, start, stop, and call and process of the work that ends the gap."""
    capture.base.execute(f"""
        CREATE TEMP TABLE gap AS
        SELECT device, reached AS start, start AS stop, call, process FROM (
            SELECT *, MAX(stop) OVER (
                PARTITION BY device ORDER BY start ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS reached
            FROM ({_build_work_query(capture)})
        ) WHERE start > reached""")


def _sum_host_bound_gaps(capture: NsightCapture) -> dict[int, int] | None:
    """Nanoseconds of gaps before the host launched the next work, by device; None if calls are not recorded."""
    ((num_calls, num_processes),) = capture.fetch_rows("SELECT COUNT(call), COUNT(process) FROM gap")
    if not num_calls or not capture.has_columns(CALL, "correlationId"):
        return None
    # correlation numbers are unique within a process only
    same = ""
    if num_processes and capture.has_columns(CALL, "globalTid"):
        same = f"AND c.globalTid / {PROCESS} = g.process"
    capture.base.execute("CREATE INDEX temp.gap_by_call ON gap (call)")
    return dict(
        capture.fetch_rows(f"""
        SELECT g.device, SUM(MIN(g.stop, c."end") - g.start)
        FROM {CALL} c CROSS JOIN gap g ON g.call = c.correlationId {same}
        WHERE c."end" > g.start GROUP BY g.device""")
    )


def _sum_calls(capture: NsightCapture) -> tuple[Work, ...]:
    """CUDA calls of the host, by name without the version suffix (cudaLaunchKernel_v7000)."""
    if not capture.has_columns(CALL, "nameId") or not capture.list_columns("StringIds"):
        return ()
    rows = _sum_by_name(capture, CALL, "nameId")
    return sum_work((name.partition("_v")[0], "call", seconds, num) for name, seconds, num in rows)


def _count_synchronisations(capture: NsightCapture, calls: Sequence[Work]) -> tuple[int | None, float | None]:
    """Number and seconds of calls in which the host waits for a device."""
    if calls:
        waits = [call for call in calls if SYNCHRONISE.search(call.name)]
        return sum(call.num for call in waits), sum(call.seconds for call in waits)
    if not capture.has_columns(SYNC):
        return None, None
    ((num, nanoseconds),) = capture.fetch_rows(f'SELECT COUNT(*), COALESCE(SUM("end" - start), 0) FROM {SYNC}')
    return num, nanoseconds * NANO


def _read_ranges(capture: NsightCapture) -> Iterator[Phase]:
    """NVTX ranges by name, those with the most time; ranges can be nested."""
    columns = capture.list_columns("NVTX_EVENTS")
    if not {"start", "end"} <= columns:
        return
    # a range holds its name as a text or, if the program registered the name, as a number
    text = "n.text" if "text" in columns else "NULL"
    registered, joined = "NULL", ""
    if "textId" in columns and capture.list_columns("StringIds"):
        registered, joined = "s.value", "LEFT JOIN StringIds s ON s.id = n.textId"
    query = f"""
        SELECT COALESCE({text}, {registered}) AS name, COUNT(*), SUM(n."end" - n.start) AS seconds
        FROM NVTX_EVENTS n {joined} WHERE n."end" > n.start AND name IS NOT NULL
        GROUP BY name ORDER BY seconds DESC LIMIT {NUM_TOP}"""
    for name, num, nanoseconds in capture.fetch_rows(query):
        yield Phase(name, num, nanoseconds * NANO)


def _list_notes(capture: NsightCapture) -> Iterator[str]:
    if not capture.has_columns(CALL, "correlationId"):
        yield "The capture holds no calls of the host: launches and host-bound gaps are unknown."
    if capture.has_columns(GRAPH) and capture.fetch_rows(f"SELECT 1 FROM {GRAPH} LIMIT 1"):
        yield (
            "CUDA graphs were captured as a whole: their kernels have no class, and their time counts as busy. Capture "
            "with --cuda-graph-trace node to see the kernels."
        )
    diagnosed = capture.list_columns("DIAGNOSTIC_EVENT")
    if {"severity", "text"} <= diagnosed:
        for (text,) in capture.fetch_rows("SELECT text FROM DIAGNOSTIC_EVENT WHERE text LIKE '%dropped%' LIMIT 3"):
            yield f"Nsight Systems reported: {text}"
