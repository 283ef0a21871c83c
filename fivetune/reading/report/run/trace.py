"""The summary of a trace (trace/summary.json) -> a section of the report, and the page of `fivetune profile`.

In: the summary as JSON gave it: seconds, bytes, shares. Out: tables and charts in milliseconds, MiB and per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivetune.machine.profiling.summary import REST
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Chart, Page, Part, Section, Table, Text
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_decimal,
    format_percent,
    format_plain,
    format_plural,
)
from fivetune.values import as_finite_number, divide, get_nested

TITLE = "Trace"
MEBI = 2**20
LEGEND = (
    "GEMM: matrix products. Attention: fused kernels only. Reduce: sums, norms, softmax. Copy: gathers, concatenations "
    "and casts. Other: kernels whose name gives no class."
)
OWN_TIME = (
    " An operator's time is its own, without that of the operators it calls, so nothing counts twice; other holds "
    "views, allocations, the autograd engine, and Python inside the model's own functions."
)


def build_trace_page(summary: Mapping[str, Any], *, title: str, about: str = "") -> Page:
    """Build the page of one trace.

    Args:
        summary: the table of a TraceSummary; about: subtitle.
    """
    return Page(title, (build_trace_section(summary),), subtitle=about)


def build_trace_section(summary: Mapping[str, Any]) -> Section:
    """Build the section of a trace from the table of a TraceSummary; no parts for {}."""
    if not summary:
        return Section(TITLE, ())
    parts: list[Part] = [
        Text(_describe_trace(summary), "lead"),
        _build_facts_table(summary),
        *_build_class_parts(summary),
        *_build_phases_table(summary),
    ]
    parts += [
        *_build_gaps_table(summary),
        *_build_transfers_table(summary),
        *_draw_memory_chart(summary),
        *_build_names_tables(summary),
    ]
    parts += [Text(format_plain(note)) for note in summary.get("notes") or ()]
    return Section(TITLE, tuple(parts))


def format_milliseconds(seconds: Any, digits: int = 2) -> str:
    """Format seconds as milliseconds: 0.0123 -> 12.30; "n/a" for any other value than a finite number."""
    known = as_finite_number(seconds)
    return UNKNOWN if known is None else format_decimal(1000 * known, digits)


def _get_rows(summary: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """Return the list of tables under a key; () if it is missing or null."""
    return summary.get(key) or ()


def _describe_operations(summary: Mapping[str, Any]) -> str:
    """Return what the times are those of: work of devices, or operators of the host."""
    return "kernels and memory operations" if summary.get("measures") == "kernels" else "operators on the CPU"


def _describe_trace(summary: Mapping[str, Any]) -> str:
    """Describe in a sentence or two the window, the largest classes, and how busy the devices were."""
    classes = _get_rows(summary, "classes")
    steps = f"{format_plural(summary['num_steps'], 'step')}, " if summary.get("num_steps") else ""
    largest = ", ".join(f"{one['name']} {format_percent(one['share'])}" for one in classes[:3])
    words = (
        f"{steps}{format_milliseconds(summary.get('window_seconds'))} ms. Of the time of "
        f"{_describe_operations(summary)}: {largest}."
    )
    if summary.get("measures") != "kernels":
        return f"{words} No device took part: its values are n/a."
    busy, late = summary.get("busy_share"), summary.get("host_bound_share")
    return (
        f"{words} Devices were busy {format_percent(busy)} of the window, and for {format_percent(late)} of it "
        "they waited for the host "
        "to launch the next kernel."
    )


def _build_facts_table(summary: Mapping[str, Any]) -> Table:
    """Build the table of the window: times in ms, shares, launches, peak memory."""
    plain_step, profiled = summary.get("plain_step_seconds"), summary.get("profiled_step_seconds")
    slower = divide(profiled, plain_step)
    remark = "" if slower is None else f"{format_decimal(slower)} times as long: overhead of the profiler"
    window, wait = summary.get("window_seconds"), summary.get("synchronisation_seconds")
    rows = [
        (
            "window (ms)",
            format_milliseconds(window),
            f"{format_plain(summary.get('source'))}, {format_plain(summary.get('num_steps'))} steps",
        ),
        (
            "step without profiler (ms)",
            format_milliseconds(plain_step),
            "" if plain_step is None else "the same steps, mean",
        ),
        ("step with profiler (ms)", format_milliseconds(profiled), remark),
        ("devices busy", format_percent(summary.get("busy_share")), "of the window; overlapping work counts once"),
        (
            "host-bound",
            format_percent(summary.get("host_bound_share")),
            "of the window: idle, waiting for a launch",
        ),
        (
            "launches per step",
            format_decimal(summary.get("launches_per_step"), 1),
            _format_total(summary.get("num_launches")),
        ),
        (
            "synchronisations per step",
            format_decimal(summary.get("synchronisations_per_step"), 1),
            _format_total(summary.get("num_synchronisations"), f", the host waited {format_milliseconds(wait)} ms"),
        ),
        ("peak memory", format_bytes(get_nested(summary, "memory", "peak_bytes")), _describe_memory(summary)),
    ]
    if (outside := summary.get("outside_seconds")) is not None:
        rows.append(
            (
                "outside operators",
                format_percent(divide(outside, window)),
                "of the window: Python, waiting for data",
            )
        )
    file = " (trace/summary.json)" if plain_step is not None else ""
    return Table(f"The window.{file}", ("quantity", "value", "remark"), tuple(rows))


def _describe_memory(summary: Mapping[str, Any]) -> str:
    """Describe the parts of the peak memory; on a host, that memory from before the window is not in it."""
    parts = dict(get_nested(summary, "memory", "parts") or {})
    if not get_nested(summary, "memory", "since_start"):
        return ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
    there = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items() if name != REST)
    return f"{REST}; there before: {there}" if there else REST


def _format_total(count: Any, more: str = "") -> str:
    """Format a count of the whole window; "" if it is unknown."""
    return "" if count is None else f"{format_count(count)} in all{more}"


def _build_class_parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the chart and the table of the time by class, and a legend."""
    classes, steps = _get_rows(summary, "classes"), as_finite_number(summary.get("num_steps"))
    names = [one["name"] for one in reversed(classes)]
    each = [1000 * one["seconds"] / (steps or 1) for one in reversed(classes)]
    unit = "ms per step" if steps else "ms"
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": each,
        "marker": {"color": charts.COLORS[0]},
        "hovertemplate": f"%{{x:.4~g}} {unit}<extra></extra>",
    }
    look = charts.build_layout(
        unit,
        "",
        height=90 + 26 * len(names),
        xaxis={"showgrid": True, "rangemode": "tozero"},
        showlegend=False,
        yaxis={"showgrid": False, "ticksuffix": "  "},
        hovermode="closest",
        bargap=0.4,
    )
    yield Chart(f"Time of {_describe_operations(summary)}, {unit}.", (bars,), look)
    rows = tuple(
        (
            one["name"],
            format_milliseconds(one["seconds"]),
            format_milliseconds(divide(one["seconds"], steps)),
            format_count(one["num"]),
            format_milliseconds(divide(one["seconds"], one["num"]), 4),
            format_percent(one["share"]),
        )
        for one in classes
    )
    header = ("class", "time (ms)", "per step (ms)", "count", "mean (ms)", "share")
    yield Table(f"Time of {_describe_operations(summary)}, by class.", header, rows)
    yield Text(LEGEND + ("" if summary.get("measures") == "kernels" else OWN_TIME))


