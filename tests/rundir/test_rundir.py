"""The run directory: whole or torn files, and whose directory it is."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fake_run import make_eval, make_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivetune import rundir
from fivetune.errors import RunDirError
from fivetune.rundir import (
    CONFIG,
    DATA,
    EVALS,
    FORMAT_VERSION,
    MACHINE,
    STATUS,
    STEPS,
    TELEMETRY,
    TRACE_FOLDER,
    RunDir,
    lock_file,
    read_jsonl,
    read_run,
)
from fivetune.rundir import writer as writer_module
from fivetune.rundir.records import Prediction, Run, RunStatus, RunWarning, StepRecord


def started(path: Path) -> RunDir:
    """A run that has written its config, as `train` does first."""
    run = RunDir.create(path)
    rundir.write_text(path / CONFIG, yaml.safe_dump({"run": {"seed": 1}}))
    return run


def refusal(function, *args, **options) -> str:
    with pytest.raises(RunDirError) as caught:
        function(*args, **options)
    return str(caught.value)


# --- files ---


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "status.json"
    rundir.write_json(path, {"who": "Zoë"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"who": "Zoë"}

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    message = refusal(rundir.write_json, path, {"who": "Ann"})
    expected = f"{path}: cannot be written: No space left on device. It needs "
    assert message.startswith(expected)
    assert " are free. " in message and message.endswith("Or choose another run.dir.")
    assert json.loads(path.read_text(encoding="utf-8")) == {"who": "Zoë"}
    assert [p.name for p in path.parent.iterdir()] == ["status.json"]


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    (tmp_path / "status.json").mkdir()
    message = refusal(rundir.write_json, tmp_path / "status.json", {})
    assert message.endswith("status.json: cannot be written: Is a directory. Rename the folder of that name.")


def test_a_file_below_a_file_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    assert "cannot be written: Not a directory." in refusal(rundir.write_text, tmp_path / "a" / "b" / "c", "")


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(records=st.lists(st.dictionaries(st.text(), st.text() | st.integers()), max_size=4), cut=st.integers(0, 400))
def test_a_torn_last_line_is_dropped(tmp_path, records, cut):
    path = tmp_path / "steps.jsonl"
    whole = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(whole[:cut])
    num_whole = whole[:cut].count(b"\n")
    assert read_jsonl(path)[:num_whole] == records[:num_whole]
    assert len(read_jsonl(path)) <= num_whole + 1


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    assert refusal(read_jsonl, path) == f"{path}:2: damaged line (no whole JSON value). Delete that line."
    assert read_jsonl(tmp_path / "absent.jsonl") == []


# --- whose directory ---


def test_an_occupied_directory_is_refused_or_moved_aside(tmp_path):
    started(tmp_path / "run").close()
    assert refusal(RunDir.create, tmp_path / "run") == (
        f"{tmp_path}/run: holds a run already. Add --resume to continue it, --overwrite to move it aside, "
        "or choose another run.dir."
    )
    RunDir.create(tmp_path / "run", overwrite=True).close()
    aside = next(tmp_path.glob("run.before-*"))
    assert (aside / CONFIG).is_file()
    assert not (tmp_path / "run" / CONFIG).exists()


def test_the_working_directory_is_not_moved_aside(tmp_path, monkeypatch):
    started(tmp_path / "run").close()
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(RunDirError, match=r"^\.: is the working directory or above it, and --overwrite moves it aside"):
        RunDir.create(".", overwrite=True)
    assert (tmp_path / "run" / CONFIG).is_file()


def test_a_discarded_run_with_a_trace_hides_no_error(tmp_path):
    started(tmp_path / "run").close()
    run = RunDir.create(tmp_path / "run", overwrite=True)
    (tmp_path / "run" / TRACE_FOLDER).mkdir()
    (tmp_path / "run" / TRACE_FOLDER / "trace.json").write_text("{}")
    run.discard()
    assert (next(tmp_path.glob("run.before-*")) / CONFIG).is_file()


def test_a_discarded_run_brings_back_the_one_before(tmp_path):
    started(tmp_path / "run").close()
    run = RunDir.create(tmp_path / "run", overwrite=True)
    run.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / CONFIG).is_file()
    RunDir.resume(tmp_path / "run").close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_directory_is_never_touched(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("precious")
    message = f"{tmp_path}: is not empty and not a run directory. Choose another run.dir."
    assert refusal(RunDir.create, tmp_path, overwrite=overwrite) == message
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(RunDir.create, tmp_path / "file") == (
        f"{tmp_path}/file: cannot be written: File exists. Choose another run.dir."
    )
    assert "cannot be written: Not a directory. Choose another run.dir." in refusal(
        RunDir.create, tmp_path / "file" / "run"
    )


def test_a_directory_whose_run_never_began_is_free(tmp_path):
    RunDir.create(tmp_path / "run").close()
    RunDir.create(tmp_path / "run").close()


def test_two_runs_in_one_directory(tmp_path):
    run = started(tmp_path)
    words = [sys.executable, "-c", f"from fivetune.rundir import RunDir; RunDir.resume({str(tmp_path)!r})"]
    other = subprocess.run(words, capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert f"{tmp_path}: in use by process {os.getpid()} on " in other.stderr
    assert ". Wait for it, or choose another run.dir." in other.stderr
    assert "in use by" in refusal(RunDir.create, tmp_path, overwrite=True)
    run.close()
    RunDir.resume(tmp_path).close()


def test_the_owner_of_a_lock_may_name_itself_a_moment_later(tmp_path):
    """The file still has the name of a killed process."""
    with (tmp_path / ".lock").open("w") as file:
        file.write(f"process 999999999 on {socket.gethostname()}")
        file.flush()
        assert lock_file(file)
        timer = threading.Timer(0.03, lambda: (tmp_path / ".lock").write_text("process 1 on another-host"))
        timer.start()
        assert refusal(RunDir.create, tmp_path).startswith(f"{tmp_path}: in use by process 1 on another-host. Wait")
        timer.join()
        timer = threading.Timer(0.03, file.close)  # it was a reader
        timer.start()
        (tmp_path / ".lock").write_text(f"process 999999999 on {socket.gethostname()}")
        RunDir.create(tmp_path).close()
        timer.join()


def test_a_resume_that_fails_keeps_no_lock(tmp_path, monkeypatch):
    """In a notebook the traceback, which is kept, held it: the run was in use by the notebook itself."""
    started(tmp_path).close()

    def fail(*args, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "find_changes", fail)
        with pytest.raises(MemoryError) as kept:
            RunDir.resume(tmp_path)
    RunDir.resume(tmp_path).close()
    assert kept.traceback


def test_a_full_disk_while_the_lock_is_named_frees_it(tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    opened, plain = [], writer_module.open_for_append

    def open_full(path):
        opened.append(Full(plain(path)))
        return opened[-1]

    monkeypatch.setattr(writer_module, "open_for_append", open_full)
    assert refusal(RunDir.create, tmp_path) == (
        f"{tmp_path}/.lock: cannot be locked: No space left on device. Choose another run.dir."
    )
    assert opened[0].file.closed


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert refusal(RunDir.create, tmp_path) == (
        f"{tmp_path}/.lock: cannot be locked: No locks available. Choose another run.dir."
    )


def test_the_loser_of_a_race_for_a_new_directory_hears_who_has_it(tmp_path):
    """Nothing but the lock is there yet, which used to be called no run directory."""
    run = RunDir.create(tmp_path / "run")
    for start in (RunDir.create, lambda path: RunDir.create(path, overwrite=True)):
        assert refusal(start, tmp_path / "run").startswith(f"{tmp_path}/run: in use by process {os.getpid()} on ")
    run.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_renamed_directory_is_noticed_at_the_next_write(tmp_path, replaced):
    """A directory of the old name is neither made nor touched."""
    run = RunDir.create(tmp_path / "run")
    run.append("steps.jsonl", {"step": 1})
    (tmp_path / "run").rename(tmp_path / "mine")
    if replaced:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").write_text("other")
    for write in (
        lambda: run.append("steps.jsonl", {"step": 2}),
        lambda: run.write("plan.json", {}),
        lambda: run.update_status(step=2),
        lambda: run.write_predictions("eval", 2, []),
    ):
        assert refusal(write) == (
            f"{tmp_path}/run: was renamed, moved or removed while its run writes to it. Resume the run where it is "
            "now: fivetune train NEW_NAME --resume"
        )
    run.discard()
    assert [path.name for path in (tmp_path / "run").glob("*")] == ["notes.txt"] * replaced
    assert (tmp_path / "run").exists() is replaced and (tmp_path / "mine" / "steps.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("function", [read_run, RunDir.resume])
def test_what_is_no_run(tmp_path, function):
    assert refusal(function, tmp_path / "x") == (
        f"{tmp_path}/x: no such directory. Give the run.dir of a run (runs/<name>)."
    )
    assert refusal(function, tmp_path) == (
        f"{tmp_path}: not a run directory (it has no config.yaml). Give the run.dir of a run."
    )
    (tmp_path / CONFIG).write_text("{}")
    rundir.write_json(tmp_path / MACHINE, {"format_version": FORMAT_VERSION + 1})
    assert refusal(function, tmp_path) == (
        f"{tmp_path}: written in format {FORMAT_VERSION + 1}, this version reads up to {FORMAT_VERSION}. Upgrade."
    )


# --- reading ---


def test_a_partial_run_reads(tmp_path):
    started(tmp_path).close()
    run = read_run(tmp_path)
    assert run == Run(name=tmp_path.name, config={"run": {"seed": 1}})


def test_predictions_are_not_written_through_a_link(tmp_path):
    run = started(tmp_path)
    (tmp_path / "outside").mkdir()
    (run.path / "predictions").symlink_to(tmp_path / "outside")
    assert refusal(lambda: run.write_predictions("eval", 1, [])).endswith(
        "predictions: is a link, which leads out of the run directory. Make it a folder."
    )
    assert not list((tmp_path / "outside").iterdir())
    run.close()


def test_what_was_written_reads_back(tmp_path):
    run = started(tmp_path)
    run.append(STEPS, make_step(1, loss=None))
    run.write_predictions("eval", 1, [{"id": "q1", "prediction": "Zoë\u2028\x85"}])
    assert [run.add_warning("odd"), run.add_warning("odd")] == [True, False]
    run.update_status(state="running", step=1)
    run.update_status(state="finished")
    run.close()
    back = read_run(tmp_path)
    assert (back.steps, back.warnings) == ([StepRecord(**make_step(1, loss=None))], ["odd"])
    assert back.predictions == {"eval-1": [Prediction(id="q1", prediction="Zoë\u2028\x85")]}
    assert back.status == RunStatus(state="finished", step=1, warnings=(RunWarning("odd"),))


def test_predictions_have_their_name_only_when_whole(tmp_path):
    def lines():
        yield {"id": "q1"}
        raise KeyboardInterrupt

    run = started(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.write_predictions("eval", 1, lines())
    run.close()
    assert read_run(tmp_path).predictions == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (STATUS, b'{"a": 1,', "status.json:1:9: damaged: "),
        (STATUS, b"[]", "status.json: damaged: it holds an array instead of an object. Delete the file: a resume"),
        (STATUS, b'{"why": "\xe5"}', "status.json: damaged: it is not UTF-8. Delete the file"),
        (
            STATUS,
            b'{"state": "failed", "step": "x", "best": 3}',
            "status.json: damaged: values of the wrong type are left out: step, best.",
        ),
        (STATUS, b"{}", "status.json: damaged: it holds no values. Delete the file: a resume writes it again."),
        (STATUS, b'{"state": null, "step": 3}', "status.json: damaged: 'state' is None, none of preparing, running, "),
        (STATUS, b'{"state": "oops"}', "status.json: damaged: 'state' is 'oops', none of preparing, running, finished"),
        (STATUS, b'{"state": 3}', "status.json: damaged: values of the wrong type are left out: state."),
        (STATUS, b'{"step": "x"}', "damaged: values of the wrong type are left out: step; 'state' is None, none of"),
        (MACHINE, b"{}", "machine.json: damaged: it holds no values. Delete the file: a resume writes it again."),
        (MACHINE, b"3", "machine.json: damaged: it holds a number instead of an object. Delete the file"),
        (MACHINE, b'{"format_version": "1"}', "machine.json: damaged: values of the wrong type are left out: format_v"),
        (DATA, b"[" * 100_000, "data.json: damaged: "),
        (STEPS, b"{}\n", "steps.jsonl:1: damaged line ('step' is None). It is left out."),
        (STEPS, b"[]\n", "steps.jsonl:1: damaged line (an array instead of an object). It is left out."),
        (EVALS, b'{"step": 1e308}\n', "evals.jsonl:1: damaged line ('step' is 1e+308). It is left out."),
        (EVALS, b'{"step": 1}\n', "evals.jsonl: damaged: lines that lack needed values are left out: 1."),
        (EVALS, b'{"step": 1, "ta', "evals.jsonl:1: damaged line (no whole JSON value). It is left out."),
        (EVALS, b'{"step": "\x80"}\n', "evals.jsonl:1: damaged line (no whole JSON value). It is left out."),
        (TELEMETRY, b"\x00\x01\xff", "telemetry.jsonl:1: damaged line (no whole JSON value). It is left out."),
        ("plan.json", b'{"num_steps": "many"}', "plan.json: damaged: of the wrong type: num_steps. Delete the file"),
        ("plan.json", b'{"num_steps": 3}', "plan.json: damaged: it has no batch_size, eval_every_steps, checkpoint_ev"),
        (
            "plan.json",
            b"[]",
            "plan.json: damaged: it holds an array instead of an object. Delete the file: a resume writes it again.",
        ),
    ],
)
def test_damaged_files_that_a_report_does_not_need_are_named_in_warnings(tmp_path, name, content, message):
    started(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    run = read_run(tmp_path)
    assert len(run.damage) == 1 and message in run.damage[0] and "\n" not in run.damage[0]
    assert run.warnings == run.damage and run.status.state in ("", "failed")


def test_a_lost_best_evaluation_is_named(tmp_path):
    """The scores of the last whole evaluation took its place in silence."""
    run = started(tmp_path)
    run.append(EVALS, make_eval(1, {"f1": 1.0}))
    best = {"step": 2, "metric": "f1", "score": 46.15}
    run.update_status(state="finished", best=best)
    expected = (
        f"{tmp_path}/evals.jsonl: lacks the evaluation that status.json names as the best: f1 46.15 at step 2. "
        "Scores are those of other evaluations."
    )
    assert read_run(tmp_path).damage == [expected]
    (tmp_path / EVALS).write_text((tmp_path / EVALS).read_text() + json.dumps(make_eval(2, {"f1": math.nan})) + "\n")
    invalid = (
        f"{tmp_path}/evals.jsonl: damaged: values that are no finite number, or of the wrong type, are left out: "
        "scores.f1 (lines: 1)."
    )
    assert read_run(tmp_path).damage == [invalid, expected]
    run.append(EVALS, make_eval(2, {"f1": 46.15}))
    run.close()
    assert read_run(tmp_path).damage == [invalid]


def test_lost_steps_of_a_finished_run_are_named(tmp_path):
    run = started(tmp_path)
    run.update_status(state="finished", step=3)
    for step in (1, 1, 3):
        run.append(STEPS, make_step(step))
    assert read_run(tmp_path).damage == [
        f"{tmp_path}/steps.jsonl: 1 of 3 steps are missing: curves, times and verdicts are of the others."
    ]
    run.update_status(state="interrupted")  # what was queued when a run ended has no records
    run.close()
    assert read_run(tmp_path).damage == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1e308, "low"])
def test_values_of_lines_that_no_run_writes_are_named_and_left_out(tmp_path, value):
    """1e308 ended report, compare and watch by an internal error; NaN hid the losses in silence."""
    started(tmp_path).close()
    lines = [make_step(1, loss=value), make_step(2, loss=3.5)]
    (tmp_path / STEPS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(tmp_path)
    assert [step.loss for step in found.steps] == [3.5]
    assert found.damage == [
        f"{tmp_path}/steps.jsonl: damaged: values that are no finite number, or of the wrong type, are left out: "
        "loss (lines: 1)."
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, b"a: !!python/object:os.system {}", "config.yaml: damaged: could not determine a constructor"),
        (CONFIG, b"a: " + b"[" * 5000, "config.yaml: damaged: "),
        (CONFIG, b"a: {", "config.yaml: damaged: while parsing a flow"),
        (CONFIG, b"- 1", "config.yaml: damaged: it is not a table of settings. Restore the file."),
        (CONFIG, b"a: \xff", "config.yaml: damaged: 'utf-8' codec can't decode byte"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path, name, content, message):
    started(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    found = refusal(read_run, tmp_path)
    assert message in found
    assert "\n" not in found
    assert found.endswith("Restore the file.")


def test_damaged_telemetry_is_left_out_with_a_warning(tmp_path):
    started(tmp_path).close()
    lines = [b'{"seconds": 2}', b"{}", b"[1]", b'{"sec', b'{"seconds": 1e308}', b'{"seconds": 1}', b'{"torn']
    (tmp_path / TELEMETRY).write_bytes(b"\n".join(lines))
    run = read_run(tmp_path)
    assert [record.seconds for record in run.telemetry] == [1, 2]
    assert run.warnings == [
        f"{tmp_path}/telemetry.jsonl:2: damaged line ('seconds' is None). It is left out. Damaged lines in all: 4."
    ]


# --- what a killed process leaves ---

LEFTOVERS = [
    [".lock"],
    [".lock", ".probe"],
    [".lock", "log.txt"],
    [".lock", "log.txt", ".config.yaml.1.tmp"],
    [".lock", "log.txt", ".best.17"],
    [".lock", "log.txt", "telemetry.jsonl", "telemetry-1.jsonl"],
]


@pytest.mark.parametrize("names", LEFTOVERS, ids=" ".join)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_killed_in_its_first_milliseconds_can_be_started(tmp_path, names, overwrite):
    for name in names:
        (tmp_path / name).touch()
    RunDir.create(tmp_path, overwrite=overwrite).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*names} & {".lock", "log.txt"})


@pytest.mark.parametrize("name", ["log.txt", "telemetry.jsonl"])
def test_a_log_with_content_is_kept(tmp_path, name):
    (tmp_path / name).write_text("10:00:00 something\n")
    assert "is not empty and not a run directory" in refusal(RunDir.create, tmp_path)


def test_a_log_with_content_beside_the_lock_of_a_run_is_of_that_run(tmp_path):
    """The sampler had logged an error before config.yaml was written, and the folder could not be used again."""
    (tmp_path / ".lock").touch()
    (tmp_path / "log.txt").write_text("10:00:00 warning: telemetry: a record is lost\n")
    RunDir.create(tmp_path).close()


def test_resuming_removes_what_killed_exports_left(tmp_path):
    started(tmp_path).close()
    (tmp_path / "predictions").mkdir()
    for name in (".status.json.1.tmp", ".report.html.99999999.tmp", ".best.3", "predictions/.eval-3.jsonl.1.tmp"):
        (tmp_path / name).write_text("half")
    for name in (".model.4.tmp", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / f".report.html.{os.getppid()}.tmp").write_text("written now")
    RunDir.resume(tmp_path).close()
    left = {".lock", CONFIG, "predictions", f".report.html.{os.getppid()}.tmp"}
    assert {path.name for path in tmp_path.rglob("*")} == left


def test_a_failed_start_leaves_no_empty_parents(tmp_path):
    RunDir.create(tmp_path / "runs" / "a" / "b").discard()
    assert list(tmp_path.iterdir()) == []


# --- a resume does not need everything ---


@pytest.mark.parametrize("content", [b"[]", b'{"a', b"\xe5", b"null", b"{}"])
@pytest.mark.parametrize("name", [STATUS, MACHINE, DATA])
def test_a_damaged_file_that_is_written_again_is_set_aside(tmp_path, name, content):
    started(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    RunDir.resume(tmp_path, repair=False).close()
    assert (tmp_path / name).read_bytes() == content
    run = RunDir.resume(tmp_path)
    run.close()
    assert (tmp_path / f"{name}.damaged").read_bytes() == content and not (tmp_path / name).exists()
    (warning,) = [each.message for each in run.warnings]
    assert name in warning and f"Set aside as {name}.damaged; the run does not need it." in warning


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "x"},
        {"num_starved_steps": 1.5},
        {"begun": 1},
        {"warnings": 3},
        {"seconds_by_phase": []},
        {"state": "oops"},
        {"state": None},
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_in_a_status_count_as_missing(tmp_path, changes):
    started(tmp_path).close()
    rundir.write_json(tmp_path / STATUS, {"state": "interrupted", **changes})
    run = RunDir.resume(tmp_path)
    run.close()
    (named,) = [*changes]
    assert replace(run.status, warnings=()) == RunStatus(state="" if named == "state" else "interrupted")
    assert [named in each.message for each in run.warnings] == [True]


@pytest.mark.parametrize("linked", ["predictions", "predictions/eval-1.jsonl"])
def test_predictions_behind_a_link_are_not_read(tmp_path, linked):
    started(tmp_path / "run").close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "eval-1.jsonl").write_text('{"id": "1", "prediction": "private"}\n')
    path = tmp_path / "run" / linked
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(outside if linked == "predictions" else outside / "eval-1.jsonl")
    run = read_run(tmp_path / "run")
    assert run.predictions["eval-1"] == [] and any("eval-1.jsonl: not read: a link" in one for one in run.damage)


@pytest.mark.parametrize("name", ["log.txt", "telemetry.jsonl", "telemetry-1.jsonl"])
def test_links_of_somebody_else_are_set_aside(tmp_path, name):
    started(tmp_path / "run").close()
    private = tmp_path / "private"
    private.write_text("mine")
    (tmp_path / "run" / name).symlink_to(private)
    run = RunDir.resume(tmp_path / "run")
    run.close()
    assert private.read_text() == "mine" and len(run.warnings) == 1
    assert (tmp_path / "run" / f"{name}.damaged").is_symlink()


def test_the_lock_is_not_written_through_a_link(tmp_path):
    started(tmp_path / "run").close()
    private = tmp_path / "private"
    private.write_text("mine")
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(private)
    assert "run/.lock: cannot be written: it is a symbolic link; remove it." in refusal(RunDir.resume, tmp_path / "run")
    assert private.read_text() == "mine"


def test_a_torn_line_does_not_swallow_the_next_evaluation(tmp_path):
    run = started(tmp_path)
    (tmp_path / EVALS).write_text(json.dumps(make_eval(1, {})) + '\n{"step": 1')
    run.append(EVALS, make_eval(2, {}))
    run.close()
    assert [record.step for record in read_run(tmp_path).evals] == [1, 2]


def test_a_resume_leaves_damaged_lines_out_and_reports_lost_steps(tmp_path):
    run = started(tmp_path)
    first, third = (json.dumps(make_step(step, loss=None)) for step in (1, 3))
    (tmp_path / STEPS).write_text(f"{first}\n{{}}\n{third}\n")
    (tmp_path / EVALS).write_text(f"[]\n{json.dumps(make_eval(3, {}))}\n" + '{"step": 3, "ta')
    notes = run.truncate_after(3)
    run.close()
    assert [record["step"] for record in read_jsonl(tmp_path / STEPS)] == [1, 3]
    assert [record["step"] for record in read_jsonl(tmp_path / EVALS)] == [3]
    assert [text.partition(str(tmp_path))[2] or text for text in notes] == [
        "/steps.jsonl:2: damaged line ('step' is None). It is left out.",
        "/evals.jsonl:1: damaged line (an array instead of an object). It is left out. Damaged lines in all: 2.",
        "steps.jsonl: 1 of 3 steps are missing: curves, times and verdicts are of the others.",
    ]


def test_a_text_that_utf8_cannot_express_is_named(tmp_path):
    message = refusal(rundir.write_text, tmp_path / CONFIG, "a: \udce5")
    assert "a setting or text holds U+DCE5, which UTF-8 cannot express. Remove it." in message


def test_a_name_that_is_too_long_is_named(tmp_path):
    assert "File name too long. Choose a shorter name." in refusal(rundir.write_text, tmp_path / ("x" * 300), "")


# --- going on ---


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    run = started(tmp_path)
    for step in range(1, 6):
        run.append(STEPS, {"step": step})
    run.append(EVALS, {"step": 4})
    run.add_warning("odd")
    run.update_status(state="running", num_resumes=2)
    run.close()
    with (tmp_path / STEPS).open("a") as file:
        file.write('{"step": 6, "lo')
    run = RunDir.resume(tmp_path)
    run.truncate_after(3)
    run.append(STEPS, {"step": 4})
    run.close()
    assert [record["step"] for record in read_jsonl(tmp_path / STEPS)] == [1, 2, 3, 4]
    assert read_jsonl(tmp_path / EVALS) == []
    assert (run.status.num_resumes, [w.message for w in run.warnings]) == (2, ["odd"])


def test_keeping_while_a_file_is_open(tmp_path):
    run = started(tmp_path)
    run.append(STEPS, {"step": 1})
    run.append(STEPS, {"step": 2})
    run.truncate_after(1)
    run.append(STEPS, {"step": 2, "again": True})
    run.close()
    assert read_jsonl(tmp_path / STEPS) == [{"step": 1}, {"step": 2, "again": True}]


def test_the_loss_of_all_steps_is_told(tmp_path):
    run = started(tmp_path)
    assert run.truncate_after(0) == []
    run.append(STEPS, {"step": 1})
    run.append(STEPS, {"step": 2})
    assert run.truncate_after(0)[-1] == "no checkpoint is left of 2 steps: the run begins again at step 0"
    run.close()
    assert read_jsonl(tmp_path / STEPS) == []


def test_of_a_list_of_records_only_the_damaged_ones_are_left_out(tmp_path):
    started(tmp_path).close()
    rundir.write_json(tmp_path / STATUS, {"state": "finished", "warnings": [3, {"message": "odd"}, {"kind": "x"}]})
    assert read_run(tmp_path).status == RunStatus(state="finished", warnings=(RunWarning("odd"),))
    run = RunDir.resume(tmp_path)
    run.close()
    assert run.warnings[0] == RunWarning("odd") and "left out: warnings." in run.warnings[1].message
