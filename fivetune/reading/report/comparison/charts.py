"""Charts of a comparison: scores with their intervals, training time, curves of all runs, scaling and Pareto front.

In: Variants, each with its own colour and dash throughout the page. Out: Charts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fivetune.reading.compare.measures import find_best_metric_eval, get_score
from fivetune.reading.compare.records import Measure, Variant
from fivetune.reading.compare.variants import get_seed
from fivetune.reading.report.comparison.variants import LAST, SCORE, get_measure
from fivetune.reading.report.page.charts import (
    COLORS,
    FROM_ZERO,
    HIDDEN,
    INK,
    MUTED,
    ROW_AXIS,
    Trace,
    build_chart,
    build_error_bars,
    build_marks_trace,
    build_stacked_bars_chart,
    choose_axis_scale,
    name_unit,
    round_values,
)
from fivetune.reading.report.page.parts import Chart
from fivetune.reading.report.page.series import Series, choose_smoothing_span, smooth_series
from fivetune.reading.report.page.wording import escape_hidden
from fivetune.reading.report.run.load_charts import (
    build_curve_trace,
    choose_line_style,
    compute_point_budget,
)
from fivetune.reading.report.run.scores import get_score_label
from fivetune.rundir.figures import select_comparable_evals
from fivetune.rundir.records import Run
from fivetune.values import select_finite

MAX_UNSORTED = 12  # variants in the order of the sweep
MAX_HOVERED_LINES = 24  # maximum number of values in one hover label
PHASE_COLORS = {"train": COLORS[0], "evaluate": COLORS[1], "checkpoint": COLORS[2], "prepare": COLORS[4]}

Points = tuple[Sequence[float], Series]


def _build_row_layout(num: int) -> dict[str, Any]:
    """Build the layout of charts with a row per variant, the first on top."""
    return {"height": 120 + 32 * num, "yaxis": ROW_AXIS}


def build_variant_scores_chart(variants: Sequence[Variant], name: str, caption: str) -> Chart:
    """Draw a row per variant: best score with its interval, last evaluation, and best score of each run.

    Many variants are in the order of their scores, the highest on top.
    """
    colored = [(variant, choose_line_style(i)[0]) for i, variant in enumerate(variants)]
    if len(variants) > MAX_UNSORTED:
        colored.sort(key=lambda pair: get_measure(pair[0], SCORE).value or 0.0, reverse=True)
    variants = [variant for variant, _ in colored]
    colors = [color for _, color in colored]
    names = [escape_hidden(variant.name) for variant in variants]
    best = [get_measure(variant, SCORE) for variant in variants]
    last = [get_measure(variant, LAST).value for variant in variants]
    single_scores: Series = []
    single_rows: list[str] = []
    for row, variant in zip(names, variants, strict=True):
        for run in variant.runs:
            score = get_score(find_best_metric_eval(run, name), name)
            if score is not None:
                single_scores.append(score)
                single_rows.append(row)
    traces: list[Trace] = []
    hover = "%{x:.2f}"
    if single_scores:
        marker = {"symbol": "line-ns-open", "size": 9, "color": MUTED}
        traces.append(build_marks_trace(single_scores, single_rows, marker, hover, name="single runs"))
    if select_finite(last):
        marker = {"symbol": "diamond-open", "size": 14, "color": INK}
        traces.append(build_marks_trace(last, names, marker, hover, name="last evaluation"))
    values = [one.value for one in best]
    if select_finite(values):
        marker = {"size": 10, "color": colors}
        bars = build_measure_bars(best)
        traces.append(build_marks_trace(values, names, marker, hover, name="best evaluation", error_x=bars))
    axis = {"showgrid": True, "showline": False}
    title = escape_hidden(get_score_label(name))
    return build_chart(caption, traces, title, "", hovermode="closest", xaxis=axis, **_build_row_layout(len(names)))


def build_measure_bars(found: Sequence[Measure], color: str = MUTED) -> dict[str, Any]:
    """Build the error bars of measures."""
    return build_error_bars([one.value for one in found], [one.interval for one in found], color, thickness=1.3)


def build_phase_times_chart(variants: Sequence[Variant], caption: str) -> Chart | None:
    """Draw the median time of each phase over a variant's runs as stacked bars; None if no run has them."""
    found: dict[str, dict[str, float]] = {}
    for variant in variants:
        seconds: dict[str, list[float]] = {}
        for run in variant.runs:
            for phase, value in run.status.seconds_by_phase.items():
                seconds.setdefault(phase, []).append(value)
        found[variant.name] = {phase: statistics.median(values) / 60 for phase, values in seconds.items()}
    phases: set[str] = set()
    for table in found.values():
        phases.update(table)
    if not phases:
        return None
    colors = {phase: color for phase, color in PHASE_COLORS.items() if phase in phases}
    colors |= dict.fromkeys(sorted(phases - set(PHASE_COLORS)), MUTED)
    long = max(sum(table.values()) for table in found.values()) >= 3
    unit, scale = ("minutes", 1.0) if long else ("seconds", 60.0)
    look = _build_row_layout(len(found))
    look["yaxis"] = {"showgrid": False}
    return build_stacked_bars_chart(found, colors, caption, unit=unit, scale=scale, **look)


