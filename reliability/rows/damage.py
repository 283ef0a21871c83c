"""Damaged files of a checkpoint, of a run directory and of model/: detected and named, or without any effect."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from fivetune import rundir
from fivetune.rundir import read_evals, read_run
from fivetune.rundir.checksums import MANIFEST
from reliability.campaign import Row, Trial
from reliability.faults import die_before_renaming_to, train, train_and_die_before_renaming_to
from reliability.peer import Peer, read_peer_weights, train_peer
from reliability.ranks import Ranks
from reliability.warm import WarmProcess, check_no_trace, run_command
from reliability.workload import NUM_STEPS, Workload, check_weights, count_ranks, read_weights

STEPS: dict[str, Any] = {"train__num_steps": 4, "eval__every_steps": 2}
LAST, BEFORE = "checkpoints/3", "checkpoints/2"  # of a run that ended before its checkpoint of step 4
RUN_FILES = (
    "config.yaml", "status.json", "machine.json", "data.json", "plan.json", "steps.jsonl", "evals.jsonl",
    "telemetry.jsonl", "predictions/eval-2.jsonl", "log.txt",
)  # fmt: skip
SETTINGS, BEST = "config.yaml", "best"
OTHERS = ("lora", "extractive", "fsdp")  # whose checkpoints and models are damaged too, each file in a few ways
NUM_OF_OTHERS = 6
Damage = Callable[[bytes], bytes | None]  # the content of a file after it; None: the file is lost
Fault = tuple[
    str, str, Callable[[Path], object]
]  # the file, what is done to it, as a name and as a function of its path


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


def damage_file(path: Path, name: str, others: dict[str, Path], random: random.Random) -> Iterator[Fault]:
    """Yield the faults of one file, also that of being replaced by `others`; those that change nothing are left out."""
    content = path.read_bytes()
    damages = dict(make_damages(random))
    damages |= {kind: replace_by(other) for kind, other in others.items() if other.exists()}
    for kind, damage in damages.items():
        if damage(content) != content:
            yield name, kind, partial(apply_damage, damage=damage)


def damage_best() -> Iterator[Fault]:
    """Yield the faults of the link to the best checkpoint."""
    yield BEST, "missing", Path.unlink
    for kind, target in (("to nothing", "checkpoints/7"), ("to another step", "checkpoints/1")):
        yield BEST, kind, lambda path, target=target: [path.unlink(), path.symlink_to(target)]
    yield BEST, "an empty folder", lambda path: [path.unlink(), path.mkdir()]
    yield BEST, "a file", lambda path: [path.unlink(), path.write_text("")]


def damage_before_resume(workload: Workload, variant: str, random: random.Random) -> Iterator[Trial]:
    """Damage a file of the last checkpoint or, of adamw, of the run; then resume."""
    stopped, other = (begin_run(workload, f"stopped-{variant}-{seed}", variant, run__seed=seed) for seed in (1, 2))
    whole = workload.run_undisturbed(variant, **STEPS).run
    faults: list[Fault] = []
    for path in sorted((stopped / LAST).iterdir()):
        name = f"{LAST}/{path.name}"
        others = {"of another step": stopped / BEFORE / path.name, "of another run": other / name}
        faults += choose(damage_file(path, name, others, random), variant, random)
    for name in RUN_FILES if variant == "adamw" else ():
        faults += damage_file(
            stopped / name, name, {"of the end": whole / name, "of another run": other / name}, random
        )
    faults += damage_best() if variant == "adamw" else ()
    for name, kind, act in faults:

        def run(folder: Path, name: str = name, act: Callable[[Path], object] = act) -> None:
            run = copy_run(stopped, folder)
            act(run / name)
            done = Ranks(train, str(run), "--resume", num=count_ranks(variant)).finish()
            is_told, is_in_checkpoint = is_damage_named(done, name), name.startswith(LAST)
            assert done.returncode == 0 or not is_in_checkpoint, f"no resume from {BEFORE}: {done.stderr[-600:]}"
            if done.returncode:
                return
            assert read_weights(run) == read_weights(whole), f"other weights; told: {done.stderr[-600:] or 'nothing'}"
            check_answers([read_answers(run), read_answers(whole)], name, is_told=is_told)
            assert is_told or not is_in_checkpoint or name.endswith(MANIFEST), "nothing is told"
            begun, expected = read_run(run).machine.parts[-1].step, 2 if is_in_checkpoint and is_told else 3
            assert begun == expected, f"resumed after step {begun}, not after {expected}"

        yield Trial(f"{variant} {name} {kind}, resume", run)


def damage_before_use(workload: Workload, variant: str, random: random.Random) -> Iterator[Trial]:
    """Damage a file of model/ or, of adamw, of a finished run; then predict, report and evaluate."""
    whole, other = (workload.run_undisturbed(variant, **STEPS, run__seed=seed).run for seed in (1, 2))
    names = [f"model/{path.name}" for path in sorted((whole / "model").iterdir())]
    questions = whole.parent / "dev.json"
    expected = run_command("predict", str(whole), "--input", str(questions)).stdout
    place = workload.make_folder(f"page-{variant}")
    page = write_page(copy_run(whole, place), place)[1]
    scores = read_evals(whole)[-1].scores
    faults: list[Fault] = []
    for name in (*names, *RUN_FILES) if variant == "adamw" else names:
        weights = {"of another step": whole / LAST / "model.safetensors"} if name == "model/model.safetensors" else {}
        faults += choose(
            damage_file(whole / name, name, {"of another run": other / name, **weights}, random), variant, random
        )
    faults += damage_best() if variant == "adamw" else ()
    for name, kind, act in faults:

        def run(folder: Path, name: str = name, act: Callable[[Path], object] = act) -> None:
            run = copy_run(whole, folder)
            act(run / name)
            predicted = run_command("predict", str(run), "--input", str(questions))
            is_told = is_damage_named(predicted, name)
            if not predicted.returncode:
                check_answers([predicted.stdout, expected], name, is_told=is_told)
            reported, found = write_page(run, folder)
            is_told = is_damage_named(reported, name)
            assert is_told or found == page, "another page, and nothing is told"
            evaluated = run_command("evaluate", str(run))
            is_told = is_damage_named(evaluated, name)
            if not evaluated.returncode:
                last = read_evals(run, damage=rundir.Damage())[-1]
                check_answers([last.scores, scores], name, is_told=is_told)

        yield Trial(f"{variant} {name} {kind}, use", run)


def damage_any(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """All in random order, and first one of each kind of run."""
    makers = (damage_before_resume, damage_before_use)
    trials = {one: [t for make in makers for t in make(workload, one, random)] for one in ("adamw", *OTHERS)}
    first = [random.choice(trials[one]) for one in OTHERS]
    rest = [trial for each in trials.values() for trial in each if trial not in first]
    yield from (*first, *random.sample(rest, len(rest)))


def choose(faults: Iterable[Fault], variant: str, random: random.Random) -> list[Fault]:
    """All faults of a file, of OTHERS a few."""
    found = list(faults)
    return random.sample(found, NUM_OF_OTHERS) if variant in OTHERS else found


def write_page(run: Path, place: Path) -> tuple[CompletedProcess[str], str]:
    """Write the report; returns what the command did, and the page without the name of the folder `place`."""
    done = run_command("report", str(run))
    return done, (run / "report.html").read_text(encoding="utf-8").replace(str(place), "")


def read_answers(run: Path) -> bytes:
    return (run / "predictions" / "eval-4.jsonl").read_bytes()


def check_answers(found: list[Any], name: str, *, is_told: bool) -> None:
    """A command that ends well gives the same answers; or others where it says that the settings were changed."""
    assert found[0] == found[1] or (is_told and name == SETTINGS), f"other answers; told: {is_told}"


def damage_peer(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Damage a file of the Trainer's last checkpoint: it is to resume to the same weights without any help."""
    peer, end = Peer(workload), partial(die_before_renaming_to, f"checkpoint-{NUM_STEPS - 1}")
    stopped, other = (workload.make_folder(f"peer-stopped-{seed}") for seed in (1, 2))
    for seed, folder in ((1, stopped), (2, other)):
        done = WarmProcess(train_peer, str(folder), str(workload.model), {"seed": seed}, end).finish()
        assert done.returncode == 137, "the peer did not reach this step"
    whole, last, before = (peer.run_undisturbed(), *(f"run/checkpoint-{NUM_STEPS - back}" for back in (2, 3)))
    faults: list[Fault] = []
    for path in sorted((stopped / last).iterdir()):
        others = {"of another step": stopped / before / path.name, "of another run": other / last / path.name}
        faults += damage_file(path, path.name, others, random)
    for name, kind, act in random.sample(faults, len(faults)):

        def run(folder: Path, name: str = name, act: Callable[[Path], object] = act) -> None:
            shutil.copytree(stopped, folder, dirs_exist_ok=True)
            act(folder / last / name)
            peer.resume(folder)
            check_weights(read_peer_weights(folder), whole.weights)

        yield Trial(f"{name} {kind}", run)


