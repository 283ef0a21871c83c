"""The charts of a page as files for a paper: SVG and PDF in a plain style, and their data as CSV.

In: a Page, whose charts are Plotly figures. Out: files in a folder, three of each chart. matplotlib draws them (extra
`paper`), because it needs no browser; it is imported when a chart is drawn.
"""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from importlib import import_module
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import numpy as np

from fivetune.errors import ConfigError
from fivetune.installation import require_package
from fivetune.reading.compare.variants import make_unique_name
from fivetune.reading.report.page.charts import COLORS, INK, MUTED
from fivetune.reading.report.page.parts import Chart, Page
from fivetune.reading.report.page.render import to_slug
from fivetune.reading.report.page.wording import name_invisible
from fivetune.rundir import write_bytes, write_text

TEXT_WIDTH, COLUMN_WIDTH = 6.5, 3.25  # inches: the text of a page, and one of two columns
PIXELS = 110  # of a page's chart, in an inch of a figure
POINT = 0.65  # points of a mark or line per pixel of the page's
INCH_CHARS = 18  # characters of a legend in an inch; an entry's sign takes 7
MAX_LEGEND = 12  # names; more hide the chart, as the lines of 40 trials
NAME_CHARS = 48
TITLE_CHARS = 20  # of a line of an axis's title
STYLE = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": False,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "text.parse_math": False,  # names of the data may hold dollar signs
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fivetune",  # equal charts give equal files
    "pdf.fonttype": 42,  # TrueType, which journals ask for
}
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
MARKERS = {
    "circle": "o",
    "diamond": "D",
    "square": "s",
    "triangle-up": "^",
    "x": "X",
    "line-ns": (2, 0),
}  # a polygon of two corners has a colour as the others

Axes = Any  # matplotlib's, which has no types of its own
Trace = Mapping[str, Any]
Values = Any  # an array of numbers, or a list of names


