"""Charts of where time goes: lanes over the time of runs with their phases shaded, and stacked bars of a step.

In: Tracks and Spans, seconds by phase. Out: Charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivetune.report.charts import COLORS, DASHES, INK, MUTED, Trace, label, layout
from fivetune.report.load import Gauge, Span, Track
from fivetune.report.series import MAX_POINTS, Series, thin
from fivetune.report.wording import visible
from fivetune.types import PHASES, Chart
from fivetune.values import known

LANE, SMALL_LANE, FRAME = 200, 66, 84
NAME = 0.27  # share of a small lane that its name takes
LINES = {"solid": "solid", "dash": "dashed", "dashdot": "dash and dot", "longdash": "long dashes"}
SHADES = {"prepare": "var(--shade-1)", "evaluate": "var(--shade-2)", "checkpoint": "var(--shade-3)"}
OTHER_SHADE = "var(--shade-4)"
PARTS = (*PHASES, "other")
PART_COLORS: dict[str, str] = dict(
    zip(PARTS, ("var(--series-2)", "var(--series-5)", "var(--series-6)", "var(--series-1)", "var(--series-7)",
                "var(--series-4)", "var(--series-3)", MUTED), strict=True)
)  # fmt: skip
UNITS = ((5400.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True, slots=True)
class Lane:
    """What one run adds to a chart: its series and phases; `look` is the colour and the dash of its lines.

    Without a look every series has its own.
    """

    name: str
    tracks: Sequence[Track]
    spans: Sequence[Span] = field(default_factory=tuple)
    look: tuple[str, str] | None = None


def look_of(place: int) -> tuple[str, str]:
    """Colour and dash of the place-th of many lines, the same in all charts of a page."""
    return COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]


def budget(num_series: int) -> int:
    """How many points each of so many series may keep, so that a page of many runs stays small."""
    return max(150, min(MAX_POINTS, 9000 // max(num_series, 1)))


def rounded(values: Sequence[float | None], digits: int = 4) -> Series:
    """Significant digits that can be seen in a chart; the rest would only make the page larger."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def curve(name: str, xs: Sequence[float], ys: Series, look: tuple[str, str], *, limit: int, **more: Any) -> Trace:
    """A line without points whose legend entry is `name`; gaps stay gaps."""
    at, values = thin(xs, ys, limit=limit)
    lone = len(known(ys)) < 3
    return {
        "type": "scatter",
        "mode": "lines+markers" if lone else "lines",
        "name": label(name),
        "meta": visible(name),
        "x": rounded(at, 6),
        "y": rounded(values),
        "line": {"color": look[0], "dash": look[1], "width": 1.6},
        "marker": {"color": look[0], "size": 6},
        "connectgaps": False,
        "hovertemplate": "%{y:.4~g}",
        **more,
    }


def lines_told(lanes: Sequence[Lane]) -> str:
    """Which line of a lane is what, where lanes hold several: "Solid: GPU 0; dashed: GPU 1."."""
    names = max(([track.name for track in lane.tracks] for lane in lanes), key=len, default=[])
    told = "; ".join(f"{line}: {name}" for line, name in zip(LINES.values(), names, strict=False))
    return f" {told[0].upper()}{told[1:]}." if len(names) > 1 else ""


def time_unit(lanes: Sequence[Lane]) -> tuple[float, str]:
    """Seconds per unit of the time axis, and its name."""
    longest = max((at for lane in lanes for track in lane.tracks for at in track.seconds[-1:]), default=0.0)
    return next((seconds, name) for least, seconds, name in UNITS if longest >= least)


def lanes_chart(gauge: Gauge, lanes: Sequence[Lane], caption: str, *, wide: bool, group: str) -> Chart:
    """A lane per run, one below the other on the same time axis and scale, its phases shaded."""
    scale, unit = time_unit(lanes)
    top = _top(gauge, lanes)
    traces = [trace for place, lane in enumerate(lanes) for trace in _lane(lane, place, scale, top, len(lanes))]
    several = len(lanes) > 1
    height = FRAME + (len(lanes) * SMALL_LANE if several else LANE)
    look = layout(unit, gauge.unit, height=height, showlegend=False, hoversubplots="axis")
    look["yaxis"] |= {"range": [0, top], "domain": [0, 1]}
    if several:
        look["margin"] |= {"t": 4}
        look |= _stacked_axes(lanes, look["yaxis"], gauge.unit)
        look["xaxis"] |= {"anchor": "y" + _axis(len(lanes) - 1)}
    return Chart(caption, tuple(traces), look, wide=wide, group=group)


