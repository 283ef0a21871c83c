"""Interrupted and resumed is the same as uninterrupted: every bit of the weights, every step once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivetune import rundir
from fivetune.errors import ConfigError, InterruptedRunError, RunDirError
from fivetune.rundir import lock_folder
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import Run
from fivetune.training.outcome import name_python_call
from fivetune.training.run import train
from fivetune.training.state import checkpoint
from reliability.warm import WarmProcess, start_command

CADENCE = {"eval__every_steps": 3, "checkpoint__every_steps": 2, "model__dropout": 0.1, "eval__metric": "HasAns_exact"}


def _table(folder: Path, model: Path, **overrides) -> dict:
    return kit.recipe(folder, model, **{**CADENCE, **overrides})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(_table(folder, model_folder), preflight=False, quiet=True)
    return folder / "run"


def _comparable(run: Run) -> tuple:
    """What must not depend on interruptions: everything but times and memory."""
    timing = ("_seconds", "_bytes", "warm_up", "starved")
    steps = [{k: v for k, v in s.as_dict().items() if not k.endswith(timing)} for s in run.steps]
    evals = [replace(e, seconds=0.0) for e in run.evals]
    return steps, evals, run.status.best, run.predictions


def _last_checkpoint(run: Path) -> Path:
    return max((p for p in (run / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested lists and dicts with tensors in them, as something that == compares."""
    if isinstance(value, torch.Tensor):
        return {name: (value.dtype, value.shape, value.numpy().tobytes())}
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for k, v in items for key, leaf in _flat(v, f"{name}.{k}").items()}
    return {name: value}


