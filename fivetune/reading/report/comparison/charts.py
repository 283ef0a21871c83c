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
    INK,
    MUTED,
    Trace,
    build_error_bars,
    build_layout,
    choose_axis_scale,
    escape_label,
)
from fivetune.reading.report.page.parts import Chart
from fivetune.reading.report.page.series import Series, choose_smoothing_span, smooth_series
from fivetune.reading.report.page.wording import escape_hidden
from fivetune.reading.report.run.load_charts import (
    build_curve_trace,
    choose_line_style,
    compute_point_budget,
    round_values,
)
from fivetune.reading.report.run.scores import get_score_label as score_name
from fivetune.rundir.figures import select_comparable_evals
from fivetune.rundir.records import Run
from fivetune.values import select_finite

MAX_HOVERED_LINES = 24  # maximum number of values in one hover label
PHASE_COLORS = {"train": COLORS[0], "evaluate": COLORS[1], "checkpoint": COLORS[2], "prepare": COLORS[4]}

Points = tuple[Sequence[float], Series]


def _build_row_layout(num: int) -> dict[str, Any]:
    """Build the layout of charts with a row per variant, the first on top."""
    axis = {"autorange": "reversed", "type": "category", "showgrid": True, "ticksuffix": "  ", "dtick": 1}
    return {"height": 120 + 32 * num, "yaxis": axis}


def build_variant_scores_chart(variants: Sequence[Variant], name: str, caption: str) -> Chart:
    """Draw a row per variant: best score with its interval, last evaluation, and best score of each run."""
    names = [escape_label(variant.name) for variant in variants]
    colors = [choose_line_style(i)[0] for i in range(len(variants))]
    best = [get_measure(variant, SCORE) for variant in variants]
    singles = [
        (row, get_score(find_best_metric_eval(run, name), name))
        for row, variant in zip(names, variants, strict=True)
        for run in variant.runs
    ]
    seen = [(row, value) for row, value in singles if value is not None]
    dots = {"type": "scatter", "mode": "markers", "hovertemplate": "%{x:.2f}<extra>%{fullData.name}</extra>"}
    traces: list[Trace] = [
        dots
        | {
            "name": "single runs",
            "y": [row for row, _ in seen],
            "x": [value for _, value in seen],
            "marker": {"symbol": "line-ns-open", "size": 9, "color": MUTED},
        },
        dots
        | {
            "name": "last evaluation",
            "y": names,
            "x": [get_measure(variant, LAST).value for variant in variants],
            "marker": {"symbol": "diamond-open", "size": 14, "color": INK},
        },
        dots
        | {
            "name": "best evaluation",
            "y": names,
            "x": [one.value for one in best],
            "error_x": _build_error_bars(best),
            "marker": {"size": 10, "color": colors},
        },
    ]
    traces = [trace for trace in traces if any(value is not None for value in trace["x"])]
    look = build_layout(
        escape_label(score_name(name)),
        "",
        hovermode="closest",
        xaxis={"showgrid": True, "showline": False},
        **_build_row_layout(len(names)),
    )
    return Chart(caption, tuple(traces), look)


def _build_error_bars(found: Sequence[Measure], color: str = MUTED) -> dict[str, Any]:
    return build_error_bars([one.value for one in found], [one.interval for one in found], color, thickness=1.3)


def build_phase_times_chart(variants: Sequence[Variant], caption: str) -> Chart | None:
    """Draw the median minutes of each phase over a variant's runs as stacked bars; None if no run has them."""
    found = [_compute_phase_minutes(variant.runs) for variant in variants]
    phases = list(dict.fromkeys(phase for table in found for phase in table))
    phases.sort(key=lambda phase: [*PHASE_COLORS, phase].index(phase))
    if not phases:
        return None
    long = max(sum(table.values()) for table in found) >= 3
    scale, unit = (1.0, "minutes") if long else (60.0, "seconds")
    traces = tuple(
        {
            "type": "bar",
            "orientation": "h",
            "name": escape_label(phase),
            "y": [escape_label(variant.name) for variant in variants],
            "x": round_values([scale * table[phase] if phase in table else None for table in found]),
            "marker": {"color": PHASE_COLORS.get(phase, MUTED)},
            "hovertemplate": "%{x:.3~g}",
        }
        for phase in phases
    )
    axis = {"showgrid": True, "rangemode": "tozero"}
    look = build_layout(
        unit, "", barmode="stack", hovermode="y unified", bargap=0.35, xaxis=axis, **_build_row_layout(len(found))
    )
    look["yaxis"] |= {"showgrid": False}
    look["legend"] |= {"traceorder": "normal"}
    return Chart(caption, traces, look)


