"""Verification of a change by short runs with and without it, alternating, each in its own process and directory.

In: a run directory, its RunStats, a Verdict with a change and a predicted gain. Out: a Verification, the measured gain.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fivetune import rundir
from fivetune.config.data import NO_SPLIT
from fivetune.config.layers import format_override
from fivetune.distributed.processes.jobs import Job
from fivetune.distributed.processes.signals import interrupt_on_all_signals
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.reading.diagnosis.stats import RunStats, collect_run_stats
from fivetune.rundir.figures import count_tokens, select_steady_steps
from fivetune.rundir.records import Run
from fivetune.types import Verdict

NUM_STEPS = 40
ROUNDS = 2
"""Rounds of one run with and one without the change, in alternating order: a machine that slows down affects both."""

SHORT_RUN_SETTINGS: dict[str, Any] = {
    "train.num_steps": NUM_STEPS, "train.num_epochs": None, "report.sinks": [], "report.beside": [],
    "eval.at_start": False, "checkpoint.every_steps": NUM_STEPS, "checkpoint.url": None, "train.early_stopping": None,
}  # fmt: skip
NO_EVALUATION: dict[str, Any] = {"data.eval": [], **{f"data.{name}": value for name, value in NO_SPLIT.items()}}
INTERRUPTION_SETTINGS: dict[str, dict[str, Any]] = {
    "evaluation_bound": {"eval.every_steps": NUM_STEPS // 2},
    "checkpoint_bound": {**NO_EVALUATION, "checkpoint.every_steps": NUM_STEPS // 4},
}
"""Settings of the short runs that measure the duration of one interruption, with and without the change."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A predicted and a measured gain; gains are speed-ups (1.3 = 1.3 times as fast).

    Args:
        measured: from the faster round of each side.
        low, high: minimum and maximum over the rounds.
    """

    rule: str
    change: Mapping[str, Any]
    predicted: float
    measured: float
    low: float
    high: float
    num_steps: int
    num_rounds: int


def can_verify(verdict: Verdict) -> bool:
    """Whether a verdict has a change and a predicted gain."""
    return bool(verdict.change) and verdict.gain is not None


def verify_change(
    folder: Path, stats: RunStats, verdict: Verdict, *, on_progress: Callable[[str], None]
) -> Verification:
    """Train NUM_STEPS steps with and without the change of a verdict (see `can_verify`) and compare.

    Steps are compared by seconds per token, because a change can alter the batches; interruptions by their duration
    times their frequency in the run. Raises FiveTuneEnvironmentError if a short run fails.
    """
    assert verdict.gain is not None
    costs: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="fivetune-trial-") as scratch, interrupt_on_all_signals():
        for number in range(ROUNDS):
            for changed in (False, True) if number % 2 == 0 else (True, False):
                on_progress(f"round {number + 1} of {ROUNDS}, {'with' if changed else 'without'} the change")
                run = _run_training(folder, Path(scratch) / f"{number}-{changed}", verdict, changed=changed)
                costs[changed].append(_measure_cost(run, stats, verdict, changed))
    gains = [without / with_it for without, with_it in zip(costs[False], costs[True], strict=True)]
    measured = min(costs[False]) / min(costs[True])  # other load only adds time, so the fastest counts
    return Verification(
        verdict.rule, dict(verdict.change), verdict.gain, measured, min(gains), max(gains), NUM_STEPS, ROUNDS
    )


def _run_training(folder: Path, target: Path, verdict: Verdict, *, changed: bool) -> Run:
    settings = SHORT_RUN_SETTINGS | INTERRUPTION_SETTINGS.get(verdict.rule, NO_EVALUATION) | {"run.dir": str(target)}
    if verdict.rule not in INTERRUPTION_SETTINGS:  # otherwise the short runs need their own interval
        settings = {key: value for key, value in settings.items() if key not in verdict.change}
    if changed:
        settings = {**verdict.change, **settings}
    words = ["train", str(folder), "--no-preflight", "--quiet"]
    words += [f"--{key}={format_override(key, value)}" for key, value in settings.items()]
    with Job(words, target.with_suffix(".log")) as job:
        code = job.wait()
    if code:
        raise FiveTuneEnvironmentError(
            f"{folder}: the short run {'with' if changed else 'without'} the change failed: {job.read_error()}. "
            "Run from the directory that the run was started in."
        )
    return rundir.read_run(target)


def _measure_cost(run: Run, stats: RunStats, verdict: Verdict, changed: bool) -> float:
    """Compute seconds per token; for a rule about interruptions, seconds per step with its share of an interruption.

    The median over steps is robust against short load by other programs.
    """
    steps, found = select_steady_steps(run.steps), collect_run_stats(run)
    if verdict.rule not in INTERRUPTION_SETTINGS:
        return median(step.step_seconds / count_tokens(step) for step in steps)
    if verdict.rule == "evaluation_bound":
        before, now, key = stats.evaluations, found.evaluations, "eval.every_steps"
    else:
        before, now, key = stats.checkpoints, found.checkpoints, "checkpoint.every_steps"
    assert before is not None and now is not None
    rarer = before.every_steps / verdict.change.get(key, before.every_steps) if changed else 1.0
    return median(step.step_seconds for step in steps) + before.per_step * rarer * now.seconds
