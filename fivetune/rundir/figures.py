"""Figures of a run, defined once for reports, comparisons, diagnosis, searches and the live view.

In: the typed records of a run directory. Out: selected records, and numbers; None where data is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from fivetune.rundir.layout import AVERAGE, OWN_SPLITS
from fivetune.rundir.records import BestEval, DeviceSample, EvalRecord, Run, StepRecord, TelemetryRecord
from fivetune.values import divide, select_finite

FROZEN_STEPS = 10
"""Steps with exactly the same loss: batches differ, so even two equal float losses are a coincidence."""

MIN_DIVERGED_STEPS, DIVERGENCE_WINDOW = 9, 10
"""Minimum number of steps, and number of steps whose losses are compared; of runs below 20 steps half of the steps."""
DIVERGED_RATIO, DIVERGED_NATS = 2.0, 1.0
"""Ratio of a median loss to its minimum, and excess over it in nats, from which it has diverged."""
ABOVE_GUESSING = 1.1
"""Ratio of a loss to its minimum that divergence above the loss of guessing also requires: an untrained model is above
guessing too."""
FIRST_LOSS_MARGIN = 1.5
"""The loss of the first batch counts as the minimum if this multiple of it is below all later medians and losses."""
NORM_RATIO, NORM_LOSS_RATIO = 100.0, 1.5
"""A gradient norm of NORM_RATIO times its minimum has exploded if the loss is NORM_LOSS_RATIO times its minimum: near a
loss of 0, norms vary by more than that without harm."""

JOULES_PER_WH = 3600
MAX_GAP_SECONDS = 60.0
"""Time between two samples of a device up to which its energy is computed; the energy in a longer gap is unknown."""
WHOLE_DEVICE = -1  # in the place of a MIG instance's number: it is ordered first
IDLE_UTILISATION = 0.05
"""Utilisation (0-1) up to which a device is idle: NVML counts whole per cents over up to a second, and a desktop or
the driver itself uses a few; a device that trains is far above, even while it waits."""

# --- evaluations ---


def select_evals_by_step(evals: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Return the evaluations of data.eval, one per step, in order of the steps.

    An evaluation of the whole set replaces an evaluation of a subset at the same step. If a resume repeated a step, the
    last evaluation counts, and its basis.
    """
    own = _select_own_evals(evals)
    last_basis: dict[int, str] = {}
    for record in own:
        last_basis[record.step] = record.basis
    by_step: dict[int, EvalRecord] = {}
    for split in OWN_SPLITS:  # "eval" after "subset", which it replaces
        for record in own:
            if record.split == split and record.basis == last_basis[record.step]:
                by_step[record.step] = record
    return [by_step[step] for step in sorted(by_step)]


def _select_own_evals(evals: Iterable[EvalRecord]) -> list[EvalRecord]:
    return [record for record in evals if record.split in OWN_SPLITS]


