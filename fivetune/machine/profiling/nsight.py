"""Summary of an Nsight Systems capture exported as SQLite, without torch.

In: the SQLite file. Out: a TraceSummary. Times in the capture are nanoseconds, in the summary seconds. SQLite counts
and sorts in temporary files: a capture of millions of kernels takes disk space and time, not memory. Tables exist only
for traced activities, and columns differ between versions of Nsight Systems, so both are looked up.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fivetune.errors import DataError
from fivetune.machine.profiling.chrome import LAUNCH, SYNCHRONISE
from fivetune.machine.profiling.kernels import classify_kernel
from fivetune.machine.profiling.summary import GAP_BOUNDS, NUM_TOP, rank_work, sum_by_class
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
        self._tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}

    def list_columns(self, table: str) -> set[str]:
        """Columns of a table; empty if the table does not exist."""
        return {row[1] for row in self.base.execute(f"PRAGMA table_info({table})")} if table in self._tables else set()

    def has_columns(self, table: str, *columns: str) -> bool:
        return {"start", "end", *columns} <= self.list_columns(table)

    def find_column(self, table: str, *names: str) -> str | None:
        """The first of `names` that is a column of the table."""
        return next((name for name in names if name in self.list_columns(table)), None)

    def fetch_rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.base.execute(query).fetchall()


def _summarise(capture: NsightCapture, num_steps: int | None) -> TraceSummary:
    if not capture.has_columns(KERNEL):
        raise DataError(
            f"{capture.path}: no kernels (no table {KERNEL}). The capture was made without CUDA tracing or on "
            f"a machine without a GPU. Capture again: {CAPTURE_COMMAND}."
        )
    kernels = _sum_kernels(capture)
    if not kernels:
        raise DataError(
            f"{capture.path}: {KERNEL} is empty: no kernel ran during the capture. Capture again during "
            f"training steps: {CAPTURE_COMMAND}."
        )
    transfers = tuple(_read_transfers(capture))
    moved = {
        (one.direction, "memory set" if one.direction == "memory set" else "copy"): (one.seconds, one.num)
        for one in transfers
    }
    works = rank_work(kernels | moved)
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


def _sum_kernels(capture: NsightCapture) -> dict[tuple[str, str], tuple[float, int]]:
    """Seconds and number of kernels by name and class."""
    column = capture.find_column(KERNEL, *NAMES)
    return _sum_by_kind(
        (name, classify_kernel(name), length, num) for name, length, num in _sum_by_name(capture, KERNEL, column)
    )


def _sum_by_name(capture: NsightCapture, table: str, column: str | None) -> Iterator[tuple[str, int, int]]:
    """Name, nanoseconds and number of the rows of a table, summed by name.

    An upsert adds each row to the total of its name; GROUP BY would sort all rows.
    """
    capture.base.execute("DROP TABLE IF EXISTS temp.total")
    capture.base.execute("CREATE TEMP TABLE total (id INTEGER PRIMARY KEY, length INTEGER, num INTEGER)")
    capture.base.execute(f"""
        INSERT INTO total SELECT COALESCE({column or "NULL"}, -1), "end" - start, 1 FROM {table} WHERE true
        ON CONFLICT (id) DO UPDATE SET length = length + excluded.length, num = num + 1""")
    names = "(SELECT value FROM StringIds s WHERE s.id = total.id)" if capture.list_columns("StringIds") else "NULL"
    yield from capture.fetch_rows(f"SELECT COALESCE({names}, 'unnamed'), length, num FROM total")


def _sum_by_kind(rows: Iterable[tuple[str, str, int, int]]) -> dict[tuple[str, str], tuple[float, int]]:
    """Sum (name, kind, nanoseconds, number) to (seconds, number) by name and kind."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for name, kind, nanoseconds, num in rows:
        seconds, before = found.get((name, kind), (0.0, 0))
        found[name, kind] = (seconds + nanoseconds * NANO, before + num)
    return found


def _read_transfers(capture: NsightCapture) -> Iterator[Transfer]:
    """Memory operations by direction, longest first."""
    found: list[tuple[str, int, int, int | None]] = []
    if capture.has_columns(COPY):
        kind = capture.find_column(COPY, "copyKind") or "NULL"
        size = "SUM(bytes)" if capture.has_columns(COPY, "bytes") else "NULL"
        query = f'SELECT {kind}, COUNT(*), SUM("end" - start), {size} FROM {COPY} GROUP BY {kind}'
        rows = capture.fetch_rows(query)
        found += [(DIRECTIONS.get(kind, "other directions"), num, length, total) for kind, num, length, total in rows]
    if capture.has_columns(SET):
        size = "SUM(bytes)" if capture.has_columns(SET, "bytes") else "NULL"
        query = f'SELECT COUNT(*), SUM("end" - start), {size} FROM {SET} HAVING COUNT(*) > 0'
        found += [("memory set", num, length, total) for num, length, total in capture.fetch_rows(query)]
    for direction, num, nanoseconds, num_bytes in sorted(found, key=lambda one: -one[2]):
        yield Transfer(direction, num, nanoseconds * NANO, num_bytes)


