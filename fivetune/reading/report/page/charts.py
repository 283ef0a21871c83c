"""Charts as plain dicts, in the form of Plotly's figures, of which templates/charts.js draws what is used here.

In: series of numbers (None = gap) and captions. Out: Charts whose colours are the page's CSS variables, so that
light, dark and print share one figure. Text from data passes through `escape_hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fivetune.reading.report.page.parts import Chart
from fivetune.reading.report.page.series import (
    Series,
    choose_smoothing_span,
    compute_quantile,
    smooth_series,
    thin_points,
)
from fivetune.reading.report.page.wording import escape_hidden, format_count
from fivetune.rundir.records import Histogram
from fivetune.values import select_finite

HEIGHT = 280
COLORS = tuple(f"var(--series-{i})" for i in range(1, 7))
MUTED, INK = "var(--muted)", "var(--ink)"
DASHES = ("solid", "dash", "dot", "dashdot")
HIDDEN = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}  # a line without a label
FROM_ZERO = {"rangemode": "tozero"}
SCORE_AXIS = {"range": [-2, 102], "showgrid": True, "showline": False}
BAR_AXIS = {"showgrid": True, "rangemode": "tozero"}
ROW_AXIS = {"autorange": "reversed", "type": "category", "showgrid": True}  # a row each, the first on top
NAME_AXIS = {"showgrid": False}  # names at the left of bars

Trace = dict[str, Any]


def build_chart(
    caption: str,
    traces: Sequence[Trace],
    x: str,
    y: str,
    *,
    height: int = HEIGHT,
    wide: bool = True,
    group: str = "",
    **layout: Any,
) -> Chart:
    """Build a chart of traces.

    Args:
        x, y: titles of the axes, with their units.
        layout: further options; the look that all charts share is in templates/charts.js.
    """
    for axis, title in (("xaxis", x), ("yaxis", y)):
        layout[axis] = {"title": {"text": title}, **layout.get(axis, {})}
    return Chart(caption, tuple(traces), {"height": height, **layout}, wide, group)


def build_line_trace(name: str, steps: Sequence[float], values: Series, color: str, **more: Any) -> Trace:
    """Build a line; gaps stay gaps, a series of few points has markers."""
    xs, ys = thin_points(steps, values)
    style = {"color": color, "width": 2, **more.pop("line", {})}
    mode = "lines+markers" if len(select_finite(values)) <= 30 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape_hidden(name),
        "x": xs,
        "y": round_values(ys, digits=6),
        "line": style,
        "marker": {"color": color, "size": 6},
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
    """Build marks without lines; `hover` is the template of their label."""
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
    low = compute_quantile(given, 0.02)
    high = compute_quantile(given, 0.98)
    if low and high and min(given) > 0 and high / low > 50:
        return {"type": "log"}
    return FROM_ZERO


def build_step_marker(step: float, text: str, **place: Any) -> dict[str, Any]:
    """Build a thin vertical line with a label as layout options; the label is at the bottom unless `place` moves it."""
    return {
        "shapes": [build_limit_line("x", step, "dot")],
        "annotations": [_build_label(text, **{"x": step, "y": 0, "xref": "x", "yref": "paper", **place})],
    }


def build_limit_line(axis: str, value: float, dash: str) -> dict[str, Any]:
    """Build a line across the plot at a value of the x or y axis."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1}
    line = {"color": MUTED, "width": 1, "dash": dash}
    return {"type": "line", f"{axis}ref": axis, f"{other}ref": "paper", **ends, "line": line}


def _build_label(text: str, **place: Any) -> dict[str, Any]:
    return {"text": escape_hidden(text), **place}


