"""Signals: one that asks the run to stop, Ctrl-C once and twice."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from subprocess import CompletedProcess

from fivetune.rundir import Damage, read_run
from fivetune.rundir.reader import read_steps
from reliability.campaign import Row, Trial
from reliability.faults import LONG_STEP_BEGINS, train_with_a_long_step
from reliability.peer import STEPS_TO_STOP, STOPPED, Peer, read_peer_weights
from reliability.warm import WarmProcess, check_no_trace
from reliability.workload import (
    NUM_STEPS,
    VARIANTS,
    Workload,
    check_same_run,
    check_weights,
    count_ranks,
    find_newest_step,
    resume,
    start_training,
)

# all of VARIANTS, those that launch ranks apart: a change runs a few of them
MIXED = ("adamw", "adafactor", "accumulation", "ddp", "lora", "labels", "mixture", "fsdp", "extractive")
assert set(MIXED) == set(VARIANTS)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LATENCY = 3.0  # seconds; a step and a save of the tiny model take well below one
LAUNCH_LATENCY = 10.0  # torchrun forwards the signal, waits for its ranks and ends
TWICE_LATENCY = 1.0  # of a second Ctrl-C, while a step goes on
LONG_STEP = 10.0
LEFT = 8  # steps: more than a run takes while its state is read and a signal is sent
NUM_DRAWS = 4


def signal_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Send each signal to each variant in turn, at a time that is uniform over the run."""
    for number in count(random.randrange(len(SIGNALS) * len(MIXED))):
        signum, share = SIGNALS[number % len(SIGNALS)], random.random()
        variant = MIXED[number % len(MIXED)]

        def run(folder: Path, signum: signal.Signals = signum, variant: str = variant, share: float = share) -> None:
            whole = workload.run_undisturbed(variant)
            recipe = workload.write_recipe(folder, variant)
            limit = LAUNCH_LATENCY if count_ranks(variant) > 1 else LATENCY
            stop_by_signal(recipe, folder / "run", signum, whole.find_time(share), limit)
            resume(recipe, folder / "run")
            check_same_run(folder / "run", whole.run)

        yield Trial(f"{number} {signum.name} {variant} at {share:.3f}", run)


def signal_peer_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """SIGTERM to the Trainer, which is to save then (enable_jit_checkpoint), in the first third of its run.

    It is to stop, and the run to go on to the same weights. Its exit code, 0, is not held against it.
    """
    peer = Peer(workload)
    for number in count():
        variant, share = list(STOPPED)[number % len(STOPPED)], random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = peer.run_undisturbed(variant)
            with peer.start(folder, variant) as process:
                time.sleep(whole.find_time(0.25 + share / 4))
                process.send_signal(signal.SIGTERM)
                done = process.wait()
            assert done.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM), f"exit code {done.returncode}"
            end = folder / "run" / f"checkpoint-{STEPS_TO_STOP}"
            assert not end.exists(), "the run went on to its end"
            peer.resume(folder, variant)
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def stop_by_signal(recipe: Path, run: Path, signum: signal.Signals, seconds: float, limit: float) -> None:
    """Send a signal to a run after a time; it must end as `check_stopped` says, within `limit` seconds.

    A run that has ended or nearly ended by then could end well before it hears the signal, which would show nothing:
    another one is started, and gets the signal earlier.
    """
    for _ in range(NUM_DRAWS):
        begun = time.monotonic()
        with start_training(recipe) as process:
            while process.code is None and time.monotonic() - begun < seconds:
                time.sleep(0.005)
            is_starting = not run.exists()
            if process.code is None and (is_starting or is_far_from_end(run)):
                send_and_wait(process, run, signum, limit, is_starting=is_starting)
                return
            seconds = 0.6 * (time.monotonic() - begun)
            process.kill_tree()
        shutil.rmtree(run, ignore_errors=True)
    raise AssertionError(f"no signal came in time; the last one would have come after {seconds:.2f} s")


def is_far_from_end(run: Path) -> bool:
    """Whether a run has steps to do, so that a signal sent now must stop it."""
    done = max((one.step for one in read_steps(run, Damage())), default=0)
    return done <= NUM_STEPS - LEFT


def send_and_wait(
    process: WarmProcess, run: Path, signum: signal.Signals, limit: float, *, is_starting: bool = False
) -> None:
    """Send the signal; the run must end as `check_stopped` says, within `limit` seconds."""
    sent = time.monotonic()
    process.send_signal(signum)
    done = process.wait()
    latency = time.monotonic() - sent
    check_stopped(done, run, signum, is_starting=is_starting)
    assert latency < limit, f"the run ended {latency:.1f} s after {signum.name}"


def check_stopped(done: CompletedProcess[str], run: Path, signum: signal.Signals, *, is_starting: bool) -> None:
    """The run says by which signal it stopped, and its last recorded step has a checkpoint.

    Args:
        is_starting: the signal came before the run's folder was there: it may also have ended the process.
    """
    check_no_trace(done.stderr)
    if done.returncode == -signum:
        assert is_starting and not run.exists(), "the signal ended the process as if nobody listened"
        return
    assert done.returncode == 128 + signum, f"exit code {done.returncode}: {done.stderr[-600:]}"
    if not (run / "steps.jsonl").exists():
        return
    found = read_run(run)
    assert signum.name in done.stderr, f"{signum.name} is not named: {done.stderr[-600:]}"
    if found.steps:
        last, newest = found.steps[-1].step, find_newest_step(run)
        assert newest == last, f"the last step is {last}, its newest whole checkpoint that of step {newest}"


def press_ctrl_c(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Ctrl-C once at a random time, or twice in a step that would take much longer than the run may take to end."""
    for number in count():
        share, step, pauses = random.random(), random.randint(2, NUM_STEPS), [random.uniform(0, 0.5) for _ in range(2)]

        def once(folder: Path, share: float = share) -> None:
            recipe, seconds = workload.write_recipe(folder), workload.run_undisturbed().find_time(share)
            stop_by_signal(recipe, folder / "run", signal.SIGINT, seconds, LATENCY)
            check_gone_on(workload, recipe, folder / "run")

        def twice(folder: Path, step: int = step, pauses: list[float] = pauses) -> None:
            recipe, run = workload.write_recipe(folder), folder / "run"
            with WarmProcess(train_with_a_long_step, str(recipe), step, LONG_STEP) as process:
                process.wait_for(f"({LONG_STEP_BEGINS})")
                time.sleep(pauses[0])
                process.send_signal(signal.SIGINT)
                time.sleep(pauses[1])
                send_and_wait(process, run, signal.SIGINT, TWICE_LATENCY)
            check_gone_on(workload, recipe, run)

        yield Trial(f"{number} twice in step {step}" if number % 2 else f"{number} once at {share:.3f}",
                    twice if number % 2 else once)  # fmt: skip


def check_gone_on(workload: Workload, recipe: Path, run: Path) -> None:
    """The run resumes from its last step to the results of an undisturbed one."""
    resume(recipe, run)
    check_same_run(run, workload.run_undisturbed().run)


ROWS = [
    Row("R4", "SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 at a random time",
        "exit code 128 + signal within 3 s; resumes from the last step to identical weights",
        signal_at_random, 5, 50, signal_peer_at_random),
    Row("R5", "Ctrl-C once at a random time, or twice within half a second in a step of 10 s",
        "exit code 130 within 3 s, no trace; resumes from the last step to identical weights",
        press_ctrl_c, 2, 20),
]  # fmt: skip
