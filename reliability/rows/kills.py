"""Processes that are killed: at any moment, several times, before every file operation; two at once in one folder."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from fivetune.rundir import Damage, lock_file
from fivetune.rundir.checksums import find_damage
from fivetune.rundir.layout import LOCK
from fivetune.rundir.reader import read_steps
from reliability.campaign import Row, Trial
from reliability.faults import train_and_count, train_and_die, train_and_die_before_renaming_to
from reliability.peer import VARIANTS as peer_variants
from reliability.peer import Peer, read_peer_weights
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import (
    NUM_STEPS,
    VARIANTS,
    Reference,
    Workload,
    check_resumed_from,
    check_same_run,
    check_weights,
    find_newest_step,
    find_resume_words,
    read_weights,
    resume,
    start_training,
    wait_for_checkpoint,
)

FEW_STEPS: dict[str, Any] = {"train__num_steps": 3, "eval__every_steps": 2}  # the third checkpoint replaces the first
KILLED_OFTEN = ("adamw", "adafactor", "accumulation", "lora", "mixture")
NUM_DRAWS = 4
REFUSAL_SECONDS = 5.0


def kill_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Kill each variant in turn at a time that is uniform over its run."""
    for number in count():
        variant = list(VARIANTS)[number % len(VARIANTS)]
        share = random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = workload.run_undisturbed(variant)
            recipe = workload.write_recipe(folder, variant)
            kill_during(partial(start_training, recipe), folder / "run", whole.find_time(share))
            check_little_lost(folder / "run")
            resume(recipe, folder / "run")
            check_same_run(folder / "run", whole.run)

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def kill_peer_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The same of the Trainer."""
    peer = Peer(workload)
    for number in count():
        variant = list(peer_variants)[number % len(peer_variants)]
        share = random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = peer.run_undisturbed(variant)
            kill_during(partial(peer.start, folder, variant), folder / "run", whole.find_time(share))
            peer.resume(folder, variant)
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def kill_five_times(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Kill a run and four of its resumes, each at a random time of what is left of it."""
    for number, variant in enumerate(cycle(random.sample(KILLED_OFTEN, len(KILLED_OFTEN)))):
        shares = [random.random() for _ in range(5)]

        def run(folder: Path, variant: str = variant, shares: list[float] = shares) -> None:
            whole = workload.run_undisturbed(variant)
            recipe, run = workload.write_recipe(folder, variant), folder / "run"
            for share in shares:
                left = 1 - find_newest_step(run) / NUM_STEPS
                start = partial(start_training, recipe, *find_resume_words(run))
                kill_during(start, run, whole.find_time(share, left))
                check_little_lost(run)
            resume(recipe, run)
            check_same_run(run, whole.run)

        yield Trial(f"{number} {variant} at {' '.join(f'{share:.2f}' for share in shares)}", run)


