"""Starting the processes of a run: what the command does for the user, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import psutil
import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fivetune import rundir
from fivetune.distributed import processes as launch
from fivetune.distributed.processes.__main__ import describe_killed_ranks
from fivetune.errors import ConfigError


def test_srun_that_starts_the_command_several_times_is_refused():
    with pytest.raises(ConfigError, match=r"srun starts this command 4 times, and each would start 2"):
        launch.is_needed(2, 1, {"SLURM_STEP_NUM_TASKS": "4"})
    assert not launch.is_needed(1, 1, {"SLURM_STEP_NUM_TASKS": "4"})


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_torchrun_handles_it_stops_the_launch(signum, capfd, tmp_path, monkeypatch):
    """torch is a module here that says when its import begins, and does not end."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal\nopen(os.environ['READY'], 'w').close()\nsignal.alarm(30)\nsignal.pause()\n"
    )
    os.mkfifo(tmp_path / "ready")
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def send() -> None:
        (tmp_path / "ready").read_bytes()
        os.kill(os.getpid(), signum)

    threading.Thread(target=send, daemon=True).start()
    assert launch.start_processes(["--version"], nproc=2, timeout_minutes=1) == 128 + signum
    name = signal.Signals(signum).name
    assert capfd.readouterr().err == f"fivetune: launch: stopped by {name} while no rank was running.\n"


def test_a_signal_while_torchrun_is_started_is_not_lost(capfd, monkeypatch):
    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fivetune.distributed.processes.subprocess.Popen", Signalled)
    assert launch.start_processes(["--version"], nproc=2, timeout_minutes=1) == 128 + signal.SIGINT
    assert capfd.readouterr().err == "fivetune: launch: stopped by SIGINT while no rank was running.\n"


@pytest.fixture
def command(tmp_path, model_folder) -> list[str]:
    """A run of two processes that takes hours."""
    table = kit.recipe(
        tmp_path,
        model_folder,
        strategy="ddp",
        launch={"nproc": 2},
        train__num_steps=10**6,
        eval__at_start=False,
        eval__every_steps=10**6,
    )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(table))
    return [sys.executable, "-m", "fivetune", "train", str(tmp_path / "r.yaml"), "--no-preflight"]


def workers(command: subprocess.Popen[str]) -> list[psutil.Process]:
    (agent,) = psutil.Process(command.pid).children()
    return sorted(agent.children(), key=lambda process: int(process.environ()["RANK"]))