def _build_phases_table(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of the phases of the steps; nothing without phases."""
    found, window = _get_rows(summary, "phases"), summary.get("window_seconds")
    if not found:
        return
    header = ["phase", "count", "host (ms)", "of the window"]
    rows = [
        [
            one["name"],
            format_count(one["num"]),
            format_milliseconds(one["host_seconds"]),
            format_percent(divide(one["host_seconds"], window)),
        ]
        for one in found
    ]
    if any(one.get("device_seconds") is not None for one in found):
        header += ["device work launched (ms)", "device idle (ms)"]
        for row, one in zip(rows, found, strict=True):
            row += [format_milliseconds(one.get("device_seconds")), format_milliseconds(one.get("idle_seconds"))]
    caption = "Phases of the steps (of a capture, its named ranges), on the host's clock."
    yield Table(caption, tuple(header), tuple(map(tuple, rows)))


def _build_gaps_table(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of the gaps of each device by length; nothing without devices."""
    rows: list[tuple[str, ...]] = []
    for device in _get_rows(summary, "devices"):
        name = f"{device['index']}: {format_plain(device.get('name'))}"
        lower = 0.0
        for bound, num, seconds in device["gaps"]:
            words = (
                f"over {format_milliseconds(lower)} ms"
                if bound is None
                else f"{format_milliseconds(lower)} to {format_milliseconds(bound)} ms"
            )
            rows.append(
                (
                    name,
                    words,
                    format_count(num),
                    format_milliseconds(seconds),
                    format_percent(divide(seconds, summary.get("window_seconds"))),
                )
            )
            lower = bound
        late = device.get("host_bound_seconds")
        rows.append(
            (
                name,
                "of all: host-bound",
                "",
                format_milliseconds(late),
                format_percent(divide(late, summary.get("window_seconds"))),
            )
        )
        rows.append((name, "longest", "1", format_milliseconds(device["longest_gap_seconds"]), ""))
    if rows:
        header = ("device", "gap", "count", "time (ms)", "of the window")
        yield Table("Gaps: idle time of a device between two operations.", header, tuple(rows))


def _build_transfers_table(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of memory operations by direction; nothing without any."""
    rows = tuple(
        (
            one["direction"],
            format_count(one["num"]),
            format_milliseconds(one["seconds"]),
            format_bytes(one.get("num_bytes")),
        )
        for one in _get_rows(summary, "transfers")
    )
    if rows:
        yield Table("Memory operations by direction.", ("direction", "count", "time (ms)", "size"), rows)


def _draw_memory_chart(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the chart of allocated memory (MiB) over time (ms); nothing if it was not recorded."""
    points = get_nested(summary, "memory", "points") or ()
    if not points:
        return
    since = ", since the profiler began" if get_nested(summary, "memory", "since_start") else ""
    times, sizes = [1000 * time for time, _ in points], [taken / MEBI for _, taken in points]
    curve = charts.build_line_trace(
        "allocated", times, sizes, charts.COLORS[0], line={"width": 1.5, "shape": "hv"}, mode="lines"
    )
    look = charts.build_layout("ms since the window began", "MiB", showlegend=False, yaxis={"rangemode": "tozero"})
    where = format_plain(get_nested(summary, "memory", "kind"))
    yield Chart(f"Memory allocated on the {where}{since}; thinned, highs and lows are kept.", (curve,), look)


def _build_names_tables(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the tables of the names and of the CUDA calls that took longest, as far as there are any."""
    for key, caption, folded in (
        ("top", f"The {len(_get_rows(summary, 'top'))} names that took longest.", False),
        ("calls", "CUDA calls of the host, the longest first.", True),
    ):
        rows = tuple(
            (
                one["kind"],
                format_milliseconds(one["seconds"]),
                format_count(one["num"]),
                format_milliseconds(divide(one["seconds"], one["num"]), 4),
                format_percent(one["share"]),
                one["name"],
            )
            for one in _get_rows(summary, key)
        )
        if rows:
            header = ("class", "time (ms)", "count", "mean (ms)", "share", "name")
            yield Table(caption, header, rows, folded=folded)
