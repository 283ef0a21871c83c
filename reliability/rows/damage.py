"""Damaged files of a checkpoint, of a run directory and of model/: detected and named, or without any effect."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from fivetune.rundir import read_evals
from fivetune.rundir.checksums import MANIFEST
from reliability.campaign import Row, Trial
from reliability.faults import die_before_renaming_to, train_and_die_before_renaming_to
from reliability.peer import Peer, read_peer_weights
from reliability.warm import WarmProcess, check_no_trace, run_command
from reliability.workload import NUM_STEPS, Workload, check_weights, read_weights, start_training

STEPS: dict[str, Any] = {"train__num_steps": 4, "eval__every_steps": 2}
LAST, BEFORE = "checkpoints/3", "checkpoints/2"  # of a run that ended before its checkpoint of step 4
RUN_FILES = (
    "config.yaml", "status.json", "machine.json", "data.json", "plan.json", "steps.jsonl", "evals.jsonl",
    "telemetry.jsonl", "predictions/eval-2.jsonl",
)  # fmt: skip
Damage = Callable[[bytes], bytes | None]  # the content of a file after it; None: the file is lost


def make_damages(random: random.Random) -> Iterator[tuple[str, Damage]]:
    """Yield the damages that a disk, a copy that stopped and a mistake make of one file."""
    yield "missing", lambda content: None
    yield "empty", lambda content: b""
    yield "zeroed", lambda content: bytes(len(content))
    for share in sorted(random.random() for _ in range(5)):
        yield f"cut at {share:.4f}", lambda content, share=share: content[: int(share * len(content))]
    for place in sorted(random.random() for _ in range(10)):
        yield f"bit flipped at {place:.7f}", partial(flip_bit, place=place)


def flip_bit(content: bytes, place: float) -> bytes:
    """Flip one bit, by its place as a share of all bits in 0 to 1."""
    number = int(place * len(content) * 8)
    changed = bytearray(content)
    changed[number // 8] ^= 1 << number % 8
    return bytes(changed)


def replace_by(path: Path) -> Damage:
    """The damage of a file that was replaced by another."""
    content = path.read_bytes()
    return lambda _: content


def damage_before_resume(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Damage a file of the last checkpoint or of the run, then resume."""
    stopped, other = (begin_run(workload, f"stopped-{seed}", run__seed=seed) for seed in (1, 2))
    whole = workload.run_undisturbed(**STEPS).run
    damages: list[tuple[str, str, Damage]] = []
    for path in sorted((stopped / LAST).iterdir()):
        name = f"{LAST}/{path.name}"
        damages += [(name, *damage) for damage in make_damages(random)]
        damages.append((name, "of another step", replace_by(stopped / BEFORE / path.name)))
        damages.append((name, "of another run", replace_by(other / name)))
    for name in RUN_FILES:
        damages += [(name, *damage) for damage in make_damages(random)]
        damages.append((name, "of another step", replace_by(whole / name)))
        damages.append((name, "of another run", replace_by(other / name)))
    for name, kind, damage in random.sample(damages, len(damages)):

        def run(folder: Path, name: str = name, damage: Damage = damage) -> None:
            run = copy_run(stopped, folder)
            apply_damage(run / name, damage)
            with start_training(run, "--resume") as process:
                done = process.wait()
            is_told = check_told(done, name)
            if done.returncode:
                return
            assert read_weights(run) == read_weights(whole), f"other weights; told: {done.stderr[-600:] or 'nothing'}"
            answers = [(folder / "predictions" / "eval-4.jsonl").read_bytes() for folder in (run, whole)]
            assert is_told or answers[0] == answers[1], "other answers, and nothing is told"
            assert is_told or not name.startswith(LAST) or name.endswith(MANIFEST), "nothing is told"

        yield Trial(f"{name} {kind}, resume", run)


