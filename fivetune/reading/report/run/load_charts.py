"""Charts over the time of a run: a lane per run with its phases shaded, and the section on load.

In: Tracks and PhaseIntervals. Out: Charts, and a Section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fivetune.reading.report.page.charts import COLORS, DASHES, INK, MUTED, Trace, build_layout, escape_label
from fivetune.reading.report.page.parts import Chart, Part, Section, Table, Text
from fivetune.reading.report.page.series import MAX_POINTS, Series, compute_quantile, thin_points
from fivetune.reading.report.page.wording import escape_hidden, format_count, format_percent, format_significant
from fivetune.reading.report.run.load import DEVICE_GAUGES, HOST_GAUGES, Gauge, Load, PhaseInterval, Track
from fivetune.rundir.records import Run
from fivetune.values import select_finite

IDLE_PERCENT = 10.0  # utilisation in per cent below which a device is idle
LANE, SMALL_LANE, FRAME = 200, 66, 84
NAME = 0.27  # share of a small lane that its name takes
LINE_STYLES = {"solid": "solid", "dash": "dashed", "dashdot": "dash and dot", "longdash": "long dashes"}
SHADES = {"prepare": "var(--shade-1)", "evaluate": "var(--shade-2)", "checkpoint": "var(--shade-3)"}
OTHER_SHADE = "var(--shade-4)"
UNITS = ((5400.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True, slots=True)
class Lane:
    """The series and phases of one run in a chart.

    `line_style` is the colour and dash of all its lines; without one every series has its own.
    """

    name: str
    tracks: Sequence[Track]
    phase_intervals: Sequence[PhaseInterval] = field(default_factory=tuple)
    line_style: tuple[str, str] | None = None


def choose_line_style(place: int) -> tuple[str, str]:
    """Colour and dash of the place-th of many lines; equal in all charts of a page."""
    return COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]


def compute_point_budget(num_series: int) -> int:
    """Compute the maximum number of points of each of `num_series` series, to limit the size of a page."""
    return max(150, min(MAX_POINTS, 9000 // max(num_series, 1)))


def round_values(values: Sequence[float | None], digits: int = 4) -> Series:
    """Round values to the resolution of a chart, to limit the size of a page."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def build_curve_trace(
    name: str, xs: Sequence[float], ys: Series, line_style: tuple[str, str], *, limit: int, **more: Any
) -> Trace:
    """A line without markers (with them below three points) named `name`; gaps stay gaps."""
    at, values = thin_points(xs, ys, limit=limit)
    lone = len(select_finite(ys)) < 3
    return {
        "type": "scatter",
        "mode": "lines+markers" if lone else "lines",
        "name": escape_label(name),
        "meta": escape_hidden(name),
        "x": round_values(at, 6),
        "y": round_values(values),
        "line": {"color": line_style[0], "dash": line_style[1], "width": 1.6},
        "marker": {"color": line_style[0], "size": 6},
        "connectgaps": False,
        "hovertemplate": "%{y:.4~g}",
        **more,
    }


def describe_line_styles(lanes: Sequence[Lane]) -> str:
    """The dash of each series, where lanes hold several: "Solid: GPU 0; dashed: GPU 1."."""
    names = max(([track.name for track in lane.tracks] for lane in lanes), key=len, default=list[str]())
    listed = "; ".join(f"{line}: {name}" for line, name in zip(LINE_STYLES.values(), names, strict=False))
    return f" {listed[0].upper()}{listed[1:]}." if len(names) > 1 else ""


def choose_time_unit(lanes: Sequence[Lane]) -> tuple[float, str]:
    """Seconds per unit of the time axis, and its name."""
    longest = max((at for lane in lanes for track in lane.tracks for at in track.seconds[-1:]), default=0.0)
    return next((seconds, name) for least, seconds, name in UNITS if longest >= least)


