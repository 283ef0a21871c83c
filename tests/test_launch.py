"""Starting the processes of a run: what the command does for the user, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kit
import psutil
import pytest
import yaml

from fivetune import launch, rundir
from fivetune.errors import ConfigError


def test_srun_that_starts_the_command_several_times_is_refused():
    with pytest.raises(ConfigError, match=r"srun starts this command 4 times, and each would start 2"):
        launch.is_needed(2, {"SLURM_STEP_NUM_TASKS": "4"})
    assert not launch.is_needed(1, {"SLURM_STEP_NUM_TASKS": "4"})


@pytest.fixture
def command(tmp_path, model_folder) -> list[str]:
    """A run of two processes that takes hours."""
    table = kit.recipe(
        tmp_path, model_folder, strategy="ddp", launch={"nproc": 2}, train__num_steps=10**6, eval__at_start=False,
        eval__every_steps=10**6,
    )  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(table))
    return [sys.executable, "-m", "fivetune", "train", str(tmp_path / "r.yaml"), "--no-preflight"]


def workers(command: subprocess.Popen[str]) -> list[psutil.Process]:
    (agent,) = psutil.Process(command.pid).children()
    return sorted(agent.children(), key=lambda process: int(process.environ()["RANK"]))


def ended(words: list[str], act: Callable[[subprocess.Popen[str]], None], run: Path) -> tuple[int, str]:
    """Exit code and messages of a command that something is done to once it trains."""
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    try:
        until = time.monotonic() + 120
        while not (run / "steps.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        left = workers(process)
        act(process)
        told = process.communicate(timeout=60)[1]
        psutil.wait_procs(left, timeout=10)
        assert not any(worker.is_running() for worker in left)
        return process.returncode, told
    finally:
        process.kill()


@pytest.mark.slow
def test_a_signal_to_the_command_stops_the_run_after_saving(command, tmp_path):
    code, told = ended(command, lambda process: process.send_signal(signal.SIGINT), tmp_path / "run")
    assert code == 128 + signal.SIGINT
    assert told.count("stopped by SIGINT after step") == told.count("saved. Go on with: fivetune train") == 1
    run = rundir.read(tmp_path / "run")
    assert run.status["state"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / str(run.steps[-1]["step"]) / "manifest.json").is_file()


@pytest.mark.slow
def test_a_killed_process_ends_the_others(command, tmp_path):
    code, told = ended(command, lambda process: workers(process)[1].kill(), tmp_path / "run")
    assert code == 128 + signal.SIGKILL
    assert told.count("another process of this run ended") == 1 and "Traceback" not in told
    assert rundir.read(tmp_path / "run").status["state"] == "failed"


@pytest.mark.slow
def test_an_error_before_training_is_told_once_and_its_code_is_passed_on(command, tmp_path):
    done = subprocess.run([*command, "--data.train", str(tmp_path / "r.yaml")], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("fivetune: ")
    assert not (tmp_path / "run").exists()
