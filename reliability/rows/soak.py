"""Long runs: memory, open files, the sizes of files and the number of checkpoints stay what they are."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import psutil

from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess, check_success
from reliability.workload import Workload, make_model, start_training

KEPT = 3
SLOPE = 2**20  # bytes that may be added in 1,000 steps
GROWTH = 32 * 2**20  # bytes that may be added by any run after its first quarter
SIZES: dict[str, tuple[int, int]] = {
    "steps.jsonl": (0, 1_000),
    "telemetry.jsonl": (2**16, 100),  # a sample of 500 bytes each second: five steps a second on a busy machine
    "report.html": (5 * 2**20, 0),
    "*": (2 * 2**20, 0),
}
"""Largest sizes in bytes of a file outside checkpoints/, by the first name that fits: of any run, and for each step."""
NUM_FILES = 40  # outside checkpoints/, after four evaluations


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process holds at a step."""

    step: int
    num_bytes: int
    num_files: int


def train_long(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """4,000 steps of a still smaller model, then 100,000."""
    for num_steps in (4_000, 100_000):

        def run(folder: Path, num_steps: int = num_steps) -> None:
            places = (str(folder / "model"), str(workload.folder / "tokenizer"))
            check_success(WarmProcess(make_smallest_model, *places).finish())
            options: dict[str, Any] = {
                "model__path": str(folder / "model"),
                "train__num_steps": num_steps,
                "train__batch_size": 1,
                "train__global_batch_size": 1,
                "eval__every_steps": num_steps // 4,
                "checkpoint": {"every_steps": 100, "keep": KEPT},
            }
            samples: list[Sample] = []
            with start_training(workload.write_recipe(folder, **options)) as process:
                watched = psutil.Process(process.pid)
                while process.code is None:
                    time.sleep(0.25)
                    if sample := take_sample(watched, folder / "run"):
                        samples.append(sample)
                done = process.wait()
            check_success(done)
            check_flat(samples, num_steps)
            check_files(folder / "run", num_steps)

        yield Trial(f"{num_steps:,} steps", run)


def take_sample(process: psutil.Process, run: Path) -> Sample | None:
    """The process now; None before its first checkpoint and after its end."""
    try:
        steps = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal()]
        return Sample(max(steps), process.memory_info().rss, process.num_fds()) if steps else None
    except (OSError, psutil.Error):
        return None


def check_flat(samples: list[Sample], num_steps: int) -> None:
    """From the first quarter to the last step, before the report is built, neither memory nor open files grow."""
    late = [one for one in samples if num_steps / 4 < one.step < num_steps]
    assert len(late) >= 8, f"{len(late)} samples show nothing"
    per_step = linear_regression([one.step for one in late], [one.num_bytes for one in late]).slope
    added = per_step * (num_steps * 3 / 4)
    told = f"memory grows by {per_step * 1000 / 2**20:.2f} MiB in 1,000 steps"
    assert added < GROWTH and per_step * 1000 < SLOPE, told
    third = len(late) // 3
    before, after = (median(one.num_files for one in part) for part in (late[:third], late[-third:]))
    assert after <= before + 2, f"open files: {before} at first, {after} at last"


def check_files(run: Path, num_steps: int) -> None:
    """Every file of the run is within SIZES, and there are as many files, and the checkpoints, as asked for."""
    kept = [path.name for path in (run / "checkpoints").iterdir()]
    best = re.search(r"\d+", str((run / "best").readlink()))
    expected = {*map(str, range(num_steps - 100 * (KEPT - 1), num_steps + 1, 100)), *([best[0]] if best else [])}
    assert set(kept) == expected, f"checkpoints {sorted(kept)} instead of {sorted(expected)}"
    files = [path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.relative_to(run).parts]
    files = [path for path in files if not path.is_relative_to(run / "best")]
    assert len(files) <= NUM_FILES, f"{len(files)} files"
    for path in files:
        fixed, per_step = next(size for name, size in SIZES.items() if fnmatch(path.name, name))
        size, most = path.stat().st_size, fixed + per_step * num_steps
        assert size <= most, f"{path.relative_to(run)} has {size:,} bytes, above {most:,}"
    assert not list(run.rglob("*.tmp")) and not list(run.rglob(".staging*")), "something half-written is left"


def make_smallest_model(folder: str, tokenizer: str) -> None:
    """A model of one block and 8 features."""
    shape: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    make_model(Path(folder), Path(tokenizer), **shape)


ROWS = [
    Row("R23", "a run of 4,000 (release: also 100,000) steps, saved every 100",
        "memory grows by less than 1 MiB in 1,000 steps; only the checkpoints to keep exist",
        train_long, 1, 2),
]  # fmt: skip
