"""Utilisation logs of other tools become telemetry."""

from __future__ import annotations

import gzip

import pytest

from fivetune.cli import main
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.reading.diagnosis.logs import find_run_starts, read_log

STATS = "Unnamed: 0,Timestamp (s),CPU (%),RAM (%),Swap (%),0:GPU (%),0:Mem (%),0:Temp (C)"
TWO = STATS + ",1:GPU (%),1:Mem (%),1:Temp (C)"
SMI = "timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W], clocks_event_reasons.active"


@pytest.fixture
def log(tmp_path):
    """Read lines as a log; a warning is an error."""

    def read(*lines, encoding="utf-8", **how):
        path = tmp_path / "log.csv"
        path.write_text("\n".join(lines) + "\n", encoding=encoding)
        return read_log(path, **how)

    return read


def test_a_row_per_moment(log):
    first, second = log(TWO, "0,1670978775.672,21.3,7.3,0.0,95,65,26,0,0,25", "1,1670978805.7,20.6,8,,,66,,N/A,0,[N/A]")
    assert (first.seconds, first.cpu_utilisation, first.ram_share, first.swap_share) == (
        1670978775.672,
        0.213,
        0.073,
        0,
    )
    assert [(d.utilisation, d.memory_busy, d.temperature_celsius) for d in first.devices] == [
        (0.95, 0.65, 26),
        (0, 0, 25),
    ]
    assert second.swap_share is None
    assert [(d.utilisation, d.memory_busy, d.temperature_celsius) for d in second.devices] == [
        (None, 0.66, None),
        (None, 0, None),
    ]
    assert first.core_utilisation is first.ram_used_bytes is first.devices[0].power_watts is None


def test_runs_appended_to_one_file(log):
    records = log(
        STATS,
        "0,100,50,5,0,90,60,50",
        "1,130,50,5,0,90,60,50",
        STATS,
        "0,900,50,5,0,90,60,50",
        TWO,
        "0,930,50,5,0,90,60,50,80,60,50",
        STATS,
        "0,10,50,5,0,90,60,50",
    )
    assert [(r.seconds, len(r.devices)) for r in records] == [(100, 1), (130, 1), (900, 1), (930, 2), (10, 1)]
    assert find_run_starts(records) == [0, 2, 4]
    assert find_run_starts([]) == []


def test_a_row_per_moment_and_device(log):
    first, second = log(
        SMI,
        "2024/05/01 12:00:00.000, 0, NVIDIA H100, 97 %, 40960 MiB, 402.51 W, 0x0000000000000004",
        "2024/05/01 12:00:00.004, 1, NVIDIA H100, 0 %, 2 MiB, [N/A], [Not Supported]",
        "2024/05/01 12:00:01.000, 0, NVIDIA H100, 96 %, 40960 MiB, 401.00 W, 0x0000000000000000",
        "2024/05/01 12:00:01.004, 1, NVIDIA H100, [Unknown Error], 2 MiB, 71.2 W, 0x0000000000000001",
    )
    assert (first.seconds, second.seconds) == (1714564800.0, 1714564801.0)
    assert [d.utilisation for r in (first, second) for d in r.devices] == [0.97, 0.0, 0.96, None]
    assert [d.power_watts for r in (first, second) for d in r.devices] == [402.51, None, 401.0, 71.2]
    assert [d.throttle_reasons for r in (first, second) for d in r.devices] == [("sw_power_cap",), None, (), ()]
    assert (first.devices[1].index, first.devices[1].memory_used_bytes, first.devices[1].name) == (
        1,
        2**21,
        "NVIDIA H100",
    )


def test_units_in_the_header_or_nowhere(log):
    rows = ["2024/05/01 12:00:00.000, GPU-aa, 97, 1024", "2024/05/01 12:00:00.001, GPU-bb, 0, 2"]
    names = "timestamp,uuid,utilization.gpu,memory.used"
    (with_header,) = log("timestamp, uuid, utilization.gpu [%], memory.used [MiB]", *rows)
    (without,) = log(*rows, columns=names)
    assert with_header == without
    assert [(d.index, d.utilisation, d.memory_used_bytes) for d in without.devices] == [(0, 0.97, 2**30), (1, 0, 2**21)]


def test_a_row_that_is_lost_does_not_shift_the_devices(log):
    rows = ["0, 0, 90 %", "0.01, 1, 80 %", "1, 0, broken", "1.01, 1, 81 %", "2, 0, 92 %", "2.01, 1, 82 %"]
    records = log("timestamp, index, utilization.gpu [%]", *rows, warn=lambda _: None)
    assert [[(d.index, d.utilisation) for d in r.devices] for r in records] == [
        [(0, 0.90), (1, 0.80)],
        [(1, 0.81)],
        [(0, 0.92), (1, 0.82)],
    ]


