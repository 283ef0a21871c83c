"""Records -> Chart: Plotly figures as plain dicts.

In: series of numbers (None = gap) and captions. Out: Charts whose colours are the page's CSS variables, so that
light, dark and print share one figure. Text that comes from data passes through `label`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import log10
from typing import Any

from fivetune.analysis.calibration import Bin, RiskCoverage
from fivetune.analysis.labels import Confusion
from fivetune.analysis.slices import Slice
from fivetune.report.series import Series, quantile, smooth, thin, window
from fivetune.report.wording import amount, visible, whole
from fivetune.types import Chart
from fivetune.values import known, number

HEIGHT = 280
COLORS = tuple(f"var(--series-{i})" for i in range(1, 7))
MUTED, GRID, INK = "var(--muted)", "var(--grid)", "var(--ink)"
DASHES = ("solid", "dash", "dot", "dashdot")

Trace = dict[str, Any]


def label(text: str) -> str:
    """Text from data for Plotly, which reads tags: they are escaped and stay text."""
    return escape(visible(text), quote=False)


def layout(x: str, y: str, *, height: int = HEIGHT, **more: Any) -> dict[str, Any]:
    """The shared look: no frame, faint horizontal grid, legend above the plot, axis titles with units."""
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "ticks": "", "linecolor": GRID}
    font = {"size": 12, "color": MUTED}
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
        "xaxis": {**axis, "title": {"text": x, "font": font, "standoff": 8}, "showgrid": False, "showline": True},
        "yaxis": {**axis, "showline": False, "title": {"text": y, "font": font, "standoff": 8}},
    }
    for axis_name in ("xaxis", "yaxis"):
        base[axis_name] |= more.pop(axis_name, {})
    if not more.get("showlegend", True):
        base["margin"] |= {"t": 12}
    return base | more


def line(name: str, steps: Sequence[float], values: Series, color: str, **more: Any) -> Trace:
    """A line; gaps stay gaps, a series of few points also shows its points."""
    xs, ys = thin(steps, values)
    style = {"color": color, "width": 2, **more.pop("line", {})}
    mode = "lines+markers" if len(known(values)) <= 30 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(name),
        "x": xs,
        "y": ys,
        "line": style,
        "marker": {"color": color, "size": 6},
        "connectgaps": False,
        "hovertemplate": "%{y:.4~g}",
        **more,
    }


def raw_and_smooth(name: str, steps: Sequence[float], values: Series, color: str) -> list[Trace]:
    """The raw series light, its moving average dark; one line where there is little to smooth."""
    span = window(len(values))
    if span == 1:
        return [line(name, steps, values, color)]
    raw = line(f"{name}, each step", steps, values, color, line={"width": 1}, opacity=0.45)
    return [raw, line(f"{name}, smoothed", steps, smooth(values, span), color)]


def log_axis(values: Series, *, above: float = 50) -> dict[str, Any]:
    """Axis options: logarithmic when all values are positive and the middle ones span more than a factor `above`."""
    given = known(values)
    low, high = quantile(given, 0.02), quantile(given, 0.98)
    wide = bool(given) and min(given) > 0 and bool(low) and (high or 0) / (low or 1) > above
    return {"type": "log", "dtick": 1, "exponentformat": "power"} if wide else {"rangemode": "tozero"}


def mark_step(step: float, text: str, **place: Any) -> dict[str, Any]:
    """Layout options: a thin vertical line with a word beside it, at the bottom if `place` does not say otherwise."""
    return {
        "shapes": [
            {
                "type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1,
                "line": {"color": MUTED, "width": 1, "dash": "dot"}, "layer": "below",
            }
        ],
        "annotations": [
            {
                "xref": "x", "yref": "paper", "x": step, "y": 0, "text": label(text), "showarrow": False,
                "xanchor": "left", "yanchor": "bottom", "font": {"size": 11, "color": MUTED}, **place,
            }
        ],
    }  # fmt: skip


def loss_chart(
    steps: Sequence[float], losses: Series, evals: Sequence[tuple[float, float | None]], caption: str
) -> Chart:
    """Training loss per step, and the loss of each evaluation, in nats per target token."""
    traces = raw_and_smooth("Training loss", steps, losses, COLORS[0])
    if any(loss is not None for _, loss in evals):
        at, values = [step for step, _ in evals], [loss for _, loss in evals]
        more = {"mode": "lines+markers", "marker": {"color": COLORS[1], "size": 7, "symbol": "diamond"}}
        traces.append(line("Evaluation loss", at, values, COLORS[1], line={"dash": "dot"}, **more))
    axis = log_axis(losses)
    unit = "nats per target token" + (", log scale" if axis.get("type") == "log" else "")
    last = max([*steps, *(step for step, _ in evals)], default=0)
    return Chart(caption, tuple(traces), layout("step", unit, xaxis=_span(last), yaxis=axis))


def _span(last_step: float) -> dict[str, Any]:
    """One x axis for all charts that show steps and evaluations."""
    return {"range": [-0.02 * last_step, 1.02 * last_step]} if last_step else {}


def scores_chart(
    curves: Mapping[str, tuple[Sequence[float], Series]],
    caption: str,
    *,
    unit: str,
    best_step: float | None,
    levels: Mapping[str, float],
    last_step: float,
) -> Chart:
    """Scores over steps 0 to `last_step`, the best step marked, other runs as level lines."""
    traces = [
        line(
            name,
            steps,
            values,
            COLORS[i % len(COLORS)],
            line={"dash": DASHES[i // 2 % len(DASHES)]},
            mode="lines+markers",
        )
        for i, (name, (steps, values)) in enumerate(curves.items())
    ]
    for name, level in levels.items():
        style = {"dash": "longdash", "width": 1.5}
        traces.append(line(name, [0, last_step], [level, level], MUTED, mode="lines", line=style))
    more = {} if best_step is None else mark_step(best_step, "best")
    axis = {"range": [-3, 103]} if unit == "score (%)" else {}
    return Chart(caption, tuple(traces), layout("step", unit, height=330, xaxis=_span(last_step), yaxis=axis, **more))


def step_chart(
    series: Mapping[str, Series],
    steps: Sequence[float],
    caption: str,
    *,
    unit: str,
    smoothed: bool,
    limit: float | None = None,
    log: bool = True,
) -> Chart:
    """One or two quantities per step, half a page wide; `limit` draws a level line."""
    traces: list[Trace] = []
    for i, (name, values) in enumerate(series.items()):
        color = COLORS[i]
        dash = {"dash": DASHES[i]}
        traces += (
            raw_and_smooth(name, steps, values, color) if smoothed else [line(name, steps, values, color, line=dash)]
        )
    axis = log_axis([value for values in series.values() for value in values] if log else [])
    scale = ", log scale" if axis.get("type") == "log" else ""
    more: dict[str, Any] = {"showlegend": len(series) > 1}
    if limit is not None and steps:
        more["shapes"] = [_level(limit)]
        more["annotations"] = [_level_name(limit, "clipped above", log=bool(scale))]
    return Chart(caption, tuple(traces), layout("step", unit + scale, yaxis=axis, **more), wide=False)


def _level(value: float) -> dict[str, Any]:
    dashed = {"color": MUTED, "width": 1, "dash": "dash"}
    return {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": dashed}


def _level_name(value: float, text: str, *, log: bool) -> dict[str, Any]:
    place = log10(value) if log else value
    font = {"size": 11, "color": MUTED}
    return {
        "xref": "paper", "yref": "y", "x": 1, "y": place, "text": label(text), "showarrow": False,
        "xanchor": "right", "yanchor": "bottom", "font": font,
    }  # fmt: skip


def phases_chart(phases: Mapping[str, float], caption: str) -> Chart:
    """Horizontal bars: seconds per phase, the longest on top."""
    names = sorted(phases, key=lambda name: phases[name])
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [label(name) for name in names],
        "x": [phases[name] for name in names],
        "marker": {"color": COLORS[0]},
        "hovertemplate": "%{x:.4~g} s<extra></extra>",
    }
    axis = {"showgrid": True, "rangemode": "tozero"}
    look = layout(
        "seconds",
        "",
        xaxis=axis,
        yaxis={"showgrid": False, "ticksuffix": "  "},
        showlegend=False,
        hovermode="closest",
        bargap=0.4,
    )
    return Chart(caption, (bars,), look, wide=False)


def lengths_chart(splits: Mapping[str, Any], caption: str, *, unit: str, limit: float | None) -> Chart | None:
    """Shares of the examples by length, the training data as bars, others as outlines, with the limit as a line.

    Args:
        splits: name -> {"edges": [n + 1 numbers], "counts": [n numbers]}.
    """
    traces = []
    for i, (name, histogram) in enumerate(splits.items()):
        edges, shares = bins(histogram)
        if shares:
            traces.append(
                _bars(name, edges, shares) if i == 0 else _outline(name, edges, shares, COLORS[i % len(COLORS)])
            )
    if not traces:
        return None
    longest = max(edge for histogram in splits.values() for edge in bins(histogram)[0])
    more: dict[str, Any] = {"xaxis": {"rangemode": "tozero"}}
    if limit is not None and limit > 2 * longest:
        caption += f" None comes near the limit of {whole(limit)}."
    elif limit is not None:
        more = mark_step(limit, f"limit {whole(limit)}", xanchor="right", yanchor="top", y=1)
        more["xaxis"] = {"range": [0, 1.02 * max(limit, longest)]}
    return Chart(
        caption, tuple(traces), layout(unit, "examples (%)", yaxis={"rangemode": "tozero"}, **more), wide=False
    )


def bins(histogram: Any) -> tuple[list[float], list[float]]:
    """Edges and shares in per cent, empty bins at the end cut off; ([], []) if there is no usable histogram."""
    table = histogram if isinstance(histogram, Mapping) else {}
    edges = [value for edge in table.get("edges") or [] if (value := number(edge)) is not None]
    counts = [value for count in table.get("counts") or [] if (value := number(count)) is not None]
    everything = sum(counts)
    if len(edges) != len(counts) + 1 or not everything:
        return [], []
    last = max(i for i, count in enumerate(counts) if count)
    return edges[: last + 2], [100 * count / everything for count in counts[: last + 1]]


def _bars(name: str, edges: list[float], shares: list[float]) -> Trace:
    widths = [high - low for low, high in pairwise(edges)]
    return {
        "type": "bar",
        "name": label(name),
        "x": [low + width / 2 for low, width in zip(edges, widths, strict=False)],
        "y": shares,
        "width": widths,
        "marker": {"color": COLORS[0], "opacity": 0.55, "line": {"width": 0}},
        "hovertemplate": "%{y:.1f} %",
    }


def _outline(name: str, edges: list[float], shares: list[float], color: str) -> Trace:
    corners = {"x": edges, "y": [*shares, 0.0], "line": {"shape": "hv", "color": color, "width": 1.5}}
    return {"type": "scatter", "mode": "lines", "name": label(name), "hovertemplate": "%{y:.1f} %", **corners}


def dots_chart(
    rows: Sequence[str], columns: Mapping[str, Series], ranges: Sequence[tuple[float, float] | None], caption: str
) -> Chart:
    """One line per score, one mark per run on a scale of 0 to 100; the last column is this run, with its intervals."""
    symbols = ("circle-open", "diamond-open", "square-open", "triangle-up-open", "x-open")
    names = [label(row) for row in rows]
    traces: list[Trace] = []
    for i, (name, values) in enumerate(columns.items()):
        last = i == len(columns) - 1
        color = COLORS[0] if last else MUTED if i == 0 else COLORS[i % len(COLORS)]
        marker = {"symbol": "circle" if last else symbols[i % len(symbols)], "size": 11 if last else 10, "color": color}
        marker["line"] = {"width": 2, "color": color}
        hover = {"hovertemplate": "%{x:.2f}<extra>" + label(name) + "</extra>"}
        dots = {
            "type": "scatter",
            "mode": "markers",
            "name": label(name),
            "x": values,
            "y": names,
            "marker": marker,
            **hover,
        }
        traces.append(dots | ({"error_x": _error_bars(values, ranges, color)} if last else {}))
    look = layout(
        "score (%)", "", height=110 + 34 * len(rows), hovermode="closest",
        xaxis={"range": [-2, 102], "showgrid": True, "showline": False},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": True},
    )  # fmt: skip
    return Chart(caption, tuple(traces), look)


def _error_bars(values: Series, ranges: Sequence[tuple[float, float] | None], color: str) -> dict[str, Any]:
    pairs = [(value, edges) for value, edges in zip(values, ranges, strict=True)]
    above = [edges[1] - value if edges and value is not None else 0 for value, edges in pairs]
    below = [value - edges[0] if edges and value is not None else 0 for value, edges in pairs]
    return {
        "type": "data",
        "symmetric": False,
        "array": above,
        "arrayminus": below,
        "color": color,
        "thickness": 1.5,
        "width": 4,
    }


def reliability_chart(bins: Sequence[Bin], caption: str) -> Chart:
    """Share of right predictions per bin of confidence as bars, beside the diagonal of perfect calibration."""
    hover = "confidence %{customdata[0]:.1f} %, right %{y:.1f} %, %{customdata[1]:,} predictions<extra></extra>"
    bars = {
        "type": "bar",
        "name": "Predictions",
        "x": [50 * (one.low + one.high) for one in bins],
        "y": [100 * one.accuracy for one in bins],
        "width": [90 * (one.high - one.low) for one in bins],
        "customdata": [[100 * one.confidence, one.num] for one in bins],
        "text": [amount(one.num) for one in bins],
        "textposition": "outside",
        "textfont": {"color": MUTED, "size": 11},
        "cliponaxis": False,
        "marker": {"color": COLORS[0], "opacity": 0.75},
        "hovertemplate": hover,
    }
    diagonal = line("Perfectly calibrated", [0, 100], [0.0, 100.0], MUTED, mode="lines", line={"dash": "dash"})
    axis = {"range": [0, 100]}
    look = layout("confidence (%)", "right (%)", height=320, hovermode="closest", xaxis=axis, yaxis={"range": [0, 108]})
    return Chart(caption, (bars, {**diagonal, "hoverinfo": "skip", "hovertemplate": None}), look, wide=False)


def risk_chart(curve: RiskCoverage, ideal: RiskCoverage, caption: str) -> Chart:
    """Mean loss of the surest predictions over the share that is answered, and of a perfect order."""
    traces = [
        line(name, (100 * one.coverage).tolist(), (100 * one.risk).tolist(), color, mode="lines", line={"dash": dash})
        for name, one, color, dash in (
            ("Sorted by confidence", curve, COLORS[0], "solid"),
            ("Sorted perfectly", ideal, MUTED, "dash"),
        )
    ]
    axis = {"range": [0, 101]}
    look = layout("answered (%)", "lost (points)", height=320, xaxis=axis, yaxis={"rangemode": "tozero"})
    return Chart(caption, tuple(traces), look, wide=False)


def slices_chart(found: Sequence[Slice], mean: float, caption: str) -> Chart:
    """One line per slice with its interval, in one colour per kind of slice, and the mean of all as a line."""
    rows = [label(f"{one.name}: {one.value}") for one in found]
    kinds = list(dict.fromkeys(one.name for one in found))
    colors = [COLORS[kinds.index(one.name) % len(COLORS)] for one in found]
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [one.score],
            "y": [row],
            "marker": {"color": color, "size": 9},
            "error_x": _error_bars([one.score], [(one.low, one.high)], color),
            "hovertemplate": f"%{{x:.2f}}, {amount(one.num)} examples<extra></extra>",
        }
        for one, row, color in zip(found, rows, colors, strict=True)
    ]
    look = layout(
        "score (%)", "", height=90 + 24 * len(rows), hovermode="closest", showlegend=False,
        xaxis={"range": [-2, 102], "showgrid": True, "showline": False},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": True, "ticksuffix": "  ", "dtick": 1},
        shapes=[{**_level(mean), "xref": "x", "yref": "paper", "x0": mean, "x1": mean, "y0": 0, "y1": 1}],
    )  # fmt: skip
    return Chart(caption, tuple(traces), look)


def confusion_chart(found: Confusion, names: Sequence[str], caption: str) -> Chart:
    """Gold labels down, predicted ones across; the colour is the share of the row, the number the count."""
    counts = [[found.counts[gold, said] for said in names] for gold in names]
    shares = [[100 * num / max(found.support(gold), 1) for num in row] for gold, row in zip(names, counts, strict=True)]
    shown = [label(name) or "(empty)" for name in names]
    cells = {
        "type": "heatmap", "x": shown, "y": shown, "z": shares, "text": counts, "texttemplate": "%{text:,}",
        "colorscale": [[0, "var(--soft)"], [1, COLORS[0]]], "zmin": 0, "zmax": 100,
        "showscale": False, "xgap": 2, "ygap": 2,
        "hovertemplate": "gold %{y}, predicted %{x}: %{text:,} (%{z:.1f} % of the row)<extra></extra>",
    }  # fmt: skip
    axis = {"type": "category", "dtick": 1, "showgrid": False, "showline": False}
    look = layout(
        "predicted", "gold", height=150 + 34 * len(names), showlegend=False, hovermode="closest",
        xaxis=axis, yaxis={**axis, "autorange": "reversed", "ticksuffix": "  "},
    )  # fmt: skip
    return Chart(caption, (cells,), look)
