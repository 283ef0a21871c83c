"""Checksums of the records of a finished run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fivetune.rundir import CHECKSUMS, EVALS, LOCK, STEPS, TELEMETRY, Damage, RunDir, read_run
from fivetune.rundir.config_file import stamp_config
from fivetune.rundir.reader import read_checksums
from fivetune.rundir.record_checksums import describe_change
from fivetune.training.answers.scoring import record_evaluation
from tests.fake_run import fake_run, make_eval, write_run

CHANGED = "differs from what the run wrote (its checksum differs). Unless you edited it, restore the file."


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory) -> Path:
    """A finished run with checksums and without damage; tests change copies of it."""
    folder = write_run(tmp_path_factory.mktemp("undamaged") / "run", fake_run())
    run = RunDir.resume(folder)
    run.append(TELEMETRY, {"seconds": 1790000000.5, "host": "a", "rank": 0})
    run.write_checksums(pytest.fail)
    run.close()
    assert read_run(folder).damage == []
    return folder


@pytest.fixture
def finished(undamaged, tmp_path) -> Path:
    return Path(shutil.copytree(undamaged, tmp_path / "run"))


def change_digit(path: Path) -> None:
    """Replace the last digit of a file by another."""
    content = path.read_bytes()
    at = max(content.rfind(str(digit).encode()) for digit in range(10))
    path.write_bytes(content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :])


@pytest.mark.parametrize("name", ["status.json", "machine.json", "data.json", "plan.json", STEPS, EVALS, TELEMETRY])
def test_a_changed_digit_is_named_by_reader_and_resume(finished, name):
    change_digit(finished / name)
    assert read_run(finished).damage == [f"{finished / name}: {CHANGED}"]
    run = RunDir.resume(finished)
    run.close()
    assert run.damage == [f"{finished / name}: {CHANGED}"]


def test_a_changed_prediction_is_named_when_it_is_read(finished):
    path = finished / "predictions" / "eval-300.jsonl"
    change_digit(path)
    run = read_run(finished)
    assert run.damage == []
    assert run.predictions["eval-300"]
    assert run.damage == [f"{path}: {CHANGED}"]


def test_lost_records_are_named_once(finished):
    size = (finished / "data.json").stat().st_size
    (finished / "data.json").unlink()
    (finished / STEPS).unlink()
    data, steps = sorted(read_run(finished).damage)
    assert data == f"{finished / 'data.json'}: missing: the run wrote {size:,} bytes. Restore the file."
    assert steps.startswith(f"{finished / STEPS}: 300 of 300 steps are missing")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize(
    "name", ["status.json", "machine.json", "data.json", "plan.json", STEPS, EVALS, CHECKSUMS, LOCK]
)
def test_a_record_that_is_no_file_is_set_aside(finished, name, make):
    """A pipe would keep every command that reads the run waiting for ever."""
    (finished / name).unlink(missing_ok=True)
    make(finished / name)
    found = read_run(finished)
    assert name in (CHECKSUMS, LOCK) or any(name in text for text in found.damage)


def test_the_settings_of_another_run_are_named(finished):
    path = finished / "config.yaml"
    path.write_text(stamp_config(path.read_text().replace("seed: 0", "seed: 1")))
    assert read_run(finished).damage == [f"{path}: {CHANGED}"]
    assert describe_change(finished, "config.yaml", read_checksums(finished, Damage())) == f"{path}: {CHANGED}"


def test_each_changed_record_is_named_in_a_folder_of_any_name(finished, tmp_path):
    """One sentence about any file of the run hid those of all others if the path held ": "."""
    folder = finished.rename(tmp_path / "run: 2")
    for name in ("status.json", "config.yaml", STEPS):
        change_digit(folder / name)
    assert sorted(read_run(folder).damage) == [
        f"{folder / name}: {CHANGED}" for name in ("config.yaml", "status.json", STEPS)
    ]


def test_a_later_evaluation_is_no_change(finished):
    run = RunDir.resume(finished, repair=False)
    run.write_predictions("eval", 300, iter([{"id": "q1", "text": "a"}]))
    run.append(EVALS, {"step": 300, "split": "other", "num_examples": 1, "scores": {"f1": 1.0}})
    run.close()
    found = read_run(finished)
    assert found.predictions["eval-300"] is not None
    assert not [text for text in found.damage if CHANGED in text]


def test_a_kill_while_a_finished_run_is_evaluated_leaves_no_false_checksum(finished, monkeypatch):
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    run = RunDir.resume(finished, repair=False)
    monkeypatch.setattr("fivetune.rundir.writer.compute_record_checksum", die)
    with pytest.raises(KeyboardInterrupt):
        run.write_predictions("eval", 300, iter([{"id": "q1", "text": "a"}]))
    run.close()
    found = read_run(finished)
    assert found.predictions["eval-300"] is not None
    assert not [text for text in found.damage if CHANGED in text]


def test_an_evaluation_names_changed_records_once(finished):
    for name in ("data.json", "plan.json", "config.yaml"):
        change_digit(finished / name)
    record = SimpleNamespace(as_dict=lambda: make_eval(300, {"f1": 1.0}))
    store = SimpleNamespace(summary={"source": ["dev.json"]}, fingerprint="0")
    evaluator = SimpleNamespace(store=store, run=lambda *args, **options: record)
    loaded, told = SimpleNamespace(build_evaluator=lambda **options: evaluator, model=None, threads=None), list[str]()
    options = {"step": 300, "split": None, "has_own_settings": True, "on_progress": print, "on_note": print}
    record_evaluation(finished, loaded, on_damage=told.append, **options)
    assert sorted(told) == [f"{finished / name}: {CHANGED}" for name in ("data.json", "plan.json")]


def test_a_run_that_goes_on_has_no_checksums_until_it_has_finished(finished):
    run = RunDir.resume(finished)
    run.update_status(step=300)
    run.close()
    assert not (finished / CHECKSUMS).exists()


def test_damaged_checksums_are_named(finished):
    (finished / CHECKSUMS).write_text("{")
    assert [text.partition(": ")[2][:9] for text in read_run(finished).damage] == ["damaged: "]
    (finished / CHECKSUMS).write_text('{"../config.yaml": {"size": 1, "crc32": 2}, "steps.jsonl": 7}')
    assert read_run(finished).damage == [f"{finished / CHECKSUMS}: damaged: of 'steps.jsonl' it has no checksum."]


def test_checksums_that_cannot_be_written_are_a_warning(finished):
    told: list[str] = []
    (finished / CHECKSUMS).unlink()
    (finished / CHECKSUMS).mkdir()
    run = RunDir.resume(finished)
    run.write_checksums(told.append)
    run.close()
    (text,) = told
    assert text.startswith(f"{finished / CHECKSUMS}: cannot be written: Is a directory.")
    assert text.endswith("Changes of the run's records will not be noticed.")
