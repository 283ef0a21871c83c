"""The summary of a trace (trace/summary.json) -> a section of the report, and the page of `fivetune profile`.

In: the summary as JSON gave it: seconds, bytes, shares. Out: tables and charts in milliseconds, MiB and per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivetune.machine.profiling.summary import REST
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Page, Part, Section, Table, Text, build_section
from fivetune.reading.report.page.series import Series
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
        summary: table of a TraceSummary.
        about: subtitle of the page.
    """
    return Page(title, (build_trace_section(summary),), subtitle=about)


def build_trace_section(summary: Mapping[str, Any]) -> Section:
    """Build the section of a trace from the table of a TraceSummary; no parts for {}."""
    if not summary:
        return build_section(TITLE)
    return build_section(
        TITLE,
        _iter_overview_parts(summary),
        _iter_class_parts(summary),
        _iter_phases_tables(summary),
        _iter_gaps_tables(summary),
        _iter_memory_parts(summary),
        _iter_names_tables(summary),
        (Text(format_plain(note)) for note in summary.get("notes") or ()),
    )


def format_milliseconds(seconds: Any, digits: int = 2) -> str:
    """Format seconds as milliseconds: 0.0123 -> 12.30; "n/a" for any other value than a finite number."""
    known = as_finite_number(seconds)
    return UNKNOWN if known is None else format_decimal(1000 * known, digits)


