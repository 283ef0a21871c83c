"""Folders that cannot be written: from the start, while a run writes into them, and invalid names."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reliability.campaign import Row, Trial
from reliability.faults import train, train_on_a_full_disk
from reliability.rows.damage import STEPS, copy_run
from reliability.rows.disk import check_resumed, explain_absence, mount_in_memory
from reliability.rows.kills import FEW_STEPS, count_file_operations
from reliability.warm import WarmProcess, check_no_trace, run_command
from reliability.workload import TRAIN_WORDS, Workload

MOST_SECONDS = 5.0
NOBODY = 65_534  # a user without rights
SIZE = 64 * 2**20
READ_ONLY, TOO_LONG, NO_RIGHT = "Read-only file system", "File name too long", "Permission denied"
Place = Callable[[Path], Path]  # makes what is in the way in a folder, returns the run.dir of the trial


def put_file(path: Path) -> Path:
    path.write_text("mine")
    return path


def link_to_nothing(path: Path) -> Path:
    path.symlink_to(path.parent / "nothing")
    return path


PLACES: dict[str, tuple[Place, str]] = {
    "a file has the name of the run": (lambda folder: put_file(folder / "mine"), "mine"),
    "a file has the name of the folder above": (lambda folder: put_file(folder / "mine") / "run", "mine"),
    "a link to nothing": (lambda folder: link_to_nothing(folder / "link"), "link"),
    "a name of 300 characters": (lambda folder: folder / ("a" * 300), "has 300 bytes. Allowed are 200"),
    "a path of 5,000 characters": (lambda folder: folder / "/".join(["a" * 49] * 100), TOO_LONG),
    "a folder of other files": (lambda folder: put_file(make_folder(folder / "other") / "x.txt").parent, "not empty"),
}


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def refuse_places(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Train into each of PLACES, and, where one can be mounted, into read-only file systems; resume, predict, evaluate
    and report in one."""
    whole = workload.run_undisturbed(**STEPS)
    for name, (make, said) in PLACES.items():

        def run(folder: Path, make: Place = make, said: str = said) -> None:
            place = make(folder)
            before = sorted(path.name for path in folder.iterdir())
            recipe = write_recipe_without_model(workload, make_folder(folder / "recipe"))
            refuse("train", str(recipe), "--run.dir", str(place), *TRAIN_WORDS, said=said)
            left = sorted(path.name for path in folder.iterdir() if path.name != "recipe")
            assert left == before, f"left behind: {left}"

        yield Trial(name, run)

    def train_as_nobody(folder: Path) -> None:
        recipe = write_recipe_without_model(workload, folder)
        folder.chmod(0o755)
        start = time.monotonic()
        done = WarmProcess(train_as, NOBODY, str(recipe)).finish()
        check_soon(done, NO_RIGHT, time.monotonic() - start)
        assert not (folder / "run").exists(), "a run directory is left"

    if os.geteuid() == 0:
        yield Trial("a folder of another user", train_as_nobody)

    def train_read_only(folder: Path) -> None:
        recipe = write_recipe_without_model(workload, folder)
        with mount_read_only(folder / "disk"):
            refuse("train", str(recipe), "--run.dir", str(folder / "disk" / "run"), *TRAIN_WORDS, said=READ_ONLY)

    def cache_read_only(folder: Path) -> None:
        recipe = workload.write_recipe(folder, **STEPS)
        with mount_read_only(folder / "disk"):
            refuse(
                "train", str(recipe), "--data.cache_dir", str(folder / "disk" / "cache"), *TRAIN_WORDS, said=READ_ONLY
            )

    def use_read_only(folder: Path, *words: str, said: str) -> None:
        with mount_read_only(folder / "disk", whole.run):
            run = folder / "disk" / "run"
            refuse(*(word.format(run=run) for word in words), said=said)

    if not explain_absence():
        yield Trial("train into a read-only file system", train_read_only)
        yield Trial("a cache on a read-only file system", cache_read_only)
        questions = str(whole.run.parent / "dev.json")
        for said, *words in (
            (READ_ONLY, "train", "{run}", "--resume", *TRAIN_WORDS),
            (READ_ONLY, "evaluate", "{run}"),
            (READ_ONLY, "report", "{run}"),
            ("is not writable", "predict", "{run}", "--input", questions, "--output", "{run}/answers.jsonl"),
        ):
            yield Trial(
                f"{words[0]} on a read-only file system",
                lambda folder, words=words, said=said: use_read_only(folder, *words, said=said),
            )
    num_operations = count_file_operations(workload)
    for at in random.sample(range(1, num_operations + 1), 8):
        yield Trial(
            f"read-only from operation {at} of {num_operations} on",
            lambda folder, at=at: lose_right_to_write(workload, folder, at),
        )


def lose_right_to_write(workload: Workload, folder: Path, at: int) -> None:
    """The run directory becomes read-only while a run trains; with the right back, the run goes on."""
    recipe, run = workload.write_recipe(folder, **FEW_STEPS), folder / "run"
    check_reason(WarmProcess(train_on_a_full_disk, str(recipe), str(run), at, errno.EROFS).finish(), READ_ONLY)
    check_resumed(workload, recipe, run)


def refuse(*words: str, said: str) -> None:
    """The command refuses in a few seconds, in one line."""
    start = time.monotonic()
    done = run_command(*words)
    check_soon(done, said, time.monotonic() - start)


def write_recipe_without_model(workload: Workload, folder: Path) -> Path:
    """A recipe whose model is a folder without weights: what loads the model before it refuses the folder says so."""
    model = folder / "model"
    shutil.copytree(workload.model, model)
    (model / "model.safetensors").write_bytes(b"none")
    return workload.write_recipe(folder, **STEPS, model__path=str(model))


def train_as(user: int, recipe: str) -> int:
    """Run `fivetune train RECIPE` as another user."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    return train(recipe)


def check_soon(done: subprocess.CompletedProcess[str], said: str, seconds: float) -> None:
    """The command refused, in one line, and soon."""
    check_reason(done, said)
    assert done.returncode, "exit code 0"
    assert done.stderr.count("\n") == 1, f"not one line: {done.stderr[-600:]}"
    assert seconds < MOST_SECONDS, f"the command took {seconds:.1f} s"


def check_reason(done: subprocess.CompletedProcess[str], said: str) -> None:
    """The command says the reason; it ends with exit code 0 if only files failed that it does not need."""
    check_no_trace(done.stderr)
    assert done.returncode in (0, 2, 4, 6), f"exit code {done.returncode}: {done.stderr[-600:]}"
    assert said in done.stderr, f"expected {said!r}, told: {done.stderr[-600:]}"


@contextmanager
def mount_read_only(folder: Path, run: Path | None = None) -> Iterator[None]:
    """A read-only file system at `folder`, with a copy of a run."""
    with mount_in_memory(folder, SIZE):
        if run:
            copy_run(run, folder)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
        yield


ROWS = [
    Row("R21", "a run directory that cannot be made or written: read-only from the start or later, of another user, "
        "invalid names",
        "refused with the reason in one line within 5 s, before the model loads", refuse_places, 15),
]  # fmt: skip
