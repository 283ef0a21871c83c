"""Named figures of a run: what its records tell about its speed, its numbers and its learning.

In: a Run, or the TelemetryRecords of another tool's log. Out: Evidence; what the records do not tell is None.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

from fivetune.rundir import own_evals
from fivetune.telemetry.activity import Device, busy_ranks, devices_of
from fivetune.types import Run, TelemetryRecord

MIN_STEPS = 10
"""Steps, warm-up left out, below which times are no evidence: one that was held up would be a tenth of them."""

IN_EVERY_STEP = (
    "step", "lr", "step_seconds", "data_seconds", "num_input_tokens", "num_target_tokens", "padding_fraction",
    "world_size",
)  # fmt: skip

MIN_SPREAD = 1.2
"""Steps whose numbers of tokens differ by less than this factor do not tell what a token costs."""

NEIGHBOURS = 3
"""Steps after a step that it is compared with: a machine hardly changes its speed in so few."""

NOT_FINITE = re.compile(r"step (\d+): (?:loss|gradient norm) (?:-?inf|nan)\b")  # as training/loop.py refuses a step


@dataclass(frozen=True, slots=True)
class Times:
    """What the time of the steps went into, warm-up left out.

    Args:
        num_steps: that were counted.
        step_seconds: mean of a step.
        shares: of the steps' time by phase (0-1), those that were measured; "data" always is.
        starved: share of the steps whose batch was not ready.
        padding: share of padded positions in what was computed.
        per_pass: share of forward and backward (0-1) that they take whatever the number of tokens: the least, the
            likely value and the most, for all that the times vary.
        tokens: real ones in a step, the mean.
    """

    num_steps: int
    step_seconds: float
    shares: Mapping[str, float]
    starved: float
    padding: float
    per_pass: tuple[float, float, float] | None
    tokens: float

    @property
    def computing(self) -> float:
        """Share of the steps' time that forward and backward take."""
        return sum(self.shares.get(phase, 0.0) for phase in ("forward", "backward")) or 1 - self.shares["data"]

    @property
    def fixed(self) -> float | None:
        """Share of the steps' time that forward and backward take whatever the number of tokens."""
        return self.computing * self.per_pass[1] if self.per_pass else None

    @property
    def host(self) -> float | None:
        return self.shares.get("host")

    @property
    def exchange(self) -> float | None:
        return self.shares.get("exchange")