def write_figures(page: Page, folder: Path, *, warn: Callable[[str], object]) -> int:
    """Write each chart of a page to a folder, which is created: NAME.svg, NAME.pdf and NAME.csv.

    A name has the section and the first words of the caption. Charts are thinned and smoothed as on the page.

    Args:
        warn: called with a sentence on characters that the font of the PDF lacks.

    Returns the number of charts. Raises ConfigError for a page without charts, and FiveTuneEnvironmentError without
    matplotlib.
    """
    require_package("--figures", "matplotlib", "paper")
    charts = dict(iter_named_charts(page))
    if not charts:
        raise ConfigError(
            f"--figures {folder}: {page.title} has no chart with data, so there is nothing to draw. Omit --figures."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures {folder}: cannot be created: {error.strerror}. Give another folder.") from None
    lacking: set[str] = set()
    for name, chart in charts.items():
        write_text(folder / f"{name}.csv", build_chart_csv(chart))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for suffix, content in draw_chart(chart).items():
                write_bytes(folder / f"{name}.{suffix}", content)
        for one in caught:
            lacking.update(re.findall(r"Glyph (\d+)", str(one.message)))
    if lacking:
        shown = "".join(chr(int(code)) for code in sorted(lacking)[:10])
        warn(f"--figures {folder}: the PDF's font has no {shown}: boxes stand there. The SVG has them as text.")
    return len(charts)


def iter_named_charts(page: Page) -> Iterator[tuple[str, Chart]]:
    """Yield the charts that have data, each with the name of its files."""
    taken: set[str] = set()
    for section in page.sections:
        for part in section.parts:
            if not isinstance(part, Chart):
                continue
            values = [value for trace in part.data for value in trace.get("y", ())]
            if all(value is None for value in values):
                continue
            first = re.split(r"[.:;,(]", part.caption)[0]
            words = shorten(f"{section.title} {first}", NAME_CHARS, placeholder="")
            name = make_unique_name(to_slug(words), taken, template="{}-{}")
            taken.add(name)
            yield name, part


# --- data ---


def build_chart_csv(chart: Chart) -> str:
    """Build CSV of a chart: a row per point with its series, its place on both axes, and the ends of its intervals."""
    quantity = chart.layout.get("meta") or _find_title(chart.layout, "yaxis")
    header = ["series", _find_title(chart.layout, "xaxis"), quantity]
    bars = [letter for letter in "xy" if any(f"error_{letter}" in trace for trace in chart.data)]
    for letter in bars:
        header += [f"{letter} low", f"{letter} high"]
    rows: list[list[Any]] = [header]
    for trace in chart.data:
        name = _get_label(trace)
        if trace["type"] == "heatmap":  # the only trace of its chart
            header += ["number", "per cent"]
            for row, numbers, shares in zip(trace["y"], trace["text"], trace["z"], strict=True):
                for column, number, share in zip(trace["x"], numbers, shares, strict=True):
                    rows.append([name, column, row, number, share])
            continue
        for place, point in enumerate(zip(trace["x"], trace["y"], strict=True)):
            cells = [name, *point]
            for letter in bars:
                middle = point["xy".index(letter)]
                error = trace.get(f"error_{letter}")
                if error is None or middle is None:
                    cells += (None, None)
                else:
                    cells += (middle - error["arrayminus"][place], middle + error["array"][place])
            rows.append(cells)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _find_title(layout: Mapping[str, Any], start: str) -> str:
    """Return the title of an axis, or of the stacked axes that share its name; "name" without a title."""
    for name in sorted(layout):
        if name.startswith(start) and layout[name].get("title", {}).get("text"):
            return layout[name]["title"]["text"]
    return "name"


def _get_label(trace: Mapping[str, Any], *, shared: bool = False) -> str:
    """Return the name of a trace, or the name that it shares with others in a legend; "" without a name."""
    own = trace.get("name") or ""
    return str(trace.get("meta") or own if shared else own)


# --- drawing ---


def draw_chart(chart: Chart) -> dict[str, bytes]:
    """Draw a chart; returns the content of its SVG and of its PDF."""
    layout = chart.layout
    lanes = sorted((name for name in layout if name.startswith("yaxis")), key=lambda name: (len(name), name))
    is_stacked = len(lanes) > 1
    # Its own types are partial, so that strict checking takes it as untyped.
    matplotlib: Any = import_module("matplotlib")
    with matplotlib.rc_context(STYLE):
        size = (TEXT_WIDTH if chart.wide else COLUMN_WIDTH, layout["height"] / PIXELS)
        figure: Any = import_module("matplotlib.figure").Figure(size, layout="constrained")
        planes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)[:, 0]
        for place, (name, plane) in enumerate(zip(lanes, planes, strict=True)):
            ends: dict[Any, float] | None = {} if layout.get("barmode") == "stack" else None
            for trace in chart.data:
                if trace.get("yaxis", "y") == name.replace("axis", ""):
                    xs = _read_values(trace["x"], layout["xaxis"])
                    _draw_trace(plane, trace, xs, _read_values(trace["y"], layout[name]), ends)
            _set_axis(plane, "x", layout["xaxis"])
            _set_axis(plane, "y", layout[name])
            plane.label_outer()
            if is_stacked:  # the annotations are the names of the lanes
                plane.set_title(layout["annotations"][place]["text"], loc="left", fontsize=7, pad=2)
            else:
                _draw_shapes(plane, layout)
        if "meta" in layout:
            for plane in planes:
                plane.set_ylabel("")
            figure.supylabel(fill(layout["meta"], TITLE_CHARS), fontsize=STYLE["font.size"])
        _add_legend(figure, is_stacked=is_stacked)
        found: dict[str, bytes] = {}
        for suffix, date in (("svg", "Date"), ("pdf", "CreationDate")):
            content = io.BytesIO()
            # Without dates, equal charts give equal files.
            metadata = {date: None, "Title": chart.caption, "Creator": "FiveTune"}
            figure.savefig(content, format=suffix, metadata=metadata)
            found[suffix] = content.getvalue()
            figure.set_layout_engine("none")  # places are computed once, which takes half of the time
    return found


@cache
def _read_colors() -> dict[str, str]:
    """Read the colours of the page in its light form: var(--ink) -> #1b1f24."""
    style = files("fivetune.reading.report.page").joinpath("templates/style.css").read_text()
    colors: dict[str, str] = {}
    for name, color in re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", style):
        colors.setdefault(f"var({name})", color)  # the light form stands first
    return colors


def _find_color(color: str | Sequence[str] | None) -> Any:
    """Convert colours of the page, one or one per mark; the page's first colour where a trace names none."""
    colors = _read_colors()
    if isinstance(color, str) or color is None:
        return colors.get(color or COLORS[0], color)
    return [colors.get(one, one) for one in color]