def _compute_phase_minutes(runs: Sequence[Run]) -> dict[str, float]:
    """Compute the median minutes of each phase over the runs that have it."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        for phase, value in run.status.seconds_by_phase.items():
            seconds.setdefault(phase, []).append(value)
    return {phase: statistics.median(values) / 60 for phase, values in seconds.items()}


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
        name = variant.name if len(variant.runs) == 1 else f"{variant.name}, {_describe_seed(run)}"
        own = {"name": escape_label(name), "meta": escape_hidden(variant.name)}
        own |= {"mode": "lines+markers"} if len(xs) <= 30 else {}
        traces.append(build_curve_trace(variant.name, xs, ys, choose_line_style(place), limit=limit) | own)
    axis = choose_axis_scale([value for *_, (_, ys) in found for value in ys]) if log else {}
    scale = ", log scale" if axis.get("type") == "log" else ""
    mode = "x unified" if len(found) <= MAX_HOVERED_LINES else "closest"
    look = build_layout(x, y + scale, height=330, showlegend=False, hovermode=mode, yaxis=axis)
    return Chart(caption, tuple(traces), look, group=group)


def _describe_seed(run: Run) -> str:
    seed = get_seed(run)
    return run.name if seed is None else f"seed {seed}"


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
    ideal: Trace = {
        "type": "scatter", "mode": "lines", "name": "ideal", "x": [1, most], "y": [1, most],
        "line": {"color": MUTED, "dash": "dash", "width": 1.5}, "hoverinfo": "skip",
    }  # fmt: skip
    traces = [ideal]
    for place, (name, line) in enumerate(lines.items()):
        color, dash = choose_line_style(place)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape_label(name),
                "x": [num for num, _ in line],
                "y": round_values([one.value for _, one in line]),
                "error_y": _build_error_bars([one for _, one in line], color),
                "line": {"color": color, "dash": dash, "width": 2},
                "marker": {"color": color, "size": 8},
                "hovertemplate": "%{y:.3~g} times with %{x}",
            }
        )
    axis = {"dtick": 1 if most <= 8 else None, "range": [0.8, most + 0.2]}
    look = build_layout("devices", "times as fast as one", height=340, xaxis=axis, yaxis={"rangemode": "tozero"})
    return Chart(caption, tuple(traces), look)


def build_pareto_chart(
    variants: Sequence[Variant], cost: str, caption: str, *, x: str, y: str, front: bool, wide: bool
) -> Chart:
    """Draw score over cost, a mark per variant; marks on the Pareto front are filled and, with `front`, connected."""
    found = [
        (place, variant, get_measure(variant, cost), get_measure(variant, SCORE))
        for place, variant in enumerate(variants)
        if get_measure(variant, cost).value is not None and get_measure(variant, SCORE).value is not None
    ]
    traces: list[Trace] = []
    if front:
        line = sorted((one.value or 0.0, two.value or 0.0) for _, variant, one, two in found if variant.pareto)
        stairs = {"color": MUTED, "width": 1.5, "dash": "dot", "shape": "hv"}
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "Pareto front",
                "x": [a for a, _ in line],
                "y": [b for _, b in line],
                "line": stairs,
                "hoverinfo": "skip",
            }
        )
    for place, variant, spent, reached in found:
        color = choose_line_style(place)[0]
        symbol, edge = "circle" if variant.pareto else "circle-open", {"width": 2, "color": color}
        marker = {"symbol": symbol, "size": 11, "color": color, "line": edge}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape_label(variant.name),
                "meta": escape_hidden(variant.name),
                "x": [spent.value],
                "y": [reached.value],
                "error_x": _build_error_bars([spent], color),
                "error_y": _build_error_bars([reached], color),
                "line": {"color": color},
                "marker": marker,
                "hovertemplate": "%{y:.2f} at %{x:.4~g}<extra>%{fullData.name}</extra>",
            }
        )
    look = build_layout(
        x, y, height=340, hovermode="closest", showlegend=False, xaxis={"rangemode": "tozero", "showgrid": True}
    )
    return Chart(caption, tuple(traces), look, wide=wide, group=f"cost {cost}")
