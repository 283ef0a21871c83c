"""Checkpoints that are written while training continues: the same ones, whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
from threading import Event
from typing import Any

import kit
import pytest

from fivetune.errors import InterruptedRunError, RunDirError
from fivetune.rundir.checksums import find_damage
from fivetune.training import loop, save
from fivetune.training.run import train
from fivetune.training.state import checkpoint
from fivetune.training.training import Training
from reliability.warm import WarmProcess


def recipe(folder, model_folder, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    saved = {"every_steps": 2, "background": True}
    return kit.recipe(folder, model_folder, checkpoint={**saved, **changes}, eval__at_start=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, model_folder):
    """The weights of a run that waits for each checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    train(recipe(folder, model_folder, background=False), preflight=False, quiet=True)
    return kit.weights_of(folder / "run")


def test_training_continues_while_a_checkpoint_is_written(tmp_path, model_folder, monkeypatch, plain):
    """The first one is not written before the third step has begun; it still holds the state of the second."""
    begun, write, step = Event(), checkpoint.write_checkpoint, loop.run_step

    def write_late(*args: Any) -> Any:
        assert begun.wait(60)
        return write(*args)

    def run(training: Training, groups: Any) -> bool:
        found = step(training, groups)
        if training.state.step == 3:
            begun.set()
        return found

    monkeypatch.setattr(checkpoint, "write_checkpoint", write_late)
    monkeypatch.setattr(loop, "run_step", run)
    table = recipe(tmp_path, model_folder, keep=5)
    assert train(table, preflight=False, quiet=True).status.state == "finished"
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.list_steps(folder) == [2, 3, 4, 6]
    assert [find_damage(folder / str(number)) for number in (2, 3, 4, 6)] == [None] * 4
    assert kit.weights_of(tmp_path / "run") == plain


def test_a_signal_waits_for_the_checkpoint(tmp_path, model_folder, monkeypatch, plain):
    step = loop.run_step

    def hit(training: Training, groups: Any) -> bool:
        if training.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training, groups)

    table = recipe(tmp_path, model_folder)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_step", hit)
        with pytest.raises(InterruptedRunError, match=r"after step 4 of 6; saved\."):
            train(table, preflight=False, quiet=True)
    assert find_damage(tmp_path / "run/checkpoints/4") is None
    train(table, resume=True, quiet=True)
    assert kit.weights_of(tmp_path / "run") == plain


def train_until_killed(table: dict[str, Any]) -> None:
    """The process is killed while its second checkpoint is written."""
    write, calls = checkpoint.write_checksums, []

    def kill(*args: Any, **options: Any) -> None:
        calls.append(0)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args, **options)

    checkpoint.write_checksums = kill
    train(table, preflight=False, quiet=True)


def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before(tmp_path, model_folder, plain):
    table = recipe(tmp_path, model_folder)
    with WarmProcess(train_until_killed, table) as process:
        assert process.wait().returncode == -signal.SIGKILL
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".staging-3", "2"]
    assert find_damage(folder / "2") is None
    run = train(table, resume=True, quiet=True)
    assert run.machine.parts[1].step == 2 and kit.weights_of(tmp_path / "run") == plain
    assert not [*folder.glob(".staging-*")]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_keeps_the_earlier_ones(
    tmp_path, model_folder, monkeypatch
):
    whole, calls = checkpoint.save_file, []

    def refuse(*args: Any) -> None:
        calls.append(0)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(*args)

    monkeypatch.setattr(checkpoint, "save_file", refuse)
    monkeypatch.setattr(save.time, "sleep", lambda seconds: None)
    with pytest.raises(RunDirError, match=r"/3: the checkpoint cannot be written: No space .*checkpoints are whole\.$"):
        train(recipe(tmp_path, model_folder), preflight=False, quiet=True)
    assert len(calls) == 3 and checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [2]


def test_an_error_of_a_step_hides_none_of_the_checkpoint_that_is_being_written(
    tmp_path, model_folder, monkeypatch, capfd
):
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run(training: Training, groups: Any) -> bool:
        if training.state.step == 1:
            raise ZeroDivisionError
        return step(training, groups)

    step = loop.run_step
    monkeypatch.setattr(checkpoint, "save_file", refuse)
    monkeypatch.setattr(loop, "run_step", run)
    monkeypatch.setattr(save.time, "sleep", lambda seconds: None)
    with pytest.raises(ZeroDivisionError):
        train(recipe(tmp_path, model_folder, every_steps=1), preflight=False, quiet=True)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "cannot be written: No space" in line]
    assert len(warnings) == 2 and warnings[0].endswith("Retrying once.")
    assert warnings[1].endswith("There is no earlier checkpoint.")
