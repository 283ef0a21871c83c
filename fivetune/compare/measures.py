"""The figures of one run that variants are compared by.

In: a Run. Out: name -> value for every name of MEASURES, None where the run does not tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fivetune import plugins, rundir
from fivetune.errors import ConfigError
from fivetune.metrics import higher_is_better, score_names
from fivetune.types import Run
from fivetune.values import known, number

MAX_GAP_SECONDS = 60.0  # between two samples of a device; what lies in a longer gap is not known


class Kind(NamedTuple):
    """What a measure is.

    Args:
        higher_is_better: None where neither is.
        kind: how it is printed: score, loss, duration, rate, count, bytes, share (0-1), celsius, watts, joules, price.
        compared: "minus" the baseline's, or its "ratio" to it.
    """

    label: str
    unit: str
    higher_is_better: bool | None
    kind: str
    compared: str = "ratio"


MEASURES: dict[str, Kind] = {
    "score_best": Kind("best score", "points", True, "score", "minus"),
    "score_last": Kind("last score", "points", True, "score", "minus"),
    "loss_best": Kind("lowest evaluation loss", "nats per token", False, "loss", "minus"),
    "loss_last": Kind("last evaluation loss", "nats per token", False, "loss", "minus"),
    "seconds": Kind("whole run", "s", False, "duration"),
    "train_seconds": Kind("training steps", "s", False, "duration"),
    "seconds_to_score": Kind("training until the baseline's best score", "s", False, "duration"),
    "examples_per_second": Kind("examples per second", "1/s", True, "rate"),
    "tokens_per_second": Kind("tokens per second, padding not counted", "1/s", True, "rate"),
    "step_seconds": Kind("step", "s", False, "duration"),
    "world_size": Kind("processes that took part", "", None, "count"),
    "scaling_efficiency": Kind("scaling efficiency against one device", "", True, "share", "minus"),
    "mfu": Kind("model FLOPs utilisation", "", True, "share", "minus"),
    "padding": Kind("padding", "", False, "share", "minus"),
    "data_wait": Kind("waiting for data", "", False, "share", "minus"),
    "peak_bytes": Kind("most memory", "bytes", False, "bytes"),
    "utilisation": Kind("device utilisation", "", True, "share", "minus"),
    "memory_busy": Kind("time accessing memory", "", None, "share", "minus"),
    "temperature_celsius": Kind("highest temperature", "°C", False, "celsius", "minus"),
    "power_watts": Kind("power of a device", "W", False, "watts"),
    "process_cores": Kind("cores kept busy", "", None, "count"),
    "energy_joules": Kind("energy of the devices", "J", False, "joules"),
    "energy_per_point": Kind("energy per point of score", "J", False, "joules"),
    "cost": Kind("cost", "", False, "price"),
    "cost_per_point": Kind("cost per point of score", "", False, "price"),
}


def measures_of(run: Run, *, metric: str, price_per_hour: float | None = None) -> dict[str, float | None]:
    """All measures of one run but those that need the others: seconds_to_score and scaling_efficiency.

    Args:
        metric: the score that counts, in points.
        price_per_hour: of the machine, in any currency.
    """
    on_the_way = series(run)
    best, last = best_eval(run, metric), next(reversed(on_the_way), None)
    score, seconds = score_of(best, metric), number(run.status.get("seconds"))
    energy = energy_joules(run.telemetry)
    cost = None if price_per_hour is None or seconds is None else price_per_hour * seconds / 3600
    return {
        **dict.fromkeys(MEASURES),
        "score_best": score,
        "score_last": score_of(last, metric),
        "loss_best": min(known(e.get("loss") for e in on_the_way), default=None),
        "loss_last": number(last.get("loss")) if last else None,
        "seconds": seconds,
        **speeds(run.steps),
        **_of_devices(run.telemetry),
        "energy_joules": energy,
        "energy_per_point": _ratio(energy, score),
        "cost": cost,
        "cost_per_point": _ratio(cost, score),
    }


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom


# --- scores ---


def score_of(record: Mapping[str, Any] | None, metric: str) -> float | None:
    """A score of an evaluation, in points."""
    return number((record.get("scores") or {}).get(metric)) if record else None


def is_higher_better(runs: Iterable[Run], metric: str) -> bool:
    """Whether more is better of a score, as the first task that has it says; True where none is understood any more."""
    tasks = (task_of(run) for run in runs)
    said = (higher_is_better(task.metrics, metric) for task in tasks if task and metric in score_names(task.metrics))
    return next(said, True)


def task_of(run: Run) -> Any:
    """The task of a run with its options; None where they are no longer understood."""
    table = dict(run.config.get("task") or {})
    try:
        return plugins.load("tasks", table.pop("name", "")).model_validate(table)
    except (ValueError, ConfigError):
        return None


def series(run: Run) -> list[dict[str, Any]]:
    """The run's own evaluations on the way, all of the same examples: those of the subset, where it has one."""
    return rundir.own_evals([e for e in run.evals if e.get("split") == "subset"]) or rundir.own_evals(run.evals)