def _assert_same(run: Path, whole: Path) -> None:
    """model/ and the last checkpoint: weights, optimizer state, random states."""
    last, other = _last_checkpoint(run), _last_checkpoint(whole)
    assert last.name == other.name
    assert (last / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    states = [_flat(torch.load(p / "state.pt", weights_only=True)) for p in (last, other)]
    assert any(name.startswith(".optimizer.state.") for name in states[0])
    assert states[0] == states[1]
    assert kit.weights_of(run) == kit.weights_of(whole)
    assert _comparable(rundir.read_run(run)) == _comparable(rundir.read_run(whole))


def _slow(*values) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


MOMENTS = [
    ("show_step", 5),  # no checkpoint is due
    _slow("show_step", 1),
    _slow("show_step", 6),
    _slow("show_evaluation", 3),
    *(kit.release("show_step", k) for k in (2, 3, 4)),
]


@pytest.mark.parametrize(("method", "step"), MOMENTS)
def test_stopped_by_a_signal_and_resumed(tmp_path, model_folder, uninterrupted, monkeypatch, method, step):
    table = _table(tmp_path, model_folder)
    kit.signal_at(monkeypatch, method, step)
    with pytest.raises(
        InterruptedRunError, match=rf"stopped by SIGTERM after step {step} of 6; saved. Resume with: fivetune"
    ) as caught:
        train(table, preflight=False, quiet=True)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert f"fivetune train {tmp_path / 'run'} --resume. In Python: " in str(caught.value)
    stopped = rundir.read_run(tmp_path / "run")
    assert (stopped.status.state, stopped.status.step) == ("interrupted", step)
    assert checkpoint.find_damage(tmp_path / "run" / "checkpoints" / str(step)) is None

    run = train(table, resume=True, quiet=True)
    _assert_same(tmp_path / "run", uninterrupted)
    assert (run.status.state, run.status.why, run.status.num_resumes) == ("finished", "", 1)


@pytest.mark.parametrize(
    "name", [_slow("SIGUSR1"), _slow("SIGHUP"), *map(kit.release, ("SIGUSR2", "SIGXCPU", "SIGALRM"))]
)
def test_other_signals_save_like_sigterm(tmp_path, model_folder, uninterrupted, monkeypatch, name):
    table, signum = _table(tmp_path, model_folder), signal.Signals[name]
    kit.signal_at(monkeypatch, "show_step", 4, signum)
    with pytest.raises(InterruptedRunError, match=rf"stopped by {name} after step 4 of 6; saved") as caught:
        train(table, preflight=False, quiet=True)
    assert caught.value.exit_code == 128 + signum
    train(table, resume=True, quiet=True)
    _assert_same(tmp_path / "run", uninterrupted)


def test_stopped_before_the_first_step(tmp_path, model_folder, uninterrupted, monkeypatch):
    table = _table(tmp_path, model_folder)
    kit.signal_at(monkeypatch, "show_evaluation", 0, signal.SIGINT)
    with pytest.raises(
        InterruptedRunError, match=r"stopped by SIGINT after step 0 of 6; nothing to save yet. Resume"
    ) as caught:
        train(table, preflight=False, quiet=True)
    assert caught.value.exit_code == 130
    train(table, resume=True, quiet=True)
    _assert_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_signal_in_the_last_evaluation_lets_the_run_finish(tmp_path, model_folder, uninterrupted, monkeypatch):
    kit.signal_at(monkeypatch, "show_evaluation", 6)
    assert train(_table(tmp_path, model_folder), preflight=False, quiet=True).status.state == "finished"
    _assert_same(tmp_path / "run", uninterrupted)


def _signal_during(monkeypatch, what: str, wanted: int, signum: int = signal.SIGTERM) -> None:
    """Once, at the `wanted`-th count of a phase, the process gets a signal."""
    whole, calls = Progress.update, []

    def told(self, name, done, total=None, **rest):
        whole(self, name, done, total, **rest)
        if name.startswith(what):
            calls.append(done)
            if len(calls) == wanted:
                os.kill(os.getpid(), signum)

    monkeypatch.setattr(Progress, "update", told)


@pytest.mark.parametrize(("count", "step"), [_slow(3, 0), (15, 3), _slow(27, 6)])
def test_stopped_during_an_evaluation(tmp_path, model_folder, uninterrupted, monkeypatch, capfd, count, step):
    """Of 12 examples, every evaluation is interrupted at the third; it is repeated on resume."""
    table = _table(tmp_path, model_folder)
    _signal_during(monkeypatch, "evaluating", count)
    with pytest.raises(
        InterruptedRunError, match=rf"stopped by SIGTERM after step {step} of 6; (saved|nothing to save yet)"
    ):
        train(table, preflight=False, quiet=True)
    assert "SIGTERM received: stopping" in capfd.readouterr().err
    assert [e.step for e in rundir.read_run(tmp_path / "run").evals] == list(range(0, step, 3))
    train(table, resume=True, quiet=True)
    _assert_same(tmp_path / "run", uninterrupted)


def test_stopped_while_preparing(tmp_path, model_folder, monkeypatch):
    table = _table(tmp_path, model_folder)
    with monkeypatch.context() as patch:
        _signal_during(patch, "tokenising", 1)
        with pytest.raises(
            InterruptedRunError, match=r"^stopped by SIGTERM. Nothing was trained, nothing is kept.$"
        ) as caught:
            train(table, quiet=True)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        _signal_during(patch, "pre-flight", 2, signal.SIGINT)
        with pytest.raises(InterruptedRunError, match=r"stopped by SIGINT. Nothing was trained"):
            train(table, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run.open_copy", "outputs.checkpoint.restore_replaced_checkpoints"])
def test_stopped_while_the_run_is_opened(tmp_path, model_folder, monkeypatch, place):
    """A copy in a bucket takes minutes to fetch. Then the folder is free at once, also in a notebook."""
    table = _table(tmp_path, model_folder)
    monkeypatch.setattr(f"fivetune.training.{place}", lambda *args, **options: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(
        InterruptedRunError, match=r"^stopped by SIGTERM. Nothing was trained, nothing is kept.$"
    ) as kept:
        train(table, quiet=True)
    assert kept.value.exit_code == 128 + signal.SIGTERM and not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("device: cpu")
    with pytest.raises(InterruptedRunError, match=r"Resume with: fivetune train .*/run --resume\. In Python: ") as kept:
        train(table, resume=True, quiet=True)
    lock_folder(tmp_path / "run").close()


def test_only_a_run_that_can_be_resumed_has_a_call_of_python():
    for can_resume in (False, True):
        with pytest.raises(InterruptedRunError) as caught, name_python_call("runs/--resume", None):
            raise InterruptedRunError("runs/--resume: stopped", signum=15, can_resume=can_resume)
        assert ("fivetune.train('runs/--resume', resume=True)" in str(caught.value)) is can_resume
        assert caught.value.exit_code == 143


def test_stopped_while_preparing_to_resume(tmp_path, model_folder, uninterrupted, monkeypatch):
    table = _table(tmp_path, model_folder)
    train(table, preflight=False, quiet=True)
    before = (tmp_path / "run" / "status.json").read_bytes()
    shutil.rmtree(tmp_path / "cache")
    with monkeypatch.context() as patch:
        _signal_during(patch, "tokenising", 1)
        with pytest.raises(
            InterruptedRunError, match=r"^stopped by SIGTERM. Resume with: fivetune train .*run --resume\. In Python: "
        ):
            train(table, resume=True, quiet=True)
    assert (tmp_path / "run" / "status.json").read_bytes() == before
    _assert_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_stopped_again_and_again(tmp_path, model_folder, uninterrupted, monkeypatch):
    table = _table(tmp_path, model_folder)
    for number, step in enumerate((1, 2, 3, 5)):
        kit.signal_at(monkeypatch, "show_step", step)
        with pytest.raises(InterruptedRunError):
            train(table, resume=number > 0, preflight=False, quiet=True)
    assert train(table, resume=True, quiet=True).status.num_resumes == 4
    _assert_same(tmp_path / "run", uninterrupted)


class _PowerCut(Exception):
    pass


def _cut_at(monkeypatch, step: int) -> None:
    whole = Progress.show_step

    def told(self, record, num_steps, **rest):
        if record.step == step:
            raise _PowerCut
        return whole(self, record, num_steps, **rest)

    monkeypatch.setattr(Progress, "show_step", told)


@pytest.mark.parametrize("step", [_slow(1), 4, kit.release(3), kit.release(6)])
def test_broken_off_without_saving_and_resumed(tmp_path, model_folder, uninterrupted, monkeypatch, step):
    """As a crash would: the run goes back to its newest checkpoint, and every step is recorded once."""
    table = _table(tmp_path, model_folder)
    with monkeypatch.context() as patch:
        _cut_at(patch, step)
        with pytest.raises(_PowerCut):
            train(table, preflight=False, quiet=True)
    assert rundir.read_run(tmp_path / "run").status.state == "failed"
    with (tmp_path / "run" / "steps.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a torn line
    train(table, resume=True, quiet=True)
    _assert_same(tmp_path / "run", uninterrupted)


@settings(
    max_examples=settings().max_examples // 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_run_broken_off_at_any_step_and_resumed_is_the_uninterrupted_one(
    tmp_path_factory, model_folder, monkeypatch, data
):
    folder = tmp_path_factory.mktemp("any")
    num_steps, save_every = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 3))
    stop = data.draw(st.integers(1, num_steps))
    overrides = {
        "optimizer": {"name": data.draw(st.sampled_from(["adamw", "adafactor"])), "lr": 1e-3},
        "schedule": {"name": data.draw(st.sampled_from(["constant", "linear"]))},
        "train__num_steps": num_steps,
        "train__batch_size": data.draw(st.sampled_from([2, 4, 8])),
        "model__dropout": data.draw(st.sampled_from([0.0, 0.1])),
        "checkpoint__every_steps": save_every,
        "eval__every_steps": data.draw(st.integers(2, 9)),
    }
    for name in ("whole", "broken"):
        (folder / name).mkdir()
        with monkeypatch.context() as patch:
            if name == "broken":
                _cut_at(patch, stop)
            with pytest.raises(_PowerCut) if name == "broken" else nullcontext():
                train(_table(folder / name, model_folder, **overrides), preflight=False, quiet=True)
    checkpoints = (folder / "broken" / "run" / "checkpoints").glob("[0-9]*")
    newest = max((int(path.name) for path in checkpoints), default=0)  # also the best of an evaluation
    assert (stop - 1) // save_every * save_every <= newest < stop
    train(_table(folder / "broken", model_folder, **overrides), resume=True, quiet=True)
    _assert_same(folder / "broken" / "run", folder / "whole" / "run")
    (resumed,) = rundir.read_run(folder / "broken" / "run").machine.parts[1:]
    assert resumed.step == newest


@pytest.mark.slow
def test_a_run_whose_directory_is_renamed_stops_and_is_resumed_where_it_is(
    tmp_path, model_folder, uninterrupted, monkeypatch
):
    """Before, it trained on in a new directory of the old name, and failed at the export."""
    whole = Progress.show_step

    def rename(self, record, num_steps):
        if record.step == 4:
            (tmp_path / "run").rename(tmp_path / "mine")
        return whole(self, record, num_steps)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "show_step", rename)
        with pytest.raises(RunDirError, match=r"run: was renamed, moved or removed while its run writes to it"):
            train(_table(tmp_path, model_folder), preflight=False, quiet=True)
    assert not (tmp_path / "run").exists()
    train(str(tmp_path / "mine"), resume=True, quiet=True)
    _assert_same(tmp_path / "mine", uninterrupted)


@pytest.mark.slow
def test_best_found_after_a_resume_is_not_forgotten(tmp_path, model_folder, monkeypatch):
    """Stopped where an evaluation is due, resumed and evaluated, broken off before the next checkpoint."""
    table = _table(tmp_path, model_folder, checkpoint__every_steps=6)
    kit.scored(monkeypatch, {3: 9.0, 6: 8.0}, name="HasAns_exact")
    with monkeypatch.context() as patch:
        kit.signal_at(patch, "show_step", 3)
        with pytest.raises(InterruptedRunError):
            train(table, preflight=False, quiet=True)
    with monkeypatch.context() as patch:
        _cut_at(patch, 4)
        with pytest.raises(_PowerCut):
            train(table, resume=True, quiet=True)
    run = train(table, resume=True, quiet=True)
    assert run.status.best.step == 3
    assert [e.step for e in run.evals] == [0, 3, 6]


@pytest.mark.slow
def test_adafactor_resumes_exactly(tmp_path, model_folder, monkeypatch):
    optimizer = {"name": "adafactor", "preset": "t5-paper"}
    schedule = {"name": "linear", "warmup_steps": 2}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    tables = [_table(tmp_path / n, model_folder, optimizer=optimizer, schedule=schedule) for n in ("whole", "parts")]
    train(tables[0], preflight=False, quiet=True)
    kit.signal_at(monkeypatch, "show_step", 4)
    with pytest.raises(InterruptedRunError):
        train(tables[1], preflight=False, quiet=True)
    train(tables[1], resume=True, quiet=True)
    _assert_same(tmp_path / "parts" / "run", tmp_path / "whole" / "run")


def test_second_signal_acts_at_once(tmp_path, model_folder, monkeypatch):
    whole = Progress.show_step

    def twice(self, record, num_steps):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return whole(self, record, num_steps)

    monkeypatch.setattr(Progress, "show_step", twice)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    with pytest.raises(KeyboardInterrupt):
        train(_table(tmp_path, model_folder), preflight=False, quiet=True)
    status = rundir.read_run(tmp_path / "run").status
    assert (status.state, status.why) == (
        "interrupted",
        "stopped by a second signal; the last checkpoint is whole",
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_directory_in_use_is_refused(tmp_path, model_folder):
    table = _table(tmp_path, model_folder, train__num_steps=1)
    train(table, preflight=False, quiet=True)
    owner = rundir.RunDir.resume(tmp_path / "run")
    with pytest.raises(RunDirError, match=rf"run: in use by process {os.getpid()} on .*Wait for it, or choose another"):
        train(table, resume=True, quiet=True)
    owner.close()


def test_fewer_steps_than_are_done_are_refused(tmp_path, model_folder):
    table = _table(tmp_path, model_folder, train__num_steps=4)
    train(table, preflight=False, quiet=True)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"has done 4 steps, and train\.num_steps or train\.num_epochs sets 2\."):
        train(_table(tmp_path, model_folder, train__num_steps=2), resume=True, quiet=True)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_an_empty_folder_is_no_checkpoint_of_later_steps(tmp_path, model_folder, capsys):
    table = _table(tmp_path, model_folder, train__num_steps=2)
    train(table, preflight=False, quiet=True)
    (tmp_path / "run" / "checkpoints" / "100").mkdir()
    assert train(table, resume=True, quiet=True).status.step == 2
    assert "checkpoints/100: manifest.json is missing. Set aside as 100.damaged" in capsys.readouterr().err


# --- real processes, real signals ---


def _start(recipe: Path, *flags: str) -> WarmProcess:
    return start_command("train", str(recipe), "--no-preflight", *flags)


def _write_recipe(folder: Path, model: Path) -> Path:
    table = _table(folder, model, train__num_steps=60, eval__every_steps=20, checkpoint__every_steps=7)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(table))
    return path


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("long")
    with _start(_write_recipe(folder, model_folder)) as command:
        done = command.wait()
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _wait_for_steps(command: WarmProcess, run: Path, count: int, pause: float) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and command.code is None:
        if (run / "steps.jsonl").is_file() and (run / "steps.jsonl").read_text().count("\n") >= count:
            break
        time.sleep(0.005)
    time.sleep(pause)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", kit.release("SIGTERM"), kit.release("SIGINT")])
def test_killed_process_resumes_to_the_same_bits(tmp_path, model_folder, long_run, name):
    recipe, moments = _write_recipe(tmp_path, model_folder), random.Random(name)
    for number, count in enumerate(sorted(moments.sample(range(2, 50), 2))):
        with _start(recipe, *(["--resume"] if number else [])) as command:
            _wait_for_steps(command, tmp_path / "run", count, moments.uniform(0, 0.05))
            command.send_signal(signal.Signals[name])
            done = command.wait()
        if name == "SIGKILL":
            assert done.returncode == -signal.SIGKILL
        else:
            assert done.returncode == 128 + signal.Signals[name], done.stderr
            assert f"stopped by {name} after step" in done.stderr and "--resume" in done.stderr
    with _start(recipe, "--resume", "--json") as command:
        done = command.wait()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 60
    _assert_same(tmp_path / "run", long_run)
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))
