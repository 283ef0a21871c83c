"""Signals: one that asks the run to stop, Ctrl-C once and twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from subprocess import CompletedProcess

from fivetune.rundir import read_run
from reliability.campaign import Row, Trial
from reliability.peer import VARIANTS as peer_variants
from reliability.peer import Peer, read_peer_weights
from reliability.warm import check_no_trace
from reliability.workload import Workload, check_weights, read_weights, resume, start_training

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
VARIANTS = ("accumulation", "adafactor", "labels", "ddp")
LATENCY = 3.0  # seconds; a step and a save of the tiny model take well below one
LAUNCH_LATENCY = 10.0  # torchrun forwards the signal, waits for its ranks and ends


def signal_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Send each signal to each variant in turn, at a time that is uniform over the run."""
    for number in count():
        signum, share = SIGNALS[number % len(SIGNALS)], random.random()
        variant = VARIANTS[(number + number // len(SIGNALS)) % len(VARIANTS)]

        def run(folder: Path, signum: signal.Signals = signum, variant: str = variant, share: float = share) -> None:
            whole = workload.run_undisturbed(variant)
            recipe = workload.write_recipe(folder, variant)
            with start_training(recipe) as process:
                time.sleep(whole.find_time(share))
                sent = time.monotonic()
                if process.code is None:
                    process.send_signal(signum)
                done = process.wait()
            latency = time.monotonic() - sent
            check_stopped(done, folder / "run", signum)
            limit = LAUNCH_LATENCY if variant == "ddp" else LATENCY
            assert latency < limit or done.returncode == 0, f"the run ended {latency:.1f} s after the signal"
            resume(recipe, folder / "run")
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{number} {signum.name} {variant} at {share:.3f}", run)


def signal_peer_at_random(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """SIGTERM to the Trainer: it is to end by the signal's code, and the run to go on to the same weights."""
    peer = Peer(workload)
    for number in count():
        variant, share = list(peer_variants)[number % len(peer_variants)], random.random()

        def run(folder: Path, variant: str = variant, share: float = share) -> None:
            whole = peer.run_undisturbed(variant)
            with peer.start(folder, variant) as process:
                time.sleep(whole.find_time(share))
                if process.code is None:
                    process.send_signal(signal.SIGTERM)
                done = process.wait()
            finished = (folder / "run" / "model.safetensors").exists()
            assert finished or abs(done.returncode) in (15, 143), f"exit code {done.returncode}"
            peer.resume(folder, variant)
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{number} {variant} at {share:.3f}", run)


def check_stopped(done: CompletedProcess[str], run: Path, signum: signal.Signals, *, saved: bool = True) -> None:
    """The run says by which signal it stopped; where it was to save, its last recorded step has a checkpoint."""
    check_no_trace(done.stderr)
    if done.returncode == -signum:
        assert not run.exists(), "the signal ended the process as if nobody listened, and a run was there"
        return
    assert done.returncode in (0, 128 + signum), f"exit code {done.returncode}: {done.stderr[-600:]}"
    if done.returncode == 0 or not (run / "steps.jsonl").exists():
        return
    found = read_run(run)
    assert signum.name in done.stderr or found.status.state == "finished", done.stderr[-600:]
    if found.steps and saved:
        assert (run / "checkpoints" / str(found.steps[-1].step)).is_dir(), "the last step has no checkpoint"


def press_ctrl_c(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Ctrl-C once, or twice within a second."""
    for number in count():
        share, pause = random.random(), random.uniform(0, 0.5)

        def run(folder: Path, share: float = share, pause: float = pause, twice: bool = number % 2 == 1) -> None:
            whole = workload.run_undisturbed()
            recipe = workload.write_recipe(folder)
            with start_training(recipe) as process:
                time.sleep(whole.find_time(share))
                for _ in range(1 + twice):
                    sent = time.monotonic()
                    if process.code is None:
                        process.send_signal(signal.SIGINT)
                    time.sleep(pause * twice)
                done = process.wait()
            latency = time.monotonic() - sent
            check_stopped(done, folder / "run", signal.SIGINT, saved=not twice)
            assert latency < LATENCY or done.returncode == 0, f"the run ended {latency:.1f} s after the last Ctrl-C"
            resume(recipe, folder / "run")
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{number} {'twice' if number % 2 else 'once'} at {share:.3f}", run)


ROWS = [
    Row("R4", "SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 at a random time",
        "exit code 128 + signal within 3 s (two ranks: 10 s), the last step saved; resumes to identical weights",
        signal_at_random, 6, 50, signal_peer_at_random),
    Row("R5", "Ctrl-C once, or twice within half a second",
        "exit code 130 within 3 s, no trace; resumes to identical weights", press_ctrl_c, 2, 20),
]  # fmt: skip
