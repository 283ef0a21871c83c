"""Files that are appended to: whole lines, and nothing outside the run directory."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

from fivetune.rundir import TELEMETRY, read_jsonl
from fivetune.rundir.lines import JsonlFile, format_json_line, open_for_append
from fivetune.rundir.progress import Progress


class AlmostFull:
    """A file on a disk that takes three bytes of a line; then it is full."""

    def __init__(self, file):
        self._file = file

    def write(self, line):
        return self._file.write(line[:3])

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_costs_records_but_tears_no_line(tmp_path):
    path = tmp_path / TELEMETRY
    lines = JsonlFile(path)
    lines.append({"seconds": 1})
    file = lines._file
    lines._file = AlmostFull(file)
    with pytest.raises(OSError) as error:
        lines.append({"seconds": 2})
    assert error.value.errno == errno.ENOSPC
    lines._file = file
    lines.append({"seconds": 3})
    lines.close()
    assert [json.loads(line)["seconds"] for line in path.read_text().splitlines()] == [1, 3]


TORN = '{"text": "' + "x" * 200_000


WHOLE = '{"seconds": 1}\n'
CASES = {
    "empty": ("", []),
    "torn": (WHOLE + '{"sec', [1]),
    "torn first line": ('{"sec', []),
    "whole": (WHOLE, [1]),
    "long torn first line": (TORN, []),
    "long torn line": (WHOLE + TORN, [1]),
}


@pytest.mark.parametrize(("before", "kept"), CASES.values(), ids=CASES)
def test_a_torn_last_line_is_cut_before_appending(tmp_path, before, kept):
    path = tmp_path / TELEMETRY
    path.write_text(before)
    lines = JsonlFile(path)
    lines.append({"seconds": 9})
    lines.close()
    assert [record["seconds"] for record in read_jsonl(path)] == [*kept, 9]


def test_nothing_is_written_through_a_link(tmp_path):
    target = tmp_path / "private"
    target.write_text("mine")
    link = tmp_path / "log.txt"
    link.symlink_to(target)
    with pytest.raises(OSError, match="it is a symbolic link; remove it"):
        open_for_append(link)
    assert target.read_text() == "mine"


def test_pipes_and_folders_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        open_for_append(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        open_for_append(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_log_that_cannot_be_written_does_not_end_a_run(tmp_path, capfd, kind):
    log = tmp_path / "log.txt"
    log.mkdir() if kind == "folder" else log.symlink_to(tmp_path / "elsewhere")
    progress = Progress(log)
    progress.log("hello")
    progress.close()
    printed = capfd.readouterr().err
    assert (
        "log.txt: cannot be written: " in printed and "The run continues without it." in printed and "hello" in printed
    )
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_costs_the_log_but_neither_the_run_nor_a_whole_line(tmp_path, capfd):
    progress = Progress(tmp_path / "log.txt")
    progress.log("zero")
    progress._log = AlmostFull(progress._log)
    progress.log("one")
    progress.log("two")
    assert capfd.readouterr().err.count("cannot be written: No space left on device") == 1
    assert re.fullmatch(r"[\d:]{8} zero\n", (tmp_path / "log.txt").read_text())


def test_quiet_prints_warnings_only_and_silent_prints_nothing(tmp_path, capfd):
    for name, options in (("quiet", {"quiet": True}), ("silent", {"silent": True})):
        progress = Progress(tmp_path / name, **options)
        progress.log("a line")
        progress.warn("a warning")
        progress.close()
        assert (tmp_path / name).read_text().count("\n") == 2
    assert capfd.readouterr().err == "warning: a warning\n"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_json_does_not_have_is_not_written(value):
    with pytest.raises(ValueError, match="JSON"):
        format_json_line({"loss": value})


def test_a_terminal_on_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        progress = Progress(tmp_path / "log.txt")
        progress.log("hello")
        progress.warn("again")
        progress.close()
        with suppress(OSError):
            full.close()  # a text that it could not write is still in its buffer
    log = (tmp_path / "log.txt").read_text()
    assert re.sub(r"\d\d:\d\d:\d\d ", "", log).splitlines() == [
        "hello",
        "warning: standard error: cannot be written: No space left on device. The run continues.",
        "warning: again",
    ]
