"""The run directory: whole or torn files, and whose directory it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivetune import rundir
from fivetune.errors import RunDirError
from fivetune.rundir import CONFIG, EVALS, FORMAT_VERSION, MACHINE, STATUS, STEPS, RunDir, read, read_jsonl


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

    monkeypatch.setattr(rundir.os, "fsync", full_disk)
    message = refusal(rundir.write_json, path, {"who": "Ann"})
    assert message == f"{path}: cannot be written: No space left on device. Free space or choose another run.dir."
    assert json.loads(path.read_text(encoding="utf-8")) == {"who": "Zoë"}
    assert [p.name for p in path.parent.iterdir()] == ["status.json"]


def test_a_file_below_a_file_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    assert "cannot be written: Not a directory." in refusal(rundir.write_text, tmp_path / "a" / "b" / "c", "")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert refusal(read_jsonl, path) == f"{path}:2: damaged line in the middle of the file. Delete that line."
    assert read_jsonl(tmp_path / "absent.jsonl") == []


# --- whose directory ---


def test_an_occupied_directory_is_refused_or_moved_aside(tmp_path):
    started(tmp_path / "run").close()
    assert refusal(RunDir.create, tmp_path / "run") == (
        f"{tmp_path}/run: holds a run already. Add --resume to go on, --overwrite to move it aside, "
        "or choose another run.dir."
    )
    RunDir.create(tmp_path / "run", overwrite=True).close()
    aside = next(tmp_path.glob("run.before-*"))
    assert (aside / CONFIG).is_file()
    assert not (tmp_path / "run" / CONFIG).exists()


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
    assert f"{tmp_path}: in use by process {rundir.os.getpid()} on " in other.stderr
    assert ". Wait for it, or choose another run.dir." in other.stderr
    assert "in use by" in refusal(RunDir.create, tmp_path, overwrite=True)
    run.close()
    RunDir.resume(tmp_path).close()


@pytest.mark.parametrize("function", [read, RunDir.resume])
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
    run = read(tmp_path)
    assert (run.name, run.config, run.machine, run.status) == (tmp_path.name, {"run": {"seed": 1}}, {}, {})
    assert (run.data, run.steps, run.evals, run.predictions, run.warnings) == ({}, [], [], {}, [])


def test_what_was_written_reads_back(tmp_path):
    run = started(tmp_path)
    run.append(STEPS, {"step": 1, "loss": None})
    run.new_predictions("eval", 1, [{"id": "q1", "prediction": "Zoë\u2028\x85"}])
    assert [run.warn("odd"), run.warn("odd")] == [True, False]
    run.status(state="running", step=1)
    run.status(state="finished")
    run.close()
    back = read(tmp_path)
    assert (back.steps, back.warnings) == ([{"step": 1, "loss": None}], ["odd"])
    assert back.predictions == {"eval-1": [{"id": "q1", "prediction": "Zoë\u2028\x85"}]}
    assert back.status == {"state": "finished", "step": 1, "warnings": ["odd"]}


def test_predictions_have_their_name_only_when_whole(tmp_path):
    def lines():
        yield {"id": "q1"}
        raise KeyboardInterrupt

    run = started(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.new_predictions("eval", 1, lines())
    run.close()
    assert read(tmp_path).predictions == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (STATUS, b'{"a": 1,', "status.json:1:9: damaged: "),
        (CONFIG, b"a: {", "config.yaml: damaged: while parsing a flow"),
        (CONFIG, b"- 1", "config.yaml: damaged: it is not a table of settings. Restore the file."),
        (CONFIG, b"a: \xff", "config.yaml: damaged: 'utf-8' codec can't decode byte"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    started(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    found = refusal(read, tmp_path)
    assert message in found
    assert "\n" not in found
    assert found.endswith("Restore the file.")


# --- going on ---


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    run = started(tmp_path)
    for step in range(1, 6):
        run.append(STEPS, {"step": step})
    run.append(EVALS, {"step": 4})
    run.warn("odd")
    run.status(state="running", num_resumes=2)
    run.close()
    with (tmp_path / STEPS).open("a") as file:
        file.write('{"step": 6, "lo')
    run = RunDir.resume(tmp_path)
    run.keep_until(3)
    run.append(STEPS, {"step": 4})
    run.close()
    assert [record["step"] for record in read_jsonl(tmp_path / STEPS)] == [1, 2, 3, 4]
    assert read_jsonl(tmp_path / EVALS) == []
    assert (run.past("num_resumes", 0), run.past("nothing", 7), run.warnings) == (2, 7, ["odd"])


def test_keeping_while_a_file_is_open(tmp_path):
    run = started(tmp_path)
    run.append(STEPS, {"step": 1})
    run.append(STEPS, {"step": 2})
    run.keep_until(1)
    run.append(STEPS, {"step": 2, "again": True})
    run.close()
    assert read_jsonl(tmp_path / STEPS) == [{"step": 1}, {"step": 2, "again": True}]