def kill_before_each_file_operation(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """End a run, or a resume of it, before each operation on its run directory: all of them, in random order."""
    stopped = workload.make_folder("stopped-before-rotation")
    recipe_of_stopped = workload.write_recipe(stopped, **FEW_STEPS)
    done = WarmProcess(train_and_die_before_renaming_to, str(recipe_of_stopped), "checkpoints/3").finish()
    assert done.returncode == 137, "the run did not reach its last checkpoint"
    nums = {False: count_file_operations(workload), True: count_file_operations(workload, stopped / "run")}
    operations = [(is_resume, at) for is_resume, num in nums.items() for at in range(1, num + 1)]
    for is_resume, at in random.sample(operations, len(operations)):

        def run(folder: Path, is_resume: bool = is_resume, at: int = at) -> None:
            whole, run = workload.run_undisturbed(**FEW_STEPS), folder / "run"
            recipe, words = workload.write_recipe(folder, **FEW_STEPS), list[str]()
            if is_resume:
                recipe, words = Path(shutil.copytree(stopped / "run", run, symlinks=True)), ["--resume"]
            done = WarmProcess(train_and_die, str(recipe), str(run), at, *words).finish()
            assert done.returncode == 137, "the process did not reach this operation"
            check_little_lost(run)
            resume(recipe, run)
            check_same_run(run, whole.run)

        yield Trial(f"operation {at} of {nums[is_resume]}{' of a resume' if is_resume else ''}", run)


def count_file_operations(workload: Workload, stopped: Path | None = None) -> int:
    """Operations of an undisturbed run of few steps on its run directory, or of a resume of one that was stopped."""
    folder = workload.make_folder("operations")
    recipe, run, words = workload.write_recipe(folder, **FEW_STEPS), folder / "run", list[str]()
    if stopped:
        recipe, words = Path(shutil.copytree(stopped, run, symlinks=True)), ["--resume"]
    counted = folder / "counted"
    check_success(WarmProcess(train_and_count, str(recipe), str(run), str(counted), *words).finish())
    return int(counted.read_text())


def start_two(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each of OWNERS in turn."""
    for number in count():
        kind = list(OWNERS)[number % len(OWNERS)]
        pause = random.uniform(0, 0.05)

        def run(folder: Path, kind: str = kind, pause: float = pause) -> None:
            whole = workload.run_undisturbed()
            recipe = workload.write_recipe(folder)
            OWNERS[kind](recipe, folder / "run", whole, pause)
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{number} {kind} after {pause * 1000:.0f} ms", run)


def start_in_one_folder(recipe: Path, run: Path, whole: Reference, pause: float) -> None:
    """Start two runs: one trains; the other names it."""
    ended = start_both(partial(start_training, recipe, *find_resume_words(run)), pause)
    codes = {one.done.returncode: one for one in ended}
    told = "".join(one.done.stderr for one in ended)
    assert sorted(codes) == [0, 4], f"exit codes {sorted(codes)}: {told[-600:]}"
    check_named_owner(codes[4].done, f"process {codes[0].pid} on {socket.gethostname()}", codes[4].seconds)


def start_after_a_kill(recipe: Path, run: Path, whole: Reference, pause: float) -> None:
    """The same where a killed run has left its lock."""
    with start_training(recipe) as process:
        wait_for_checkpoint(process, run, 1)
        process.kill_tree()
    assert (run / LOCK).exists(), "the killed run has left no lock"
    newest = find_newest_step(run)
    start_in_one_folder(recipe, run, whole, pause)
    check_resumed_from(run, newest)


def start_beside_another_host(recipe: Path, run: Path, whole: Reference, pause: float) -> None:
    """Another host holds the lock, then has left it behind."""
    owner = "process 1 on another-host"
    run.mkdir()
    with (run / LOCK).open("w") as file:
        file.write(owner)
        file.flush()
        assert lock_file(file)
        begun = time.monotonic()
        done = start_training(recipe).finish()
        check_named_owner(done, owner, time.monotonic() - begun)
        assert [path.name for path in run.iterdir()] == [LOCK], "the refused process wrote into the folder"
    check_success(start_training(recipe).finish())


OWNERS: dict[str, Callable[[Path, Path, Reference, float], None]] = {
    "two": start_in_one_folder,
    "two, stale lock": start_after_a_kill,
    "other host": start_beside_another_host,
}


def check_named_owner(done: CompletedProcess[str], owner: str, seconds: float) -> None:
    """The process says in time, in its own words, who has the folder."""
    assert done.returncode == 4, f"exit code {done.returncode}: {done.stderr[-600:]}"
    check_no_trace(done.stderr)
    assert f"in use by {owner}. " in done.stderr, f"{owner} is not named: {done.stderr[-600:]}"
    assert seconds < REFUSAL_SECONDS, f"refused after {seconds:.1f} s"


def start_two_of_peer(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Two starts of the Trainer in one folder."""
    peer = Peer(workload)
    for number in count():
        pause = random.uniform(0, 0.05)

        def run(folder: Path, pause: float = pause) -> None:
            whole = peer.run_undisturbed()
            codes = [one.done.returncode for one in start_both(partial(peer.start, folder), pause)]
            assert codes.count(0) == 1, f"exit codes {codes}"
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{number} after {pause * 1000:.0f} ms", run)


@dataclass(frozen=True)
class Ended:
    """How a process of two ended, and how many seconds after both had started."""

    pid: int
    done: CompletedProcess[str]
    seconds: float


def start_both(start: Callable[[], WarmProcess], pause: float) -> list[Ended]:
    """Start two processes with a pause between, and wait until both have ended."""
    ended: list[Ended] = []
    with start() as first:
        time.sleep(pause)
        begun = time.monotonic()
        with start() as second:
            running = [first, second]
            while running:
                for one in [one for one in running if one.code is not None]:
                    ended.append(Ended(one.pid, one.wait(), time.monotonic() - begun))
                    running.remove(one)
                time.sleep(0.01)
    return ended


def kill_during(start: Callable[[], WarmProcess], place: Path, seconds: float) -> None:
    """SIGKILL a process that writes `place`, and its ranks, after a time.

    Where it ended before, `place` is put back, and another one is killed earlier than that: `seconds` may come from a
    time at which the machine was slower.
    """
    before = place.with_name(f"{place.name}-before")
    if place.exists():
        shutil.copytree(place, before, symlinks=True)
    for _ in range(NUM_DRAWS):
        ended_after = kill_after(start(), seconds)
        if ended_after is None:
            break
        seconds = 0.6 * ended_after
        shutil.rmtree(place, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, place, symlinks=True)
    else:
        raise AssertionError(f"no kill hit; the last one was after {seconds:.2f} s")
    shutil.rmtree(before, ignore_errors=True)


def kill_after(process: WarmProcess, seconds: float) -> float | None:
    """SIGKILL the process and its ranks after a time. Returns None, or after how many seconds it had ended before."""
    begun = time.monotonic()
    with process:
        while process.code is None and time.monotonic() - begun < seconds:
            time.sleep(0.005)
        ended_after = time.monotonic() - begun
        process.kill_tree()
        return None if process.wait().returncode == -signal.SIGKILL else ended_after


def check_little_lost(run: Path) -> None:
    """Of a run that saves every step and was killed: no step but the last on record lacks its checkpoint.

    The checkpoint before the last one is whole too; older ones may be half removed.
    """
    last = max((one.step for one in read_steps(run, Damage())), default=0)
    newest = find_newest_step(run)
    assert newest >= last - 1, f"step {last} is on record, and the newest whole checkpoint is that of step {newest}"
    steps = sorted(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal())
    for step in steps[-2:]:
        damage = find_damage(run / "checkpoints" / str(step))
        assert damage is None, f"the checkpoint of step {step}: {damage}"


SAME_RUN = "resumes by itself from the newest whole checkpoint, to the bits of the undisturbed run"
ROWS = [
    Row("R1", "SIGKILL at a random time, a checkpoint at every step", SAME_RUN,
        kill_at_random, 9, 200, kill_peer_at_random),
    Row("R2", "the process ends before a file operation of a run or of its resume",
        f"the last two checkpoints are whole; {SAME_RUN}", kill_before_each_file_operation, 60),
    Row("R3", "five SIGKILLs at random times, some of them during a resume", SAME_RUN, kill_five_times, 1, 50),
    Row("R20", "two processes start in one folder within 50 ms, also where a killed one left its lock; another host "
        "holds the lock, then has left it",
        "one trains to identical weights, the other exits with 4 within 5 s and names the owner",
        start_two, 4, 60, start_two_of_peer),
]  # fmt: skip