def peak(run: Run, metric: str) -> float | None:
    """The best score on the way, in points."""
    best = max if is_higher_better([run], metric) else min
    return best(known(score_of(record, metric) for record in series(run)), default=None)


def best_eval(run: Run, metric: str) -> dict[str, Any] | None:
    """The evaluation that the run chose its weights by; by another score the best one after the start.

    Among evaluations of all examples, where there is one; a part's score is not compared with the whole's.
    """
    named = run.status.get("best") or {}
    if named.get("metric") == metric and (record := rundir.best_eval(run.evals, named)):
        return record
    evals = [e for e in rundir.own_evals(run.evals) if score_of(e, metric) is not None]
    whole = [e for e in evals if e.get("split") == "eval"] or evals
    tuned = [e for e in whole if e["step"] > 0] or whole
    sign = 1 if is_higher_better([run], metric) else -1
    return max(tuned, key=lambda e: sign * (score_of(e, metric) or 0.0), default=None)


def seconds_to(run: Run, metric: str, target: float) -> float | None:
    """Seconds of training steps until an evaluation on the way first reached a score; None if none did.

    Seconds of evaluations and checkpoints are not counted.
    """
    sign = 1 if is_higher_better([run], metric) else -1
    for record in series(run):
        score = score_of(record, metric)
        if score is not None and sign * score >= sign * target:
            taken = [number(step.get("step_seconds")) for step in run.steps if step["step"] <= record["step"]]
            return math.fsum(known(taken)) if None not in taken else None
    return None


# --- speed ---