def draw_lanes_chart(gauge: Gauge, lanes: Sequence[Lane], caption: str, *, wide: bool, group: str) -> Chart:
    """A lane per run, one below the other on the same time axis and scale, its phases shaded.

    The lines of one run in a gauge of several quantities (read, written) have a legend of their own in the chart;
    all other entries are in the legend that the charts of a group share (`meta` of their traces).
    """
    scale, unit = choose_time_unit(lanes)
    top = _compute_axis_top(gauge, lanes)
    traces = [
        trace for place, lane in enumerate(lanes) for trace in _build_lane_traces(lane, place, scale, top, len(lanes))
    ]
    several = len(lanes) > 1
    own_legend = not several and len(gauge.fields) > 1 and len(lanes[0].tracks) > 1
    if own_legend:
        traces = [_list_in_own_legend(trace) for trace in traces]
    height = FRAME + (len(lanes) * SMALL_LANE if several else LANE)
    look = build_layout(unit, gauge.unit, height=height, showlegend=own_legend, hoversubplots="axis")
    look["yaxis"] |= {"range": [0, top], "domain": [0, 1]}
    if several:
        look["margin"] |= {"t": 4}
        look |= _build_stacked_axes(lanes, look["yaxis"], gauge.unit)
        look["xaxis"] |= {"anchor": "y" + _format_axis_suffix(len(lanes) - 1)}
    return Chart(caption, tuple(traces), look, wide=wide, group=group)


def _list_in_own_legend(trace: Trace) -> Trace:
    """Move a series from the shared legend to that of its chart; phases and limits stay in the shared one."""
    if trace.get("fill") or "meta" not in trace:
        return {**trace, "showlegend": False}
    return {key: value for key, value in trace.items() if key != "meta"}


def _compute_axis_top(gauge: Gauge, lanes: Sequence[Lane]) -> float:
    if gauge.unit == "%":
        return 105.0
    highest = [
        value for lane in lanes for track in lane.tracks for value in (*select_finite(track.values), track.limit or 0.0)
    ]
    return 1.08 * max(highest, default=0.0) or 1.0


def _format_axis_suffix(place: int) -> str:
    return "" if place == 0 else str(place + 1)


def _build_stacked_axes(lanes: Sequence[Lane], axis: dict[str, Any], unit: str) -> dict[str, Any]:
    """The axes of the lanes from the top down, each with its run's name in the upper left corner."""
    share = 1 / len(lanes)
    axes: dict[str, Any] = {}
    names: list[dict[str, Any]] = []
    for place, lane in enumerate(lanes):
        top = 1 - place * share
        title = axis["title"] | {"text": unit if place == len(lanes) // 2 else ""}
        axes["yaxis" + _format_axis_suffix(place)] = axis | {
            "domain": [top - share, top - NAME * share],
            "nticks": 3,
            "title": title,
        }
        names.append(
            {
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": top - NAME * share,
                "xanchor": "left",
                "yanchor": "bottom",
                "text": escape_label(lane.name[:60]),
                "showarrow": False,
                "font": {"size": 11, "color": INK},
            }
        )
    return axes | {"annotations": names}


def _build_lane_traces(lane: Lane, place: int, scale: float, top: float, num_lanes: int) -> list[Trace]:
    axis = {"yaxis": "y" + _format_axis_suffix(place)}
    traces: list[Trace] = [
        _build_shade_trace(phase, lane.phase_intervals, scale, top) | axis
        for phase in _list_shaded_phases(lane.phase_intervals)
    ]
    limit = compute_point_budget(num_lanes * len(lane.tracks))
    for i, track in enumerate(lane.tracks):
        name = (track.name or lane.name) if lane.line_style is None else lane.name
        hover = f"{lane.name}: {track.name}" if lane.line_style and track.name and len(lane.tracks) > 1 else name
        look = (
            choose_line_style(i)
            if lane.line_style is None
            else (lane.line_style[0], tuple(LINE_STYLES)[i % len(LINE_STYLES)])
        )
        xs = [at / scale for at in track.seconds]
        traces.append(
            build_curve_trace(name, xs, track.values, look, limit=limit) | {"name": escape_label(hover)} | axis
        )
    for level in sorted({track.limit for track in lane.tracks if track.limit}):
        ends = [xs / scale for xs in (0.0, max(track.seconds[-1] for track in lane.tracks))]
        dotted = {"color": MUTED, "width": 1, "dash": "dot"}
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": ends,
                "y": [level, level],
                "line": dotted,
                "hoverinfo": "skip",
                **axis,
            }
        )
    return traces


