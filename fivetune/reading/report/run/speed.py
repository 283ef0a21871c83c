"""Throughput and the parts of a step: the sections on speed and on step time.

In: steps and status of a Run. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.charts import MUTED, build_layout, escape_label
from fivetune.reading.report.page.parts import Chart, Part, Section, Table, Text
from fivetune.reading.report.page.series import (
    Series,
    compute_quantile,
    describe_smoothing,
    select_latest_by_step,
)
from fivetune.reading.report.page.wording import (
    format_duration,
    format_percent,
    format_plural,
    format_significant,
)
from fivetune.reading.report.run.load_charts import round_values
from fivetune.rundir.figures import count_tokens
from fivetune.rundir.records import Run, StepRecord
from fivetune.types import PHASES
from fivetune.values import divide, select_finite

STEP_PARTS = (*PHASES, "other")
STEP_PART_COLORS: dict[str, str] = dict(
    zip(
        STEP_PARTS,
        (
            "var(--series-2)",
            "var(--series-5)",
            "var(--series-6)",
            "var(--series-1)",
            "var(--series-7)",
            "var(--series-8)",
            "var(--series-4)",
            "var(--series-3)",
            MUTED,
        ),
        strict=True,
    )
)
MEANINGS = {
    "data": "waiting for the next batch",
    "host": "work of the host between the other parts",
    "copy": "copying the batch to the device",
    "forward": "forward pass and loss",
    "backward": "backward pass",
    "bubble": "waiting for another pipeline stage",
    "exchange": "all-reduce of the gradients",
    "optimizer": "clipping and the optimizer's update",
    "other": "the rest of the step",
}


def build_speed_section(run: Run) -> Section:
    """Build the section on throughput, seconds per step, padding, and seconds by phase."""
    steps = select_latest_by_step(run.steps)
    phases = _compute_phase_seconds(run)
    if not steps and not phases:
        return Section("Speed", (Text("No step was recorded, so the speed is not known.", "note"),))
    at = [float(record.step) for record in steps]
    seconds: Series = [record.step_seconds for record in steps]
    waits: Series = [record.data_seconds for record in steps]
    rates, padding = list_tokens_per_second(steps), [record.padding_fraction for record in steps]
    waiting = divide(sum(select_finite(waits)), sum(select_finite(seconds)))
    no_padding = " Padding: none." if padding and not any(padding) else ""
    parts: list[Part] = [Text(_describe_speed(run, phases, waiting) + no_padding)]
    if phases:
        parts.append(charts.build_phases_chart(phases, "Seconds by phase of the run. (status.json)"))
    if steps:
        shares: Series = [100 * value for value in padding]
        smoothing, pair = describe_smoothing(len(steps)), {"step": seconds, "waiting for data": waits}
        words = f"Input and target tokens per second{smoothing}, without padding."
        waited = "Duration of each step, and the part spent waiting for data."
        padded = f"Padded share of the positions that the model computed{smoothing}."
        parts += [
            charts.build_step_chart({"tokens per second": rates}, at, words, unit="tokens/s", smoothed=True),
            charts.build_step_chart(pair, at, waited, unit="seconds", smoothed=False, log=False),
        ]
        if not no_padding:
            parts.append(charts.build_step_chart({"padding": shares}, at, padded, unit="padding (%)", smoothed=True))
        parts.append(_build_speed_table(rates, seconds, waits, shares))
    return Section("Speed", tuple(parts))


def _compute_phase_seconds(run: Run) -> dict[str, float]:
    """Compute seconds by phase; the rest of the run's time is "other"."""
    phases, whole_run = dict(run.status.seconds_by_phase), run.status.seconds
    if phases and whole_run is not None and whole_run - sum(phases.values()) > 0.005 * whole_run:
        phases["other"] = whole_run - sum(phases.values())
    return phases


def _describe_speed(run: Run, phases: Mapping[str, float], waiting: float | None) -> str:
    everything = sum(phases.values())
    ordered = sorted(phases, key=lambda name: -phases[name])
    listed = ", ".join(f"{name} {format_percent(divide(phases[name], everything), 0)}" for name in ordered)
    shares = f"Of {format_duration(run.status.seconds)}: {listed}. " if phases else ""
    return f"{shares}Waiting for data took {format_percent(waiting)} of the steps' time."