def test_devices_without_a_number(log):
    assert [r.devices[0].utilisation for r in log("timestamp,utilization.gpu [%]", "1,90 %", "2,80 %")] == [0.9, 0.8]
    with pytest.raises(DataError, match="rows of several devices, and no column that identifies the device"):
        log("timestamp,utilization.gpu [%]", *(f"{second}.00{gpu},{gpu} %" for second in range(3) for gpu in range(2)))


@pytest.mark.parametrize(
    "line, why",
    [
        ("1,200,50,5,0,90", "6 cells, the header has 8"),
        ("1,yesterday,50,5,0,90,60,50", "'yesterday' is not a time"),
        ("1,1670978775672,50,5,0,90,60,50", "'1670978775672' is not in seconds since 1970"),
        ("1,200,50,5,0,190,60,50", "'190' is out of range"),
        ("1,200,50,5,0,90 MiB,60,50", "'90 MiB' is not a number in %"),
        ("1,200,fifty,5,0,90,60,50", "'fifty' is not a number in %"),
        ('"1,200,50,5,0', "5 cells, the header has 8"),
    ],
)
def test_bad_rows_are_counted_and_the_first_is_told(log, line, why):
    told = []
    records = log(STATS, "0,100,50,5,0,90,60,50", "", line, "2,130,50,5,0,90,60,50", line, warn=told.append)
    assert [r.seconds for r in records] == [100, 130]
    (said,) = told
    assert f"skipped 2 unreadable rows. The first is line 4: {why}." in said


def test_diagnose_tells_unreadable_rows_without_a_place_in_the_source(tmp_path, capsys):
    path = tmp_path / "log.csv"
    path.write_text(f"{STATS}\n0,100,50,5,0,90,60,50\nx\n")
    assert main(["diagnose", str(path)]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert "skipped 1 unreadable rows. The first is line 3: 1 cells" in told and ".py" not in told


@pytest.mark.parametrize("lines", [["step,loss", "1,2.5"], ["timestamp,loss", "1,2.5"], ["1670978775.6,95,65"]])
def test_an_unknown_header_lists_what_is_understood(log, lines):
    with pytest.raises(DataError, match=r"log\.csv:1: .*header.*CPU \(%\).*0:GPU.*utilization.gpu.*memory.used"):
        log(*lines)


def test_files_that_hold_nothing(log, tmp_path):
    with pytest.raises(DataError, match="columns 'loss': not the header"):
        log("1,2", columns="loss")
    with pytest.raises(DataError, match=r"no row of figures. Give"):
        log(STATS)
    with pytest.raises(DataError, match=r"no row of figures \(line 2: 1 cells"):
        log(STATS, "x")
    with pytest.raises(DataError, match="no row of figures"):
        log("")
    with pytest.raises(FiveTuneEnvironmentError, match=r"gone\.csv"):
        read_log(tmp_path / "gone.csv")
    with pytest.raises(FiveTuneEnvironmentError, match="directory"):
        read_log(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_what_windows_and_spreadsheets_make_of_it(log, encoding, delimiter):
    lines = [line.replace(",", delimiter) for line in ('"Timestamp","CPU","0:GPU"', "100,50,90\r")]
    (record,) = log(*lines, encoding=encoding)
    assert (record.seconds, record.cpu_utilisation, record.devices[0].utilisation) == (100, 0.5, 0.9)


def test_a_gzipped_log_reads_like_the_plain_one(tmp_path):
    rows = f"{STATS}\n0,100,50,5,0,90,60,50\n"
    (tmp_path / "log.csv").write_text(rows)
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(rows.encode()))
    assert read_log(tmp_path / "log.csv.gz") == read_log(tmp_path / "log.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(rows.encode())[:-9])
    with pytest.raises(DataError, match=r"cut\.csv\.gz: the gzip file is cut off"):
        read_log(tmp_path / "cut.csv.gz")


@pytest.mark.parametrize("content", [b"\x7fELF\x02\x00\x01\xff", b"\x1b]0;own\x07\xff\xfe,\xe9\n"])
def test_bytes_of_a_binary_file_are_never_printed(tmp_path, content):
    path = tmp_path / "program.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_log(path)
    assert str(caught.value).isascii() and str(caught.value).isprintable()
