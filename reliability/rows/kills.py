"""Processes that are killed: at any moment, several times, before every file operation; two at once in one folder."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from reliability.campaign import Row, Trial
from reliability.faults import train_and_count, train_and_die
from reliability.peer import VARIANTS as peer_variants
from reliability.peer import Peer, read_peer_weights
from reliability.warm import WarmProcess, check_success
from reliability.workload import (
    VARIANTS,
    Workload,
    check_weights,
    find_resume_words,
    read_weights,
    resume,
    start_training,
)

FEW_STEPS: dict[str, Any] = {"train__num_steps": 2, "eval__every_steps": 2}


def kill_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Kill each variant in turn at a time that is uniform over its run."""
    for number in count():
        variant = list(VARIANTS)[number % len(VARIANTS)]
        share = random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = workload.run_undisturbed(variant)
            recipe = workload.write_recipe(folder, variant)
            kill_after(start_training(recipe), whole.find_time(share))
            resume(recipe, folder / "run")
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def kill_peer_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The same of the Trainer."""
    peer = Peer(workload)
    for number in count():
        variant = list(peer_variants)[number % len(peer_variants)]
        share = random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = peer.run_undisturbed(variant)
            kill_after(peer.start(folder, variant), whole.find_time(share))
            peer.resume(folder, variant)
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def kill_five_times(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Kill a run and four of its resumes at random times."""
    for number in count():
        shares = [random.random() for _ in range(5)]

        def run(folder: Path, shares: list[float] = shares) -> None:
            whole = workload.run_undisturbed()
            recipe = workload.write_recipe(folder)
            for share in shares:
                kill_after(start_training(recipe, *find_resume_words(folder / "run")), whole.find_time(share))
            resume(recipe, folder / "run")
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{number} at {' '.join(f'{share:.2f}' for share in shares)}", run)


def kill_before_each_file_operation(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """End the process before each operation on its run directory: all of them, in random order."""
    num_operations = count_file_operations(workload)
    for at in random.sample(range(1, num_operations + 1), num_operations):

        def run(folder: Path, at: int = at) -> None:
            whole = workload.run_undisturbed(**FEW_STEPS)
            recipe = workload.write_recipe(folder, **FEW_STEPS)
            with WarmProcess(train_and_die, str(recipe), str(folder / "run"), at) as process:
                assert process.wait().returncode == 137, "the process did not reach this operation"
            resume(recipe, folder / "run")
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"operation {at} of {num_operations}", run)


def count_file_operations(workload: Workload) -> int:
    """Operations of an undisturbed run of few steps on its run directory."""
    folder = workload.make_folder("operations")
    recipe, counted = workload.write_recipe(folder, **FEW_STEPS), folder / "counted"
    with WarmProcess(train_and_count, str(recipe), str(folder / "run"), str(counted)) as process:
        done = process.wait()
    check_success(done)
    return int(counted.read_text())


def start_two(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Start two runs in one folder within 50 ms, every third time where a killed run has left its lock."""
    for number in count():
        pause = random.uniform(0, 0.05)

        def run(folder: Path, pause: float = pause, stale: bool = number % 3 == 2) -> None:
            whole = workload.run_undisturbed()
            recipe = workload.write_recipe(folder)
            if stale:
                kill_after(start_training(recipe), whole.find_time(0.7))
            words = find_resume_words(folder / "run")
            with start_training(recipe, *words) as first:
                time.sleep(pause)
                with start_training(recipe, *words) as second:
                    ended = [first.wait(), second.wait()]
            codes = sorted(one.returncode for one in ended)
            told = "".join(one.stderr for one in ended)
            assert codes == [0, 4], f"exit codes {codes}: {told[-600:]}"
            assert re.search(r"process \d+|holds a run already", told), f"the other process is not named: {told[-600:]}"
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{number} after {pause * 1000:.0f} ms", run)


def start_two_of_peer(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The same two starts."""
    peer = Peer(workload)
    for number in count():
        pause = random.uniform(0, 0.05)

        def run(folder: Path, pause: float = pause) -> None:
            whole = peer.run_undisturbed()
            with peer.start(folder) as first:
                time.sleep(pause)
                with peer.start(folder) as second:
                    codes = [first.wait().returncode, second.wait().returncode]
            assert codes.count(0) == 1, f"exit codes {codes}"
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{number} after {pause * 1000:.0f} ms", run)


def kill_after(process: WarmProcess, seconds: float) -> None:
    """SIGKILL the process and its ranks after a time; it may have ended by then."""
    with process:
        time.sleep(seconds)
        process.kill_tree()


WEIGHTS = "resumes without help; weights identical to those of the undisturbed run"
ROWS = [
    Row("R1", "SIGKILL at a random time, a checkpoint at every step", WEIGHTS,
        kill_at_random, 9, 200, kill_peer_at_random),
    Row("R2", "the process ends before a file operation of the run", WEIGHTS, kill_before_each_file_operation, 8),
    Row("R3", "five SIGKILLs at random times, some of them during a resume", WEIGHTS, kill_five_times, 1, 50),
    Row("R20", "two processes start in one folder within 50 ms, or where a killed one left its lock",
        "one trains, to identical weights; the other exits with 4 and names the owner", start_two, 4, 60,
        start_two_of_peer),
]  # fmt: skip
