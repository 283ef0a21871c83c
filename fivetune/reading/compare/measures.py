"""Measures of one run, by which variants are compared.

In: a Run. Out: name -> value for every name of MEASURES, None if unknown. Figures that other packages use as well are
in `rundir/figures.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from fivetune.rundir import figures
from fivetune.rundir.figures import select_comparable_evals
from fivetune.rundir.records import DeviceSample, EvalRecord, Run, TelemetryRecord
from fivetune.tasks import is_higher_better
from fivetune.values import divide, select_finite


class MeasureSpec(NamedTuple):
    """Definition of a measure.

    Args:
        kind: unit and format: score, loss, duration, rate, count, bytes, share (0-1), celsius, watts, joules, price.
        compared: "minus" the baseline's value, or "ratio" to it.
    """

    label: str
    unit: str
    kind: str
    compared: str = "ratio"


MEASURES: dict[str, MeasureSpec] = {
    "score_best": MeasureSpec("best score", "points", "score", "minus"),
    "score_last": MeasureSpec("last score", "points", "score", "minus"),
    "loss_best": MeasureSpec("lowest evaluation loss", "nats per token", "loss", "minus"),
    "loss_last": MeasureSpec("last evaluation loss", "nats per token", "loss", "minus"),
    "seconds": MeasureSpec("whole run", "s", "duration"),
    "train_seconds": MeasureSpec("training steps", "s", "duration"),
    "seconds_to_score": MeasureSpec("training until the baseline's best score", "s", "duration"),
    "examples_per_second": MeasureSpec("examples per second", "1/s", "rate"),
    "tokens_per_second": MeasureSpec("tokens per second, padding not counted", "1/s", "rate"),
    "step_seconds": MeasureSpec("step", "s", "duration"),
    "world_size": MeasureSpec("processes that took part", "", "count"),
    "scaling_efficiency": MeasureSpec("scaling efficiency against one device", "", "share", "minus"),
    "mfu": MeasureSpec("model FLOPs utilisation", "", "share", "minus"),
    "padding": MeasureSpec("padding", "", "share", "minus"),
    "data_wait": MeasureSpec("waiting for data", "", "share", "minus"),
    "peak_bytes": MeasureSpec("most memory", "bytes", "bytes"),
    "utilisation": MeasureSpec("device utilisation", "", "share", "minus"),
    "memory_busy": MeasureSpec("time accessing memory", "", "share", "minus"),
    "temperature_celsius": MeasureSpec("highest temperature", "°C", "celsius", "minus"),
    "power_watts": MeasureSpec("power of a device", "W", "watts"),
    "process_cores": MeasureSpec("cores kept busy", "", "count"),
    "energy_joules": MeasureSpec("energy of the devices", "J", "joules"),
    "energy_per_point": MeasureSpec("energy per point of score", "J", "joules"),
    "cost": MeasureSpec("cost", "", "price"),
    "cost_per_point": MeasureSpec("cost per point of score", "", "price"),
}

TIME_KINDS = ("duration", "rate", "joules", "price")
SCORE_KINDS = ("score", "loss")

TIME_MEASURES = {"scaling_efficiency", "mfu", *(name for name, spec in MEASURES.items() if spec.kind in TIME_KINDS)}
"""Measures that other work on the machine changes."""

SCORE_MEASURES = {
    "seconds_to_score",
    "energy_per_point",
    "cost_per_point",
    *(name for name, spec in MEASURES.items() if spec.kind in SCORE_KINDS),
}
"""Measures that depend on the evaluation set."""


def compute_measures(run: Run, *, metric: str, price_per_hour: float | None = None) -> dict[str, float | None]:
    """Compute all measures of one run except those that need other runs: seconds_to_score and scaling_efficiency.

    Args:
        metric: name of the score to compare by.
        price_per_hour: price of the machine, in any currency.
    """
    steps = run.steps
    evals = select_comparable_evals(run.evals)
    best = find_best_metric_eval(run, metric)
    last = evals[-1] if evals else None
    # Scores of other examples differ by these examples too.
    if best and last and last.num_examples != best.num_examples:
        last = None
    score = get_score(best, metric)
    seconds = run.status.seconds
    energy = figures.compute_energy_joules(run.telemetry)
    cost = None
    if price_per_hour is not None and seconds is not None:
        cost = price_per_hour * seconds / 3600
    training = _list_used_samples(figures.select_training_samples(run.telemetry))
    whole = _list_used_samples(run.telemetry)
    cores = figures.compute_process_cores(run.telemetry)
    return {
        **dict.fromkeys(MEASURES),
        "score_best": score,
        "score_last": get_score(last, metric),
        "loss_best": min((one.loss for one in evals if one.loss is not None), default=None),
        "loss_last": evals[-1].loss if evals else None,
        "seconds": seconds,
        # Times and rates are of the steady steps; total time, memory and padding of all steps.
        "train_seconds": figures.compute_train_seconds(steps),
        "examples_per_second": figures.compute_examples_per_second(steps),
        "tokens_per_second": figures.compute_tokens_per_second(steps),
        "step_seconds": figures.compute_median_step_seconds(steps),
        "data_wait": figures.compute_phase_shares(steps).get("data"),
        "world_size": max((step.world_size for step in steps), default=None),
        "mfu": figures.compute_mfu(steps),
        "padding": figures.compute_padding_share(steps),
        "peak_bytes": figures.compute_peak_bytes(steps),
        # Devices and processes are averaged over the training; the temperature is the maximum of the run.
        "utilisation": figures.compute_utilisation(run.telemetry),
        "memory_busy": _compute_mean(sample.memory_busy for sample in training),
        "temperature_celsius": max(select_finite([sample.temperature_celsius for sample in whole]), default=None),
        "power_watts": _compute_mean(sample.power_watts for sample in training),
        "process_cores": math.fsum(cores.values()) if cores else None,
        "energy_joules": energy,
        "energy_per_point": divide(energy, score),
        "cost": cost,
        "cost_per_point": divide(cost, score),
    }


def _list_used_samples(telemetry: Iterable[TelemetryRecord]) -> list[DeviceSample]:
    """List the samples of the run's own devices."""
    samples: list[DeviceSample] = []
    for device in figures.list_device_series(telemetry):
        if device.is_used:
            samples += device.samples
    return samples


def _compute_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# --- scores ---


def get_score(record: EvalRecord | None, metric: str) -> float | None:
    """Return a score of an evaluation, in points."""
    return record.scores.get(metric) if record else None


def find_best_score(run: Run, metric: str) -> float | None:
    """Return the best score among comparable evaluations, in points."""
    scores = [get_score(record, metric) for record in select_comparable_evals(run.evals)]
    known = [score for score in scores if score is not None]
    choose = max if is_higher_better([run.config], metric) else min
    return choose(known, default=None)


def find_best_metric_eval(run: Run, metric: str) -> EvalRecord | None:
    """Return the evaluation that chose the run's best checkpoint; for a metric other than the run's, the best by it."""
    return figures.find_best_eval(
        run.evals,
        metric=metric,
        higher_is_better=is_higher_better([run.config], metric),
        chosen=run.status.best,
    )


def compute_seconds_to_score(run: Run, metric: str, target: float) -> float | None:
    """Compute the seconds of training steps until a comparable evaluation first reached a score; None if none did.

    Evaluations and checkpoints do not count.
    """
    sign = 1 if is_higher_better([run.config], metric) else -1
    for record in select_comparable_evals(run.evals):
        score = get_score(record, metric)
        if score is not None and sign * score >= sign * target:
            return math.fsum(step.step_seconds for step in run.steps if step.step <= record.step)
    return None