def _read_device_times(capture: NsightCapture) -> tuple[tuple[DeviceTime, ...], float]:
    """Work and gaps of each device, and the seconds from the first work of any device to the end of the last."""
    _collect_gaps(capture)
    work = _build_work_query(capture)
    extents: list[tuple[int, int, int]] = []
    for (device,) in sorted(capture.fetch_rows(f"SELECT DISTINCT device FROM ({work})")):
        # one pass per device: GROUP BY would sort everything
        ((first, last),) = capture.fetch_rows(f"SELECT MIN(start), MAX(stop) FROM ({work}) WHERE device = {device}")
        extents.append((device, first, last))
    seconds = (max(last for *_, last in extents) - min(first for _, first, _ in extents)) * NANO
    bounds = " ".join(f"WHEN stop - start <= {bound / NANO:.0f} THEN {i}" for i, bound in enumerate(GAP_BOUNDS))
    counted: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    place = f"CASE {bounds} ELSE {len(GAP_BOUNDS)} END"
    query = f"SELECT device, {place}, COUNT(*), SUM(stop - start) FROM gap GROUP BY 1, 2"
    for device, length_class, num, length in capture.fetch_rows(query):
        counted[device][length_class] = (num, length)
    longest: dict[int, int] = dict(capture.fetch_rows("SELECT device, MAX(stop - start) FROM gap GROUP BY device"))
    names, host_bound = _read_device_names(capture), _sum_host_bound_gaps(capture)
    devices: list[DeviceTime] = []
    for device, first, last in extents:
        by_length = [counted[device].get(place, (0, 0)) for place in range(len(GAP_BOUNDS) + 1)]
        gaps = [
            (bound, num, length * NANO) for bound, (num, length) in zip((*GAP_BOUNDS, None), by_length, strict=True)
        ]
        busy = last - first - sum(length for _, length in by_length)
        late = None if host_bound is None else host_bound.get(device, 0) * NANO
        devices.append(
            DeviceTime(
                device,
                names.get(device),
                busy * NANO,
                tuple(gaps),
                longest.get(device, 0) * NANO,
                late,
            )
        )
    return tuple(devices), seconds


def _build_work_query(capture: NsightCapture) -> str:
    """A query of all device work: device, start, stop, call, process; NULL for a column that does not exist."""
    queries: list[str] = []
    for table in DEVICE_TABLES:
        if not capture.has_columns(table):
            continue
        device, call = (capture.find_column(table, name) or "NULL" for name in ("deviceId", "correlationId"))
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
    if not capture.has_columns(CALL, "correlationId") or not capture.fetch_rows(
        "SELECT 1 FROM gap WHERE call IS NOT NULL LIMIT 1"
    ):
        return None
    same = ""
    if capture.has_columns(CALL, "globalTid") and capture.fetch_rows(
        "SELECT 1 FROM gap WHERE process IS NOT NULL LIMIT 1"
    ):
        same = f"AND c.globalTid / {PROCESS} = g.process"
    capture.base.execute("CREATE INDEX temp.gap_by_call ON gap (call)")
    return dict(
        capture.fetch_rows(f"""
        SELECT g.device, SUM(MIN(g.stop, c."end") - g.start)
        FROM {CALL} c CROSS JOIN gap g ON g.call = c.correlationId {same}
        WHERE c."end" > g.start GROUP BY g.device""")
    )


def _read_device_names(capture: NsightCapture) -> dict[int, str]:
    if not {"id", "name"} <= capture.list_columns("TARGET_INFO_GPU"):
        return {}
    return dict(capture.fetch_rows("SELECT id, name FROM TARGET_INFO_GPU"))


def _sum_calls(capture: NsightCapture) -> tuple[Work, ...]:
    """CUDA calls of the host, by name without the version suffix (cudaLaunchKernel_v7000)."""
    if not capture.has_columns(CALL, "nameId") or not capture.list_columns("StringIds"):
        return ()
    totals = _sum_by_name(capture, CALL, "nameId")
    return rank_work(_sum_by_kind((name.partition("_v")[0], "call", length, num) for name, length, num in totals))


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
    texts = [f"n.{name}" for name in ("text",) if name in capture.list_columns("NVTX_EVENTS")]
    joined = ""
    if "textId" in capture.list_columns("NVTX_EVENTS") and capture.list_columns("StringIds"):
        texts.append("s.value")
        joined = "LEFT JOIN StringIds s ON s.id = n.textId"
    if not capture.has_columns("NVTX_EVENTS") or not texts:
        return
    query = f"""
        SELECT COALESCE({", ".join(texts)}, NULL) AS name, COUNT(*), SUM(n."end" - n.start) AS seconds
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
