"""Statistics of a run for the rules: speed, numerics, learning.

In: a Run, or the TelemetryRecords of another tool's log. Out: RunStats, with None for missing data.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, median, quantiles
from typing import Any

from fivetune.reading.diagnosis.device_use import MIN_SAMPLES, DeviceUse, summarise_devices
from fivetune.rundir.figures import (
    HostLoad,
    compute_host_load,
    compute_mfu,
    compute_padding_share,
    compute_peak_bytes,
    compute_phase_shares,
    compute_process_cores,
    count_positions,
    count_tokens,
    find_exported_eval,
    find_longest_freeze,
    select_comparable_evals,
    select_steady_steps,
    select_training_samples,
)
from fivetune.rundir.records import EvalRecord, Run, SplitSummary, StepRecord, TelemetryRecord
from fivetune.scores.analysis.bootstrap import compute_wilson_interval
from fivetune.tasks import is_higher_better, load_run_task
from fivetune.values import get_nested

MIN_STEPS = 10
"""Minimum number of steady steps for timings: one delayed step is a tenth of them."""

MIN_SPREAD = 1.2
"""Ratio of long to short steps (in tokens) below which the cost of a token cannot be estimated."""

NUM_NEIGHBOURS = 3
"""Number of following steps that each step is compared with: over so few, the speed of a machine is almost constant."""


@dataclass(frozen=True, slots=True)
class StepTimeBreakdown:
    """Breakdown of the time of the steady steps.

    Args:
        num_steps: number of steady steps.
        step_seconds: mean of a step.
        shares: share of the steps' time (0-1) by measured phase; "data" is always measured.
        starved: share of the steps whose batch was not ready.
        padding: share of padding among the computed positions.
        fixed_cost_share: share of forward and backward (0-1) that does not depend on the number of tokens: lower end,
            estimate and upper end, one standard error apart.
        tokens: mean number of tokens in a step, padding not counted.
    """

    num_steps: int
    step_seconds: float
    shares: Mapping[str, float]
    starved: float
    padding: float
    fixed_cost_share: tuple[float, float, float] | None
    tokens: float

    @property
    def compute_share(self) -> float:
        """Share of the steps' time in forward and backward."""
        return sum(self.shares.get(phase, 0.0) for phase in ("forward", "backward")) or 1 - self.shares["data"]

    @property
    def fixed_step_share(self) -> float | None:
        """Share of the steps' time in forward and backward that does not depend on the number of tokens."""
        return self.compute_share * self.fixed_cost_share[1] if self.fixed_cost_share else None

    @property
    def host(self) -> float | None:
        return self.shares.get("host")

    @property
    def exchange(self) -> float | None:
        return self.shares.get("exchange")


@dataclass(frozen=True, slots=True)
class Interruption:
    """Evaluations or checkpoints between the first and the last step.

    Args:
        share: share (0-1) of the time of steps and interruptions.
        every_steps: interval in steps.
        seconds: mean duration of one.
        per_step: number of interruptions per step.
    """

    share: float
    every_steps: int
    seconds: float
    per_step: float