def _top(gauge: Gauge, lanes: Sequence[Lane]) -> float:
    if gauge.unit == "%":
        return 105.0
    highest = [value for lane in lanes for track in lane.tracks for value in (*known(track.values), track.limit or 0.0)]
    return 1.08 * max(highest, default=0.0) or 1.0


def _axis(place: int) -> str:
    return "" if place == 0 else str(place + 1)


def _stacked_axes(lanes: Sequence[Lane], axis: dict[str, Any], unit: str) -> dict[str, Any]:
    """The axes of the lanes from the top down, each with its run's name in the upper left corner."""
    share, axes, names = 1 / len(lanes), {}, []
    for place, lane in enumerate(lanes):
        top = 1 - place * share
        title = axis["title"] | {"text": unit if place == len(lanes) // 2 else ""}
        axes["yaxis" + _axis(place)] = axis | {"domain": [top - share, top - NAME * share], "nticks": 3, "title": title}
        names.append(
            {"xref": "paper", "yref": "paper", "x": 0, "y": top - NAME * share, "xanchor": "left", "yanchor": "bottom",
             "text": label(lane.name[:60]), "showarrow": False, "font": {"size": 11, "color": INK}}
        )  # fmt: skip
    return axes | {"annotations": names}


def _lane(lane: Lane, place: int, scale: float, top: float, num_lanes: int) -> list[Trace]:
    axis = {"yaxis": "y" + _axis(place)}
    traces: list[Trace] = [_shade(phase, lane.spans, scale, top) | axis for phase in _shaded(lane.spans)]
    limit = budget(num_lanes * len(lane.tracks))
    for i, track in enumerate(lane.tracks):
        name = (track.name or lane.name) if lane.look is None else lane.name
        hover = f"{lane.name}: {track.name}" if lane.look and track.name and len(lane.tracks) > 1 else name
        look = look_of(i) if lane.look is None else (lane.look[0], tuple(LINES)[i % len(LINES)])
        xs = [at / scale for at in track.seconds]
        traces.append(curve(name, xs, track.values, look, limit=limit) | {"name": label(hover)} | axis)
    for level in sorted({track.limit for track in lane.tracks if track.limit}):
        ends = [xs / scale for xs in (0.0, max(track.seconds[-1] for track in lane.tracks))]
        dotted = {"color": MUTED, "width": 1, "dash": "dot"}
        traces.append(
            {"type": "scatter", "mode": "lines", "x": ends, "y": [level, level], "line": dotted, "hoverinfo": "skip",
             **axis}
        )  # fmt: skip
    return traces


def _shaded(spans: Sequence[Span]) -> list[str]:
    """The phases that are shaded: all but training, which is what a run is there for."""
    return [phase for phase in dict.fromkeys(span.phase for span in spans) if phase != "train"]


def _shade(phase: str, spans: Sequence[Span], scale: float, top: float) -> Trace:
    """One filled outline for all stretches of a phase."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for span in spans:
        if span.phase == phase:
            start, end = span.start / scale, span.end / scale
            xs += [start, start, end, end, None]
            ys += [0, top, top, 0, None]
    return {
        "type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": SHADES.get(phase, OTHER_SHADE),
        "line": {"width": 0}, "x": rounded(xs[:-1], 6), "y": ys[:-1], "name": label(phase), "meta": visible(phase),
        "hoverinfo": "skip",
    }  # fmt: skip


def step_bars(rows: Mapping[str, Mapping[str, float]], caption: str, *, wide: bool = True) -> Chart:
    """Stacked bars: mean seconds of a step by part, one bar per row, the first on top.

    Args:
        rows: name -> part -> seconds.
    """
    names = [label(name) for name in rows]
    present = [part for part in PARTS if any(row.get(part) for row in rows.values())]
    scale, unit = (1e3, "milliseconds") if all(sum(row.values()) < 2 for row in rows.values()) else (1.0, "seconds")
    traces = tuple(
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": names,
            "x": rounded([scale * row[part] if part in row else None for row in rows.values()]),
            "marker": {"color": PART_COLORS[part]},
            "hovertemplate": "%{x:.3~g}",
        }
        for part in present
    )
    look = layout(
        f"{unit} per step", "", height=150 + 30 * len(rows), barmode="stack", hovermode="y unified", bargap=0.35,
        xaxis={"showgrid": True, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False, "ticksuffix": "  "},
    )  # fmt: skip
    look["legend"] |= {"traceorder": "normal"}
    return Chart(caption, traces, look, wide=wide)
