"""A change tried out: short runs with and without it, in turn, each in a process and a directory of its own.

In: a run directory, the evidence on it, a Verdict with a change and a predicted gain. Out: a Trial, the gain measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fivetune import rundir
from fivetune.errors import EnvironmentProblem
from fivetune.telemetry.evidence import Evidence, num_tokens, of_run, steady
from fivetune.types import Run, Verdict

NUM_STEPS = 40
ROUNDS = 2
"""With and without, then without and with: a machine that grows slower all the while then hits both alike."""

QUIET: dict[str, Any] = {
    "train.num_steps": NUM_STEPS, "train.num_epochs": None, "report.sinks": [], "report.beside": [],
    "eval.at_start": False, "checkpoint.every_steps": NUM_STEPS,
}  # fmt: skip
WITH_PAUSES: dict[str, dict[str, Any]] = {
    "evaluation_bound": {"eval.every_steps": NUM_STEPS // 2},
    "checkpoint_bound": {"data.eval": [], "checkpoint.every_steps": NUM_STEPS // 4},
}
"""What the short runs measure of rules about pauses: how long one is, with the change and without it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A prediction and what became of it; gains are speed-ups (1.3 = 1.3 times as fast).

    Args:
        measured: from the faster round of either side.
        low, high: the least and the most of the rounds.
    """

    rule: str
    change: Mapping[str, Any]
    predicted: float
    measured: float
    low: float
    high: float
    num_steps: int
    num_rounds: int


def can_try(verdict: Verdict) -> bool:
    """Whether a verdict has settings to change and a gain to compare with."""
    return bool(verdict.change) and verdict.gain is not None


def try_out(folder: Path, evidence: Evidence, verdict: Verdict, *, say: Callable[[str], None]) -> Trial:
    """Train with and without the change of a verdict (`can_try`), a few dozen steps each, and compare.

    Steps are compared by the seconds per token, for a change may deal out other batches; pauses by what one takes, as
    often as they came in the run. Raises EnvironmentProblem if a short run fails.
    """
    assert verdict.gain is not None
    costs: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="fivetune-trial-") as scratch:
        for number in range(ROUNDS):
            for changed in (False, True) if number % 2 == 0 else (True, False):
                say(f"round {number + 1} of {ROUNDS}, {'with' if changed else 'without'} the change")
                run = _short_run(folder, Path(scratch) / f"{number}-{changed}", verdict, changed=changed)
                costs[changed].append(_cost(run, evidence, verdict, changed))
    gains = [without / with_it for without, with_it in zip(costs[False], costs[True], strict=True)]
    measured = min(costs[False]) / min(costs[True])  # what else the machine does adds time, and takes none away
    return Trial(verdict.rule, dict(verdict.change), verdict.gain, measured, min(gains), max(gains), NUM_STEPS, ROUNDS)


def _short_run(folder: Path, target: Path, verdict: Verdict, *, changed: bool) -> Run:
    settings = {**QUIET, **WITH_PAUSES.get(verdict.rule, {"data.eval": []}), "run.dir": str(target)}
    if verdict.rule not in WITH_PAUSES:  # else the short runs need their own number of them
        settings = {key: value for key, value in settings.items() if key not in verdict.change}
    if changed:
        settings = {**verdict.change, **settings}
    words = [f"--{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "fivetune", "train", str(folder), "--no-preflight", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentProblem(f"{folder}: the short run {'with' if changed else 'without'} the change failed: {why} "
                                 "Run from the directory that the run was started in.")  # fmt: skip
    return rundir.read(target)


def _cost(run: Run, evidence: Evidence, verdict: Verdict, changed: bool) -> float:
    """Seconds per token; of a rule about pauses, seconds per step and its part of a pause.

    The middle one of the steps counts, so that a moment in which the machine did something else does not.
    """
    steps, found = steady(run.steps), of_run(run)
    if verdict.rule not in WITH_PAUSES:
        return median(step["step_seconds"] / num_tokens(step) for step in steps)
    is_evaluation = verdict.rule == "evaluation_bound"
    before = evidence.evaluations if is_evaluation else evidence.checkpoints
    now = found.evaluations if is_evaluation else found.checkpoints
    assert before is not None and now is not None
    every = verdict.change.get("eval.every_steps" if is_evaluation else "checkpoint.every_steps", before.every_steps)
    rarer = before.every_steps / every if changed else 1.0
    return median(step["step_seconds"] for step in steps) + before.per_step * rarer * now.seconds