def select_current_evals(evals: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Return the evaluations of the present data and settings: of the same data and settings as the last evaluation.

    A resume may change data.eval or eval.num_beams; scores before and after it are not comparable. Evaluations of a
    subset and of the whole set are current at the same time.
    """
    current: list[EvalRecord] = []
    sizes: dict[str, int] = {}  # of each split, by its last evaluation
    for record in reversed(_select_own_evals(evals)):
        basis = current[0].basis if current else record.basis
        if record.basis == basis and sizes.setdefault(record.split, record.num_examples) == record.num_examples:
            current.append(record)
    return current[::-1]


def find_eval_changes(evals: Iterable[EvalRecord]) -> list[int]:
    """Return the steps from which the evaluations have other data or settings than before.

    Args:
        evals: one per step, in order of the steps.
    """
    changes: list[int] = []
    basis: str | None = None
    sizes: dict[str, int] = {}
    for record in evals:
        if record.basis != basis or sizes.get(record.split, record.num_examples) != record.num_examples:
            if basis is not None:
                changes.append(record.step)
            basis = record.basis
            sizes = {}
        sizes[record.split] = record.num_examples
    return changes


def find_own_eval(evals: Iterable[EvalRecord], step: int) -> EvalRecord | None:
    """Return the evaluation of data.eval at a step; None if there is none."""
    for record in select_evals_by_step(evals):
        if record.step == step:
            return record
    return None


def find_chosen_eval(evals: Iterable[EvalRecord], best: BestEval) -> EvalRecord | None:
    """Return the evaluation of the exported weights: at the best step, or of the weights that were averaged."""
    if not best.averaged:
        return find_own_eval(evals, best.step)
    for record in reversed(list(evals)):  # a resume may have repeated it
        if record.split == AVERAGE and record.step == best.step:
            return record
    return None


def find_exported_eval(run: Run) -> EvalRecord | None:
    """Return the evaluation of the weights in model/, by status.json."""
    return find_chosen_eval(run.evals, run.status.best) if run.status.best else None


def describe_weights(record: EvalRecord, best: BestEval | None) -> str:
    """Describe which weights an evaluation is of.

    Args:
        best: of status.json.
    """
    if best and best.averaged and record.split == AVERAGE:
        steps = [f"{step:,}" for step in best.averaged]
        return f"the mean of steps {', '.join(steps)}"
    return f"step {record.step:,}"


def select_comparable_evals(evals: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Return the current evaluations of the same examples, one per step, in order; only these are comparable.

    With eval.max_examples a run evaluates a subset during training, and all examples before the first step and for the
    exported weights. The set with the most evaluated steps counts; on a tie, the subset.
    """
    by_set: dict[str, dict[int, EvalRecord]] = {}
    for record in select_current_evals(evals):
        by_set.setdefault(record.split, {})[record.step] = record
    chosen: dict[int, EvalRecord] = {}
    for name in ("eval", "subset"):
        found = by_set.get(name, {})
        if len(found) >= len(chosen):
            chosen = found
    return [chosen[step] for step in sorted(chosen)]


def list_eval_losses(evals: Iterable[EvalRecord]) -> dict[int, float]:
    """List the known evaluation losses of the same examples by step, in order."""
    losses: dict[int, float] = {}
    for record in select_comparable_evals(evals):
        if record.loss is not None:
            losses[record.step] = record.loss
    return losses


def find_best_eval(
    evals: Iterable[EvalRecord], *, metric: str, higher_is_better: bool, chosen: BestEval | None = None
) -> EvalRecord | None:
    """Return the evaluation of the exported weights, or the best one by `metric`.

    Args:
        chosen: status.best, which counts if it is of this metric.

    Candidates are current evaluations after step 0, of all examples if there are any: scores of a subset and of the
    whole set are not comparable. Ties go to the lower loss, then to the later step, as in `is_better_eval`.
    """
    evals = list(evals)
    exported = find_chosen_eval(evals, chosen) if chosen and chosen.metric == metric else None
    if exported and metric in exported.scores:
        return exported
    records = [record for record in select_evals_by_step(select_current_evals(evals)) if metric in record.scores]
    records = [record for record in records if record.step > 0] or records
    records = [record for record in records if record.split == "eval"] or records
    found: EvalRecord | None = None
    best: BestEval | None = None
    for record in records:
        one = build_best_eval(record, metric)
        if best is None or is_better_eval(one, best, higher_is_better=higher_is_better):
            found = record
            best = one
    return found


def build_best_eval(record: EvalRecord, metric: str) -> BestEval:
    """Build what is compared of an evaluation: its step, its score by `metric` and its loss."""
    return BestEval(record.step, metric, record.scores[metric], record.loss)


def is_better_eval(later: BestEval, earlier: BestEval, *, higher_is_better: bool) -> bool:
    """Whether a later evaluation replaces an earlier one as the best: the better score, then the lower loss.

    If the losses are equal or one is unknown, the later step wins, because its weights have seen more data.
    """
    if later.score != earlier.score:
        return later.score > earlier.score if higher_is_better else later.score < earlier.score
    if later.loss is None or earlier.loss is None:
        return True
    return later.loss <= earlier.loss


# --- steps ---


def select_steady_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steady steps, whose times represent the run: all after the first that are not marked as warm-up."""
    return [step for step in steps[1:] if not step.warm_up]


def count_tokens(step: StepRecord) -> int:
    """Input and target tokens of a step, without padding."""
    return step.num_input_tokens + step.num_target_tokens


def count_positions(step: StepRecord) -> float:
    """Positions that the model computed in a step: tokens and padding."""
    return count_tokens(step) / (1 - step.padding_fraction)


def compute_train_seconds(steps: Sequence[StepRecord]) -> float | None:
    """Seconds of all steps, warm-up included; None without steps."""
    return math.fsum(step.step_seconds for step in steps) if steps else None


def compute_tokens_per_second(steps: Sequence[StepRecord]) -> float | None:
    """Tokens of the steady steps divided by their seconds, without padding."""
    steady = select_steady_steps(steps)
    return divide(sum(map(count_tokens, steady)), math.fsum(step.step_seconds for step in steady))


def compute_examples_per_second(steps: Sequence[StepRecord]) -> float | None:
    """Examples of the steady steps divided by their seconds; num_examples_seen grows by a step's examples."""
    examples = 0
    seconds = list[float]()
    for before, step in pairwise(steps):
        if not step.warm_up:
            examples += step.num_examples_seen - before.num_examples_seen
            seconds.append(step.step_seconds)
    return divide(examples, math.fsum(seconds))


def compute_median_step_seconds(steps: Sequence[StepRecord]) -> float | None:
    """Median duration of the steady steps."""
    seconds = [step.step_seconds for step in select_steady_steps(steps)]
    return median(seconds) if seconds else None


def compute_padding_share(steps: Sequence[StepRecord]) -> float | None:
    """Share (0-1) of padding among all positions that the model computed, warm-up included."""
    if not steps or any(step.padding_fraction >= 1 for step in steps):
        return None
    positions = math.fsum(map(count_positions, steps))
    return divide(positions - sum(map(count_tokens, steps)), positions)


def compute_mfu(steps: Sequence[StepRecord]) -> float | None:
    """Mean share (0-1) of the peak of the devices' data sheets over the steady steps; None where it is unknown."""
    known = [step.mfu for step in select_steady_steps(steps) if step.mfu is not None]
    return fmean(known) if known else None


def compute_peak_bytes(steps: Sequence[StepRecord]) -> int | None:
    """Peak memory in bytes over all steps."""
    return max((step.peak_bytes for step in steps if step.peak_bytes), default=None)


def compute_phase_shares(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Share (0-1) of the steady steps' time by phase, for the measured ones of PHASES; "data" is always measured.

    {} without steady steps.
    """
    steady = select_steady_steps(steps)
    whole = math.fsum(step.step_seconds for step in steady)
    if not whole:
        return {}
    seconds: dict[str, float] = {"data": 0.0}
    for step in steady:
        phases = {"data": step.data_seconds, **step.phase_seconds}  # where a phase "data" was measured, that one counts
        for phase, each in phases.items():
            seconds[phase] = seconds.get(phase, 0.0) + each
    return {phase: each / whole for phase, each in seconds.items()}


def is_frozen(losses: Sequence[float | None]) -> bool:
    """Whether the last FROZEN_STEPS losses are exactly equal: the weights do not change.

    >>> is_frozen([2.5, *[1.5] * 9]), is_frozen([2.5, *[1.5] * 10]), is_frozen([None] * 10)
    (False, True, False)
    """
    tail = losses[-FROZEN_STEPS:]
    return len(tail) == FROZEN_STEPS and tail[0] is not None and all(loss == tail[0] for loss in tail)


def find_longest_freeze(steps: Sequence[StepRecord]) -> tuple[int, int]:
    """Number of steps and first step of the longest stretch of exactly equal losses; (0, 0) where no loss is known."""
    longest = 0
    first = 0
    begin = 0  # of the stretch of the present step
    for number, step in enumerate(steps):
        if step.loss != steps[begin].loss:
            begin = number
        if step.loss is not None and number - begin + 1 > longest:
            longest = number - begin + 1
            first = steps[begin].step
    return longest, first


@dataclass(frozen=True, slots=True)
class Divergence:
    """A training that diverged; losses and norms are medians over a window of steps.

    Args:
        step: last step at which the loss was near its minimum.
        guessing_loss: of uniform guessing over the vocabulary, ln(V); None where V is unknown.
        norm_ratio: last gradient norm divided by its minimum; None where norms are unknown.
    """

    step: int
    lowest_loss: float
    last_loss: float
    guessing_loss: float | None
    norm_ratio: float | None


def find_divergence(
    losses: Mapping[int, float],
    grad_norms: Mapping[int, float],
    *,
    vocab_size: int | None = None,
    eval_losses: Mapping[int, float] | None = None,
) -> Divergence | None:
    """Find a divergence that lasts to the end of the run; None without one, or with too few known steps.

    The loss has diverged if it is above guessing and ABOVE_GUESSING times its minimum, or DIVERGED_RATIO times its
    minimum, or NORM_LOSS_RATIO times its minimum with an exploded gradient norm. All losses of the last window must
    also be above the losses of the lowest window, one outlier excepted: losses of small batches vary by more than these
    ratios, but return. An evaluation loss below all earlier ones, made after the rise, excludes a divergence.

    Args:
        losses, grad_norms: by step, in order; finite values only.
        eval_losses: of the same examples, by step, in order.

    >>> find_divergence({step: 2.0 if step < 12 else 9.0 for step in range(24)}, {}).last_loss
    9.0
    >>> find_divergence({step: 9.0 - step / 4 for step in range(24)}, {})
    """
    if len(losses) < MIN_DIVERGED_STEPS:
        return None
    # Medians over a moving window: the losses of single batches vary too much.
    steps = list(losses)
    values = list(losses.values())
    window = min(DIVERGENCE_WINDOW, len(values) // 2)
    medians = _compute_moving_medians(values, window)
    last = medians[-1]
    first = values[0]
    guessing = math.log(vocab_size) if vocab_size else None
    # A learning rate far too high ruins the weights at once: only the noisy loss of the first batch is then low.
    is_early = FIRST_LOSS_MARGIN * first < min(medians)
    if is_early:
        lowest = first
        bound = FIRST_LOSS_MARGIN * first
        highest = FIRST_LOSS_MARGIN * first
    elif window == DIVERGENCE_WINDOW:
        at = medians.index(min(medians))
        lowest = bound = medians[at]
        highest = sorted(values[at : at + window])[-2]
    else:
        return None  # noise separates the losses of two such short windows
    if min(values[-window:]) <= highest or (is_early and guessing is not None and last <= guessing):
        return None

    # How far the loss has risen, and with it the gradient norm.
    norms = list(grad_norms.values())
    norm_ratio = None
    if len(norms) >= 2 * window:
        norm_medians = _compute_moving_medians(norms, window)
        norm_ratio = divide(norm_medians[-1], min(norm_medians))
    rises = last > DIVERGED_RATIO * bound and last > bound + DIVERGED_NATS
    above_guessing = guessing is not None and last > guessing and last > ABOVE_GUESSING * bound
    explodes = norm_ratio is not None and norm_ratio >= NORM_RATIO and last > NORM_LOSS_RATIO * bound
    if not (rises or above_guessing or explodes):
        return None

    # The last step near the minimum, after which an evaluation may still have been better than all before.
    left = 0
    if not is_early:
        near = lowest + 0.1 * (last - lowest)
        left = window - 1 + max(i for i, each in enumerate(medians) if each <= near)
    before = list[float]()
    after = list[float]()
    for step, loss in (eval_losses or {}).items():
        (before if step <= steps[left] else after).append(loss)
    if before and after and after[-1] < min(before):
        return None
    return Divergence(steps[left], lowest, last, guessing, norm_ratio)


def _compute_moving_medians(values: Sequence[float], window: int) -> list[float]:
    return [median(values[i : i + window]) for i in range(len(values) - window + 1)]


# --- devices and hosts ---


@dataclass(frozen=True, slots=True)
class DeviceSeries:
    """The samples of one accelerator, in the order of time.

    Args:
        mig: number of a MIG instance; None for the whole device.
        is_used: a process of the run uses it, or the process lists do not exclude that.
        seconds: wall-clock times of `samples`.
    """

    host: str | None
    index: int
    mig: int | None
    is_used: bool
    seconds: tuple[float, ...]
    samples: tuple[DeviceSample, ...]

    @property
    def name(self) -> str | None:
        for sample in self.samples:
            if sample.name:
                return sample.name
        return None


def list_device_series(telemetry: Iterable[TelemetryRecord]) -> list[DeviceSeries]:
    """List every accelerator of a run's nodes, by host, index and MIG instance; `is_used` marks the run's own devices.

    Each device is counted once: if several processes of a node sampled it, the samples of the lowest rank count.
    A device is the run's own unless every sample attributes it to other programs only.
    """
    by_device: dict[tuple[str, int, int], dict[int, list[tuple[float, DeviceSample]]]] = {}
    hosts: dict[str, str | None] = {}  # an unknown host is ordered as ""
    used: set[tuple[str, int, int]] = set()
    for record in telemetry:
        hosts[record.host or ""] = record.host
        for sample in record.devices:
            device = record.host or "", sample.index, WHOLE_DEVICE if sample.mig is None else sample.mig
            by_device.setdefault(device, {}).setdefault(record.rank, []).append((record.seconds, sample))
            if sample.ours is not False:
                used.add(device)
    found: list[DeviceSeries] = []
    for device, ranks in sorted(by_device.items()):
        host, index, mig = device
        seconds, samples = zip(*ranks[min(ranks)], strict=True)
        instance = None if mig == WHOLE_DEVICE else mig
        found.append(DeviceSeries(hosts[host], index, instance, device in used, seconds, samples))
    return found


def select_training_samples(telemetry: Iterable[TelemetryRecord]) -> list[TelemetryRecord]:
    """Return the samples of the phase "train".

    If no sample has a phase (another tool's log), return the samples in which a device was active, because a log starts
    before the training and ends after it; all samples if no device was ever active.
    """
    telemetry = list(telemetry)
    if any(record.phase for record in telemetry):
        return [record for record in telemetry if record.phase == "train"]
    active: list[TelemetryRecord] = []
    for record in telemetry:
        if max((device.utilisation or 0.0 for device in record.devices), default=0.0) > IDLE_UTILISATION:
            active.append(record)
    return active or telemetry


def compute_utilisation(telemetry: Iterable[TelemetryRecord]) -> float | None:
    """Mean utilisation (0-1) of the run's own accelerators during training; None if none reports it."""
    known: list[float] = []
    for device in list_device_series(select_training_samples(telemetry)):
        if device.is_used:
            known.extend(select_finite([sample.utilisation for sample in device.samples]))
    return fmean(known) if known else None


def compute_process_cores(telemetry: Iterable[TelemetryRecord]) -> dict[int, float]:
    """Mean number of busy cores of each rank and its children during training, by rank."""
    cores: dict[int, list[float]] = {}
    for record in select_training_samples(telemetry):
        if record.process_cores is not None:
            cores.setdefault(record.rank, []).append(record.process_cores)
    return {rank: fmean(values) for rank, values in sorted(cores.items())}


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Mean busy cores of a host during training, of the run's own processes and of other programs; and all cores."""

    own_cores: float
    other_cores: float
    num_cores: int


def compute_host_load(telemetry: Iterable[TelemetryRecord]) -> HostLoad | None:
    """Mean busy cores of the run's host; None if unknown or if the run has several hosts."""
    training = select_training_samples(telemetry)
    own = compute_process_cores(training)
    hosts = {record.host for record in training}
    ranks = {record.rank for record in training}
    if len(hosts) != 1 or set(own) != ranks:
        return None
    # Every rank samples all cores of the host: the samples of one rank are enough.
    first = min(ranks)
    busy: list[float] = []
    num_cores = 0
    for record in training:
        if record.rank == first and record.core_utilisation:
            busy.append(math.fsum(record.core_utilisation))
            num_cores = num_cores or len(record.core_utilisation)
    if not busy:
        return None
    mine = math.fsum(own.values())
    return HostLoad(mine, max(0.0, fmean(busy) - mine), num_cores)


def compute_energy_joules(telemetry: Iterable[TelemetryRecord]) -> float | None:
    """Energy of the run's devices by energy counters, else as the integral of power (trapezoids); None if unknown."""
    parts: list[float] = []
    for series in list_device_series(telemetry):
        if series.is_used:
            energy = _compute_device_energy(series)
            if energy is None:
                return None
            parts.append(energy)
    return math.fsum(parts) if parts else None


def _compute_device_energy(series: DeviceSeries) -> float | None:
    """Energy of one device over its samples, without gaps of more than a minute."""
    parts: list[float] = []
    for (before, a), (after, b) in pairwise(zip(series.seconds, series.samples, strict=True)):
        if after - before > MAX_GAP_SECONDS:
            continue
        if a.energy_joules is not None and b.energy_joules is not None and b.energy_joules >= a.energy_joules:
            parts.append(b.energy_joules - a.energy_joules)
        elif a.power_watts is not None and b.power_watts is not None:
            parts.append((after - before) * (a.power_watts + b.power_watts) / 2)
    return math.fsum(parts) if parts else None
