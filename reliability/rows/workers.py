"""Processes that convert records: killed, stopped for ever, slow, and with a task that fails."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import yaml

from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import Workload, check_weights, read_weights, start_training

PATIENCE = 3.0  # seconds of a hung worker in trials; 60 in the program
LATENCY = 30.0  # seconds from a fault that ends the command to its end
NUM_RECORDS, PLACE = 3_000, 2_345  # of three blocks, the record of the last that fails or takes long
BLOCK = r"a process that converts records ([0-9,]+) to ([0-9,]+)"
FAULTS = {  # what the task does at one record, exit code, what is said
    "killed": ("sleep 2", 4, rf"{BLOCK} of train ended \(exit code -9\)\."),
    "stopped": ("sleep 2", 4, rf"{BLOCK} of train did nothing for {PATIENCE:g} s, and was ended\."),
    "failing": ("fail 0", 3, rf"/train\.jsonl:{PLACE}: task fragile fails on this record: KeyError: 'colour' \("),
    "slow": (f"compute {2 * PATIENCE}", 0, "^$"),
}
PLUGIN = f'''"""Text to text; one record makes it fail, wait, or compute for long."""

import os
import time

from fivetune.tasks.jsonl import JSONL


class Fragile(JSONL):
    """Text to text."""

    def to_text(self, record, *, labelled=True):
        what, seconds = os.environ.get("FRAGILE", "none 0").split()
        number = int(record.fields["id"])
        if what == "sleep" and number % 1_000 == {PLACE % 1_000}:  # in every block
            time.sleep(float(seconds))
        if what == "compute" and number == {PLACE}:
            end = time.monotonic() + float(seconds)
            while time.monotonic() < end:
                pass
        if what == "fail" and number == {PLACE}:
            raise KeyError("colour")
        return super().to_text(record, labelled=labelled)
'''


def disturb_workers(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Disturb one of two processes that convert the training data, each way in turn; then start the same run again."""
    folder = workload.make_folder("records")
    recipe, environ = write_inputs(workload, folder)
    check_success(start_training(recipe, environ=environ).finish())
    weights = read_weights(folder / "run")
    for number in count():
        fault = list(FAULTS)[number % len(FAULTS)]
        pause = random.uniform(0, 1.5)  # less than a block takes

        def run(folder: Path, fault: str = fault, pause: float = pause) -> None:
            recipe, environ = write_inputs(workload, folder)
            act, code, said = FAULTS[fault]
            with WarmProcess(train_with_workers, str(recipe), environ={**environ, "FRAGILE": act}) as process:
                workers = wait_for_workers(process)
                if fault in ("killed", "stopped"):
                    time.sleep(pause)
                    os.kill(workers[0].pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
                start = time.monotonic()
                done = process.wait()
            seconds = time.monotonic() - start
            check_no_trace(done.stderr)
            found = re.search(said, done.stderr.strip())
            assert done.returncode == code and found, f"{done.returncode}: {done.stderr[-600:]}"
            if fault in ("killed", "stopped"):
                first, last = (int(number.replace(",", "")) for number in found.groups())
                assert 1 <= first <= last <= NUM_RECORDS, f"records {first} to {last} of {NUM_RECORDS}"
            assert not code or seconds < LATENCY, f"the command ended {seconds:.0f} s after the fault"
            _, alive = psutil.wait_procs(workers, timeout=2)
            assert not alive, f"left behind: {alive}"
            if code:
                check_success(start_training(recipe, environ=environ).finish())
            check_weights(read_weights(folder / "run"), weights)

        yield Trial(f"{number} {fault}", run)


def write_inputs(workload: Workload, folder: Path) -> tuple[Path, dict[str, str]]:
    """Write records, the task and a recipe for them; returns the recipe and the environment of its commands."""
    plugins = folder / "plugins" / "tasks"
    plugins.mkdir(parents=True)
    (plugins / "fragile.py").write_text(PLUGIN)
    recipe = workload.write_recipe(folder, train__num_steps=2, eval__every_steps=2, task={"name": "fragile"})
    table = yaml.safe_load(recipe.read_text())
    for name, num in (("train", NUM_RECORDS), ("eval", 4)):
        path = folder / f"{name}.jsonl"
        records = [{"id": f"{i}", "inputs": f"What has {i}?", "targets": "red hat"} for i in range(1, num + 1)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        table["data"][name] = str(path)
    recipe.write_text(yaml.safe_dump(table))
    return recipe, {**os.environ, "FIVETUNE_PLUGINS": str(folder / "plugins")}


def train_with_workers(recipe: str) -> int:
    """Run `fivetune train RECIPE` with two processes that convert records, and little patience with them."""
    from fivetune.cli import main
    from fivetune.data.store import worker

    worker.HUNG_SECONDS = PATIENCE
    return main(["train", recipe, "--no-preflight", "--quiet", "--data.num_processes", "2"])


def wait_for_workers(process: WarmProcess) -> list[psutil.Process]:
    """The processes that convert records, as soon as there are two."""
    while process.code is None:
        started = psutil.Process(process.pid).children()
        workers = [one for one in started if "fivetune.data.store.worker" in one.cmdline()]
        if len(workers) == 2:
            return workers
        time.sleep(0.02)
    raise AssertionError(f"no process converts records: {process.wait().stderr[-600:]}")


ROWS = [
    Row("R18", "a process that converts records is killed, stopped for ever, slow, or its task fails",
        "told within 30 s with data set and records; the same command then gives identical weights",
        disturb_workers, 4, 32),
]  # fmt: skip
