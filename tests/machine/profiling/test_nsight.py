"""Captures of Nsight Systems: a made one, with the schema of its SQLite export, and what may be missing or wrong."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from fivetune.errors import DataError
from fivetune.machine.profiling.nsight import summarise_capture
from fivetune.rundir.trace import TraceSummary

K, M, S, R, N = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION"))
WHERE = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
)
SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    K: f"{WHERE}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER, blockX INTEGER",
    M: f"{WHERE}, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL",
    S: f"{WHERE}, value INTEGER NOT NULL, bytes INTEGER NOT NULL",
    R: "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    N: f"{WHERE}, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL",
    "TARGET_INFO_GPU": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, smCount INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, textId INTEGER",
}
NAMES = (
    "ampere_sgemm_128x64_tn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)",
    "cudaLaunchKernel_v7000", "cudaMemsetAsync_v3020", "cudaMemcpyAsync_v3020", "cudaStreamSynchronize_v3020", "step",
)  # fmt: skip
ZERO, PID, OTHER = 5_000_000_000, 1 << 24, 2 << 24

Rows = Mapping[str, Sequence[tuple]]


def work(start: int, end: int, call: int, *more: int, stream: int = 7, device: int = 0) -> tuple:
    return (ZERO + start, ZERO + end, device, 1, stream, call, PID, *more)


def call(start: int, end: int, number: int, name: int, process: int = PID) -> tuple:
    return (ZERO + start, ZERO + end, 0, process + 11, number, name, 0)


ROWS: Rows = {
    "StringIds": list(enumerate(NAMES)),
    K: [
        work(0, 100_000, 1, 0, 0, 1, 128),  # 5 us later the next one, which was launched in time
        work(105_000, 125_000, 2, 1, 1, 1, 128),  # 200 us later the next one, launched 190 us too late
        work(325_000, 425_000, 3, 0, 0, 1, 128),
        work(330_000, 400_000, 6, 2, 2, 1, 128, stream=8),  # beside the one before
    ],
    S: [work(425_000, 430_000, 4, 0, 1024)],
    M: [work(430_000, 530_000, 5, 4096, 2)],
    R: [
        call(-50_000, -40_000, 1, 3),
        call(-30_000, -20_000, 2, 3),
        call(300_000, 315_000, 3, 3),
        call(316_000, 318_000, 6, 3),
        call(318_000, 319_000, 4, 4),
        call(319_000, 320_000, 5, 5),
        call(440_000, 540_000, 7, 6),
        call(300_000, 324_000, 3, 6, process=OTHER),
    ],
    N: [work(440_000, 540_000, 7, 2, 0)],
    "TARGET_INFO_GPU": [(0, "NVIDIA RTX A6000", 84)],
    "NVTX_EVENTS": [(ZERO, ZERO + 540_000, 59, None, 7), (ZERO, None, 34, "a mark", None)],
}


def capture(path: Path, rows: Rows = ROWS, *, without: Sequence[str] = (), schema: Mapping[str, str] = SCHEMA) -> Path:
    """An SQLite file with the tables of `schema` but some, filled with `rows`."""
    with closing(sqlite3.connect(path)) as base:
        for table in schema.keys() - set(without):
            base.execute(f"CREATE TABLE {table} ({schema[table]})")
            for row in rows.get(table, ()):
                base.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        base.commit()
    return path


def seconds(summary: TraceSummary) -> dict[str, float]:
    return {work.kind: round(1e6 * work.seconds) for work in summary.classes}


def test_work_gaps_and_calls_come_out_in_seconds(tmp_path):
    found = summarise_capture(capture(tmp_path / "a.sqlite"), num_steps=2)
    assert seconds(found) == {"GEMM": 200, "copy": 100, "reduce": 70, "pointwise": 20, "memory set": 5}
    assert sum(work.share for work in found.classes) == pytest.approx(1)
    assert found.window_seconds == pytest.approx(530e-6)
    (device,) = found.devices
    assert (device.name, device.busy_seconds) == ("NVIDIA RTX A6000", pytest.approx(325e-6))
    assert [(num, round(1e6 * length)) for _, num, length in device.gaps] == [(1, 5), (0, 0), (1, 200), (0, 0)]
    assert device.host_bound_seconds == pytest.approx(190e-6)  # the other process's call of the same number is not ours
    assert found.busy_share == pytest.approx(325 / 530) and found.host_bound_share == pytest.approx(190 / 530)
    assert found.num_launches == 4 and found.divide_by_steps(found.num_launches) == 2
    assert [(one.direction, one.num_bytes) for one in found.transfers] == [("DtoH", 4096), ("memory set", 1024)]
    assert [(one.name, one.num) for one in found.phases] == [("step", 1)]
    assert found.top[0].name == NAMES[0] and found.top[0].num == 2
    assert {call.name for call in found.calls} == {name.partition("_v")[0] for name in NAMES[3:7]}


def test_two_devices_are_told_apart(tmp_path):
    rows = {**ROWS, K: [*ROWS[K], work(0, 53_000, 9, 0, 0, 1, 128, device=1)]}
    found = summarise_capture(capture(tmp_path / "a.sqlite", rows))
    assert [round(1e6 * device.busy_seconds) for device in found.devices] == [325, 53]
    assert found.busy_share == pytest.approx((325 + 53) / 2 / 530)


def test_missing_tables_and_columns_make_figures_unknown(tmp_path):
    old = {**SCHEMA, K: "start INT, end INT, shortName INT", M: "start INT, end INT"}
    rows = {**ROWS, K: [(row[0], row[1], row[8]) for row in ROWS[K]], M: [row[:2] for row in ROWS[M]]}
    found = summarise_capture(capture(tmp_path / "a.sqlite", rows, schema=old, without=(R, S, "NVTX_EVENTS")))
    assert seconds(found) == {"GEMM": 200, "copy": 100, "reduce": 70, "pointwise": 20}
    assert found.num_launches is None and found.host_bound_share is None and found.divide_by_steps(4) is None
    assert found.num_synchronisations == 1  # from their own table
    assert [one.num_bytes for one in found.transfers] == [None]
    assert "launches" in found.notes[0]


def test_kernels_without_names_are_counted(tmp_path):
    (work,) = summarise_capture(capture(tmp_path / "a.sqlite", without=("StringIds", M, S))).top
    assert (work.name, work.kind, work.num) == ("unnamed", "other", 4)


def test_names_that_stand_twice_count_together(tmp_path):
    twice = {
        **ROWS,
        "StringIds": [*enumerate((*NAMES, NAMES[0]))],
        K: [*ROWS[K], work(600_000, 700_000, 9, 8, 8, 1, 128)],
    }
    found = summarise_capture(capture(tmp_path / "a.sqlite", twice))
    assert (found.top[0].name, found.top[0].num, round(1e6 * found.top[0].seconds)) == (NAMES[0], 3, 300)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("start,end\n" * 50) and path, "cannot be read as an SQLite file"),
        (lambda path: path.write_bytes(b"") * 0 or path, ": no kernels"),
        (lambda path: capture(path, without=(K,)), "no kernels .* made without CUDA"),
        (lambda path: capture(path, {}), "is empty: no kernel ran"),
        (lambda path: path, "no such file"),
    ],
)
def test_what_is_no_capture_is_told_in_a_sentence(tmp_path, make, says):
    with pytest.raises(DataError, match=says) as error:
        summarise_capture(make(tmp_path / "a.sqlite"))
    assert "nsys" in str(error.value)


def test_the_capture_is_read_and_never_written(tmp_path):
    path = capture(tmp_path / "a.sqlite")
    before = path.read_bytes()
    summarise_capture(path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["a.sqlite"]


def test_a_capture_is_read_without_torch(tmp_path):
    path = capture(tmp_path / "a.sqlite")
    code = "import sys; from fivetune.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "NVIDIA RTX A6000" in done.stdout and "GEMM" in done.stdout
