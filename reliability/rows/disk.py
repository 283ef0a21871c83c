"""Disks that are full: from a file operation on, by the size of a file or of the file system, for one file alone."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from reliability.campaign import Row, Trial
from reliability.faults import train, train_on_a_full_disk, train_with_small_files
from reliability.rows.kills import FEW_STEPS, check_little_lost, count_file_operations
from reliability.warm import WarmProcess, check_no_trace
from reliability.workload import Workload, check_same_run, check_weights, read_weights, resume, start_training

LOG, TELEMETRY, TERMINAL = "log.txt", "telemetry.jsonl", "the terminal's output"
NEEDED = ("steps.jsonl", "evals.jsonl")
OUTPUTS = (LOG, TELEMETRY, TERMINAL, *NEEDED)
TOLD = {LOG: "log.txt: cannot be written", TELEMETRY: "telemetry: a record is lost", TERMINAL: "standard error"}
SIZED = ("the checkpoint cannot be written", ".json: cannot be written", "report.html: cannot be written")
SPACE = re.compile(r"\d [KMGT]?i?B(,| are needed,) .*\d [KMGT]?i?B are free")


def fill_at_each_operation(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """From one operation on, each finds the disk full; then there is space again."""
    num_operations = count_file_operations(workload)
    for at in random.sample(range(1, num_operations + 1), num_operations):

        def run(folder: Path, at: int = at) -> None:
            recipe = workload.write_recipe(folder, **FEW_STEPS)
            check_full_disk_is_named(WarmProcess(train_on_a_full_disk, str(recipe), str(folder / "run"), at).finish())
            check_resumed(workload, recipe, folder / "run")

        yield Trial(f"operation {at} of {num_operations}", run)


def limit_files(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """No file may become larger than a part of the largest that an undisturbed run writes."""
    sizes = [path.stat().st_size for path in workload.run_undisturbed(**FEW_STEPS).run.rglob("*") if path.is_file()]
    shares = [(number + 0.5) / 40 for number in range(40)]
    for share in random.sample(shares, len(shares)):

        def run(folder: Path, limit: int = int(share * max(sizes))) -> None:
            recipe = workload.write_recipe(folder, **FEW_STEPS)
            check_full_disk_is_named(WarmProcess(train_with_small_files, str(recipe), limit).finish())
            check_resumed(workload, recipe, folder / "run")

        yield Trial(f"{share:.4f} of the largest file", run)


def shrink_file_system(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """A file system in memory that holds 0.5 to 3 checkpoints; then it becomes larger."""
    checkpoint = workload.run_undisturbed(**FEW_STEPS).run / "checkpoints" / "2"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*"))
    shares = [0.5 + 2.5 * number / 19 for number in range(20)]
    for share in random.sample(shares, len(shares)):

        def run(folder: Path, num_bytes: int = int(share * size)) -> None:
            recipe = workload.write_recipe(folder, **FEW_STEPS)
            with mount_in_memory(folder / "run", num_bytes):
                check_full_disk_is_named(start_training(recipe).finish())
                _call("mount", "-o", "remount,size=64m", str(folder / "run"))
                check_resumed(workload, recipe, folder / "run")

        yield Trial(f"{share:.2f} checkpoints", run)


@contextmanager
def mount_in_memory(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of `num_bytes` at `folder`."""
    folder.mkdir()
    _call("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder))
    try:
        yield
    finally:
        _call("umount", "--lazy", str(folder))


@cache
def explain_absence() -> str:
    """Why no file system can be mounted here; empty if one can."""
    with TemporaryDirectory() as place:
        try:
            with mount_in_memory(Path(place, "disk"), 2**20):
                return ""
        except (OSError, subprocess.CalledProcessError):
            return "no right to mount a file system"


def fill_for_each_file(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Of an undisturbed run, what is appended to one file, or printed, meets a full disk: /dev/full."""
    for name in random.sample(OUTPUTS, len(OUTPUTS)):

        def run(folder: Path, name: str = name) -> None:
            recipe, run = workload.write_recipe(folder, **FEW_STEPS), folder / "run"
            done = WarmProcess(train_with_full_file, str(recipe), name).finish()
            check_no_trace(done.stderr)
            if name in NEEDED:
                assert done.returncode == 4, f"exit code {done.returncode}: {done.stderr[-600:]}"
                said = f"{run / name}: cannot be written: {os.strerror(errno.ENOSPC)}"
                assert said in done.stderr, done.stderr[-600:]
                check_resumed(workload, recipe, run)
                return
            assert done.returncode == 0, f"the run ended with exit code {done.returncode}: {done.stderr[-600:]}"
            check_weights(read_weights(run), workload.run_undisturbed(**FEW_STEPS).weights)
            told, place = (run / LOG).read_text() if name == TERMINAL else done.stderr, TOLD[name]
            assert place in told and os.strerror(errno.ENOSPC) in told, f"{place} is not named: {told[-600:]}"

        yield Trial(name, run)


def train_with_full_file(recipe: str, name: str) -> int:
    """Run `fivetune train RECIPE`; what is appended to the file `name` of the run goes to /dev/full."""
    from fivetune.rundir import lines, progress

    if name == TERMINAL:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        return train(recipe, quiet=False)
    whole = lines.open_for_append

    def open_for_append(path: Path) -> FileIO:
        return FullFile("/dev/full", "r+b") if path.name == name else whole(path)

    lines.open_for_append = progress.open_for_append = open_for_append
    return train(recipe)


class FullFile(FileIO):
    """/dev/full, which cannot be cut, as an empty file."""

    def truncate(self, size: int | None = None) -> int:
        return 0


def check_full_disk_is_named(done: CompletedProcess[str]) -> None:
    """The run ended well without the file, or says what could not be written, in a line and without a trace."""
    check_no_trace(done.stderr)
    assert done.returncode in (0, 4, 6), f"exit code {done.returncode}: {done.stderr[-600:]}"
    words = ("No space left", "File too large", "did not write the whole file")
    assert any(word in done.stderr for word in words), f"the full disk is not named: {done.stderr[-600:]}"
    for line in done.stderr.splitlines():
        is_sized = "No space left" in line and any(file in line for file in SIZED)
        assert not is_sized or SPACE.search(line), f"needed and free space are not told: {line[-600:]}"


def check_resumed(workload: Workload, recipe: Path, run: Path) -> None:
    """With space, the run goes on from its last or last but one step on record to the results of an undisturbed one,
    and nothing half-written is left."""
    check_little_lost(run)
    resume(recipe, run)
    whole = workload.run_undisturbed(**FEW_STEPS)
    check_same_run(run, whole.run)
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    expected = {str(path.relative_to(whole.run)) for path in whole.run.rglob("*")}
    assert names <= expected, f"left behind: {sorted(names - expected)}"


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


ROWS = [
    Row("R7a", "a file system of 0.5 to 3 checkpoints, which later grows",
        "the message names the full disk; resumes to identical weights, nothing half-written is left",
        shrink_file_system, 4, 20, explain_absence=explain_absence),
    Row("R7b", "the disk is full from a file operation on", "as R7a", fill_at_each_operation, 5),
    Row("R7c", "no file may become larger than a limit", "as R7a, without sizes", limit_files, 2, 40),
    Row("R7d", "the disk is full for one file alone: log, telemetry, the terminal's output, steps, evaluations",
        "log or terminal: the run ends well; records: exit code 4, and a resume to identical weights",
        fill_for_each_file, 2),
]  # fmt: skip
