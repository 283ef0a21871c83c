"""A capture of Nsight Systems, exported as SQLite -> TraceSummary, without torch.

The capture counts in nanoseconds, the summary in seconds. Everything is counted by SQLite, which sorts in temporary
files: a capture of millions of kernels takes disk and time, not memory. Tables exist only for what was traced, and
columns differ between versions, so both are looked for.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from fivetune.errors import DataError
from fivetune.telemetry.chrome import LAUNCH, SYNCHRONISE
from fivetune.telemetry.kernels import kernel_class
from fivetune.telemetry.trace import (
    GAP_BOUNDS,
    NUM_TOP,
    DeviceTime,
    Phase,
    TraceSummary,
    Transfer,
    Work,
    by_class,
    ranked,
)

NANO = 1e-9
CACHE_KIB = 64 * 1024
ACTIVITIES = ("KERNEL", "RUNTIME", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "GRAPH_TRACE")
KERNEL, CALL, COPY, SET, SYNC, GRAPH = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ACTIVITIES)
DEVICE_WORK = (KERNEL, COPY, SET, GRAPH)
NAMES = ("demangledName", "shortName", "mangledName")
DIRECTIONS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
}  # fmt: skip
"""CUpti_ActivityMemcpyKind; ENUM_CUDA_MEMCPY_OPER, where it is there, numbers them the same way."""
PROCESS = 1 << 24  # globalPid and globalTid hold the process above their lowest 24 bits
CAPTURE = "nsys profile --trace cuda,nvtx COMMAND, then nsys export --type sqlite REPORT.nsys-rep"


def summarise_capture(path: Path, *, num_steps: int | None = None) -> TraceSummary:
    """What a capture says.

    Args:
        num_steps: training steps that it holds, if that is known; no figures per step otherwise.

    Raises DataError if the file is no such capture, or holds no kernels.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Give a capture exported as SQLite ({CAPTURE}).")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            base.execute("PRAGMA temp_store = FILE")
            base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            return _summarise(Capture(path, base), num_steps)
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path}: cannot be read as an SQLite file: {error}. Export the capture again "
                        f"({CAPTURE}).") from None  # fmt: skip


class Capture:
    """An open capture, and which tables and columns it has."""

    def __init__(self, path: Path, base: sqlite3.Connection) -> None:
        self.path = path
        self.base = base
        self._tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}

    def columns(self, table: str) -> set[str]:
        """Empty where there is no such table."""
        return {row[1] for row in self.base.execute(f"PRAGMA table_info({table})")} if table in self._tables else set()

    def has(self, table: str, *columns: str) -> bool:
        return {"start", "end", *columns} <= self.columns(table)

    def column(self, table: str, *names: str) -> str | None:
        """The first of the columns that the table has."""
        return next((name for name in names if name in self.columns(table)), None)

    def rows(self, query: str) -> list[tuple]:
        return self.base.execute(query).fetchall()


def _summarise(capture: Capture, num_steps: int | None) -> TraceSummary:
    if not capture.has(KERNEL):
        raise DataError(f"{capture.path}: holds no kernels (no table {KERNEL}). It was captured without CUDA, or on "
                        f"a machine without a GPU. Capture again: {CAPTURE}.")  # fmt: skip
    kernels = _kernels(capture)
    if not kernels:
        raise DataError(f"{capture.path}: {KERNEL} is empty: no kernel ran while it was captured. Capture again, over "
                        f"some training steps: {CAPTURE}.")  # fmt: skip
    transfers = tuple(_transfers(capture))
    moved = {(one.direction, "memory set" if one.direction == "memory set" else "copy"): (one.seconds, one.num)
             for one in transfers}  # fmt: skip
    works = ranked(kernels | moved)
    devices, seconds = _devices(capture)
    calls = _calls(capture)
    num_synchronisations, waited = _synchronisations(capture, calls)
    return TraceSummary(
        source="Nsight Systems",
        measures="kernels",
        window_seconds=seconds,
        num_steps=num_steps,
        classes=by_class(works),
        top=works[:NUM_TOP],
        devices=devices,
        phases=tuple(_ranges(capture)),
        calls=calls[:NUM_TOP],
        transfers=transfers,
        num_launches=sum(call.num for call in calls if LAUNCH.search(call.name)) if calls else None,
        num_synchronisations=num_synchronisations,
        synchronisation_seconds=waited,
        notes=tuple(_notes(capture)),
    )


def _kernels(capture: Capture) -> dict[tuple[str, str], tuple[float, int]]:
    """Seconds and number of the kernels by name and class."""
    column = capture.column(KERNEL, *NAMES)
    return _added((name, kernel_class(name), length, num) for name, length, num in _totals(capture, KERNEL, column))