def ended(
    words: list[str], act: Callable[[subprocess.Popen[str]], None], run: Path, *, seconds: int = 60
) -> tuple[int, str]:
    """Exit code and messages of a command that something is done to once it trains."""
    environ = {**os.environ, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            until = time.monotonic() + 120
            while not (run / "steps.jsonl").exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            assert (run / "steps.jsonl").exists(), process.kill() or process.communicate()[1]
            left = workers(process)
            act(process)
            told = process.communicate(timeout=seconds)[1]
            psutil.wait_procs(left, timeout=10)
            assert not any(worker.is_running() for worker in left)
            return process.returncode, told
        finally:
            process.kill()


RANK = """
import os, pathlib, signal, time
def save(signum, frame):
    run.joinpath(f"saved-{os.environ['RANK']}").write_text(str(signum))
    os._exit(128 + signum)
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, save)
run = pathlib.Path(os.environ["RUN"])
run.joinpath(f"started-{os.environ['RANK']}").touch()
while not all(run.joinpath(f"started-{rank}").exists() for rank in range(2)):
    time.sleep(0.01)
run.joinpath("steps.jsonl").touch()
time.sleep(60)
"""


@pytest.fixture
def ranks_without_torch(tmp_path, monkeypatch) -> Path:
    """The ranks are programs that import no torch: what a real one does after a signal is tested by test_resume.py."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -S {tmp_path}/rank.py\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("PYTHON_EXEC", str(tmp_path / "python"))  # torchrun's
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    return tmp_path / "run"


def find_saved(run: Path) -> dict[str, int]:
    """The signal after which each rank has saved."""
    return {path.name: int(path.read_text()) for path in run.glob("saved-*")}


@pytest.mark.slow
def test_the_ranks_of_a_killed_torchrun_save_and_stop(command, ranks_without_torch):
    code, told = ended(command, lambda process: psutil.Process(process.pid).children()[0].kill(), ranks_without_torch)
    assert code == 128 + signal.SIGKILL
    assert re.search(r"launch: torchrun \(process \d+\) was killed by SIGKILL, .*Its ranks are stopped now", told)
    assert find_saved(ranks_without_torch) == {"saved-0": signal.SIGTERM, "saved-1": signal.SIGTERM}


@pytest.mark.slow
def test_a_signal_to_the_command_reaches_every_rank(command, ranks_without_torch):
    code, told = ended(command, lambda process: process.send_signal(signal.SIGUSR1), ranks_without_torch)
    assert (code, told) == (128 + signal.SIGUSR1, "")
    assert find_saved(ranks_without_torch) == {"saved-0": signal.SIGUSR1, "saved-1": signal.SIGUSR1}


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_the_others(command, ranks_without_torch):
    code, told = ended(command, lambda process: workers(process)[1].kill(), ranks_without_torch)
    assert code == 128 + signal.SIGKILL
    assert re.fullmatch(r"fivetune: launch: rank 1 \(process \d+\) was killed by SIGKILL\. Often memory .*\n", told)
    assert find_saved(ranks_without_torch) == {"saved-0": signal.SIGTERM}


@pytest.mark.slow
def test_the_code_of_ranks_that_fail_is_passed_on(command, ranks_without_torch, tmp_path):
    (tmp_path / "rank.py").write_text("raise SystemExit(3)")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.release
def test_a_signal_to_the_command_stops_the_run_after_saving(command, tmp_path):
    code, told = ended(command, lambda process: process.send_signal(signal.SIGUSR1), tmp_path / "run")
    assert code == 128 + signal.SIGUSR1
    assert told.count("stopped by SIGUSR1 after step") == told.count("saved. Resume with: fivetune train") == 1
    run = rundir.read_run(tmp_path / "run")
    assert run.status.state == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / str(run.steps[-1].step) / "manifest.json").is_file()


@pytest.mark.release
def test_a_killed_process_ends_the_others(command, tmp_path):
    code, told = ended(command, lambda process: workers(process)[1].kill(), tmp_path / "run")
    assert code == 128 + signal.SIGKILL
    assert told.count("fivetune: launch: rank 1 of this run ended without a message of its own, as a killed") == 1
    assert "another process" not in told and "Traceback" not in told
    assert re.search(r"launch: rank 1 \(process \d+\) was killed by SIGKILL\. Often memory ran out", told)
    status = rundir.read_run(tmp_path / "run").status
    assert status.state == "failed" and status.why.startswith("launch: rank 1 of this run ended")


@pytest.mark.release
def test_a_hung_rank_is_killed_once_the_others_have_failed(command, tmp_path):
    words = [*command, "--launch.timeout_minutes", "0.05"]
    code, told = ended(words, lambda process: workers(process)[1].suspend(), tmp_path / "run", seconds=120)
    assert code == 4
    assert re.search(r"launch: rank 1 \(process \d+\) did not end after rank 0 had failed, and was killed", told)


def test_ranks_killed_by_a_signal_are_named(tmp_path):
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(tmp_path / "none"))
        for rank, code in enumerate([143, -signal.SIGSEGV, -signal.SIGKILL])
    }
    for rank, failure in failures.items():
        failure.timestamp = int(rank != 1)
    assert describe_killed_ranks(ChildFailedError("ranks", failures)) == [
        "launch: rank 1 (process 101) was killed by SIGSEGV. Continue the run with --resume.",
        "launch: rank 2 (process 102) did not end after rank 1 had failed, and was killed.",
    ]


@pytest.mark.release
def test_an_error_before_training_is_told_once_and_its_code_is_passed_on(command, tmp_path):
    done = subprocess.run([*command, "--data.train", str(tmp_path / "r.yaml")], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("fivetune: ")
    assert not (tmp_path / "run").exists()