def _read_values(values: Sequence[Any], axis: Mapping[str, Any]) -> Any:
    """Convert the values of an axis to numbers, NaN for gaps, or to names."""
    if axis.get("type") == "category" or any(isinstance(value, str) for value in values):
        return [str(value) for value in values]
    return np.array(values, dtype=float)


def _draw_trace(plane: Axes, trace: Trace, xs: Values, ys: Values, ends: dict[Any, float] | None) -> None:
    """Draw a line, marks, areas, bars or the cells of a matrix; `ends` has the ends of stacked bars so far."""
    if trace["type"] == "heatmap":
        _draw_matrix(plane, trace, xs, ys)
    elif trace["type"] == "bar":
        _draw_bars(plane, trace, xs, ys, {} if ends is None else ends)
    elif trace.get("fill"):
        _fill_areas(plane, trace, xs, ys)
    else:
        _draw_line(plane, trace, xs, ys)


def _draw_line(plane: Axes, trace: Trace, xs: Values, ys: Values) -> None:
    """Draw a line or marks, and their intervals."""
    for letter in "xy":
        error = trace.get(f"error_{letter}")
        if error:
            # Without an interval there are no caps either.
            sides = [[length or math.nan for length in error[side]] for side in ("arrayminus", "array")]
            look = {"fmt": "none", "ecolor": _find_color(error["color"]), "elinewidth": 0.9, "capsize": 2, "zorder": 2}
            plane.errorbar(xs, ys, **{f"{letter}err": sides}, **look)
    line = trace.get("line", {})
    mode = trace.get("mode", "lines")
    label = _get_label(trace, shared=True)
    device = _get_label(trace).removeprefix(f"{label}: ")
    if device != _get_label(trace):  # of several lines of a log, the dash tells the device: "slow: GPU 1"
        label = device
    marker = trace.get("marker", {})
    size = POINT * marker.get("size", 6)
    if "lines" in mode:
        plane.plot(
            xs,
            ys,
            color=_find_color(line.get("color")),
            linewidth=POINT * line.get("width", 2),
            linestyle=DASHES[line.get("dash", "solid")],
            drawstyle="steps-post" if line.get("shape") == "hv" else "default",
            alpha=trace.get("opacity"),
            label=label,
            marker="o" if "markers" in mode else None,
            markersize=size,
        )
        return
    color = _find_color(marker.get("color"))
    symbol = marker.get("symbol", "circle")
    face = "none" if symbol.endswith("-open") else color
    shape = MARKERS[symbol.removesuffix("-open")]
    plane.scatter(
        xs, ys, s=size**2, marker=shape, linewidths=1, zorder=3, label=label, edgecolors=color, facecolors=face
    )


def _fill_areas(plane: Axes, trace: Trace, xs: Values, ys: Values) -> None:
    """Fill the areas of a trace, between which stand gaps."""
    label = _get_label(trace)
    color = _find_color(trace["fillcolor"])
    for is_gap, points in groupby(zip(xs, ys, strict=True), key=lambda point: math.isnan(point[0])):
        if not is_gap:
            plane.fill(*zip(*points, strict=True), color=color, linewidth=0, label=label, zorder=0)
            label = ""  # one entry in the legend


def _draw_bars(plane: Axes, trace: Trace, xs: Values, ys: Values, ends: dict[Any, float]) -> None:
    """Draw bars, upright or lying; `ends` has the end of the bar of each row so far, where bars are stacked."""
    is_lying = trace.get("orientation") == "h"
    places, lengths = (ys, xs) if is_lying else (xs, ys)
    starts = [ends.get(place, 0.0) for place in places]
    ends |= {place: start + np.nan_to_num(length) for place, start, length in zip(places, starts, lengths, strict=True)}
    marker = trace["marker"]
    look = {"color": _find_color(marker["color"]), "alpha": marker.get("opacity"), "linewidth": 0}
    draw = plane.barh if is_lying else plane.bar
    draw(places, lengths, trace.get("width", 0.6), starts, label=_get_label(trace), **look)
    if "text" in trace and not is_lying:
        for place, length, text in zip(places, lengths, trace["text"], strict=True):
            plane.annotate(text, (place, length), ha="center", va="bottom", fontsize=6, color=_find_color(MUTED))