def _totals(capture: Capture, table: str, column: str | None) -> Iterator[tuple[str, int, int]]:
    """Name, nanoseconds and number of what a table holds, by the number of the name.

    Each row is added to the one that is kept for its name; grouping would sort all of them.
    """
    capture.base.execute("DROP TABLE IF EXISTS temp.total")
    capture.base.execute("CREATE TEMP TABLE total (id INTEGER PRIMARY KEY, length INTEGER, num INTEGER)")
    capture.base.execute(f"""
        INSERT INTO total SELECT COALESCE({column or "NULL"}, -1), "end" - start, 1 FROM {table} WHERE true
        ON CONFLICT (id) DO UPDATE SET length = length + excluded.length, num = num + 1""")
    names = "(SELECT value FROM StringIds s WHERE s.id = total.id)" if capture.columns("StringIds") else "NULL"
    yield from capture.rows(f"SELECT COALESCE({names}, 'unnamed'), length, num FROM total")


def _added(rows: Iterable[tuple[str, str, int, int]]) -> dict[tuple[str, str], tuple[float, int]]:
    """Name, kind, nanoseconds, number each -> (seconds, number) by name and kind."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for name, kind, nanoseconds, num in rows:
        seconds, before = found.get((name, kind), (0.0, 0))
        found[name, kind] = (seconds + nanoseconds * NANO, before + num)
    return found


def _transfers(capture: Capture) -> Iterator[Transfer]:
    """Memory operations by direction, the longest first."""
    found = []
    if capture.has(COPY):
        kind = capture.column(COPY, "copyKind") or "NULL"
        size = "SUM(bytes)" if capture.has(COPY, "bytes") else "NULL"
        query = f'SELECT {kind}, COUNT(*), SUM("end" - start), {size} FROM {COPY} GROUP BY {kind}'
        found += [(DIRECTIONS.get(kind, "other directions"), *rest) for kind, *rest in capture.rows(query)]
    if capture.has(SET):
        size = "SUM(bytes)" if capture.has(SET, "bytes") else "NULL"
        query = f'SELECT COUNT(*), SUM("end" - start), {size} FROM {SET} HAVING COUNT(*) > 0'
        found += [("memory set", *rest) for rest in capture.rows(query)]
    for direction, num, nanoseconds, num_bytes in sorted(found, key=lambda one: -one[2]):
        yield Transfer(direction, num, nanoseconds * NANO, num_bytes)


def _devices(capture: Capture) -> tuple[tuple[DeviceTime, ...], float]:
    """Each device's work and gaps, and the seconds from the first work of any device to the end of the last."""
    _collect_gaps(capture)
    work = _all_work(capture)
    extents = [  # one pass for each device: grouping would sort everything
        (device, *capture.rows(f"SELECT MIN(start), MAX(stop) FROM ({work}) WHERE device = {device}")[0])
        for (device,) in sorted(capture.rows(f"SELECT DISTINCT device FROM ({work})"))
    ]
    seconds = (max(last for *_, last in extents) - min(first for _, first, _ in extents)) * NANO
    bounds = " ".join(f"WHEN stop - start <= {bound / NANO:.0f} THEN {i}" for i, bound in enumerate(GAP_BOUNDS))
    counted: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    place = f"CASE {bounds} ELSE {len(GAP_BOUNDS)} END"
    query = f"SELECT device, {place}, COUNT(*), SUM(stop - start) FROM gap GROUP BY 1, 2"
    for device, length_class, num, length in capture.rows(query):
        counted[device][length_class] = (num, length)
    longest = dict(capture.rows("SELECT device, MAX(stop - start) FROM gap GROUP BY device"))
    names, host_bound = _device_names(capture), _host_bound(capture)
    devices = []
    for device, first, last in extents:
        by_length = [counted[device].get(place, (0, 0)) for place in range(len(GAP_BOUNDS) + 1)]
        gaps = [(bound, num, length * NANO)
                for bound, (num, length) in zip((*GAP_BOUNDS, None), by_length, strict=True)]  # fmt: skip
        busy = last - first - sum(length for _, length in by_length)
        late = None if host_bound is None else host_bound.get(device, 0) * NANO
        devices.append(DeviceTime(
            device, names.get(device), busy * NANO, tuple(gaps), longest.get(device, 0) * NANO, late,
        ))  # fmt: skip
    return tuple(devices), seconds


def _all_work(capture: Capture) -> str:
    """A query of all work of the devices: device, start, stop, call, process; NULL where a column is not there."""
    queries = []
    for table in DEVICE_WORK:
        if not capture.has(table):
            continue
        device, call = (capture.column(table, name) or "NULL" for name in ("deviceId", "correlationId"))
        process = f"globalPid / {PROCESS}" if capture.has(table, "globalPid") else "NULL"
        queries.append(f'SELECT COALESCE({device}, 0) AS device, start, "end" AS stop, {call} AS call, '
                       f"{process} AS process FROM {table}")  # fmt: skip
    return " UNION ALL ".join(queries)