def damage_before_use(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Damage a file of a finished run or of its model/, then predict, evaluate and report."""
    whole, other = (workload.run_undisturbed(**STEPS, run__seed=seed).run for seed in (1, 2))
    names = [f"model/{path.name}" for path in sorted((whole / "model").iterdir())]
    questions = whole.parent / "dev.json"
    expected = run_command("predict", str(whole), "--input", str(questions)).stdout
    scores = read_evals(whole)[-1].scores
    damages = [(name, *damage) for name in (*names, *RUN_FILES) for damage in make_damages(random)]
    damages += [(name, "of another run", replace_by(other / name)) for name in (*names, *RUN_FILES)]
    damages.append(("model/model.safetensors", "of another step", replace_by(whole / LAST / "model.safetensors")))
    for name, kind, damage in random.sample(damages, len(damages)):

        def run(folder: Path, name: str = name, damage: Damage = damage) -> None:
            run = copy_run(whole, folder)
            apply_damage(run / name, damage)
            predicted = run_command("predict", str(run), "--input", str(questions))
            is_told = check_told(predicted, name)
            assert is_told or predicted.stdout == expected, "other answers, and nothing is told"
            reported = run_command("report", str(run))
            check_told(reported, name)
            evaluated = run_command("evaluate", str(run))
            is_told = check_told(evaluated, name)
            assert is_told or read_evals(run)[-1].scores == scores, "other scores, and nothing is told"

        yield Trial(f"{name} {kind}, use", run)


def damage_any(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Both in turn."""
    trials = [*damage_before_resume(workload, random), *damage_before_use(workload, random)]
    yield from random.sample(trials, len(trials))


def damage_peer(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Damage a file of the Trainer's last checkpoint: it is to resume to the same weights without any help."""
    peer = Peer(workload)
    stopped = workload.make_folder("peer-stopped")
    with peer.start(stopped, prepare=partial(die_before_renaming_to, f"checkpoint-{NUM_STEPS - 1}")) as process:
        assert process.wait().returncode == 137, "the peer did not reach this step"
    whole, last = peer.run_undisturbed(), f"run/checkpoint-{NUM_STEPS - 2}"
    names = sorted(path.name for path in (stopped / last).iterdir())
    damages = [(name, *damage) for name in names for damage in make_damages(random)]
    for name, kind, damage in random.sample(damages, len(damages)):

        def run(folder: Path, name: str = name, damage: Damage = damage) -> None:
            shutil.copytree(stopped, folder, dirs_exist_ok=True)
            apply_damage(folder / last / name, damage)
            peer.resume(folder)
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{name} {kind}", run)


def begin_run(workload: Workload, name: str, **overrides: Any) -> Path:
    """A run of STEPS in a folder of the workload that ended, as if killed, before its last checkpoint had its name."""
    folder = workload.make_folder(name)
    stop_before_end(workload.write_recipe(folder, **STEPS, **overrides))
    return folder / "run"


def stop_before_end(recipe: Path) -> None:
    """Train by a recipe of STEPS until the last checkpoint is to get its name."""
    with WarmProcess(train_and_die_before_renaming_to, str(recipe), "checkpoints/4") as process:
        assert process.wait().returncode == 137, "the run did not reach its last checkpoint"


def copy_run(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run", symlinks=True))


def apply_damage(path: Path, damage: Damage) -> None:
    content = damage(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


def check_told(done: CompletedProcess[str], name: str) -> bool:
    """Whether the command names the damaged file; it ends well, or with the exit code of the file's kind."""
    said = done.stderr
    check_no_trace(said)
    assert done.returncode in (0, 2, 3, 4), f"exit code {done.returncode}: {said[-600:]}"
    is_told = os.path.basename(name) in said
    if os.path.basename(name) == MANIFEST:  # what it lists is compared with the files, whichever of them is damaged
        is_told |= f"{os.path.dirname(name)}: " in said
    assert is_told or done.returncode == 0, f"{name} is not named: {said[-600:]}"
    return is_told


ROWS = [
    Row("R8", "a damaged file: missing, empty, zeroed, cut, one bit flipped, of another step, of another run",
        "named with its exit code, or without effect: same weights, same answers; the checkpoint before is used",
        damage_any, 40, None, damage_peer),
]  # fmt: skip
