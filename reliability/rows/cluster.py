"""A node of a real SLURM that is lost while a run trains on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from fivetune.rundir import read_run, read_status
from reliability.campaign import Row, Trial
from reliability.slurm_cluster import explain_absence, is_started_early, start_cluster, train_on_two_ranks
from reliability.warm import check_success, start_command, wait_until
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
                wait = partial(wait_until, seconds=240, explain=partial(describe_jobs, folder, environ))
                wait(lambda: read_status(folder / "run").step >= step)
                kill_node(Path(place), environ)
                wait(lambda: is_started_early(job, environ))
                wait(lambda: read_status(folder / "run").state == "finished")
            train_on_two_ranks(str(recipe), str(folder / "whole"))
            found = read_run(folder / "run")
            assert (found.status.state, found.status.num_resumes) == ("finished", 1), found.status
            assert found.machine.parts[-1].step > 0, "it began again at step 0"
            check_weights(read_weights(folder / "run"), read_weights(folder / "whole"))

        yield Trial(f"{number} after step {step}", run)


def launch(recipe: Path, environ: Mapping[str, str]) -> str:
    """Submit the run on two nodes; returns the number of its job."""
    options = ("--on", "slurm", "--nodes", "2", "--no-preflight", "--json", "--stage", "false")
    done = start_command("launch", str(recipe), *options, environ=environ).finish()
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


def describe_jobs(folder: Path, environ: Mapping[str, str]) -> str:
    """What SLURM's queue and the logs of a run say."""
    logs = [f"{path.name}: {path.read_text()[-1500:]}" for path in folder.rglob("*.log")]
    shown = subprocess.run(["squeue"], env=dict(environ), capture_output=True, text=True, check=False).stdout
    return f"{shown} {logs}"


ROWS = [
    Row("R38", "a node of a real SLURM is lost while a run trains on two nodes",
        "the job is queued again and resumes to the weights of an uninterrupted run",
        lose_node, 0, 10, explain_absence=explain_absence),
]  # fmt: skip
