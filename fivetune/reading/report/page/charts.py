"""Plotly charts as plain dicts.

In: series of numbers (None = gap) and captions. Out: Charts whose colours are the page's CSS variables, so that
light, dark and print share one figure. Text from data passes through `escape_label`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import log10
from typing import Any

from fivetune.reading.report.page.parts import Chart
from fivetune.reading.report.page.series import (
    Series,
    choose_smoothing_span,
    compute_quantile,
    smooth_series,
    thin_points,
)
from fivetune.reading.report.page.wording import escape_hidden, format_count, format_large_count
from fivetune.rundir.records import Histogram
from fivetune.scores.analysis.calibration import Bin, RiskCoverage
from fivetune.scores.analysis.labels import ConfusionMatrix
from fivetune.scores.analysis.slices import Slice
from fivetune.values import select_finite

HEIGHT = 280
COLORS = tuple(f"var(--series-{i})" for i in range(1, 7))
MUTED, GRID, INK = "var(--muted)", "var(--grid)", "var(--ink)"
DASHES = ("solid", "dash", "dot", "dashdot")
HIDDEN = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}  # a line without a label
BAR_AXIS = {"showgrid": True, "rangemode": "tozero"}
ROW_AXIS = {"autorange": "reversed", "type": "category", "showgrid": True}  # a row each, the first on top
NAME_AXIS = {"showgrid": False, "ticksuffix": "  "}  # names at the left of bars

Trace = dict[str, Any]


def escape_label(text: str) -> str:
    """Escape the tags of a text from data, because Plotly interprets them."""
    return escape(escape_hidden(text), quote=False)


def build_layout(x: str, y: str, *, height: int = HEIGHT, **more: Any) -> dict[str, Any]:
    """Build the shared layout: no frame, faint horizontal grid, legend above the plot, axis titles with units."""
    axis = {"gridcolor": GRID, "zeroline": False, "ticks": "", "linecolor": GRID}
    font = {"size": 12, "color": MUTED}
    title = {"font": font, "standoff": 8}
    base: dict[str, Any] = {
        "height": height,
        "autosize": True,
        "margin": {"l": 56, "r": 16, "t": 34, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", **font},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": GRID, "font": {"color": INK, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12, "color": INK}},
        "showlegend": True,
        # A width that follows the ticks of x changes these ticks: some charts never settle.
        "xaxis": {**axis, "automargin": "height", "title": {**title, "text": x}, "showgrid": False, "showline": True},
        "yaxis": {**axis, "automargin": True, "title": {**title, "text": y}, "showline": False},
    }
    for axis_name in ("xaxis", "yaxis"):
        base[axis_name] |= more.pop(axis_name, {})
    if not more.get("showlegend", True):
        base["margin"] |= {"t": 12}
    return base | more


def give_zero_axes_a_range(chart: Chart) -> dict[str, Any]:
    """Return the layout of a chart; an axis with only zeros ranges from 0 to 1 instead of Plotly's -1 to 1."""
    layout = dict(chart.layout)
    for letter in "xy":
        axis = layout.get(f"{letter}axis", {})
        given = [value for trace in chart.data for value in trace.get(letter, ())]
        is_zero = any(value == 0 for value in given) and all(value is None or value == 0 for value in given)
        if is_zero and "range" not in axis and axis.get("type") != "category":
            layout[f"{letter}axis"] = {**axis, "range": [0, 1]}
    return layout


def build_line_trace(name: str, steps: Sequence[float], values: Series, color: str, **more: Any) -> Trace:
    """Build a line; gaps stay gaps, a series of few points has markers."""
    xs, ys = thin_points(steps, values)
    style = {"color": color, "width": 2, **more.pop("line", {})}
    mode = "lines+markers" if len(select_finite(values)) <= 30 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape_label(name),
        "x": xs,
        "y": ys,
        "line": style,
        "marker": {"color": color, "size": 6},
        "connectgaps": False,
        "hovertemplate": "%{y:.4~g}",
        **more,
    }


def build_smoothed_traces(name: str, steps: Sequence[float], values: Series, color: str) -> list[Trace]:
    """Build the raw series in light, its moving average in dark; a single line for a short series."""
    span = choose_smoothing_span(len(values))
    if span == 1:
        return [build_line_trace(name, steps, values, color)]
    raw = build_line_trace(f"{name}, each step", steps, values, color, line={"width": 1}, opacity=0.45)
    return [raw, build_line_trace(f"{name}, smoothed", steps, smooth_series(values, span), color)]