def _collect_gaps(capture: Capture) -> None:
    """The temporary table `gap`: device, start, stop, and the call and process of the work that ends it."""
    capture.base.execute(f"""
        CREATE TEMP TABLE gap AS
        SELECT device, reached AS start, start AS stop, call, process FROM (
            SELECT *, MAX(stop) OVER (
                PARTITION BY device ORDER BY start ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS reached
            FROM ({_all_work(capture)})
        ) WHERE start > reached""")


def _host_bound(capture: Capture) -> dict[int, int] | None:
    """Nanoseconds of gaps until the host had launched what came next, by device; None where calls are not known."""
    if not capture.has(CALL, "correlationId") or not capture.rows("SELECT 1 FROM gap WHERE call IS NOT NULL LIMIT 1"):
        return None
    same = ""
    if capture.has(CALL, "globalTid") and capture.rows("SELECT 1 FROM gap WHERE process IS NOT NULL LIMIT 1"):
        same = f"AND c.globalTid / {PROCESS} = g.process"
    capture.base.execute("CREATE INDEX temp.gap_by_call ON gap (call)")
    return dict(capture.rows(f"""
        SELECT g.device, SUM(MIN(g.stop, c."end") - g.start)
        FROM {CALL} c CROSS JOIN gap g ON g.call = c.correlationId {same}
        WHERE c."end" > g.start GROUP BY g.device"""))  # fmt: skip


def _device_names(capture: Capture) -> dict[int, str]:
    if not {"id", "name"} <= capture.columns("TARGET_INFO_GPU"):
        return {}
    return dict(capture.rows("SELECT id, name FROM TARGET_INFO_GPU"))


def _calls(capture: Capture) -> tuple[Work, ...]:
    """What the host called, by name without its version (cudaLaunchKernel_v7000)."""
    if not capture.has(CALL, "nameId") or not capture.columns("StringIds"):
        return ()
    totals = _totals(capture, CALL, "nameId")
    return ranked(_added((name.partition("_v")[0], "call", length, num) for name, length, num in totals))


def _synchronisations(capture: Capture, calls: Sequence[Work]) -> tuple[int | None, float | None]:
    """Number and seconds of the calls in which the host waited for a device."""
    if calls:
        waits = [call for call in calls if SYNCHRONISE.search(call.name)]
        return sum(call.num for call in waits), sum(call.seconds for call in waits)
    if not capture.has(SYNC):
        return None, None
    ((num, nanoseconds),) = capture.rows(f'SELECT COUNT(*), COALESCE(SUM("end" - start), 0) FROM {SYNC}')
    return num, nanoseconds * NANO


def _ranges(capture: Capture) -> Iterator[Phase]:
    """NVTX ranges by name, those of the longest time; ranges may lie in one another."""
    texts = [f"n.{name}" for name in ("text",) if name in capture.columns("NVTX_EVENTS")]
    joined = ""
    if "textId" in capture.columns("NVTX_EVENTS") and capture.columns("StringIds"):
        texts.append("s.value")
        joined = "LEFT JOIN StringIds s ON s.id = n.textId"
    if not capture.has("NVTX_EVENTS") or not texts:
        return
    query = f"""
        SELECT COALESCE({", ".join(texts)}, NULL) AS name, COUNT(*), SUM(n."end" - n.start) AS seconds
        FROM NVTX_EVENTS n {joined} WHERE n."end" > n.start AND name IS NOT NULL
        GROUP BY name ORDER BY seconds DESC LIMIT {NUM_TOP}"""
    for name, num, nanoseconds in capture.rows(query):
        yield Phase(name, num, nanoseconds * NANO)


def _notes(capture: Capture) -> Iterator[str]:
    if not capture.has(CALL, "correlationId"):
        yield "The capture holds no calls of the host, so launches and the host's part in the gaps are not known."
    if capture.has(GRAPH) and capture.rows(f"SELECT 1 FROM {GRAPH} LIMIT 1"):
        yield ("CUDA graphs were captured as wholes: their kernels are in no class, their time counts as busy. Capture "
               "with --cuda-graph-trace node to see them.")  # fmt: skip
    diagnosed = capture.columns("DIAGNOSTIC_EVENT")
    if {"severity", "text"} <= diagnosed:
        for (text,) in capture.rows("SELECT text FROM DIAGNOSTIC_EVENT WHERE text LIKE '%dropped%' LIMIT 3"):
            yield f"Nsight Systems reported: {text}"
