"""Charts over the time of a run: a lane per run with its phases shaded, and the section on load.

In: Tracks and PhaseIntervals. Out: Charts, and a Section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fivetune.reading.report.page.charts import (
    COLORS,
    DASHES,
    HIDDEN,
    INK,
    MUTED,
    Trace,
    build_chart,
    build_line_trace,
    round_values,
)
from fivetune.reading.report.page.parts import Chart, Part, Section, Table, Text, build_section
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
    """Choose colour and dash of the place-th of many lines; equal in all charts of a page."""
    return COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]


def compute_point_budget(num_series: int) -> int:
    """Compute the maximum number of points of each of `num_series` series, to limit the size of a page."""
    return max(150, min(MAX_POINTS, 9000 // max(num_series, 1)))


def build_curve_trace(name: str, xs: Sequence[float], ys: Series, line_style: tuple[str, str], *, limit: int) -> Trace:
    """Build a line without markers (with them below three points) named `name`; gaps stay gaps."""
    at, values = thin_points(xs, ys, limit=limit)
    color, dash = line_style
    return build_line_trace(
        name,
        [float(f"{x:.6g}") for x in at],
        round_values(values),
        color,
        line={"dash": dash, "width": 1.6},
        mode="lines" if len(select_finite(ys)) >= 3 else "lines+markers",
        meta=escape_hidden(name),
    )


def describe_line_styles(lanes: Sequence[Lane]) -> str:
    """Describe the dash of each series, where lanes hold several: "Solid: GPU 0; dashed: GPU 1."."""
    most: Sequence[Track] = ()
    for lane in lanes:
        if len(lane.tracks) > len(most):
            most = lane.tracks
    if len(most) < 2:
        return ""
    listed = "; ".join(f"{line}: {track.name}" for line, track in zip(LINE_STYLES.values(), most, strict=False))
    return f" {listed[0].upper()}{listed[1:]}."


def draw_lanes_chart(gauge: Gauge, lanes: Sequence[Lane], caption: str, *, wide: bool) -> Chart:
    """Draw a lane per run, one below the other on the same time axis and scale, its phases shaded.

    The lines of one run in a gauge of several quantities (read, written) have a legend of their own in the chart;
    all other entries are in the legend that all charts of load share (`meta` of their traces).
    """
    tracks = [track for lane in lanes for track in lane.tracks]
    longest = highest = 0.0
    for track in tracks:
        longest = max(longest, track.seconds[-1])
        highest = max(highest, track.limit or 0.0, *select_finite(track.values))
    scale, unit = next((seconds, name) for least, seconds, name in UNITS if longest >= least)
    top = 1.08 * highest or 1.0
    if gauge.unit == "%":
        top = 105.0
    num = len(lanes)
    traces: list[Trace] = []
    for place, lane in enumerate(lanes):
        for trace in _build_lane_traces(lane, scale, top, num):
            traces.append({**trace, "yaxis": _name_axis("y", place)})
    own_legend = num == 1 and len(gauge.fields) > 1 and len(tracks) > 1
    if own_legend:
        for trace in traces:  # phases and limits stay in the shared legend
            if "meta" in trace and not trace.get("fill"):
                del trace["meta"]
            else:
                trace["showlegend"] = False
    height = FRAME + (num * SMALL_LANE if num > 1 else LANE)
    chart = build_chart(
        caption,
        traces,
        unit,
        gauge.unit,
        wide=wide,
        group="load",
        height=height,
        showlegend=own_legend,
        yaxis={"range": [0, top], "domain": [0, 1]},
        meta=f"{gauge.title} ({gauge.unit})",  # the axis of a figure, which has no caption; too long for a lane
    )
    if num > 1:
        _stack_lanes(chart.layout, lanes, gauge.unit)
    return chart


def iter_lanes_charts(
    named_loads: Sequence[tuple[str, Load | None]], gauges: Sequence[Gauge], what: str
) -> Iterator[Chart]:
    """Yield a chart of each gauge that any run has, with a lane per run.

    Args:
        named_loads: name and load of each run, which has one colour in all charts.
        what: the runs that are drawn, for the caption.
    """
    for gauge in gauges:
        lanes: list[Lane] = []
        for place, (name, load) in enumerate(named_loads):
            tracks = load.build_tracks(gauge) if load else ()
            if load and tracks:
                lanes.append(Lane(name, tracks, load.list_phase_intervals(), choose_line_style(place)))
        if lanes:
            caption = f"{gauge.title}, {what}. {gauge.description}{describe_line_styles(lanes)}"
            yield draw_lanes_chart(gauge, lanes, caption, wide=True)


def list_used_values(load: Load, gauge: Gauge, word: str) -> list[float]:
    """List all known values of a quantity over the devices that a run used."""
    values: list[float] = []
    for track in load.build_tracks(gauge):
        if track.quantity == word and track.used:
            values += select_finite(track.values)
    return values


def _name_axis(letter: str, place: int) -> str:
    """Name an axis as Plotly does: y, y2, y3."""
    return f"{letter}{place + 1}" if place else letter


def _stack_lanes(look: dict[str, Any], lanes: Sequence[Lane], unit: str) -> None:
    """Give a layout an axis per lane, from the top down, each with its run's name in the upper left corner."""
    share = 1 / len(lanes)
    names: list[Trace] = []
    for place, lane in enumerate(lanes):
        top = 1 - place * share
        title = {"text": unit if place == len(lanes) // 2 else ""}
        domain = [max(0.0, top - share), top - NAME * share]
        look[_name_axis("yaxis", place)] = {**look["yaxis"], "domain": domain, "nticks": 3, "title": title}
        names.append(
            {
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": domain[1],
                "text": escape_hidden(lane.name[:60]),
                "font": {"color": INK},
            }
        )
    look["annotations"] = names


def _build_lane_traces(lane: Lane, scale: float, top: float, num_lanes: int) -> list[Trace]:
    """Build the shaded phases of a lane, its lines, and a dotted line for each limit."""
    traces: list[Trace] = []
    # Training is the normal state of a run, and not shaded; one filled outline stands for all intervals of a phase.
    outlines: dict[str, tuple[Series, Series]] = {}
    for span in lane.phase_intervals:
        if span.phase != "train":
            xs, ys = outlines.setdefault(span.phase, ([], []))
            start, end = span.start / scale, span.end / scale
            xs += [start, start, end, end, None]
            ys += [0, top, top, 0, None]
    for phase, (xs, ys) in outlines.items():
        traces.append(
            {
                **HIDDEN,
                "fill": "toself",
                "fillcolor": SHADES.get(phase, OTHER_SHADE),
                "line": {"width": 0},
                "name": escape_hidden(phase),
                "meta": escape_hidden(phase),
                "x": round_values(xs[:-1], 6),
                "y": ys[:-1],
            }
        )
    limit = compute_point_budget(num_lanes * len(lane.tracks))
    for i, track in enumerate(lane.tracks):
        times = [at / scale for at in track.seconds]
        if lane.line_style is None:
            name = track.name or lane.name
            traces.append(build_curve_trace(name, times, track.values, choose_line_style(i), limit=limit))
            continue
        style = lane.line_style[0], tuple(LINE_STYLES)[i % len(LINE_STYLES)]
        curve = build_curve_trace(lane.name, times, track.values, style, limit=limit)
        if track.name and len(lane.tracks) > 1:
            curve["name"] = escape_hidden(f"{lane.name}: {track.name}")
        traces.append(curve)
    for level in sorted({track.limit for track in lane.tracks if track.limit}):
        end = max(track.seconds[-1] for track in lane.tracks) / scale
        dotted = {"color": MUTED, "width": 1, "dash": "dot"}
        traces.append({**HIDDEN, "x": [0.0, end], "y": [level, level], "line": dotted})
    return traces


def build_run_load_section(run: Run) -> Section:
    """Build the section on devices and hosts over the time of the run, with its phases shaded."""
    load = Load(run.telemetry)
    phases = load.list_phase_intervals()
    parts: list[Part] = []
    for heading, gauges in (("Devices", DEVICE_GAUGES), ("Hosts", HOST_GAUGES)):
        found: list[tuple[Gauge, Sequence[Track]]] = []
        for gauge in gauges:
            tracks = load.build_tracks(gauge)
            if tracks:
                found.append((gauge, tracks))
        if not found:
            continue
        parts.append(Text(heading, "heading"))
        empty: list[str] = []
        for gauge, tracks in found:
            # Series in per cent are drawn in any case, because an idle device is a finding.
            drawn = [track for track in tracks if gauge.unit == "%" or any(track.values)]
            if drawn:
                caption = f"{gauge.title}. {gauge.description}"
                parts.append(draw_lanes_chart(gauge, [Lane("run", drawn, phases)], caption, wide=False))
                empty += [track.name for track in tracks if track not in drawn]
            else:
                empty.append(gauge.title)
        if empty:
            parts.append(Text(f"Zero in every sample: {', '.join(name[:1].lower() + name[1:] for name in empty)}."))
        parts.append(_build_load_table(found))
    return build_section("Load", parts)


def _build_load_table(found: Sequence[tuple[Gauge, Sequence[Track]]]) -> Table:
    rows: list[Sequence[str]] = []
    for gauge, tracks in found:
        for track in tracks:
            values = select_finite(track.values)
            marks = (fmean(values), compute_quantile(values, 0.05), compute_quantile(values, 0.95), max(values))
            idle = fmean(value < IDLE_PERCENT for value in values) if gauge.unit == "%" else None
            name = f"{gauge.title} ({gauge.unit})"
            if track.name:
                name += f": {track.name}"
            rows.append((name, *map(format_significant, marks), format_percent(idle), format_count(len(values))))
    header = ("what", "mean", "p5", "p95", "highest", f"below {IDLE_PERCENT:.0f} %", "samples")
    caption = "The numbers of the charts: 5 % of the samples lie below p5, 95 % below p95. (telemetry.jsonl)"
    return Table(caption, header, rows, folded=True)