def build_marks_trace(xs: Sequence[Any], ys: Sequence[Any], marker: dict[str, Any], hover: str, **more: Any) -> Trace:
    """Build marks without lines; `hover` is Plotly's template of their label."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": xs,
        "y": ys,
        "marker": marker,
        "hovertemplate": hover,
        **more,
    }


def choose_axis_scale(values: Series) -> dict[str, Any]:
    """Choose a logarithmic axis if all values are positive and their middle 96 % span a factor of 50."""
    given = select_finite(values)
    low, high = compute_quantile(given, 0.02), compute_quantile(given, 0.98)
    wide = bool(given) and min(given) > 0 and bool(low) and (high or 0) / (low or 1) > 50
    return {"type": "log", "dtick": 1, "exponentformat": "power"} if wide else {"rangemode": "tozero"}


def build_step_marker(step: float, text: str, **place: Any) -> dict[str, Any]:
    """Build a thin vertical line with a label as layout options; the label is at the bottom unless `place` moves it."""
    return {
        "shapes": [_build_limit_line("x", step, "dot", layer="below")],
        "annotations": [_build_label(text, **{"x": step, "y": 0, "xref": "x", "yref": "paper", **place})],
    }


def _build_limit_line(axis: str, value: float, dash: str, **more: Any) -> dict[str, Any]:
    """Build a line across the plot at a value of the x or y axis."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1}
    line = {"color": MUTED, "width": 1, "dash": dash}
    return {"type": "line", f"{axis}ref": axis, f"{other}ref": "paper", **ends, "line": line, **more}


def _build_label(text: str, **place: Any) -> dict[str, Any]:
    return {
        "text": escape_label(text),
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom",
        "font": {"size": 11, "color": MUTED},
        "bgcolor": "var(--paper)",
        **place,
    }


def build_loss_chart(
    steps: Sequence[float], losses: Series, evals: Sequence[tuple[float, float | None]], caption: str
) -> Chart:
    """Draw the training loss per step and the loss of each evaluation, in nats per target token."""
    traces = build_smoothed_traces("Training loss", steps, losses, COLORS[0])
    at, values = [step for step, _ in evals], [loss for _, loss in evals]
    if select_finite(values):
        more = {"mode": "lines+markers", "marker": {"color": COLORS[1], "size": 7, "symbol": "diamond"}}
        traces.append(build_line_trace("Evaluation loss", at, values, COLORS[1], line={"dash": "dot"}, **more))
    axis = choose_axis_scale(losses)
    last = max([*steps, *at], default=0)
    look = build_layout("step", _name_unit("nats per target token", axis), xaxis=_build_step_axis(last), yaxis=axis)
    return Chart(caption, tuple(traces), look)


def _name_unit(unit: str, axis: Mapping[str, Any]) -> str:
    return f"{unit}, log scale" if axis.get("type") == "log" else unit


def _build_step_axis(last_step: float) -> dict[str, Any]:
    """Build the x axis that all charts of steps and evaluations share."""
    return {"range": [-0.02 * last_step, 1.02 * last_step]} if last_step else {}