def _build_speed_table(rates: Series, seconds: Series, waits: Series, padding: Series) -> Table:
    named = {
        "tokens per second": rates,
        "seconds per step": seconds,
        "seconds waiting for data": waits,
        "padding (%)": padding,
    }
    rows: list[tuple[str, ...]] = []
    for name, series in named.items():
        values = select_finite(series)
        marks = (
            compute_quantile(values, 0.5),
            compute_quantile(values, 0.05),
            compute_quantile(values, 0.95),
            max(values, default=None),
        )
        rows.append((name, *(format_significant(mark) for mark in marks)))
    caption = "Distribution over the steps: 5 % of them are below p5, 95 % below p95. (steps.jsonl)"
    return Table(caption, ("quantity", "median", "p5", "p95", "highest"), tuple(rows))


def list_tokens_per_second(steps: Sequence[StepRecord]) -> Series:
    """List input and target tokens of each step divided by its duration."""
    return [count_tokens(step) / step.step_seconds if step.step_seconds else None for step in steps]


def build_step_time_section(run: Run) -> Section:
    """Build the section on the mean seconds of a step by part, with median and p99."""
    measured = select_measured_steps(run.steps)
    parts = compute_step_breakdown(measured)
    if not parts:
        return Section("Step time", ())
    warm_up = sum(record.warm_up for record in select_latest_by_step(run.steps))
    left_out = f" {format_plural(warm_up, 'warm-up step')} left out." if warm_up else ""
    caption = f"Mean seconds of a step by part, over {format_plural(len(measured), 'step')}.{left_out} (steps.jsonl)"
    return Section("Step time", (draw_step_time_chart({"a step": parts}, caption), _build_parts_table(measured, parts)))


def select_measured_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps with measured parts, without warm-up."""
    return [step for step in select_latest_by_step(steps) if step.phase_seconds and not step.warm_up]


def compute_step_breakdown(measured: Sequence[StepRecord]) -> dict[str, float]:
    """Compute the mean seconds of a step by part; the rest of the step is "other"."""
    if not measured:
        return {}
    means = {part: fmean(values) for part in STEP_PARTS if (values := _list_part_seconds(measured, part))}
    rest = fmean(step.step_seconds for step in measured) - sum(means.values())
    return means | ({"other": rest} if rest > 0.005 * sum(means.values()) else {})


def _list_part_seconds(measured: Sequence[StepRecord], part: str) -> list[float]:
    return [step.phase_seconds[part] for step in measured if part in step.phase_seconds]


def _build_parts_table(measured: Sequence[StepRecord], parts: Mapping[str, float]) -> Table:
    everything = sum(parts.values())
    rows: list[tuple[str, ...]] = []
    for part, mean in parts.items():
        values = _list_part_seconds(measured, part)
        marks = [
            format_significant(None if (mark := compute_quantile(values, q)) is None else 1e3 * mark)
            for q in (0.5, 0.99)
        ]
        rows.append(
            (f"{part}: {MEANINGS[part]}", format_percent(mean / everything), format_significant(1e3 * mean), *marks)
        )
    header = ("part of a step", "share", "mean (ms)", "median (ms)", "p99 (ms)")
    return Table("The numbers of the chart; 99 % of the steps lie below p99.", header, tuple(rows))


def draw_step_time_chart(rows: Mapping[str, Mapping[str, float]], caption: str, *, wide: bool = True) -> Chart:
    """Draw mean seconds of a step by part as stacked bars, one per row, the first on top.

    Args:
        rows: name -> part -> seconds.
    """
    names = [escape_label(name) for name in rows]
    present = [part for part in STEP_PARTS if any(row.get(part) for row in rows.values())]
    scale, unit = (1e3, "milliseconds") if all(sum(row.values()) < 2 for row in rows.values()) else (1.0, "seconds")
    traces = tuple(
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": names,
            "x": round_values([scale * row[part] if part in row else None for row in rows.values()]),
            "marker": {"color": STEP_PART_COLORS[part]},
            "hovertemplate": "%{x:.3~g}",
        }
        for part in present
    )
    look = build_layout(
        f"{unit} per step",
        "",
        height=150 + 30 * len(rows),
        barmode="stack",
        hovermode="y unified",
        bargap=0.35,
        xaxis={"showgrid": True, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False, "ticksuffix": "  "},
    )
    look["legend"] |= {"traceorder": "normal"}
    return Chart(caption, traces, look, wide=wide)
