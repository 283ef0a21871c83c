"""Wall clocks that jump, stop and run backwards, and files with such dates."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from fivetune.rundir import read_run
from reliability.campaign import Row, Trial
from reliability.faults import CLOCKS, NEVER_FIRED, die_before_renaming_to, train_with_wrong_clock
from reliability.warm import WarmProcess, check_success, run_command
from reliability.workload import NUM_STEPS, Workload, check_weights, read_weights

OFTEN: dict[str, Any] = {"telemetry__every_seconds": 0.2}


def break_clock(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Train until half of the steps with each wrong clock in turn, date the checkpoints backwards, resume, report."""
    for number in count():
        kind = list(CLOCKS)[number % len(CLOCKS)]
        share = random.uniform(0, 0.25)  # of the time of a whole run: half of its steps take twice as long

        def run(folder: Path, kind: str = kind, share: float = share) -> None:
            whole = workload.run_undisturbed(**OFTEN)
            after = share * whole.ended
            recipe, run = workload.write_recipe(folder, **OFTEN), folder / "run"
            half = f"checkpoints/{NUM_STEPS // 2}"
            done = WarmProcess(train_half_with_wrong_clock, str(recipe), kind, after, half).finish()
            assert done.returncode == 137, f"exit code {done.returncode}: {done.stderr[-600:]}"
            for age, path in enumerate(sorted((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))):
                os.utime(path, (1e9 - 86_400 * age, 1e9 - 86_400 * age))
            done = WarmProcess(resume_with_wrong_clock, str(recipe), kind, after).finish()
            check_success(done)
            check_weights(read_weights(run), whole.weights)
            begun = read_run(run).machine.parts[-1].step
            assert begun == NUM_STEPS // 2 - 1, f"resumed after step {begun}, not after the newest"
            check_durations(run)
            for words in (("report", str(run)), ("diagnose", str(run), "--json")):
                told = run_command(*words)
                check_success(told)

        yield Trial(f"{number} {kind} after {share:.4f} of the run", run)


def train_half_with_wrong_clock(recipe: str, kind: str, after: float, half: str) -> int:
    """Train with a wrong clock, and end before the checkpoint `half`, with NEVER_FIRED if the clock is right."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and os.fspath(args[1]).endswith(half) and is_clock_right():
            os._exit(NEVER_FIRED)

    sys.addaudithook(hook)  # before that which ends the process
    die_before_renaming_to(half)
    return train_with_wrong_clock(recipe, kind, after)


def resume_with_wrong_clock(recipe: str, kind: str, after: float) -> int:
    """Resume with a wrong clock, to its end."""
    code = train_with_wrong_clock(recipe, kind, after, "--resume")
    return NEVER_FIRED if is_clock_right() else code


def is_clock_right() -> bool:
    """Whether Python's wall clock shows what the system's does."""
    return abs(time.time() - time.clock_gettime(time.CLOCK_REALTIME)) < 0.001


def check_durations(run: Path) -> None:
    """All durations and rates in the records are finite and not negative; each step is recorded once, in order."""
    found = read_run(run)
    assert [one.step for one in found.steps] == list(range(1, NUM_STEPS + 1)), "steps are not recorded once, in order"
    for name in ("steps.jsonl", "evals.jsonl", "status.json"):
        lines = (run / name).read_text().splitlines() if name.endswith("l") else [(run / name).read_text()]
        for line in lines:
            for key, value in iter_durations(json.loads(line)):
                assert math.isfinite(value) and 0 <= value < 600, f"{name}: {key} is {value}"
    for line in (run / "telemetry.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert math.isfinite(sample.pop("seconds"))  # the wall clock, whatever it shows
        rates = {key: value for key, value in sample.items() if isinstance(value, int | float)}
        assert len(rates) > 5, f"telemetry has {sorted(rates)} alone"
        bad = {key: value for key, value in rates.items() if not (math.isfinite(value) and value >= 0)}
        assert not bad, f"telemetry.jsonl: {bad}"


def iter_durations(table: dict[str, Any], key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers whose key, or a key around them, has "seconds"."""
    for name, value in table.items():
        path = f"{key}.{name}"
        if isinstance(value, dict):
            yield from iter_durations(value, path)
        elif "seconds" in path and isinstance(value, int | float):
            yield path, value


ROWS = [
    Row("R19", "the wall clock jumps by a day, stops or runs backwards; checkpoints are dated in reverse",
        "resumes from the newest step; no negative duration; report and diagnosis are made",
        break_clock, 4, 24),
]  # fmt: skip