def _draw_matrix(plane: Axes, trace: Trace, columns: Values, rows: Values) -> None:
    """Draw a matrix of shares as colours, with its numbers as text."""
    scale = [_find_color(color) for _, color in trace["colorscale"]]
    colors = import_module("matplotlib.colors").LinearSegmentedColormap.from_list("page", scale)
    plane.imshow(trace["z"], cmap=colors, vmin=trace["zmin"], vmax=trace["zmax"], aspect="auto")
    plane.set_xticks(range(len(columns)), columns)
    plane.set_yticks(range(len(rows)), rows)
    for row, (numbers, shares) in enumerate(zip(trace["text"], trace["z"], strict=True)):
        for column, (number, share) in enumerate(zip(numbers, shares, strict=True)):
            color = "white" if share > 0.6 * trace["zmax"] else _find_color(INK)
            plane.text(column, row, f"{number:,}", ha="center", va="center", fontsize=7, color=color)


def _set_axis(plane: Axes, letter: str, axis: Mapping[str, Any]) -> None:
    """Give an axis of a plot its title, scale and range."""
    own = getattr(plane, f"{letter}axis")
    set_range = getattr(plane, f"set_{letter}lim")
    own.set_label_text(axis.get("title", {}).get("text", ""))
    own.grid(bool(axis.get("showgrid", letter == "y")))
    is_log = axis.get("type") == "log"
    if is_log:
        plane.set(**{f"{letter}scale": "log"})
        # Plain numbers: matplotlib's usual powers of ten are formulas, which no text is read as here.
        low, high = own.get_data_interval()
        if high < 200 * low:  # powers of ten alone would be one or two
            own.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
        own.set_major_formatter("{x:g}")
        own.set_minor_formatter("")
    if own.have_units():  # names
        set_range(-0.5, round(own.get_data_interval()[1]) + 0.5)
    if "nticks" in axis:
        plane.locator_params(letter, nbins=axis["nticks"])
    if "range" in axis:
        set_range(10.0 ** np.array(axis["range"]) if is_log else axis["range"])
    elif axis.get("rangemode") == "tozero":
        low, high = own.get_view_interval()
        set_range(low if low < -0.2 * high else 0, high)
    if axis.get("autorange") == "reversed":
        own.set_inverted(True)


def _draw_shapes(plane: Axes, layout: Mapping[str, Any]) -> None:
    """Draw the lines across a plot, and its notes."""
    look = {"color": _find_color(MUTED), "linewidth": 0.7, "zorder": 1}
    for shape in layout.get("shapes", ()):
        dash = DASHES[shape["line"]["dash"]]
        if shape["yref"] == "paper":
            plane.axvline(shape["x0"], linestyle=dash, **look)
        else:
            plane.axhline(shape["y0"], linestyle=dash, **look)
    for note in layout.get("annotations", ()):
        frames = ["axes fraction" if note[f"{letter}ref"] == "paper" else "data" for letter in "xy"]
        plane.annotate(
            f" {note['text']} ",
            (note["x"], note["y"]),
            xycoords=tuple(frames),
            ha=note.get("xanchor", "left"),
            va=note.get("yanchor", "bottom"),
            fontsize=7,
            color=look["color"],
        )


def _add_legend(figure: Any, *, is_stacked: bool) -> None:
    """Add a legend above the plot, unless it has one name or too many.

    The title of a stacked plot names its log; the legend has the shaded phases, and the dashes of several devices.
    """
    entries: dict[str, Any] = {}
    for plane in figure.axes:
        title = plane.get_title("left")
        for handle, label in zip(*plane.get_legend_handles_labels(), strict=True):
            if is_stacked and type(handle).__name__ == "Line2D":
                if label.startswith(title):
                    continue
                handle = copy(handle)  # the dash is the same in all logs, the colour is not
                handle.set_color(_find_color(INK))
            entries.setdefault(name_invisible(label), handle)
    if 2 - is_stacked <= len(entries) <= MAX_LEGEND:
        longest = max(map(len, entries))
        columns = max(1, int(INCH_CHARS * figure.get_figwidth() / (longest + 7)))
        figure.legend(entries.values(), entries, loc="outside upper left", ncols=min(columns, len(entries)))
