"""The checks of reliability's rows: what a run that broke a promise would leave makes them fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import pytest

from reliability.rows import kills, signals, soak
from reliability.rows.buckets import Proxy
from reliability.workload import check_same_run


def write_records(run: Path, steps: list[int]) -> Path:
    """A run of two steps with these records."""
    (run / "model").mkdir(parents=True)
    (run / "predictions").mkdir()
    (run / "model" / "model.safetensors").write_bytes(b"weights")
    (run / "predictions" / "eval-2.jsonl").write_text("{}\n")
    shutil.copy(run.parent / "config.yaml", run)
    values = dict.fromkeys(("lr", "num_input_tokens", "num_target_tokens", "world_size", "num_examples_seen"), 1)
    values |= dict.fromkeys(("effective_lr", "grad_norm", "peak_bytes", "mfu"), None)
    values |= dict.fromkeys(("padding_fraction", "step_seconds", "data_seconds"), 0.1)
    lines = [json.dumps({"step": step, "loss": step / 2, **values}) for step in steps]
    (run / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run


def test_a_resumed_run_must_have_the_records_of_the_undisturbed_one(tmp_path):
    (tmp_path / "config.yaml").write_text("run:\n  dir: run\n")
    whole = write_records(tmp_path / "whole", [1, 2])
    check_same_run(write_records(tmp_path / "same", [1, 2]), whole)
    for name, steps in (("twice", [1, 2, 2]), ("lost", [2]), ("swapped", [2, 1])):
        with pytest.raises(AssertionError, match=r"other than in the undisturbed run: \['steps'\]"):
            check_same_run(write_records(tmp_path / name, steps), whole)
    (tmp_path / "same" / "predictions" / "eval-1.jsonl").touch()
    with pytest.raises(AssertionError, match=r"'eval-1.jsonl'"):
        check_same_run(tmp_path / "same", whole)


@pytest.mark.parametrize(
    ("code", "is_starting", "has_run", "is_right"),
    [(143, False, True, True), (0, False, True, False), (0, True, True, False), (0, True, False, False),
     (-15, True, False, True), (-15, True, True, False), (-15, False, False, False)],
)  # fmt: skip
def test_a_run_that_a_signal_did_not_stop_has_failed(code, is_starting, has_run, is_right, tmp_path):
    if has_run:
        (tmp_path / "run").mkdir()
    done = CompletedProcess("", code, "", "SIGTERM")
    with nullcontext() if is_right else pytest.raises(AssertionError):
        signals.check_stopped(done, tmp_path / "run", signal.SIGTERM, is_starting=is_starting)


def test_a_signal_that_comes_too_late_is_sent_to_another_run(tmp_path, monkeypatch):
    """The first run has ended before its signal, the second one has two steps left, the third one hears it."""
    run, started, sent = tmp_path / "run", list[int](), list[bool]()

    class Process:
        def __enter__(self):
            started.append(len(started))
            self.code = 0 if len(started) == 1 else None
            return self

        def __exit__(self, *error):
            pass

        def kill_tree(self):
            pass

    monkeypatch.setattr(signals, "start_training", lambda recipe: [run.mkdir(), Process()][1])
    monkeypatch.setattr(signals, "is_far_from_end", lambda run: len(started) == 3)
    monkeypatch.setattr(signals, "send_and_wait", lambda *_, is_starting: sent.append(is_starting))
    signals.stop_by_signal(tmp_path, run, signal.SIGTERM, 0.01, 3.0)
    assert (started, sent) == ([0, 1, 2], [False])
    monkeypatch.setattr(signals, "is_far_from_end", lambda run: False)
    with pytest.raises(AssertionError, match=r"^no signal came in time"):
        shutil.rmtree(run)
        signals.stop_by_signal(tmp_path, run, signal.SIGTERM, 0.01, 3.0)


def test_each_of_two_processes_has_a_time_of_its_own():
    """The second one, which is refused, ends long after the first."""

    class Process:
        def __init__(self, pid: int, seconds: float) -> None:
            self.pid, self._end = pid, time.monotonic() + seconds

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        @property
        def code(self) -> int | None:
            return None if time.monotonic() < self._end else 0

        def wait(self):
            return CompletedProcess("", 0)

    processes = iter([Process(1, 0), Process(2, 0.3)])
    first, second = kills.start_both(cast("Any", lambda: next(processes)), 0.0)
    assert (first.pid, second.pid) == (1, 2) and first.seconds < 0.2 <= second.seconds


@pytest.mark.parametrize(("per_step", "is_right"), [(500, True), (1_200, False)])
def test_memory_that_grows_with_each_step_is_found_in_the_run_of_each_change(per_step, is_right):
    samples = [soak.Sample(step, 2**28 + per_step * step, 9) for step in range(100, 10_000, 100)]
    with nullcontext() if is_right else pytest.raises(AssertionError, match=r"memory grows by 1\.14 MiB"):
        soak.check_flat(samples, 10_000)


@pytest.mark.parametrize(
    "name", ["telemetry.jsonl", "report.html", "predictions/eval-1.jsonl", "model/config.json", "new"]
)
def test_every_file_of_a_long_run_has_a_bound(name, tmp_path):
    for step in (9_800, 9_900, 10_000):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "model.safetensors").write_bytes(bytes(2**23))
    (tmp_path / "best").symlink_to("checkpoints/9900")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    soak.check_files(tmp_path, 10_000)
    os.truncate(tmp_path / name, 2**23)
    with pytest.raises(AssertionError, match=f"{name} has 8,388,608 bytes, above "):
        soak.check_files(tmp_path, 10_000)


def test_a_bucket_knows_what_was_whole_before_the_fault():
    """The manifest of step 2 comes after the fault, which has the third write."""
    proxy = Proxy(0, "500", first=3, num=1, on_fault=lambda: None)
    names = ("1/model.safetensors", "1/manifest.json", "2/model.safetensors", "2/manifest.json")
    writes = [f"PUT /bucket/run/checkpoints/{name} HTTP/1.1\r\n".encode() for name in names]
    assert [proxy._is_faulty(one) for one in writes] == [False, False, True, False]
    assert proxy.newest == 1
    proxy.close()
