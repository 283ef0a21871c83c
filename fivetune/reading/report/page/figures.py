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
from functools import cache
from html import unescape
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.installation import name_install
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
MARKERS = {"circle": "o", "diamond": "D", "square": "s", "triangle-up": "^", "x": "X", "line-ns": "|"}

Axes = Any  # matplotlib's, which has no types of its own


def write_figures(page: Page, folder: Path, *, warn: Callable[[str], object]) -> int:
    """Write each chart of a page to a folder, which is created: NAME.svg, NAME.pdf and NAME.csv.

    A name has the section and the first words of the caption. Charts are thinned and smoothed as on the page.

    Args:
        warn: called with a sentence on characters that the font of the PDF lacks.

    Returns the number of charts. Raises ConfigError for a page without charts, and FiveTuneEnvironmentError without
    matplotlib.
    """
    require_matplotlib()
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


def require_matplotlib() -> None:
    """Raise FiveTuneEnvironmentError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise FiveTuneEnvironmentError(
            f"--figures: the package matplotlib is not installed. Install it: {name_install('paper')}"
        )


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
            name = to_slug(f"{section.title} {first}")
            if len(name) > NAME_CHARS:  # cut between words
                name = name[:NAME_CHARS].rpartition("-")[0]
            name = make_unique_name(name, taken, template="{}-{}")
            taken.add(name)
            yield name, part


# --- data ---


def build_chart_csv(chart: Chart) -> str:
    """Build CSV of a chart: a row per point with its series, its place on both axes, and the ends of its intervals."""
    layout = chart.layout
    x = _name_axis_title(layout, "xaxis") or "name"
    y = _name_axis_title(layout, "yaxis") or "name"
    header = ["series", x, y if y != x else f"{y} 2"]
    bars = [letter for letter in "xy" if any(f"error_{letter}" in trace for trace in chart.data)]
    for letter in bars:
        header += [f"{letter} low", f"{letter} high"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    is_grid = any(trace["type"] == "heatmap" for trace in chart.data)
    writer.writerow([*header, "number", "per cent"] if is_grid else header)
    for trace in chart.data:
        name = _get_label(trace)
        if is_grid:
            for row, numbers, shares in zip(trace["y"], trace["text"], trace["z"], strict=True):
                for column, number, share in zip(trace["x"], numbers, shares, strict=True):
                    writer.writerow([name, unescape(column), unescape(row), number, share])
            continue
        for place, (at, value) in enumerate(zip(trace["x"], trace["y"], strict=True)):
            cells = [name, *(unescape(one) if isinstance(one, str) else one for one in (at, value))]
            for letter, middle in zip("xy", (at, value), strict=True):
                if letter in bars:
                    error = trace.get(f"error_{letter}")
                    if error is None or middle is None:
                        cells += (None, None)
                    else:
                        cells += (middle - error["arrayminus"][place], middle + error["array"][place])
            writer.writerow(cells)
    return text.getvalue()


def _name_axis_title(layout: Mapping[str, Any], start: str) -> str:
    """Return the title of an axis, or of the stacked axes that share its name; "" without a title."""
    for name in sorted(layout):
        if name.startswith(start):
            title = layout[name].get("title", {}).get("text")
            if title:
                return unescape(title)
    return ""


def _get_label(trace: Mapping[str, Any], *, shared: bool = False) -> str:
    """Return the name of a trace, or the name that it shares with others in a legend; "" without a name."""
    own = trace.get("name") or ""
    return unescape(str(trace.get("meta") or own if shared else own))


# --- drawing ---


def draw_chart(chart: Chart) -> dict[str, bytes]:
    """Draw a chart; returns the content of its SVG and of its PDF."""
    layout = chart.layout
    lanes = sorted((name for name in layout if name.startswith("yaxis")), key=lambda name: (len(name), name))
    width = TEXT_WIDTH if chart.wide else COLUMN_WIDTH
    # Its own types are partial, so that strict checking takes it as untyped.
    matplotlib: Any = import_module("matplotlib")
    with matplotlib.rc_context(STYLE):
        figure: Any = import_module("matplotlib.figure").Figure(
            figsize=(width, layout["height"] / PIXELS), layout="constrained"
        )
        grid = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)
        planes = dict(zip(lanes, grid[:, 0], strict=True))
        for name, plane in planes.items():
            own = "y" + name.removeprefix("yaxis")
            traces = [trace for trace in chart.data if trace.get("yaxis", "y") == own]
            columns = _number_names(traces, "x", layout["xaxis"])
            rows = _number_names(traces, "y", layout[name])
            _draw_traces(plane, traces, columns, rows, is_stacked=layout.get("barmode") == "stack")
            _set_axis(plane, "x", layout["xaxis"], columns, is_titled=name == lanes[-1])
            _set_axis(plane, "y", layout[name], rows, is_titled=True)
        if len(lanes) > 1:  # the annotations are the names of the lanes
            for plane, note in zip(planes.values(), layout["annotations"], strict=True):
                plane.set_title(unescape(note["text"]), loc="left", fontsize=7, pad=2)
        else:
            _draw_shapes(planes["yaxis"], layout)
        _add_legend(figure, list(planes.values()), is_stacked=len(lanes) > 1)
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


def _number_names(traces: Sequence[Mapping[str, Any]], letter: str, axis: Mapping[str, Any]) -> dict[str, int]:
    """Number the names of an axis in the order in which they come; {} for an axis of numbers."""
    names: dict[str, int] = {}
    for trace in traces:
        for value in trace[letter]:
            if isinstance(value, str) or axis.get("type") == "category":
                names.setdefault(unescape(str(value)), len(names))
    return names


def _compute_places(values: Sequence[Any], names: Mapping[str, int]) -> list[float]:
    """Convert values of an axis to places; a name is at its number."""
    places: list[float] = []
    for value in values:
        at = names.get(unescape(str(value)), value) if names else value
        places.append(math.nan if at is None else float(at))
    return places


def _draw_traces(
    plane: Axes,
    traces: Sequence[Mapping[str, Any]],
    columns: Mapping[str, int],
    rows: Mapping[str, int],
    *,
    is_stacked: bool,
) -> None:
    """Draw lines, marks, areas, bars and the cells of a matrix; `columns` and `rows` are the names of the axes."""
    ends: dict[float, float] = {}  # of stacked bars
    for trace in traces:
        xs = _compute_places(trace["x"], columns)
        ys = _compute_places(trace["y"], rows)
        if trace["type"] == "heatmap":
            _draw_matrix(plane, trace)
        elif trace["type"] == "bar":
            _draw_bars(plane, trace, xs, ys, ends if is_stacked else {})
        elif trace.get("fill"):
            _fill_areas(plane, trace, xs, ys)
        else:
            _draw_line(plane, trace, xs, ys)


def _draw_line(plane: Axes, trace: Mapping[str, Any], xs: list[float], ys: list[float]) -> None:
    line = trace.get("line", {})
    mode = trace.get("mode", "lines")
    label = _get_label(trace, shared=True)
    marker = trace.get("marker", {})
    color = _find_color(marker.get("color") if mode == "markers" else line.get("color"))
    for letter in "xy":
        error = trace.get(f"error_{letter}")
        if error:
            sides: list[list[float]] = []
            for side in ("arrayminus", "array"):  # without an interval there are no caps either
                sides.append([length or math.nan for length in error[side]])
            look = {"fmt": "none", "ecolor": _find_color(error["color"]), "elinewidth": 0.9, "capsize": 2, "zorder": 2}
            plane.errorbar(xs, ys, **{f"{letter}err": sides}, **look)
    if "lines" in mode:
        plane.plot(
            xs,
            ys,
            color=color,
            linewidth=POINT * line.get("width", 2),
            linestyle=DASHES.get(line.get("dash"), "-"),
            drawstyle="steps-post" if line.get("shape") == "hv" else "default",
            alpha=trace.get("opacity"),
            label=label,
            marker="o" if "markers" in mode else None,
            markersize=POINT * marker.get("size", 6),
        )
        return
    symbol = str(marker.get("symbol", "circle"))
    is_open = symbol.endswith("-open")
    shape = MARKERS.get(symbol.removesuffix("-open"), "o")
    look = {"edgecolors": color, "facecolors": "none" if is_open else color}
    if shape == "|":  # it has no face
        look = {"c": color}
    size = POINT * marker.get("size", 6)
    plane.scatter(xs, ys, s=size**2, marker=shape, linewidths=1, zorder=3, label=label, **look)


def _fill_areas(plane: Axes, trace: Mapping[str, Any], xs: list[float], ys: list[float]) -> None:
    """Fill the areas of a trace, between which stand gaps."""
    label = _get_label(trace)
    points = zip(xs, ys, strict=True)
    for is_gap, group in groupby(points, key=lambda point: math.isnan(point[0])):
        if not is_gap:
            area = list(group)
            plane.fill(
                *zip(*area, strict=True), color=_find_color(trace["fillcolor"]), linewidth=0, label=label, zorder=0
            )
            label = ""  # one entry in the legend


def _draw_bars(
    plane: Axes, trace: Mapping[str, Any], xs: list[float], ys: list[float], ends: dict[float, float]
) -> None:
    """Draw bars, upright or lying; `ends` has the end of the bar of each row so far, where bars are stacked."""
    marker = trace.get("marker", {})
    is_lying = trace.get("orientation") == "h"
    places, lengths = (ys, xs) if is_lying else (xs, ys)
    starts: list[float] = []
    for place, length in zip(places, lengths, strict=True):
        start = ends.get(place, 0.0)
        starts.append(start)
        ends[place] = start + (0.0 if math.isnan(length) else length)
    widths = trace.get("width", 0.6)
    look = {"color": _find_color(marker.get("color")), "alpha": marker.get("opacity"), "linewidth": 0}
    look["label"] = _get_label(trace)
    if is_lying:
        plane.barh(places, lengths, widths, left=starts, **look)
    else:
        plane.bar(places, lengths, widths, bottom=starts, **look)
        for place, length, text in zip(places, lengths, trace.get("text", ()), strict=False):
            plane.annotate(text, (place, length), ha="center", va="bottom", fontsize=6, color=_find_color(MUTED))


def _draw_matrix(plane: Axes, trace: Mapping[str, Any]) -> None:
    """Draw a matrix of shares as colours, with its numbers as text."""
    scale = [_find_color(color) for _, color in trace["colorscale"]]
    colors = import_module("matplotlib.colors").LinearSegmentedColormap.from_list("page", scale)
    plane.imshow(trace["z"], cmap=colors, vmin=trace["zmin"], vmax=trace["zmax"], aspect="auto")
    for row, (numbers, shares) in enumerate(zip(trace["text"], trace["z"], strict=True)):
        for column, (number, share) in enumerate(zip(numbers, shares, strict=True)):
            color = "white" if share > 0.6 * trace["zmax"] else _find_color(INK)
            plane.text(column, row, f"{number:,}", ha="center", va="center", fontsize=7, color=color)


def _set_axis(plane: Axes, letter: str, axis: Mapping[str, Any], names: Mapping[str, int], *, is_titled: bool) -> None:
    """Give an axis of a plot its title, scale, names and range."""
    own = plane.xaxis if letter == "x" else plane.yaxis
    set_range = plane.set_xlim if letter == "x" else plane.set_ylim
    if is_titled:
        own.set_label_text(unescape(axis.get("title", {}).get("text", "")))
    is_log = axis.get("type") == "log"
    if is_log:
        (plane.set_xscale if letter == "x" else plane.set_yscale)("log")
        # Plain numbers: matplotlib's usual powers of ten are formulas, which no text is read as here.
        low, high = own.get_data_interval()
        if high < 200 * low:  # powers of ten alone would be one or two
            own.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
        own.set_major_formatter("{x:g}")
        own.set_minor_formatter("")
    own.grid(bool(axis.get("showgrid", letter == "y")))
    if names:
        own.set_ticks(list(names.values()), list(names))
        set_range(-0.5, len(names) - 0.5)
    if "nticks" in axis:
        plane.locator_params(letter, nbins=axis["nticks"])
    if "range" in axis:
        low, high = axis["range"]
        set_range(*((10**low, 10**high) if is_log else (low, high)))
    elif axis.get("rangemode") == "tozero":
        low, high = plane.get_xlim() if letter == "x" else plane.get_ylim()
        set_range(min(low, 0) if low < -0.2 * high else 0, high)
    if axis.get("autorange") == "reversed" and not own.get_inverted():
        own.set_inverted(True)


def _draw_shapes(plane: Axes, layout: Mapping[str, Any]) -> None:
    """Draw the lines across a plot, and its notes."""
    muted = _find_color(MUTED)
    for shape in layout.get("shapes", ()):
        look = {"color": muted, "linewidth": 0.7, "linestyle": DASHES.get(shape["line"]["dash"], "-"), "zorder": 1}
        if shape["yref"] == "paper":
            plane.axvline(shape["x0"], **look)
        else:
            plane.axhline(shape["y0"], **look)
    for note in layout.get("annotations", ()):
        across = note.get("xref") == "paper"
        upright = note.get("yref") == "paper"
        if across and upright:
            transform = plane.transAxes
        elif upright:
            transform = plane.get_xaxis_transform()
        else:
            transform = plane.get_yaxis_transform() if across else plane.transData
        place = [note["x"], note["y"]]
        for i, (letter, is_free) in enumerate((("x", across), ("y", upright))):
            if not is_free and layout[f"{letter}axis"].get("type") == "log":  # Plotly's notes take the logarithm there
                place[i] = 10 ** place[i]
        plane.text(
            *place,
            f" {unescape(note['text'])} ",
            transform=transform,
            ha=note.get("xanchor", "left"),
            va=note.get("yanchor", "bottom"),
            fontsize=7,
            color=muted,
        )


def _add_legend(figure: Any, planes: Sequence[Axes], *, is_stacked: bool) -> None:
    """Add a legend above the plot, unless it has one name or too many; stacked plots have their names themselves."""
    entries: dict[str, Any] = {}
    for plane in planes:
        handles, labels = plane.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            if not is_stacked or type(handle).__name__ == "Polygon":  # the shaded phases
                entries.setdefault(name_invisible(label), handle)
    least = 1 if is_stacked else 2
    if least <= len(entries) <= MAX_LEGEND:
        longest = max(map(len, entries))
        columns = max(1, min(len(entries), int(INCH_CHARS * figure.get_figwidth() / (longest + 7))))
        figure.legend(list(entries.values()), list(entries), loc="outside upper left", ncols=columns)