def build_run_curves_chart(
    variants: Sequence[Variant],
    get_points: Callable[[Run], Points],
    caption: str,
    *,
    x: str,
    y: str,
    group: str,
    log: bool = False,
) -> Chart | None:
    """Draw a line per run, all runs of a variant in one style; None without points."""
    found: list[tuple[int, Variant, Run, Points]] = []
    for place, variant in enumerate(variants):
        for run in variant.runs:
            points = get_points(run)
            if select_finite(points[1]):
                found.append((place, variant, run, points))
    if not found:
        return None
    limit = compute_point_budget(len(found))
    traces: list[Trace] = []
    every: Series = []
    for place, variant, run, (xs, ys) in found:
        every += ys
        name = variant.name
        if len(variant.runs) > 1:
            seed = get_seed(run)
            name += f", {run.name}" if seed is None else f", seed {seed}"
        trace = build_curve_trace(variant.name, xs, ys, choose_line_style(place), limit=limit)
        trace["name"] = escape_hidden(name)
        if len(xs) <= 30:
            trace["mode"] = "lines+markers"
        traces.append(trace)
    axis = choose_axis_scale(every) if log else {}
    mode = "x unified" if len(found) <= MAX_HOVERED_LINES else "closest"
    return build_chart(
        caption, traces, x, name_unit(y, axis), group=group, height=330, showlegend=False, hovermode=mode, yaxis=axis
    )


def get_training_losses(run: Run) -> Points:
    """Return step and smoothed training loss."""
    losses = [step.loss for step in run.steps]
    return [float(step.step) for step in run.steps], smooth_series(losses, choose_smoothing_span(len(losses)))


def get_eval_losses(run: Run) -> Points:
    """Return step and loss of each evaluation."""
    evals = select_comparable_evals(run.evals)
    return [float(record.step) for record in evals], [record.loss for record in evals]


def get_eval_scores(run: Run, name: str) -> Points:
    """Return step and score of each evaluation."""
    evals = select_comparable_evals(run.evals)
    return [float(record.step) for record in evals], [get_score(record, name) for record in evals]


def get_scores_over_time(run: Run, name: str) -> Points:
    """Return minutes of training before each evaluation, and its score; evaluations after unknown times are omitted."""
    minutes = 0.0
    spent = {0.0: minutes}  # minutes after each step
    for step in run.steps:
        minutes += step.step_seconds / 60
        spent[float(step.step)] = minutes
    times: list[float] = []
    scores: Series = []
    for at, score in zip(*get_eval_scores(run, name), strict=True):
        if at in spent:
            times.append(spent[at])
            scores.append(score)
    return times, scores


def build_scaling_chart(lines: Mapping[str, Sequence[tuple[int, Measure]]], caption: str) -> Chart:
    """Draw the speed-up over devices of each line, and the ideal, linear speed-up."""
    most = max(max(num for num, _ in line) for line in lines.values())
    style = {"color": MUTED, "dash": "dash", "width": 1.5}
    traces: list[Trace] = [{**HIDDEN, "name": "ideal", "x": [1, most], "y": [1, most], "line": style}]
    for place, (name, line) in enumerate(lines.items()):
        color, dash = choose_line_style(place)
        speed_ups = [one for _, one in line]
        trace = build_marks_trace(
            [num for num, _ in line],
            round_values([one.value for one in speed_ups]),
            {"color": color, "size": 8},
            "%{y:.3~g} times with %{x}",
            error_y=build_measure_bars(speed_ups, color),
            line={"color": color, "dash": dash, "width": 2},
            mode="lines+markers",
            name=escape_hidden(name),
        )
        traces.append(trace)
    axis = {"range": [0.8, most + 0.2]}
    return build_chart(caption, traces, "devices", "times as fast as one", height=340, xaxis=axis, yaxis=FROM_ZERO)
