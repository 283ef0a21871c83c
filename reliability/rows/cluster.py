"""A node of a real SLURM that is lost while a run trains on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from fivetune.rundir import read_run, read_status
from reliability.campaign import Row, Trial
from reliability.slurm_cluster import explain_absence, is_started_early, start_cluster, train_on_two_ranks
from reliability.warm import WarmProcess, check_success, start_command
from reliability.workload import Workload, check_weights, read_weights

STEPS: dict[str, Any] = {
    "train__num_steps": 200,
    "eval__every_steps": 200,
    "checkpoint__every_steps": 10,
    "model__dropout": 0.0,
    "telemetry": {"every_seconds": 0},
    "strategy": "ddp",
}


def lose_node(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Train on two nodes; the second one dies at a random step, comes back, and SLURM queues the job again."""
    for number in count():
        step = random.randint(11, 150)

        def run(folder: Path, step: int = step) -> None:
            recipe = workload.write_recipe(folder, **STEPS)
            with tempfile.TemporaryDirectory() as place, start_cluster(Path(place)) as variables:
                environ = {**os.environ, **variables}
                job = launch(recipe, environ)
                wait_until(lambda: read_status(folder / "run").step >= step, folder, environ)
                kill_node(Path(place), environ)
                wait_until(lambda: is_started_early(job, environ), folder, environ)
                wait_until(lambda: read_status(folder / "run").state == "finished", folder, environ)
            with WarmProcess(train_on_two_ranks, str(recipe), str(folder / "whole")) as process:
                done = process.wait()
            check_success(done)
            found = read_run(folder / "run")
            assert (found.status.state, found.status.num_resumes) == ("finished", 1), found.status
            assert found.machine.parts[-1].step > 0, "it began again at step 0"
            check_weights(read_weights(folder / "run"), read_weights(folder / "whole"))

        yield Trial(f"{number} after step {step}", run)


def launch(recipe: Path, environ: Mapping[str, str]) -> str:
    """Submit the run on two nodes; returns the number of its job."""
    options = ("--on", "slurm", "--nodes", "2", "--no-preflight", "--json", "--stage", "false")
    with start_command("launch", str(recipe), *options, environ=environ) as process:
        done = process.wait()
    check_success(done)
    return json.loads(done.stdout.splitlines()[-1])["job"]


def kill_node(place: Path, environ: Mapping[str, str]) -> None:
    """SLURM finds the second node down, and SIGKILL ends all that it ran; then it is back."""
    daemon = psutil.Process(int((place / "slurmd.n2.pid").read_text()))
    lost = daemon.children(recursive=True)
    assert lost, "nothing runs on the node"
    update = ["scontrol", "update", "NodeName=n2"]
    subprocess.run([*update, "State=DOWN", "Reason=lost"], env=dict(environ), check=True)
    for one in lost:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    time.sleep(1)
    subprocess.run(
        [*update, "State=RESUME"], env=dict(environ), check=False, capture_output=True
    )  # or it did so itself


def wait_until(is_done: Callable[[], bool], folder: Path, environ: Mapping[str, str], seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > until:
            logs = [f"{path.name}: {path.read_text()[-1500:]}" for path in folder.rglob("*.log")]
            shown = subprocess.run(["squeue"], env=dict(environ), capture_output=True, text=True, check=False).stdout
            raise AssertionError(f"not within {seconds:g} s: {shown} {logs}")
        time.sleep(0.1)


ROWS = [
    Row("R38", "a node of a real SLURM is lost while a run trains on two nodes",
        "the job is queued again and resumes from a checkpoint, to the weights of an uninterrupted run",
        lose_node, 0, 10, explain_absence=explain_absence),
]  # fmt: skip
