"""A machine without a network: commands neither need it nor ask for it."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from reliability.campaign import Row, Trial
from reliability.rows.damage import STEPS
from reliability.warm import WarmProcess, check_success
from reliability.workload import Workload

CLONE_NEWNET = 0x40000000
RUN_COMMANDS = (
    "check {recipe}",
    "train {recipe} --quiet",
    "evaluate {run}",
    "predict {run} --input {data} --output {folder}/answers.jsonl",
    "report {run}",
)
PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{variant: (variant, RUN_COMMANDS) for variant in ("adamw", "labels", "extractive", "lora")},
    "before a run": (
        "labels",
        (
            "new {folder}/train.csv --output {folder}/new.yaml --model {model}",
            "inspect {folder}/train.csv --task classification --tokenizer {model}",
            "estimate {recipe} --devices 2 --device h100",
            "prepare {recipe}",
            "config {recipe}",
        ),
    ),
    "after a run": (
        "adamw",
        (
            "train {recipe} --quiet --no-preflight",
            "train {recipe} --quiet --resume --train.num_steps 6",
            "card {run}",
            "diagnose {run}",
            "export {run} --format hf",
            "predict {run} --question Who? --context Ann.",
            "watch {run} --once",
            "list models",
        ),
    ),
}  # fmt: skip


@cache
def explain_absence() -> str:
    """Why no network namespace can be made here; empty if one can."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "a network namespace needs root and the command ip (Debian: iproute2)"
    done = WarmProcess(enter_silent_network).finish()
    return "" if done.returncode == 0 else "no network namespace can be made"


def work_alone(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Commands one after the other; each in a process whose packets are counted, those of children too.

    Handlers that Python calls at its exit come after the count.
    """
    for name, (variant, commands) in random.sample(list(PATHS.items()), len(PATHS)):

        def run(folder: Path, variant: str = variant, commands: tuple[str, ...] = commands) -> None:
            recipe = workload.write_recipe(folder, variant, **STEPS)
            data = next(path for path in (folder / "dev.csv", folder / "dev.json") if path.exists())
            places = {
                "recipe": recipe, "run": folder / "run", "data": data, "folder": folder, "model": workload.model,
            }  # fmt: skip
            for command in commands:
                num_packets = run_silently(folder, *(word.format(**places) for word in command.split()))
                assert num_packets == 0, f"{command}: sent {num_packets} packets"

        yield Trial(name, run)


def run_silently(folder: Path, *words: str) -> int:
    """Run `fivetune WORDS` without a network; it must succeed. Returns how many packets it sent."""
    counted = folder / "packets"
    done = WarmProcess(_run_and_count, str(counted), *words).finish()
    check_success(done)
    return int(counted.read_text())


def _run_and_count(counted: str, *words: str) -> int:
    enter_silent_network()  # before anything starts a thread
    from fivetune.cli import main

    code = main(list(words))
    Path(counted).write_text(str(count_packets()))
    return code


def enter_silent_network() -> None:
    """Leave for a network namespace where each address is this machine's own, and nothing listens. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace can be made")
    for words in ("link set lo up", "route add local default dev lo"):
        subprocess.run(["ip", *words.split()], check=True)
    if Path("/proc/net/if_inet6").exists():
        subprocess.run(["ip", "-6", "route", "add", "local", "default", "dev", "lo"], check=True)


def count_packets() -> int:
    """Packets that this network namespace has sent."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[9])


ROWS = [
    Row("R32", "there is no network", "commands succeed, and no packet is sent", work_alone, 3,
        explain_absence=explain_absence),
]  # fmt: skip