def _list_shaded_phases(spans: Sequence[PhaseInterval]) -> list[str]:
    """The phases that are shaded: all but training, the normal state of a run."""
    return [phase for phase in dict.fromkeys(span.phase for span in spans) if phase != "train"]


def _build_shade_trace(phase: str, spans: Sequence[PhaseInterval], scale: float, top: float) -> Trace:
    """One filled outline for all intervals of a phase."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for span in spans:
        if span.phase == phase:
            start, end = span.start / scale, span.end / scale
            xs += [start, start, end, end, None]
            ys += [0, top, top, 0, None]
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "fillcolor": SHADES.get(phase, OTHER_SHADE),
        "line": {"width": 0},
        "x": round_values(xs[:-1], 6),
        "y": ys[:-1],
        "name": escape_label(phase),
        "meta": escape_hidden(phase),
        "hoverinfo": "skip",
    }


def build_run_load_section(run: Run) -> Section:
    """Utilisation, memory, temperature, power and traffic over the time of the run, with its phases shaded."""
    load = Load(run.telemetry)
    parts: list[Part] = []
    for heading, gauges in (("Devices", DEVICE_GAUGES), ("Hosts", HOST_GAUGES)):
        found = [(gauge, tracks) for gauge in gauges if (tracks := load.build_tracks(gauge))]
        if not found:
            continue
        parts.append(Text(heading, "heading"))
        empty: list[str] = []
        for gauge, tracks in found:
            drawn = [track for track in tracks if not _is_zero(gauge, track)]
            if drawn:
                parts.append(_draw_gauge_chart(gauge, drawn, load))
            names = [track.name for track in tracks if _is_zero(gauge, track)]
            empty += names if drawn else [gauge.title] if names else []
        if empty:
            parts.append(Text(f"Zero in every sample: {', '.join(name[:1].lower() + name[1:] for name in empty)}."))
        parts.append(_build_load_table(found))
    return Section("Load", tuple(parts))


def _is_zero(gauge: Gauge, track: Track) -> bool:
    """Whether a series is zero throughout; series in per cent never count, because an idle device is a finding."""
    return gauge.unit != "%" and not any(track.values)


def _draw_gauge_chart(gauge: Gauge, tracks: Sequence[Track], load: Load) -> Part:
    caption = f"{gauge.title}. {gauge.description}"
    return draw_lanes_chart(
        gauge, [Lane("run", tracks, load.list_phase_intervals())], caption, wide=False, group="load"
    )


def _build_load_table(found: Sequence[tuple[Gauge, Sequence[Track]]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for gauge, tracks in found:
        for track in tracks:
            values = select_finite(track.values)
            marks = (fmean(values), compute_quantile(values, 0.05), compute_quantile(values, 0.95), max(values))
            idle = sum(value < IDLE_PERCENT for value in values) / len(values) if gauge.unit == "%" else None
            name = f"{gauge.title} ({gauge.unit}){': ' if track.name else ''}{track.name}"
            rows.append(
                (name, *(format_significant(mark) for mark in marks), format_percent(idle), format_count(len(values)))
            )
    header = ("what", "mean", "p5", "p95", "highest", f"below {IDLE_PERCENT:.0f} %", "samples")
    caption = "The numbers of the charts: 5 % of the samples lie below p5, 95 % below p95. (telemetry.jsonl)"
    return Table(caption, header, tuple(rows), folded=True)
