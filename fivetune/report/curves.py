"""What happened over the steps: the sections on learning and on speed.

In: the steps and evaluations of a Run. Out: Sections of charts with the numbers behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fivetune.report import charts
from fivetune.report.scores import (
    Eval,
    best_eval,
    first_scores,
    label,
    main_evals,
    main_score,
    points,
    score,
    score_keys,
)
from fivetune.report.series import Series, by_step, column, evenly, quantile, ratio, smooth, total, window
from fivetune.report.wording import duration, fixed, percent, share, short, whole
from fivetune.types import Run, Section, Table, Text
from fivetune.values import dig, known, number

Part = Any
NUM_VALUES = 13


def learning_section(run: Run, beside: Sequence[Run]) -> Section:
    """Loss, scores, learning rate and gradient norm over the steps, and the numbers behind them."""
    steps, evals = by_step(run.steps), main_evals(run)
    parts: list[Part] = []
    if steps:
        losses, at = column(steps, "loss"), [float(record["step"]) for record in steps]
        eval_losses = [(record["step"], number(record.get("loss"))) for record in evals]
        words = _smoothing(len(losses))
        caption = f"Loss on the training data{words}, and on the evaluation data. (steps.jsonl, evals.jsonl)"
        parts.append(charts.loss_chart(at, losses, eval_losses, caption))
    parts += _score_curves(run, evals, beside)
    if steps:
        parts += _rate_and_norm(run, steps)
        parts.append(_steps_table(steps))
    return Section("Learning", tuple(parts) or (Text("No step was recorded, so there are no curves.", "note"),))


def _smoothing(num_points: int) -> str:
    span = window(num_points)
    return "" if span == 1 else f" (light: each step; dark: moving average over about {span} steps)"


def _score_curves(run: Run, evals: Sequence[Eval], beside: Sequence[Run]) -> list[Part]:
    keys = [key for key in score_keys(evals) if not key.startswith("best")]
    if not keys:
        return [Text("No evaluation was made, so there is no curve of scores.", "note")]
    shown = [key for key in keys if key not in ("HasAns_exact", "NoAns_exact")]
    at, main, best = [float(record["step"]) for record in evals], main_score(run), best_eval(run)
    curves = {label(key): (at, [score(record, key) for record in evals]) for key in first_scores(run, shown or keys)}
    levels = {
        f"{other.name}: {label(main)}": level
        for other in beside
        if main and (level := score(best_eval(other), main)) is not None
    }
    caption = "Scores on the evaluation data over the steps; step 0 is the model before fine-tuning."
    chart = charts.scores_chart(
        curves,
        caption,
        unit="score (%)",
        best_step=dig(best, "step"),
        levels=levels,
        last_step=max([*at, *(record["step"] for record in by_step(run.steps))]),
    )
    header = ("step", "examples", "loss", *(label(key) for key in keys), "cut off", "time")
    rows = tuple(_eval_row(record, keys) for record in evals)
    return [chart, Table("Every evaluation. (evals.jsonl)", header, rows, folded=True)]


def _eval_row(record: Eval, keys: Sequence[str]) -> tuple[str, ...]:
    return (
        whole(record["step"]),
        whole(record.get("num_examples")),
        fixed(record.get("loss"), 3),
        *(points(score(record, key)) for key in keys),
        percent(dig(record, "rates", "cap_hit")),
        duration(record.get("seconds")),
    )


def _rate_and_norm(run: Run, steps: Sequence[dict[str, Any]]) -> list[Part]:
    at = [float(record["step"]) for record in steps]
    rates = {"learning rate": column(steps, "lr")}
    taken = column(steps, "effective_lr")
    if known(taken):
        rates["effective learning rate"] = taken
    norms, limit = column(steps, "grad_norm"), number(dig(run.config, "train", "max_grad_norm"))
    clipped = [norm for norm in known(norms) if limit is not None and norm > limit]
    clipping = (
        ""
        if limit is None
        else f" {percent(share(len(clipped), len(known(norms))))} of the steps were clipped at {short(limit)}."
    )
    rate_words = (
        "The learning rate as scheduled, and the step the optimizer really took."
        if known(taken)
        else "The learning rate."
    )
    return [
        charts.step_chart(rates, at, rate_words, unit="learning rate", smoothed=False),
        charts.step_chart(
            {"gradient norm": norms},
            at,
            f"Norm of the gradient before clipping{_smoothing(len(norms))}.{clipping}",
            unit="norm",
            smoothed=True,
            limit=limit,
        ),
    ]


def _steps_table(steps: Sequence[dict[str, Any]]) -> Table:
    losses = column(steps, "loss")
    smoothed = smooth(losses, window(len(losses)))
    rows = []
    for i in evenly(len(steps), NUM_VALUES):
        record = steps[i]
        numbers = (losses[i], smoothed[i], record.get("lr"), record.get("effective_lr"), record.get("grad_norm"))
        rows.append((whole(record["step"]), *(short(value) for value in numbers)))
    header = ("step", "loss", "loss, smoothed", "learning rate", "effective learning rate", "gradient norm")
    return Table("Values at evenly spaced steps. (steps.jsonl)", header, tuple(rows), folded=True)


def speed_section(run: Run) -> Section:
    """Throughput, seconds per step, padding, and where the time went."""
    steps = by_step(run.steps)
    phases = _phases(run)
    if not steps and not phases:
        return Section("Speed", (Text("No step was recorded, so nothing is known about speed.", "note"),))
    at = [float(record["step"]) for record in steps]
    seconds, waits = column(steps, "step_seconds"), column(steps, "data_seconds")
    rates, padding = tokens_per_second(steps), column(steps, "padding_fraction")
    waiting = share(sum(known(waits)), sum(known(seconds)))
    parts: list[Part] = [Text(_speed_words(run, phases, waiting))]
    if phases:
        parts.append(charts.phases_chart(phases, "Where the time went, by phase. (status.json)"))
    if steps:
        shares = [None if value is None else 100 * value for value in padding]
        smoothing, pair = _smoothing(len(steps)), {"step": seconds, "waiting for data": waits}
        words = f"Input and target tokens per second{smoothing}; padding is not counted."
        waited = "Duration of each step, and the part spent waiting for data."
        padded = f"Padded share of the positions that the model computed{smoothing}."
        parts += [
            charts.step_chart({"tokens per second": rates}, at, words, unit="tokens/s", smoothed=True),
            charts.step_chart(pair, at, waited, unit="seconds", smoothed=False, log=False),
            charts.step_chart({"padding": shares}, at, padded, unit="padding (%)", smoothed=True),
            _speed_table(rates, seconds, waits, shares),
        ]
    return Section("Speed", tuple(parts))


def _phases(run: Run) -> dict[str, float]:
    """Seconds by phase, what is left of the whole as "other"."""
    given = dig(run.status, "seconds_by_phase")
    phases = {str(name): value for name in given or {} if (value := number(given[name])) is not None}
    whole_run = number(dig(run.status, "seconds"))
    if phases and whole_run is not None and whole_run - sum(phases.values()) > 0.005 * whole_run:
        phases["other"] = whole_run - sum(phases.values())
    return phases


def _speed_words(run: Run, phases: Mapping[str, float], waiting: float | None) -> str:
    everything = sum(phases.values())
    ordered = sorted(phases, key=lambda name: -phases[name])
    listed = ", ".join(f"{name} {percent(share(phases[name], everything), 0)}" for name in ordered)
    told = f"Of {duration(dig(run.status, 'seconds'))}: {listed}. " if phases else ""
    return f"{told}Waiting for data took {percent(waiting)} of the time of the steps."


def _speed_table(
    rates: list[float | None], seconds: list[float | None], waits: list[float | None], padding: list[float | None]
) -> Table:
    named = {
        "tokens per second": rates,
        "seconds per step": seconds,
        "seconds waiting for data": waits,
        "padding (%)": padding,
    }
    rows = []
    for name, series in named.items():
        values = known(series)
        marks = (quantile(values, 0.5), quantile(values, 0.05), quantile(values, 0.95), max(values, default=None))
        rows.append((name, *(short(mark) for mark in marks)))
    caption = "Spread over the steps: half of them lie below the median, 5 % below p5, 95 % below p95. (steps.jsonl)"
    return Table(caption, ("quantity", "median", "p5", "p95", "highest"), tuple(rows))


def tokens_per_second(steps: Sequence[dict[str, Any]]) -> Series:
    """Input and target tokens of each step by its duration."""
    tokens = total(column(steps, "num_input_tokens"), column(steps, "num_target_tokens"))
    return ratio(tokens, column(steps, "step_seconds"))
