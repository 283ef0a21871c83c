"""Throughput and the parts of a step: the sections on speed and on step time.

In: steps and status of a Run. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Chart, Part, Section, Table, Text, build_section
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
from fivetune.rundir.figures import count_tokens
from fivetune.rundir.records import Run, StepRecord
from fivetune.types import PHASES
from fivetune.values import divide, select_finite

STEP_PARTS = (*PHASES, "other")
SERIES = (2, 5, 6, 1, 7, 8, 4, 3)  # colours of the phases; neighbours in a bar differ also without colour vision
STEP_PART_COLORS = {part: f"var(--series-{i})" for part, i in zip(PHASES, SERIES, strict=True)} | {
    "other": charts.MUTED
}
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


def iter_speed_parts(run: Run) -> Iterator[Part]:
    """Yield throughput, seconds per step, padding, and seconds by phase."""
    steps = select_latest_by_step(run.steps)
    whole = run.status.seconds
    phases = dict(run.status.seconds_by_phase)
    # What no phase measures is "other", unless it is so little that it would only fill the legend.
    rest = (whole or 0.0) - sum(phases.values())
    if phases and whole is not None and rest > 0.005 * whole:
        phases["other"] = rest
    if not steps and not phases:
        yield Text("No step was recorded, so the speed is not known.")
        return
    at = [float(record.step) for record in steps]
    seconds: Series = [record.step_seconds for record in steps]
    waits: Series = [record.data_seconds for record in steps]
    padding: Series = [100 * record.padding_fraction for record in steps]
    rates = list_tokens_per_second(steps)
    words = ""
    if phases:
        everything = sum(phases.values())
        longest_first = sorted(phases.items(), key=lambda pair: -pair[1])
        shares = [f"{name} {format_percent(divide(value, everything), 0)}" for name, value in longest_first]
        words = f"Of {format_duration(whole)}: {', '.join(shares)}. "
    waiting = format_percent(divide(sum(select_finite(waits)), sum(select_finite(seconds))))
    words += f"Waiting for data took {waiting} of the steps' time."
    is_unpadded = bool(steps) and not any(padding)
    if is_unpadded:
        words += " Padding: none."
    yield Text(words)
    if phases:
        # Bars go from the bottom up, so that the longest phase is on top.
        bars = dict(sorted(phases.items(), key=lambda pair: pair[1]))
        caption = "Seconds by phase of the run. (status.json)"
        yield charts.build_bars_chart(bars, caption, unit="seconds", hover="%{x:.4~g} s", wide=False)
    if not steps:
        return
    smoothing = describe_smoothing(len(steps))
    caption = f"Input and target tokens per second{smoothing}, without padding."
    yield charts.build_step_chart({"tokens per second": rates}, at, caption, unit="tokens/s", smoothed=True)
    caption = "Duration of each step, and the part spent waiting for data."
    pair = {"step": seconds, "waiting for data": waits}
    yield charts.build_step_chart(pair, at, caption, unit="seconds", smoothed=False, log=False)
    if not is_unpadded:
        caption = f"Padded share of the positions that the model computed{smoothing}."
        yield charts.build_step_chart({"padding": padding}, at, caption, unit="padding (%)", smoothed=True)
    rows: list[Sequence[str]] = []
    for name, series in (
        ("tokens per second", rates),
        ("seconds per step", seconds),
        ("seconds waiting for data", waits),
        ("padding (%)", padding),
    ):
        values = select_finite(series)
        marks = [compute_quantile(values, fraction) for fraction in (0.5, 0.05, 0.95)]
        marks.append(max(values, default=None))
        rows.append((name, *map(format_significant, marks)))
    caption = "Distribution over the steps: 5 % of them are below p5, 95 % below p95. (steps.jsonl)"
    yield Table(caption, ("quantity", "median", "p5", "p95", "highest"), rows)


def list_tokens_per_second(steps: Sequence[StepRecord]) -> Series:
    """List input and target tokens of each step divided by its duration."""
    return [count_tokens(step) / step.step_seconds if step.step_seconds else None for step in steps]


def build_step_time_section(run: Run) -> Section:
    """Build the section on the mean seconds of a step by part, with median and p99."""
    measured = select_measured_steps(run.steps)
    means = compute_step_breakdown(measured)
    if not means:
        return build_section("Step time")
    warm_up = sum(record.warm_up for record in select_latest_by_step(run.steps))
    left_out = f" {format_plural(warm_up, 'warm-up step')} left out." if warm_up else ""
    caption = f"Mean seconds of a step by part, over {format_plural(len(measured), 'step')}.{left_out} (steps.jsonl)"
    rows: list[Sequence[str]] = []
    for part, mean in means.items():
        milliseconds = [1e3 * seconds for seconds in _list_part_seconds(measured, part)]
        marks = (1e3 * mean, compute_quantile(milliseconds, 0.5), compute_quantile(milliseconds, 0.99))
        share = format_percent(mean / sum(means.values()))
        rows.append((f"{part}: {MEANINGS[part]}", share, *map(format_significant, marks)))
    header = ("part of a step", "share", "mean (ms)", "median (ms)", "p99 (ms)")
    table = Table("The numbers of the chart; 99 % of the steps lie below p99.", header, rows)
    return build_section("Step time", draw_step_time_chart({"a step": means}, caption), table)


def select_measured_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps with measured parts, without warm-up."""
    return [step for step in select_latest_by_step(steps) if step.phase_seconds and not step.warm_up]


def compute_step_breakdown(measured: Sequence[StepRecord]) -> dict[str, float]:
    """Compute the mean seconds of a step by part; the rest of the step is "other"."""
    if not measured:
        return {}
    means: dict[str, float] = {}
    for part in STEP_PARTS:
        seconds = _list_part_seconds(measured, part)
        if seconds:
            means[part] = fmean(seconds)
    known = sum(means.values())
    rest = fmean(step.step_seconds for step in measured) - known
    if rest > 0.005 * known:
        means["other"] = rest
    return means


def _list_part_seconds(measured: Sequence[StepRecord], part: str) -> list[float]:
    return [step.phase_seconds[part] for step in measured if part in step.phase_seconds]


def draw_step_time_chart(rows: Mapping[str, Mapping[str, float]], caption: str) -> Chart:
    """Draw mean seconds of a step by part as stacked bars, one per row, the first on top.

    Args:
        rows: name -> part -> seconds.
    """
    colors: dict[str, str] = {}
    for part, color in STEP_PART_COLORS.items():
        if any(row.get(part) for row in rows.values()):
            colors[part] = color
    is_short = all(sum(row.values()) < 2 for row in rows.values())
    unit, scale = ("milliseconds per step", 1e3) if is_short else ("seconds per step", 1.0)
    height = 150 + 30 * len(rows)
    return charts.build_stacked_bars_chart(rows, colors, caption, unit=unit, scale=scale, height=height)
