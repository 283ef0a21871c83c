"""Charts of a comparison: scores with their intervals, training time, curves of all runs, scaling and Pareto front.

In: Variants, each with its own colour and dash throughout the page. Out: Charts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
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
    escape_label,
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

MAX_HOVERED_LINES = 24  # maximum number of values in one hover label
PHASE_COLORS = {"train": COLORS[0], "evaluate": COLORS[1], "checkpoint": COLORS[2], "prepare": COLORS[4]}

Points = tuple[Sequence[float], Series]


def _build_row_layout(num: int) -> dict[str, Any]:
    """Build the layout of charts with a row per variant, the first on top."""
    return {"height": 120 + 32 * num, "yaxis": {**ROW_AXIS, "ticksuffix": "  ", "dtick": 1}}


def build_variant_scores_chart(variants: Sequence[Variant], name: str, caption: str) -> Chart:
    """Draw a row per variant: best score with its interval, last evaluation, and best score of each run."""
    names = [escape_label(variant.name) for variant in variants]
    best = [get_measure(variant, SCORE) for variant in variants]
    singles: list[tuple[float, str]] = []
    for row, variant in zip(names, variants, strict=True):
        scores = (get_score(find_best_metric_eval(run, name), name) for run in variant.runs)
        singles += [(score, row) for score in scores if score is not None]
    colors = [choose_line_style(i)[0] for i in range(len(variants))]
    last = [get_measure(variant, LAST).value for variant in variants]
    symbols = (
        {"symbol": "line-ns-open", "size": 9, "color": MUTED},
        {"symbol": "diamond-open", "size": 14, "color": INK},
    )
    found: tuple[tuple[str, Series, list[str], dict[str, Any], dict[str, Any]], ...] = (
        ("single runs", [score for score, _ in singles], [row for _, row in singles], symbols[0], {}),
        ("last evaluation", last, names, symbols[1], {}),
        ("best evaluation", [one.value for one in best], names, {"size": 10, "color": colors},
         {"error_x": build_measure_bars(best)}),
    )  # fmt: skip
    hover = "%{x:.2f}<extra>%{fullData.name}</extra>"
    traces = [
        build_marks_trace(xs, ys, marker, hover, name=title, **more)
        for title, xs, ys, marker, more in found
        if select_finite(xs)
    ]
    axis, title = {"showgrid": True, "showline": False}, escape_label(get_score_label(name))
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
    phases = {phase for table in found.values() for phase in table}
    if not phases:
        return None
    others = sorted(phases - set(PHASE_COLORS))
    colors = {phase: PHASE_COLORS.get(phase, MUTED) for phase in (*PHASE_COLORS, *others) if phase in phases}
    long = max(sum(table.values()) for table in found.values()) >= 3
    unit, scale = ("minutes", 1.0) if long else ("seconds", 60.0)
    look = _build_row_layout(len(found))
    look["yaxis"] |= {"showgrid": False}
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
    found = [(place, variant, run, get_points(run)) for place, variant in enumerate(variants) for run in variant.runs]
    found = [one for one in found if select_finite(one[3][1])]
    if not found:
        return None
    limit = compute_point_budget(len(found))
    traces: list[Trace] = []
    for place, variant, run, (xs, ys) in found:
        seed = get_seed(run)
        told = run.name if seed is None else f"seed {seed}"
        name = variant.name if len(variant.runs) == 1 else f"{variant.name}, {told}"
        own = {"name": escape_label(name), "meta": escape_hidden(variant.name)}
        own |= {"mode": "lines+markers"} if len(xs) <= 30 else {}
        traces.append(build_curve_trace(variant.name, xs, ys, choose_line_style(place), limit=limit) | own)
    axis = choose_axis_scale([value for *_, (_, ys) in found for value in ys]) if log else {}
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
    minutes = accumulate((step.step_seconds / 60 for step in run.steps), initial=0.0)
    spent = dict(zip((0.0, *(float(step.step) for step in run.steps)), minutes, strict=True))
    found = [(spent[step], value) for step, value in zip(*get_eval_scores(run, name), strict=True) if step in spent]
    return [minutes for minutes, _ in found], [value for _, value in found]


def build_scaling_chart(lines: Mapping[str, Sequence[tuple[int, Measure]]], caption: str) -> Chart:
    """Draw the speed-up over devices of each line, and the ideal, linear speed-up."""
    most = max(num for line in lines.values() for num, _ in line)
    style = {"color": MUTED, "dash": "dash", "width": 1.5}
    traces: list[Trace] = [{**HIDDEN, "name": "ideal", "x": [1, most], "y": [1, most], "line": style}]
    for place, (name, line) in enumerate(lines.items()):
        color, dash = choose_line_style(place)
        more = {"line": {"color": color, "dash": dash, "width": 2}, "mode": "lines+markers", "name": escape_label(name)}
        nums, found = [num for num, _ in line], [one for _, one in line]
        ys, bars = round_values([one.value for one in found]), build_measure_bars(found, color)
        hover = "%{y:.3~g} times with %{x}"
        traces.append(build_marks_trace(nums, ys, {"color": color, "size": 8}, hover, error_y=bars, **more))
    axis = {"dtick": 1 if most <= 8 else None, "range": [0.8, most + 0.2]}
    return build_chart(caption, traces, "devices", "times as fast as one", height=340, xaxis=axis, yaxis=FROM_ZERO)