def build_score_curves_chart(
    curves: Mapping[str, tuple[Sequence[float], Series]],
    caption: str,
    *,
    best_step: float | None,
    levels: Mapping[str, float],
    last_step: float,
    changes: Sequence[float] = (),
) -> Chart:
    """Draw scores over steps 0 to `last_step`, the best step marked, other runs as horizontal lines.

    Args:
        changes: steps from which the evaluations have other data or settings; marked too.
    """
    traces: list[Trace] = []
    for i, (name, (steps, values)) in enumerate(curves.items()):
        color, line = COLORS[i % len(COLORS)], {"dash": DASHES[i // 2 % len(DASHES)]}
        traces.append(build_line_trace(name, steps, values, color, line=line, mode="lines+markers"))
    for name, level in levels.items():
        style = {"dash": "longdash", "width": 1.5}
        traces.append(build_line_trace(name, [0, last_step], [level, level], MUTED, mode="lines", line=style))
    markers = [build_step_marker(step, "other evaluation", yanchor="top", y=1) for step in changes]
    if best_step is not None:
        side = "right" if best_step > last_step / 2 else "left"
        markers.insert(0, build_step_marker(best_step, "best", xanchor=side))
    more = {name: [part for marker in markers for part in marker[name]] for name in ("shapes", "annotations")}
    axes = {"xaxis": _build_step_axis(last_step), "yaxis": {"range": [-3, 103]}}
    return Chart(caption, tuple(traces), build_layout("step", "score (%)", height=330, **axes, **more))


def build_step_chart(
    series: Mapping[str, Series],
    steps: Sequence[float],
    caption: str,
    *,
    unit: str,
    smoothed: bool,
    limit: float | None = None,
    log: bool = True,
) -> Chart:
    """Draw one or two quantities per step, half a page wide; `limit` adds a horizontal line."""
    traces: list[Trace] = []
    for i, (name, values) in enumerate(series.items()):
        if smoothed:
            traces += build_smoothed_traces(name, steps, values, COLORS[i])
        else:
            traces.append(build_line_trace(name, steps, values, COLORS[i], line={"dash": DASHES[i]}))
    axis = choose_axis_scale([value for values in series.values() for value in values] if log else [])
    more: dict[str, Any] = {"showlegend": len(series) > 1, "yaxis": axis}
    if limit is not None and steps:
        # Plotly takes the place of an annotation on a log axis as a logarithm, that of a shape as it is.
        place = log10(limit) if axis.get("type") == "log" else limit
        label = _build_label("clipped above", x=1, y=place, xref="paper", yref="y", xanchor="right")
        more |= {"shapes": [_build_limit_line("y", limit, "dash")], "annotations": [label]}
    return Chart(caption, tuple(traces), build_layout("step", _name_unit(unit, axis), **more), wide=False)


def build_bars_chart(
    bars: Mapping[str, float],
    caption: str,
    *,
    unit: str,
    hover: str,
    height: int = HEIGHT,
    axis: Mapping[str, Any] = BAR_AXIS,
    wide: bool = True,
) -> Chart:
    """Draw horizontal bars, the last on top; `hover` is Plotly's template of a bar's label."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [escape_label(name) for name in bars],
        "x": list(bars.values()),
        "marker": {"color": COLORS[0]},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    more = {"showlegend": False, "hovermode": "closest", "bargap": 0.4}
    look = build_layout(unit, "", height=height, xaxis=axis, yaxis=NAME_AXIS, **more)
    return Chart(caption, (trace,), look, wide=wide)


def build_stacked_bars_chart(
    rows: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
    caption: str,
    *,
    unit: str,
    scale: float,
    wide: bool = True,
    **more: Any,
) -> Chart:
    """Draw a horizontal bar per row, the first on top, of stacked parts in the order of `colors`.

    Args:
        rows: name -> part -> value.
        scale: factor of the values.
        more: options of the layout.
    """
    traces: list[Trace] = []
    for part, color in colors.items():
        values = [scale * row[part] if part in row else None for row in rows.values()]
        trace = {"type": "bar", "orientation": "h", "name": escape_label(part), "marker": {"color": color}}
        places = {"x": round_values(values), "y": [escape_label(name) for name in rows]}
        traces.append({**trace, **places, "hovertemplate": "%{x:.3~g}"})
    yaxis = {**ROW_AXIS, **NAME_AXIS, **more.pop("yaxis", {})}
    stacked = {"barmode": "stack", "hovermode": "y unified", "bargap": 0.35}
    look = build_layout(unit, "", xaxis=BAR_AXIS, yaxis=yaxis, **stacked, **more)
    look["legend"] |= {"traceorder": "normal"}
    return Chart(caption, tuple(traces), look, wide=wide)


def build_lengths_chart(
    splits: Mapping[str, Histogram | None], caption: str, *, unit: str, limit: float | None
) -> Chart | None:
    """Draw length histograms: the training data as bars, other splits as outlines, the limit as a line.

    Args:
        splits: name -> histogram; None if unknown.
    """
    traces: list[Trace] = []
    longest = 0.0
    for i, (name, histogram) in enumerate(splits.items()):
        edges, shares = compute_histogram_shares(histogram)
        if not shares:
            continue
        longest = max(longest, *edges)
        trace: Trace = {"name": escape_label(name), "hovertemplate": "%{y:.1f} %"}
        if i == 0:
            widths = [high - low for low, high in pairwise(edges)]
            middles = [low + width / 2 for low, width in zip(edges, widths, strict=False)]
            look = {"width": widths, "marker": {"color": COLORS[0], "opacity": 0.55, "line": {"width": 0}}}
            traces.append({"type": "bar", "x": middles, "y": shares, **trace, **look})
        else:
            line = {"shape": "hv", "color": COLORS[i % len(COLORS)], "width": 1.5}
            traces.append({"type": "scatter", "mode": "lines", "x": edges, "y": [*shares, 0.0], "line": line, **trace})
    if not traces:
        return None
    more: dict[str, Any] = {"xaxis": {"rangemode": "tozero"}}
    if limit is not None and limit > 2 * longest:
        caption += f" None comes near the limit of {format_count(limit)}."
    elif limit is not None:
        more = build_step_marker(limit, f"limit {format_count(limit)}", xanchor="right", yanchor="top", y=1)
        more["xaxis"] = {"range": [0, 1.02 * max(limit, longest)]}
    look = build_layout(unit, "examples (%)", yaxis={"rangemode": "tozero"}, **more)
    return Chart(caption, tuple(traces), look, wide=False)


def compute_histogram_shares(histogram: Histogram | None) -> tuple[list[float], list[float]]:
    """Return edges and shares in per cent, without empty bins at the end; ([], []) without a filled histogram."""
    if histogram is None or len(histogram.edges) != len(histogram.counts) + 1 or not any(histogram.counts):
        return [], []
    total = sum(histogram.counts)
    last = max(i for i, count in enumerate(histogram.counts) if count)
    return list(histogram.edges[: last + 2]), [100 * count / total for count in histogram.counts[: last + 1]]


def build_score_dots_chart(
    rows: Sequence[str], columns: Mapping[str, Series], ranges: Sequence[tuple[float, float] | None], caption: str
) -> Chart:
    """Draw a row per score and a marker per run on a scale of 0 to 100; the last column is this run, with intervals."""
    symbols = ("circle-open", "diamond-open", "square-open", "triangle-up-open", "x-open")
    names = [escape_label(row) for row in rows]
    traces: list[Trace] = []
    for i, (name, values) in enumerate(columns.items()):
        color, shape, more = COLORS[i % len(COLORS)], {"symbol": symbols[i % len(symbols)], "size": 10}, {}
        if i == len(columns) - 1:
            color, shape = COLORS[0], {"symbol": "circle", "size": 11}
            more = {"error_x": build_error_bars(values, ranges, color)}
        elif i == 0:
            color = MUTED
        marker = {**shape, "color": color, "line": {"width": 2, "color": color}}
        hover = f"%{{x:.2f}}<extra>{escape_label(name)}</extra>"
        traces.append(build_marks_trace(values, names, marker, hover, name=escape_label(name), **more))
    axes = {"xaxis": {"range": [-2, 102], "showgrid": True, "showline": False}, "yaxis": ROW_AXIS}
    return Chart(
        caption,
        tuple(traces),
        build_layout("score (%)", "", height=110 + 34 * len(rows), hovermode="closest", **axes),
    )


def build_error_bars(
    values: Series, ranges: Sequence[tuple[float, float] | None], color: str, *, thickness: float = 1.5
) -> dict[str, Any]:
    """Build error bars from each value to the ends of its range; none where it has no range."""
    bars: dict[str, Any] = {"type": "data", "symmetric": False, "array": [], "arrayminus": []}
    for value, edges in zip(values, ranges, strict=True):
        level = value or 0.0
        low, high = (level, level) if value is None or edges is None else edges
        bars["array"].append(high - level)
        bars["arrayminus"].append(level - low)
    return {**bars, "color": color, "thickness": thickness, "width": 4}


def round_values(values: Sequence[float | None], digits: int = 4) -> Series:
    """Round values to the resolution of a chart, to limit the size of a page."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def build_reliability_chart(bins: Sequence[Bin], caption: str) -> Chart:
    """Draw accuracy per bin of confidence as bars, beside the diagonal of perfect calibration."""
    hover = "confidence %{customdata[0]:.1f} %, right %{y:.1f} %, %{customdata[1]:,} predictions<extra></extra>"
    bars = {
        "type": "bar",
        "name": "Predictions",
        "x": [50 * (one.low + one.high) for one in bins],
        "y": [100 * one.accuracy for one in bins],
        "width": [90 * (one.high - one.low) for one in bins],
        "customdata": [[100 * one.confidence, one.num] for one in bins],
        "text": [format_large_count(one.num) for one in bins],
        "textposition": "outside",
        "textfont": {"color": MUTED, "size": 11},
        "cliponaxis": False,
        "marker": {"color": COLORS[0], "opacity": 0.75},
        "hovertemplate": hover,
    }
    style = {"mode": "lines", "line": {"dash": "dash"}, "hoverinfo": "skip", "hovertemplate": None}
    diagonal = build_line_trace("Perfectly calibrated", [0, 100], [0.0, 100.0], MUTED, **style)
    axes = {"xaxis": {"range": [0, 100]}, "yaxis": {"range": [0, 108]}}
    look = build_layout("confidence (%)", "right (%)", height=320, hovermode="closest", **axes)
    return Chart(caption, (bars, diagonal), look, wide=False)


def build_risk_coverage_chart(curve: RiskCoverage, ideal: RiskCoverage, caption: str) -> Chart:
    """Draw the risk (mean loss) of the most confident predictions over coverage, beside that of a perfect ranking."""
    traces: list[Trace] = []
    for name, one, color, dash in (
        ("Ranked by confidence", curve, COLORS[0], "solid"),
        ("Ranked perfectly", ideal, MUTED, "dash"),
    ):
        xs, ys = (100 * one.coverage).tolist(), (100 * one.risk).tolist()
        traces.append(build_line_trace(name, xs, ys, color, mode="lines", line={"dash": dash}))
    axes = {"xaxis": {"range": [0, 101]}, "yaxis": {"rangemode": "tozero"}}
    return Chart(caption, tuple(traces), build_layout("coverage (%)", "risk (points)", height=320, **axes), wide=False)


def build_slices_chart(slices: Sequence[Slice], mean: float, caption: str) -> Chart:
    """Draw each slice with its interval, in one colour per property, and the mean of all examples as a line."""
    kinds = list(dict.fromkeys(one.name for one in slices))
    traces: list[Trace] = []
    for one in slices:
        color = COLORS[kinds.index(one.name) % len(COLORS)]
        bars = build_error_bars([one.score], [(one.low, one.high)], color)
        row = escape_label(f"{one.name}: {one.value}")
        hover = f"%{{x:.2f}}, {format_large_count(one.num)} examples<extra></extra>"
        traces.append(build_marks_trace([one.score], [row], {"color": color, "size": 9}, hover, error_x=bars))
    look = build_layout(
        "score (%)",
        "",
        height=90 + 24 * len(slices),
        hovermode="closest",
        showlegend=False,
        xaxis={"range": [-2, 102], "showgrid": True, "showline": False},
        yaxis={**ROW_AXIS, "ticksuffix": "  ", "dtick": 1},
        shapes=[_build_limit_line("x", mean, "dash")],
    )
    return Chart(caption, tuple(traces), look)


def build_confusion_chart(confusion: ConfusionMatrix, names: Sequence[str], caption: str) -> Chart:
    """Draw gold labels as rows, predicted labels as columns; colours are shares of the row, numbers are counts."""
    counts = [[confusion.counts[gold, said] for said in names] for gold in names]
    shares = [
        [100 * num / max(confusion.count_support(gold), 1) for num in row]
        for gold, row in zip(names, counts, strict=True)
    ]
    shown = [escape_label(name) or "(empty)" for name in names]
    cells = {
        "type": "heatmap",
        "x": shown,
        "y": shown,
        "z": shares,
        "text": counts,
        "texttemplate": "%{text:,}",
        "colorscale": [[0, "var(--soft)"], [1, COLORS[0]]],
        "zmin": 0,
        "zmax": 100,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "gold %{y}, predicted %{x}: %{text:,} (%{z:.1f} % of the row)<extra></extra>",
    }
    axis = {"type": "category", "dtick": 1, "showgrid": False, "showline": False}
    look = build_layout(
        "predicted",
        "gold",
        height=150 + 34 * len(names),
        showlegend=False,
        hovermode="closest",
        xaxis={**axis, "automargin": True},
        yaxis={**axis, "autorange": "reversed", "ticksuffix": "  "},
    )
    return Chart(caption, (cells,), look)