@dataclass(frozen=True, slots=True)
class RunStats:
    """All figures that the rules use.

    Args:
        is_log: the source is another tool's log, without settings and steps.
        config: the run's settings; {} of a log.
        state: finished, running, failed ... and why; None of a log.
        num_inactive_samples: samples of a log in which no device was active; all figures exclude them.
        devices_requested: number of devices that the user requested.
        world_size: number of processes that trained together, as recorded in the steps.
        device_kind: cpu, cuda, mps.
        forward: flat, padded, buckets.
        vocab_size: rows of the output layer; ln of it is the loss of guessing.
        nonfinite_step, num_nonfinite: first step whose loss or gradient was not finite, and number of such steps.
        skipped_share: share of the steps whose gradient overflowed, so that the update was skipped.
        freeze: length and first step of the longest stretch of exactly equal losses.
        peak_lr: largest step that the optimizer took, parameter scaling included.
        grad_norm: median over the steps.
        scored_ratio: scored labels per example, divided by the labels per example of the data.
        padded_length: length of all targets, if it equals the limit although none was truncated.
        evals: evaluations of the same examples, in order.
        best_eval: the evaluation of the exported weights; None before the first after step 0.
        metric, higher_is_better: the score that chooses the exported weights.
        train_loss, grad_norms: by step, finite ones.
        num_examples_seen: examples of all steps, repeated ones too.
        peak_bytes, memory_bytes: peak and size of the memory of the device; of the host for a CPU run.
        batch_size_now: micro-batch, if it was lowered during the run.
        mfu: mean share of the device's peak (0-1).
        devices: accelerators; () for a CPU run.
        ranks: mean number of busy cores by rank, of ranks with MIN_SAMPLES samples.
        host_load: busy cores of the host, the run's own and others'.
        has_model: the run is finished, so that model/ was written.
        splits: counts of the data by name, "train" first.
        extractive: answers are parts of the inputs.
    """

    is_log: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    state: str | None = None
    num_inactive_samples: int = 0
    devices_requested: int | None = None
    world_size: int | None = None
    device_kind: str | None = None
    precision: str | None = None
    weights: str | None = None
    num_parameters: int | None = None
    num_threads: int | None = None
    forward: str | None = None
    vocab_size: int | None = None
    times: StepTimeBreakdown | None = None
    evaluations: Interruption | None = None
    checkpoints: Interruption | None = None
    nonfinite_step: int | None = None
    num_nonfinite: int = 0
    skipped_share: float | None = None
    freeze: tuple[int, int] | None = None
    peak_lr: float | None = None
    grad_norm: float | None = None
    scored_ratio: float | None = None
    padded_length: int | None = None
    evals: Sequence[EvalRecord] = ()
    best_eval: EvalRecord | None = None
    metric: str | None = None
    higher_is_better: bool = True
    train_loss: Mapping[int, float] = field(default_factory=dict[int, float])
    grad_norms: Mapping[int, float] = field(default_factory=dict[int, float])
    num_examples_seen: int | None = None
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    batch_size_now: int | None = None
    mfu: float | None = None
    devices: Sequence[DeviceUse] = ()
    ranks: Mapping[int, float] = field(default_factory=dict[int, float])
    host_load: HostLoad | None = None
    has_model: bool = False
    splits: Mapping[str, SplitSummary] = field(default_factory=dict[str, SplitSummary])
    extractive: bool = False

    def get_setting(self, key: str) -> Any:
        """Return a setting by its dotted key; None if the run lacks it.

        >>> RunStats(config={"train": {"batch_size": 8}}).get_setting("train.batch_size")
        8
        """
        return get_nested(self.config, *key.split("."))

    @property
    def examples_per_step(self) -> int | None:
        """Examples in an optimizer step, over all devices."""
        size = self.get_setting("train.global_batch_size") or self.get_setting("train.batch_size")
        return size if isinstance(size, int) else None

    @property
    def num_passes(self) -> int | None:
        """Forward passes of one device in an optimizer step."""
        size = self.get_setting("train.batch_size")
        total = self.examples_per_step
        if not isinstance(size, int) or not total:
            return None
        return -(-total // (size * (self.world_size or 1)))  # rounded up

    @property
    def accumulates(self) -> bool:
        """Whether an update sums the gradients of several passes."""
        return (self.num_passes or 1) > 1

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens in a forward pass, padding not counted."""
        if self.times is None or not self.num_passes:
            return None
        return self.times.tokens / self.num_passes / (self.world_size or 1)


def collect_log_stats(records: Sequence[TelemetryRecord], *, devices_requested: int | None = None) -> RunStats:
    """Collect the statistics of another tool's log: of devices only, because it has no steps."""
    num_inactive = len(records) - len(select_training_samples(records))
    devices = summarise_devices(records)
    return RunStats(
        is_log=True, devices_requested=devices_requested, devices=devices, num_inactive_samples=num_inactive
    )


def collect_run_stats(run: Run, *, devices_requested: int | None = None) -> RunStats:
    """Collect the statistics of a run, finished or in progress."""
    steps = run.steps
    machine = run.machine
    status = run.status
    kind = machine.device.kind
    metric = status.best.metric if status.best else None
    exported = find_exported_eval(run)
    # The step at which a run ended has no record, but stands in status.json.
    nonfinite = [step.step for step in steps if step.loss is None]
    if status.nonfinite_step is not None:
        nonfinite.append(status.nonfinite_step)
    norms = {step.step: step.grad_norm for step in steps if step.grad_norm is not None}
    task = load_run_task(run.config or {})
    splits = {"train": run.data.train, "eval": run.data.eval}
    # An outside launcher may set the number of processes, so that one, the default, says nothing.
    counts = [get_nested(run.config, "launch", key) for key in ("nnodes", "nproc")]
    requested = math.prod(count for count in counts if isinstance(count, int))
    # The scheduled rate stands for the effective one if the optimizer reports none.
    rates = [step.effective_lr for step in steps if step.effective_lr is not None]
    batch_size = get_nested(run.config, "train", "batch_size")
    size = run.plan.batch_size if run.plan else None
    is_lowered = isinstance(batch_size, int) and size is not None and size < batch_size
    # A CPU run can use the memory of the host; of an accelerator without a known size, nothing is known.
    memory = machine.device.memory_bytes
    if not memory and kind == "cpu":
        memory = machine.host.memory_bytes
    # Few samples cover the time before the training as well, so that they say nothing.
    training = select_training_samples(run.telemetry)
    sampled = [record.rank for record in training if record.process_cores is not None]
    num_hosts = sum(record.rank == 0 and bool(record.core_utilisation) for record in training)
    busy = compute_process_cores(run.telemetry)
    return RunStats(
        config=run.config,
        state=": ".join(filter(None, (status.state, status.why))) or None,
        devices_requested=devices_requested or (requested if requested > 1 else None),
        world_size=steps[-1].world_size if steps else None,
        device_kind=kind,
        precision=machine.precision,
        weights=machine.weights,
        num_parameters=machine.num_parameters,
        num_threads=machine.num_threads,
        forward=machine.forward.kind,
        vocab_size=machine.vocab_size,
        times=compute_time_breakdown(steps),
        evaluations=_measure_evaluations(run),
        checkpoints=_measure_checkpoints(run),
        nonfinite_step=min(nonfinite, default=None),
        num_nonfinite=len(set(nonfinite)),
        skipped_share=fmean(step.grad_norm is None for step in steps) if steps else None,
        freeze=find_longest_freeze(steps) if steps else None,
        peak_lr=max(rates or [step.lr for step in steps], default=None),
        grad_norm=median(norms.values()) if norms else None,
        scored_ratio=_compute_scored_ratio(run),
        padded_length=_find_padded_length(run.data.train),
        evals=select_comparable_evals(run.evals),
        best_eval=exported if exported and metric in exported.scores else None,
        metric=metric,
        higher_is_better=metric is None or is_higher_better([run.config], metric),
        train_loss={step.step: step.loss for step in steps if step.loss is not None},
        grad_norms=norms,
        num_examples_seen=steps[-1].num_examples_seen if steps else None,
        peak_bytes=compute_peak_bytes(steps),
        memory_bytes=memory,
        batch_size_now=size if is_lowered else None,
        mfu=compute_mfu(steps),
        devices=() if kind == "cpu" else summarise_devices(run.telemetry),
        ranks={rank: cores for rank, cores in busy.items() if sampled.count(rank) >= MIN_SAMPLES},
        host_load=compute_host_load(run.telemetry) if num_hosts >= MIN_SAMPLES else None,
        has_model=status.state == "finished",
        splits={name: facts for name, facts in splits.items() if facts},
        extractive=task is not None and task.extractive,
    )


# --- the steps ---


def compute_time_breakdown(steps: Sequence[StepRecord]) -> StepTimeBreakdown | None:
    """Break down the steps' time; None with fewer than MIN_STEPS steady steps."""
    steady = select_steady_steps(steps)
    shares = compute_phase_shares(steps)
    if len(steady) < MIN_STEPS or not shares:
        return None
    seconds: list[float] = []
    for step in steady:
        phases = step.phase_seconds
        if "backward" in phases:
            seconds.append(phases.get("forward", 0.0) + phases["backward"])
        else:
            seconds.append(step.step_seconds - step.data_seconds)
    return StepTimeBreakdown(
        num_steps=len(steady),
        step_seconds=fmean(step.step_seconds for step in steady),
        shares=shares,
        starved=fmean(step.starved for step in steady),
        padding=compute_padding_share(steady) or 0.0,
        fixed_cost_share=_estimate_fixed_cost_share([count_positions(step) for step in steady], seconds),
        tokens=fmean(map(count_tokens, steady)),
    )


def _estimate_fixed_cost_share(
    positions: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float] | None:
    """Estimate the share of a pass's time that does not depend on its positions: lower end, estimate, upper end.

    The share is 1 minus the elasticity of time in positions, from pairs of neighbouring steps: the elasticity is 1 if
    all time is computing, lower by the fixed cost per pass (kernel launches). Attention grows faster than linearly, so
    the estimate can be too low, never too high. Only neighbours are compared, because the speed of a machine changes;
    the median over pairs, weighted by their difference in positions, is robust against short load by other programs.
    The ends are one standard error away. None if lengths are too similar, or if times vary so much that any share is
    possible.
    """
    if len(positions) < 2 * MIN_STEPS:
        return None
    eighths = quantiles(positions, n=8)
    if eighths[-1] < MIN_SPREAD * eighths[0]:
        return None
    pairs: list[tuple[float, float]] = []
    for apart in range(1, NUM_NEIGHBOURS + 1):
        for few, many, short, long in zip(positions, positions[apart:], seconds, seconds[apart:], strict=False):
            if few != many:
                longer = (many - few) / (many + few)
                pairs.append((1 - (long - short) / (long + short) / longer, abs(longer)))
    error = 0.5 / math.sqrt(len(positions) / 2)  # in ranks: of a median, over pairs without a common step
    low, estimate, high = _compute_weighted_quantiles(pairs, [0.5 - error, 0.5, 0.5 + error])
    if high - low >= 1:
        return None
    return max(0.0, low), min(1.0, max(0.0, estimate)), min(1.0, high)


def _compute_weighted_quantiles(pairs: Sequence[tuple[float, float]], ranks: Sequence[float]) -> list[float]:
    """Compute weighted quantiles: of each rank (0-1) the value below which that share of the weight lies.

    >>> _compute_weighted_quantiles([(3.0, 1.0), (1.0, 1.0), (2.0, 4.0)], [0.5, 0.9])
    [2.0, 3.0]
    """
    values, weights = zip(*sorted(pairs), strict=True)
    below = list(accumulate(weights))
    return [values[bisect_left(below, rank * below[-1])] for rank in ranks]


def _compute_scored_ratio(run: Run) -> float | None:
    """Compute scored labels per example, divided by labels per example of the data; None for mixtures, which draw
    unevenly.

    A flat forward computes only the tokens of its batches: positions beyond the tokens of the data are padding scored
    as labels. This does not hold on accelerators, where CUDA graphs round lengths up, nor with several processes, which
    run filler batches.
    """
    data, steps = run.data.train, run.steps
    if data is None or not data.num_target_tokens or not data.num_examples or data.parts:
        return None
    if not steps or steps[0].step != 1 or not steps[-1].num_examples_seen:
        return None
    scored: float = sum(step.num_target_tokens for step in steps)
    is_flat_on_cpu = run.machine.forward.kind == "flat" and run.machine.device.kind == "cpu"
    if is_flat_on_cpu and all(step.world_size == 1 for step in steps):
        scored += sum(map(count_positions, steps)) - sum(map(count_tokens, steps))
    return scored / steps[-1].num_examples_seen / (data.num_target_tokens / data.num_examples)


def _find_padded_length(data: SplitSummary | None) -> int | None:
    """Return the length of the targets, if all are as long as the limit although none was truncated; else None."""
    if data is None or not data.max_target_tokens or not data.num_examples or data.parts:
        return None
    is_full = data.num_target_tokens == data.max_target_tokens * data.num_examples
    return data.max_target_tokens if is_full and data.num_clipped_targets == 0 else None


# --- evaluations and checkpoints ---


def _measure_evaluations(run: Run) -> Interruption | None:
    """Measure the evaluations after the first step and before the last one; None without any.

    They are selected by `run_step`, because the evaluation of the exported weights has the best step's number, but runs
    after the last step.
    """
    last = run.num_steps or math.inf
    between = [record for record in run.evals if record.run_step is not None and 0 < record.run_step < last]
    if not between:
        return None
    every = run.plan.eval_every_steps if run.plan else between[0].step
    return _build_interruption(run.steps, len(between), fmean(record.seconds for record in between), every)


def _measure_checkpoints(run: Run) -> Interruption | None:
    """Measure the checkpoints before the last one. The phase includes the export of the weights: one more."""
    seconds = run.status.seconds_by_phase.get("checkpoint")
    done = run.status.step
    every = run.plan.checkpoint_every_steps if run.plan else None
    if not (seconds and every) or done <= every:
        return None
    num_between = (done - 1) // every
    return _build_interruption(run.steps, num_between, seconds / (num_between + 2), every)


def _build_interruption(steps: Sequence[StepRecord], num: int, seconds: float, every_steps: int) -> Interruption | None:
    training = sum(step.step_seconds for step in steps)
    if not training:
        return None
    return Interruption(num * seconds / (num * seconds + training), every_steps, seconds, num / len(steps))


def compute_eval_interval(record: EvalRecord, metric: str) -> tuple[float, float]:
    """Return the 95 % interval of a score in points: the recorded bootstrap interval, else Wilson's over all examples.

    Every score gets an interval, to judge its changes; the report's `compute_score_interval` has Wilson's interval of
    means only, over the examples that they average.
    """
    if metric in record.intervals:
        return record.intervals[metric]
    share = min(1.0, max(0.0, record.scores[metric] / 100))
    low, high = compute_wilson_interval(share, max(1, record.num_examples))
    return 100 * low, 100 * high


def format_share(share: float) -> str:
    """Format a share (0-1) as per cent.

    >>> format_share(0.314), format_share(0.0049)
    ('31 %', '0.5 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.02 or not share else f"{100 * share:.1g} %"