def _get_rows(summary: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """Return the list of tables under a key; () if it is missing or null."""
    return summary.get(key) or ()


def _name_operations(summary: Mapping[str, Any]) -> str:
    """Name what the times belong to: work of devices, or operators of the host."""
    return "kernels and memory operations" if summary.get("measures") == "kernels" else "operators on the CPU"


def _iter_overview_parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield a sentence on the largest classes and the busy devices, and the table of the window."""
    get = summary.get
    window = get("window_seconds")
    num_steps = get("num_steps")
    steps = f"{format_plural(num_steps, 'step')}, " if num_steps else ""
    largest = ", ".join(f"{one['name']} {format_percent(one['share'])}" for one in _get_rows(summary, "classes")[:3])
    words = f"{steps}{format_milliseconds(window)} ms. Of the time of {_name_operations(summary)}: {largest}."
    busy = format_percent(get("busy_share"))
    late = format_percent(get("host_bound_share"))
    if get("measures") == "kernels":
        words += (
            f" Devices were busy {busy} of the window, and for {late} of it they waited for the host to launch the "
            "next kernel."
        )
    else:
        words += " No device took part: its values are n/a."
    yield Text(words, "lead")
    plain = get("plain_step_seconds")
    profiled = get("profiled_step_seconds")
    slower = divide(profiled, plain)
    overhead = "" if slower is None else f"{format_decimal(slower)} times as long: overhead of the profiler"
    launches = _describe_total(get("num_launches"))
    waits = _describe_total(get("num_synchronisations"))
    if waits:
        waits += f", the host waited {format_milliseconds(get('synchronisation_seconds'))} ms"
    # On a host, memory from before the window is not in the peak.
    since_start = get_nested(summary, "memory", "since_start")
    sizes: dict[str, Any] = get_nested(summary, "memory", "parts") or {}
    parts = ", ".join(
        f"{name} {format_bytes(value)}" for name, value in sizes.items() if not since_start or name != REST
    )
    if since_start:
        parts = f"{REST}; there before: {parts}" if parts else REST
    rows = [
        ("window (ms)", format_milliseconds(window), f"{format_plain(get('source'))}, {format_plain(num_steps)} steps"),
        ("step without profiler (ms)", format_milliseconds(plain), "" if plain is None else "the same steps, mean"),
        ("step with profiler (ms)", format_milliseconds(profiled), overhead),
        ("devices busy", busy, "of the window; overlapping work counts once"),
        ("host-bound", late, "of the window: idle, waiting for a launch"),
        ("launches per step", format_decimal(get("launches_per_step"), 1), launches),
        ("synchronisations per step", format_decimal(get("synchronisations_per_step"), 1), waits),
        ("peak memory", format_bytes(get_nested(summary, "memory", "peak_bytes")), parts),
    ]
    outside = get("outside_seconds")
    if outside is not None:
        share = format_percent(divide(outside, window))
        rows.append(("outside operators", share, "of the window: Python, waiting for data"))
    file = "" if plain is None else " (trace/summary.json)"
    yield Table(f"The window.{file}", ("quantity", "value", "remark"), rows)


def _describe_total(count: Any) -> str:
    return "" if count is None else f"{format_count(count)} in all"


def _iter_class_parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the chart and the table of the time by class, and a legend."""
    classes = _get_rows(summary, "classes")
    steps = as_finite_number(summary.get("num_steps"))
    unit = "ms per step" if steps else "ms"
    what = _name_operations(summary)
    # From the bottom up, so that the largest class is on top.
    bars = {one["name"]: 1000 * one["seconds"] / (steps or 1) for one in reversed(classes)}
    caption = f"Time of {what}, {unit}."
    height = 90 + 26 * len(bars)
    yield charts.build_bars_chart(bars, caption, unit=unit, hover=f"%{{x:.4~g}} {unit}", height=height)
    rows = [
        (
            one["name"],
            format_milliseconds(one["seconds"]),
            format_milliseconds(divide(one["seconds"], steps)),
            format_count(one["num"]),
            format_milliseconds(divide(one["seconds"], one["num"]), 4),
            format_percent(one["share"]),
        )
        for one in classes
    ]
    header = ("class", "time (ms)", "per step (ms)", "count", "mean (ms)", "share")
    yield Table(f"Time of {what}, by class.", header, rows)
    yield Text(LEGEND if summary.get("measures") == "kernels" else LEGEND + OWN_TIME)


def _iter_phases_tables(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of the phases of the steps; nothing without phases."""
    found = _get_rows(summary, "phases")
    window = summary.get("window_seconds")
    header = ["phase", "count", "host (ms)", "of the window"]
    has_devices = any(one.get("device_seconds") is not None for one in found)
    if has_devices:
        header += ["device work launched (ms)", "device idle (ms)"]
    rows: list[list[str]] = []
    for one in found:
        host = one["host_seconds"]
        share = format_percent(divide(host, window))
        rows.append([one["name"], format_count(one["num"]), format_milliseconds(host), share])
        if has_devices:
            rows[-1] += [format_milliseconds(one.get(key)) for key in ("device_seconds", "idle_seconds")]
    if rows:
        yield Table("Phases of the steps (of a capture, its named ranges), on the host's clock.", header, rows)


def _iter_gaps_tables(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of the gaps of each device by length; nothing without devices."""
    rows: list[Sequence[str]] = []
    window = summary.get("window_seconds")
    for device in _get_rows(summary, "devices"):
        name = f"{device['index']}: {format_plain(device.get('name'))}"
        lower = 0.0
        late = device.get("host_bound_seconds")
        for bound, num, seconds in device["gaps"]:
            words = f"{format_milliseconds(lower)} to {format_milliseconds(bound)} ms"
            if bound is None:
                words = f"over {format_milliseconds(lower)} ms"
            share = format_percent(divide(seconds, window))
            rows.append((name, words, format_count(num), format_milliseconds(seconds), share))
            lower = bound
        share = format_percent(divide(late, window))
        rows.append((name, "of all: host-bound", "", format_milliseconds(late), share))
        rows.append((name, "longest", "1", format_milliseconds(device["longest_gap_seconds"]), ""))
    if rows:
        header = ("device", "gap", "count", "time (ms)", "of the window")
        yield Table("Gaps: idle time of a device between two operations.", header, rows)


def _iter_memory_parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of memory operations, and the chart of allocated memory (MiB) over time (ms)."""
    rows = [
        (
            one["direction"],
            format_count(one["num"]),
            format_milliseconds(one["seconds"]),
            format_bytes(one.get("num_bytes")),
        )
        for one in _get_rows(summary, "transfers")
    ]
    if rows:
        yield Table("Memory operations by direction.", ("direction", "count", "time (ms)", "size"), rows)
    points = get_nested(summary, "memory", "points")
    if points:
        since = ", since the profiler began" if get_nested(summary, "memory", "since_start") else ""
        times = [1000 * time for time, _ in points]
        sizes: Series = [taken / MEBI for _, taken in points]
        line = {"width": 1.5, "shape": "hv"}
        curve = charts.build_line_trace("allocated", times, sizes, charts.COLORS[0], line=line, mode="lines")
        kind = format_plain(get_nested(summary, "memory", "kind"))
        caption = f"Memory allocated on the {kind}{since}; thinned, highs and lows are kept."
        yield charts.build_chart(
            caption, [curve], "ms since the window began", "MiB", showlegend=False, yaxis=charts.FROM_ZERO
        )


def _iter_names_tables(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the tables of the names and of the CUDA calls that took longest, as far as there are any."""
    captions = {
        "top": f"The {len(_get_rows(summary, 'top'))} names that took longest.",
        "calls": "CUDA calls of the host, the longest first.",
    }
    for key, caption in captions.items():
        rows = [
            (
                one["kind"],
                format_milliseconds(one["seconds"]),
                format_count(one["num"]),
                format_milliseconds(divide(one["seconds"], one["num"]), 4),
                format_percent(one["share"]),
                one["name"],
            )
            for one in _get_rows(summary, key)
        ]
        if rows:
            header = ("class", "time (ms)", "count", "mean (ms)", "share", "name")
            yield Table(caption, header, rows, folded=key == "calls")