def begin_run(workload: Workload, name: str, variant: str = "adamw", **overrides: Any) -> Path:
    """A run of STEPS in a folder of the workload that ended, as if killed, before its last checkpoint had its name."""
    folder = workload.make_folder(name)
    recipe = workload.write_recipe(folder, variant, **STEPS, **overrides)
    stop_before_end(recipe, num=count_ranks(variant))
    return folder / "run"


def stop_before_end(recipe: Path, *, num: int = 1) -> None:
    """Train by a recipe of STEPS until the last checkpoint is to get its name."""
    done = Ranks(train_and_die_before_renaming_to, str(recipe), "checkpoints/4", num=num).finish()
    assert done.returncode == 137, "the run did not reach its last checkpoint"


def copy_run(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run", symlinks=True))


def apply_damage(path: Path, damage: Damage) -> None:
    content = damage(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


def is_damage_named(done: CompletedProcess[str], name: str) -> bool:
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
    Row("R8", "a damaged file of a checkpoint (also sharded, of an adapter, of an extractive head), of the records, of "
        "model/: missing, empty, zeroed, cut, one bit flipped, of another step or run; the link `best` to nothing",
        "an error or a warning names the file; without an error the same weights and answers",
        damage_any, 36, None, damage_peer),
]  # fmt: skip
