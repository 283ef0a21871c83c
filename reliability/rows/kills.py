"""Processes that are killed: at any moment, several times, before every file operation."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess
from reliability.workload import VARIANTS, Workload, read_weights, start_training


def kill_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Kill each variant in turn at a time that is uniform over its run."""
    for number in count():
        variant = list(VARIANTS)[number % len(VARIANTS)]
        share = random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = workload.run_undisturbed(variant)
            recipe = workload.write_recipe(folder, variant)
            kill_after(start_training(recipe), share * whole.seconds)
            resume(recipe, folder / "run")
            assert read_weights(folder / "run") == whole.weights, "the weights differ from those of the undisturbed run"

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def kill_after(process: WarmProcess, seconds: float) -> None:
    """SIGKILL the process and its ranks after a time; it may have ended by then."""
    with process:
        time.sleep(seconds)
        process.kill_tree()


def resume(recipe: Path, run: Path) -> None:
    """Continue the run, or start it where nothing of it is there yet, as its user's script does."""
    with start_training(recipe, *(["--resume"] if run.exists() else [])) as process:
        done = process.wait()
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-600:]}"


ROWS = [
    Row(
        "R1",
        "SIGKILL at a random time, a checkpoint at every step",
        "resumes without help; weights identical to those of the undisturbed run",
        kill_at_random,
        num_trials=20,
        num_release=200,
    )
]