@dataclass(frozen=True, slots=True)
class Pauses:
    """Evaluations or checkpoints between the first step and the last one; what is made there anyway is left out.

    Args:
        share: of the time of training and these pauses.
        every_steps: how often they come.
        seconds: of one.
        per_step: how many there were for each step.
    """

    share: float
    every_steps: int
    seconds: float
    per_step: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run; the fields that a rule needs are named in the rule.

    Args:
        config: the run's settings; {} of a log.
        state: finished, running, failed ... and why; None of a log.
        devices_asked: how many devices the user wanted.
        world_size: processes that trained together, as they counted themselves.
        device_kind: cpu, cuda, mps.
        forward: flat, padded or buckets.
        not_finite_step: first step whose loss or gradient was not finite, so that the run could not go on.
        skipped: share of the steps whose gradient overflowed, so that the weights stayed.
        loss_repeats: steps at the end whose loss is exactly that of the last one.
        peak_lr: largest step that the optimizer took, parameter scaling included.
        grad_norm: middle value over the steps.
        scored_ratio: labels scored in an example, divided by the labels that the data have in one.
        padded_length: of all targets, where they are exactly as long as the limit though none was cut.
        evals: evaluations on the same examples, in order.
        best_step: where the score that picks the best checkpoint was best.
        peak_bytes, memory_bytes: most memory used, and what there is: of the device, or of the host for a CPU run.
        batch_size_now: examples in a forward pass where it had to be lowered while training.
        mfu: share of the device's peak (0-1), the mean after the warm-up.
        devices: accelerators that were looked at; none of a CPU run, whatever the machine has.
        ranks: cores that each process kept busy while training, by rank.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    state: str | None = None
    devices_asked: int | None = None
    world_size: int | None = None
    device_kind: str | None = None
    precision: str | None = None
    weights: str | None = None
    num_parameters: int | None = None
    num_threads: int | None = None
    forward: str | None = None
    times: Times | None = None
    evaluations: Pauses | None = None
    checkpoints: Pauses | None = None
    not_finite_step: int | None = None
    skipped: float | None = None
    loss_repeats: int | None = None
    peak_lr: float | None = None
    grad_norm: float | None = None
    scored_ratio: float | None = None
    padded_length: int | None = None
    evals: Sequence[Mapping[str, Any]] = ()
    best_step: int | None = None
    train_loss: Mapping[int, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    batch_size_now: int | None = None
    mfu: float | None = None
    devices: Sequence[Device] = ()
    ranks: Mapping[int, float] = field(default_factory=dict)

    def setting(self, key: str) -> Any:
        """A setting by its dotted key; None where the run has none.

        >>> Evidence({"train": {"batch_size": 8}}).setting("train.batch_size")
        8
        """
        section, _, name = key.partition(".")
        return self.config.get(section, {}).get(name)

    @property
    def examples_per_step(self) -> int | None:
        """Examples in an optimizer step, over all devices."""
        asked = self.setting("train.global_batch_size") or self.setting("train.batch_size")
        return asked if isinstance(asked, int) else None

    @property
    def num_passes(self) -> int | None:
        """Forward passes of one device in an optimizer step."""
        size, total = self.setting("train.batch_size"), self.examples_per_step
        return -(-total // (size * (self.world_size or 1))) if isinstance(size, int) and total else None

    @property
    def accumulates(self) -> bool:
        """Whether an update is made of several passes."""
        return (self.num_passes or 1) > 1

    @property
    def tokens_per_pass(self) -> float | None:
        """Real tokens in a forward pass, the mean."""
        if self.times is None or not self.num_passes:
            return None
        return self.times.tokens / self.num_passes / (self.world_size or 1)


def of_log(records: Sequence[TelemetryRecord], *, devices_asked: int | None = None) -> Evidence:
    """The figures of another tool's log: devices only, for it knows no steps."""
    return Evidence(devices_asked=devices_asked, devices=devices_of([record.as_dict() for record in records]))


def of_run(run: Run, *, devices_asked: int | None = None) -> Evidence:
    """The figures of a run, finished or under way."""
    run = _readable(run)
    steps, machine = run.steps, run.machine
    device = machine.get("device") or {}
    evals = same_examples(own_evals(run.evals))
    return Evidence(
        config=run.config,
        state=": ".join(run.status[key] for key in ("state", "why") if run.status.get(key)) or None,
        devices_asked=devices_asked or _several((run.config.get("launch") or {}).get("nproc")),
        world_size=steps[-1].get("world_size") if steps else None,
        device_kind=device.get("kind"),
        precision=machine.get("precision"),
        weights=machine.get("weights", "fp32"),  # FiveTune loads and keeps them so; autocast only computes in 16 bits
        num_parameters=machine.get("num_parameters"),
        num_threads=machine.get("num_threads"),
        forward=_forward(run),
        times=times_of(steps),
        evaluations=_evaluations(run),
        checkpoints=_checkpoints(run),
        not_finite_step=_not_finite_step(run),
        skipped=_mean([step["grad_norm"] is None for step in steps]),
        loss_repeats=_repeats([step["loss"] for step in steps]),
        peak_lr=_peak_lr(steps),
        grad_norm=_median([step["grad_norm"] for step in steps if step["grad_norm"] is not None]),
        scored_ratio=_scored_ratio(run),
        padded_length=_padded_length(run),
        evals=evals,
        best_step=(run.status.get("best") or {}).get("step"),
        train_loss={step["step"]: step["loss"] for step in steps if step["loss"] is not None},
        peak_bytes=max((step["peak_bytes"] for step in steps if step.get("peak_bytes")), default=None),
        memory_bytes=device.get("memory_bytes") or _host_memory(machine),
        batch_size_now=_lowered_batch(run),
        mfu=_mean([step["mfu"] for step in steady(steps) if step.get("mfu") is not None]),
        devices=() if device.get("kind") == "cpu" else devices_of(run.telemetry),
        ranks=busy_ranks(run.telemetry),
    )


def _readable(run: Run) -> Run:
    """A run whose files hold what they should: null is nothing, and steps that lack IN_EVERY_STEP are left out."""
    tables = {name: getattr(run, name) or {} for name in ("config", "machine", "status", "data", "predictions")}
    lists = {name: getattr(run, name) or [] for name in ("evals", "telemetry", "warnings")}
    steps = [step for step in run.steps or () if None not in map(step.get, IN_EVERY_STEP)]
    return replace(run, steps=steps, **tables, **lists)


def steady(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps whose times say something: those not marked as warm-up, and never the first."""
    return [step for step in steps[1:] if not step.get("warm_up")]


def times_of(steps: Sequence[Mapping[str, Any]]) -> Times | None:
    """What the steps' time went into; None where fewer than MIN_STEPS were timed."""
    steps = steady(steps)
    if len(steps) < MIN_STEPS:
        return None
    whole = sum(step["step_seconds"] for step in steps)
    phases = Counter[str]()
    for step in steps:
        phases.update({"data": step["data_seconds"], **(step.get("phase_seconds") or {})})
    positions = list(map(_positions, steps))
    tokens = sum(map(num_tokens, steps))
    return Times(
        num_steps=len(steps),
        step_seconds=whole / len(steps),
        shares={phase: seconds / whole for phase, seconds in phases.items()},
        starved=sum(bool(step.get("starved")) for step in steps) / len(steps),
        padding=1 - tokens / sum(positions),
        per_pass=_per_pass(positions, list(map(_computing_seconds, steps))),
        tokens=tokens / len(steps),
    )


def num_tokens(step: Mapping[str, Any]) -> int:
    """Real tokens of a step."""
    return step["num_input_tokens"] + step["num_target_tokens"]


def _positions(step: Mapping[str, Any]) -> float:
    return num_tokens(step) / (1 - step["padding_fraction"])


def _per_pass(positions: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float] | None:
    """The share of its time that a pass would take with no token at all: the least, the likely value and the most.

    By how many per cent does a step take longer than its neighbour that has one per cent more positions? By one, if
    all is computing; what is missing is paid per pass: launching. Attention grows faster than a line, which makes the
    share smaller than it is, never larger. Only neighbours are compared, so a machine that grows slower or faster in
    the course of a run does no harm, and the middle one of all pairs counts, weighted by their difference in
    positions, so neither do moments in which it did something else. The least and the most are a standard error away.
    None where lengths are too alike, or the times vary so much that any share is possible.
    """
    if len(positions) < 2 * MIN_STEPS:
        return None
    eighths = quantiles(positions, n=8)
    if eighths[-1] < MIN_SPREAD * eighths[0]:
        return None
    pairs: list[tuple[float, float]] = []
    for apart in range(1, NEIGHBOURS + 1):
        for few, many, short, long in zip(positions, positions[apart:], seconds, seconds[apart:], strict=False):
            if few != many:
                longer = (many - few) / (many + few)
                pairs.append((1 - (long - short) / (long + short) / longer, abs(longer)))
    error = 0.5 / math.sqrt(len(positions) / 2)  # in ranks: of a median, over pairs that have no step in common
    least, likely, most = (_weighted_quantile(pairs, 0.5 + away) for away in (-error, 0.0, error))
    if most - least >= 1:
        return None
    return max(0.0, least), min(1.0, max(0.0, likely)), min(1.0, most)


def _weighted_quantile(pairs: Sequence[tuple[float, float]], rank: float) -> float:
    """The value below which a share `rank` (0-1) of the weight lies.

    >>> _weighted_quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 4.0)], 0.5)
    2.0
    """
    values, weights = zip(*sorted(pairs), strict=True)
    below = list(accumulate(weights))
    return values[bisect_left(below, rank * below[-1])]


def _computing_seconds(step: Mapping[str, Any]) -> float:
    phases = step.get("phase_seconds") or {}
    if "backward" in phases:
        return phases.get("forward", 0.0) + phases["backward"]
    return step["step_seconds"] - step["data_seconds"]


def _evaluations(run: Run) -> Pauses | None:
    """Evaluations after the first step and before the last; None where there is none."""
    last = run.status.get("num_steps") or math.inf
    between = [record for record in run.evals if 0 < record["step"] < last and record.get("seconds")]
    if not between:
        return None
    every = run.config.get("eval", {}).get("every_steps") or between[0]["step"]
    return _pauses(run, len(between), sum(record["seconds"] for record in between) / len(between), every)


def _checkpoints(run: Run) -> Pauses | None:
    """Checkpoints before the last one; their time also holds the export of the weights, which counts as one of them."""
    seconds, done = (run.status.get("seconds_by_phase") or {}).get("checkpoint"), run.status.get("step") or 0
    every = run.config.get("checkpoint", {}).get("every_steps") or run.config.get("eval", {}).get("every_steps")
    every = every or next((record["step"] for record in own_evals(run.evals) if record["step"]), None)
    if not (seconds and every) or done <= every:
        return None
    num_between = (done - 1) // every
    return _pauses(run, num_between, seconds / (num_between + 2), every)


def _pauses(run: Run, num: int, seconds: float, every_steps: int) -> Pauses | None:
    training = sum(step["step_seconds"] for step in run.steps)
    if not training:
        return None
    return Pauses(num * seconds / (num * seconds + training), every_steps, seconds, num / len(run.steps))


def _not_finite_step(run: Run) -> int | None:
    found = NOT_FINITE.search(str(run.status.get("why") or ""))
    if found and run.status.get("state") == "failed":
        return int(found[1])
    return next((step["step"] for step in run.steps if step["loss"] is None), None)


def _repeats(losses: Sequence[float | None]) -> int | None:
    """How many values at the end equal the last one.

    >>> _repeats([0.3, 0.5, 0.5])
    2
    """
    if not losses or losses[-1] is None:
        return None
    return next((i for i, loss in enumerate(reversed(losses)) if loss != losses[-1]), len(losses))


def _scored_ratio(run: Run) -> float | None:
    """Labels that a training example was scored on over those that it has; None of mixtures, which draw unevenly.

    A flat forward computes what its batches hold: positions beyond the tokens of the data were put there on the way,
    and are scored as labels. Not so on other devices than a CPU, where CUDA graphs round lengths up, and in several
    processes, which lend each other examples.
    """
    data, steps = run.data.get("train") or {}, run.steps
    if not data.get("num_target_tokens") or "parts" in data or not steps or steps[0]["step"] != 1:
        return None
    scored = sum(step["num_target_tokens"] for step in steps)
    on_cpu = (run.machine.get("device") or {}).get("kind") == "cpu"
    if _forward(run) == "flat" and on_cpu and all(step["world_size"] == 1 for step in steps):
        scored += sum(map(_positions, steps)) - sum(map(num_tokens, steps))
    return scored / steps[-1]["num_examples_seen"] / (data["num_target_tokens"] / data["num_examples"])


def _padded_length(run: Run) -> int | None:
    """The length of the targets, if all of them are as long as the limit though none was cut; else None."""
    data = run.data.get("train") or {}
    limit = data.get("max_target_tokens")
    if not limit or data.get("num_clipped_targets") != 0 or "parts" in data:
        return None
    return limit if data.get("num_target_tokens") == limit * data["num_examples"] else None


def _forward(run: Run) -> str | None:
    return (run.machine.get("forward") or {}).get("kind")


def _host_memory(machine: Mapping[str, Any]) -> int | None:
    """What a CPU run can take; of an accelerator whose memory is not known, nothing is known."""
    is_cpu = (machine.get("device") or {}).get("kind") == "cpu"
    return (machine.get("host") or {}).get("memory_bytes") if is_cpu else None


def _lowered_batch(run: Run) -> int | None:
    asked, now = run.config.get("train", {}).get("batch_size"), run.status.get("batch_size")
    return now if isinstance(asked, int) and isinstance(now, int) and now < asked else None


def same_examples(evals: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations that can be compared: those on the set that was evaluated most often.

    >>> kinds = [("eval", 90), ("subset", 9), ("subset", 9), ("eval", 90), ("subset", 9)]
    >>> [record["num_examples"] for record in same_examples([{"split": s, "num_examples": n} for s, n in kinds])]
    [9, 9, 9]
    """
    kinds = Counter((record.get("split"), record.get("num_examples")) for record in evals)
    most = max(kinds, key=kinds.__getitem__, default=None)
    return [record for record in evals if (record.get("split"), record.get("num_examples")) == most]


def _several(nproc: int | None) -> int | None:
    """launch.nproc where it asks for something: 1, the default, leaves it to who starts the processes."""
    return nproc if nproc and nproc > 1 else None


def _peak_lr(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest step taken; where the optimizer did not tell it, the largest rate."""
    taken = [step["effective_lr"] for step in steps if step.get("effective_lr") is not None]
    return max(taken or [step["lr"] for step in steps], default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def percent(share: float) -> str:
    """A share (0-1) in words.

    >>> percent(0.314), percent(0.0049)
    ('31 %', '0.5 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.02 or not share else f"{100 * share:.1g} %"