def name_unit(unit: str, axis: Mapping[str, Any]) -> str:
    """Name the unit of an axis, and its scale if it is logarithmic."""
    return f"{unit}, log scale" if axis.get("type") == "log" else unit


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
    axis: Mapping[str, Any] = FROM_ZERO
    if log:
        axis = choose_axis_scale([value for values in series.values() for value in values])
    more: dict[str, Any] = {"showlegend": len(series) > 1, "yaxis": axis}
    if limit is not None and steps:
        label = _build_label("clipped above", x=1, y=limit, xref="paper", yref="y", xanchor="right")
        more |= {"shapes": [build_limit_line("y", limit, "dash")], "annotations": [label]}
    return build_chart(caption, traces, "step", name_unit(unit, axis), wide=False, **more)


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
    """Draw horizontal bars, the last on top; `hover` is the template of a bar's label."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [escape_hidden(name) for name in bars],
        "x": list(bars.values()),
        "marker": {"color": COLORS[0]},
        "hovertemplate": hover,
    }
    return build_chart(
        caption,
        [trace],
        unit,
        "",
        wide=wide,
        xaxis=axis,
        yaxis=NAME_AXIS,
        height=height,
        showlegend=False,
        hovermode="closest",
        bargap=0.4,
    )


def build_stacked_bars_chart(
    rows: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
    caption: str,
    *,
    unit: str,
    scale: float,
    **more: Any,
) -> Chart:
    """Draw a horizontal bar per row, the first on top, of stacked parts in the order of `colors`.

    Args:
        rows: name -> part -> value.
        scale: factor of the values.
        more: further options of the layout.
    """
    traces: list[Trace] = []
    for part, color in colors.items():
        values = [scale * row[part] if part in row else None for row in rows.values()]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escape_hidden(part),
                "marker": {"color": color},
                "x": round_values(values),
                "y": [escape_hidden(name) for name in rows],
                "hovertemplate": "%{x:.3~g}",
            }
        )
    yaxis = {**ROW_AXIS, **NAME_AXIS, **more.pop("yaxis", {})}
    return build_chart(
        caption,
        traces,
        unit,
        "",
        xaxis=BAR_AXIS,
        yaxis=yaxis,
        barmode="stack",
        hovermode="y unified",
        bargap=0.35,
        **more,
    )


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
        trace: Trace = {"name": escape_hidden(name), "hovertemplate": "%{y:.1f} %"}
        if i == 0:
            widths: list[float] = []
            middles: list[float] = []
            for low, high in pairwise(edges):
                widths.append(high - low)
                middles.append(low + (high - low) / 2)
            look = {"width": widths, "marker": {"color": COLORS[0], "opacity": 0.55, "line": {"width": 0}}}
            traces.append({"type": "bar", "x": middles, "y": shares, **trace, **look})
        else:
            line = {"shape": "hv", "color": COLORS[i % len(COLORS)], "width": 1.5}
            traces.append({"type": "scatter", "mode": "lines", "x": edges, "y": [*shares, 0.0], "line": line, **trace})
    if not traces:
        return None
    more: dict[str, Any] = {"xaxis": FROM_ZERO}
    if limit is not None and limit > 2 * longest:
        caption += f" None comes near the limit of {format_count(limit)}."
    elif limit is not None:
        more = build_step_marker(limit, f"limit {format_count(limit)}", xanchor="right", yanchor="top", y=1)
        more["xaxis"] = {"range": [0, 1.02 * max(limit, longest)]}
    return build_chart(caption, traces, unit, "examples (%)", wide=False, yaxis=FROM_ZERO, **more)


def compute_histogram_shares(histogram: Histogram | None) -> tuple[list[float], list[float]]:
    """Return edges and shares in per cent, without empty bins at the end; ([], []) without a filled histogram."""
    if histogram is None or len(histogram.edges) != len(histogram.counts) + 1 or not any(histogram.counts):
        return [], []
    total = sum(histogram.counts)
    num = len(histogram.counts)
    while histogram.counts[num - 1] == 0:
        num -= 1
    return list(histogram.edges[: num + 1]), [100 * count / total for count in histogram.counts[:num]]


def build_score_dots_chart(
    rows: Sequence[str], columns: Mapping[str, Series], ranges: Sequence[tuple[float, float] | None], caption: str
) -> Chart:
    """Draw a row per score and a marker per run on a scale of 0 to 100; the last column is this run, with intervals."""
    symbols = ("circle-open", "diamond-open", "square-open", "triangle-up-open", "x-open")
    names = [escape_hidden(row) for row in rows]
    traces: list[Trace] = []
    for i, (name, values) in enumerate(columns.items()):
        color = COLORS[i % len(COLORS)]
        symbol = symbols[i % len(symbols)]
        size = 10
        if i == len(columns) - 1:
            color, symbol, size = COLORS[0], "circle", 11
        elif i == 0:
            color = MUTED
        marker = {"symbol": symbol, "size": size, "color": color, "line": {"width": 2, "color": color}}
        trace = build_marks_trace(values, names, marker, "%{x:.2f}", name=escape_hidden(name))
        if i == len(columns) - 1:
            trace["error_x"] = build_error_bars(values, ranges, color)
        traces.append(trace)
    return build_chart(
        caption,
        traces,
        "score (%)",
        "",
        xaxis=SCORE_AXIS,
        yaxis=ROW_AXIS,
        height=110 + 34 * len(rows),
        hovermode="closest",
    )


def build_coverage_chart(caption: str, traces: Sequence[Trace], x: str, y: str) -> Chart:
    """Draw errors over the share of answers that are given (0 to 100 %), half a page wide."""
    axis = {"range": [0, 101]}
    return build_chart(caption, traces, x, y, wide=False, height=320, xaxis=axis, yaxis=FROM_ZERO)


def build_error_bars(
    values: Series, ranges: Sequence[tuple[float, float] | None], color: str, *, thickness: float = 1.5
) -> dict[str, Any]:
    """Build error bars from each value to the ends of its range; none where it has no range."""
    up: list[float] = []
    down: list[float] = []
    for value, edges in zip(values, ranges, strict=True):
        if value is None or edges is None:
            up.append(0.0)
            down.append(0.0)
        else:
            up.append(edges[1] - value)
            down.append(value - edges[0])
    return {
        "array": up,
        "arrayminus": down,
        "color": color,
        "thickness": thickness,
        "width": 4,
    }


def round_values(values: Sequence[float | None], digits: int = 4) -> Series:
    """Round values to the resolution of a chart, to limit the size of a page."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]