def speeds(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Times and rates of the steps after warm-up; memory, padding and utilisation of them all.

    examples_per_second = sum of examples that the steps took / sum of their seconds, over steps that are no warm-up.
    The examples of a step are the growth of `num_examples_seen` since the step before.

    >>> steps = [{"step": 1, "num_examples_seen": 8, "step_seconds": 9.0, "warm_up": True},
    ...          {"step": 2, "num_examples_seen": 16, "step_seconds": 2.0}]
    >>> speeds(steps)["examples_per_second"]
    4.0
    """
    seen = [0.0, *(number(step.get("num_examples_seen")) for step in steps)]
    examples = [None if a is None or b is None else b - a for a, b in pairwise(seen)]
    warm = [pair for pair in zip(steps, examples, strict=True) if not pair[0].get("warm_up")]
    seconds = [number(step.get("step_seconds")) for step, _ in warm]
    tokens = [_tokens(step) for step, _ in warm]
    waits = [number(step.get("data_seconds")) for step, _ in warm]
    return {
        "train_seconds": _total([number(step.get("step_seconds")) for step in steps]),
        "examples_per_second": _ratio(_total([pair[1] for pair in warm]), _total(seconds)),
        "tokens_per_second": _ratio(_total(tokens), _total(seconds)),
        "step_seconds": _median(known(seconds)),
        "data_wait": _ratio(_total(waits), _total(seconds)),
        "world_size": max(known(step.get("world_size") for step in steps), default=None),
        "mfu": _mean(known(step.get("mfu") for step, _ in warm)),
        "padding": _padding(steps),
        "peak_bytes": max(known(step.get("peak_bytes") for step in steps), default=None),
    }


def _tokens(step: Mapping[str, Any]) -> float | None:
    counts = [number(step.get(key)) for key in ("num_input_tokens", "num_target_tokens")]
    return None if None in counts else math.fsum(known(counts))


def _padding(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of padded positions among all: sum of the padded ones / sum of all, a step's being tokens / (1 - share)."""
    real = padded = 0.0
    for step in steps:
        tokens, share = _tokens(step), number(step.get("padding_fraction"))
        if tokens is None or share is None or share >= 1:
            return None
        real, padded = real + tokens, padded + tokens * share / (1 - share)
    return _ratio(padded, real + padded)


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None if there are none, or one is unknown."""
    return None if None in values or not values else math.fsum(known(values))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# --- devices ---


def _of_devices(telemetry: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means while the run trains of what its devices and processes did; of the temperature the highest at any time."""
    training = [line for line in telemetry if line.get("phase") in ("train", None)]
    own = [sample for series in device_series(training).values() for _, sample in series]
    everything = [sample for series in device_series(telemetry).values() for _, sample in series]
    by_rank: dict[Any, list[float]] = {}
    for line in training:
        by_rank.setdefault(line.get("rank", 0), []).extend(known([line.get("process_cores")]))
    cores = [statistics.fmean(values) for values in by_rank.values() if values]
    return {
        "utilisation": _mean(known(sample.get("utilisation") for sample in own)),
        "memory_busy": _mean(known(sample.get("memory_busy") for sample in own)),
        "temperature_celsius": max(known(sample.get("temperature_celsius") for sample in everything), default=None),
        "power_watts": _mean(known(sample.get("power_watts") for sample in own)),
        "process_cores": math.fsum(cores) if cores else None,
    }


Series = list[tuple[float, Mapping[str, Any]]]
"""Moments (seconds) and samples of one device."""


def device_series(telemetry: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], Series]:
    """The samples of each device of the run, by host, index and MIG instance, in the order of time.

    Where several processes of a node sampled the same device, those of the lowest rank; devices that no process of the
    run uses are left out.
    """
    by_rank: dict[tuple[Any, ...], dict[int, Series]] = {}
    for line in telemetry:
        for sample in line.get("devices") or ():
            ranks = by_rank.setdefault((line.get("host"), sample["index"], sample.get("mig")), {})
            ranks.setdefault(line.get("rank") or 0, []).append((line["seconds"], sample))
    series = {}
    for device, ranks in by_rank.items():
        uses = {sample.get("ours") for samples in ranks.values() for _, sample in samples}
        if True in uses or None in uses:
            series[device] = ranks[min(ranks)]
    return series


def energy_joules(telemetry: Sequence[Mapping[str, Any]]) -> float | None:
    """Energy of the run's devices: their counters' growth, else power x time (trapezoids); None if neither is known."""
    parts = [_energy(series) for series in device_series(telemetry).values()]
    return _total(parts)


def _energy(series: Series) -> float | None:
    """Energy of one device over its samples, gaps of more than a minute left out."""
    parts = []
    for (before, a), (after, b) in pairwise(series):
        if after - before > MAX_GAP_SECONDS:
            continue
        first, last = number(a.get("energy_joules")), number(b.get("energy_joules"))
        watts = known([a.get("power_watts"), b.get("power_watts")])
        if first is not None and last is not None and last >= first:
            parts.append(last - first)
        elif len(watts) == 2:
            parts.append((after - before) * sum(watts) / 2)
    return math.fsum(parts) if parts else None
