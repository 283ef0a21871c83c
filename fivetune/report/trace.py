"""The summary of a trace (trace/summary.json) -> a section of the report, and the page of `fivetune profile`.

In: the summary as JSON gave it: seconds, bytes, shares. Out: tables and charts in milliseconds, MiB and per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivetune.report import charts
from fivetune.report.wording import UNKNOWN, fixed, percent, plain, plural, share, size, whole
from fivetune.telemetry.trace import REST
from fivetune.types import Chart, Page, Section, Table, Text
from fivetune.values import dig, number

Part = Text | Table | Chart
TITLE = "Trace"
MEBI = 2**20
LEGEND = (
    "GEMM: matrix products. Attention: fused kernels only. Reduce: sums, norms, softmax. Copy: gathers, concatenations "
    "and casts too. Other: what the name tells nothing about."
)
OWN_TIME = (
    " An operator's time is its own, without that of the operators it calls, so nothing counts twice; other holds "
    "views, allocations, the autograd engine, and Python inside the model's own functions."
)


def trace_page(summary: Mapping[str, Any], *, title: str, about: str = "") -> Page:
    """The page of one trace."""
    return Page(title, (trace_section(summary),), subtitle=about)


def trace_section(summary: Mapping[str, Any]) -> Section:
    """What a trace says; without parts if there is none."""
    if not summary:
        return Section(TITLE, ())
    parts: list[Part] = [Text(_lead(summary), "lead"), _facts(summary), *_classes(summary), *_phases(summary)]
    parts += [*_gaps(summary), *_transfers(summary), *_memory(summary), *_names(summary)]
    parts += [Text(plain(note)) for note in summary.get("notes") or ()]
    return Section(TITLE, tuple(parts))


def ms(seconds: Any, digits: int = 2) -> str:
    """Seconds as milliseconds: 0.0123 -> 12.30."""
    known = number(seconds)
    return UNKNOWN if known is None else fixed(1000 * known, digits)


def _rows(summary: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    return summary.get(key) or ()


def _what(summary: Mapping[str, Any]) -> str:
    return "kernels and memory operations" if summary.get("measures") == "kernels" else "operators on the CPU"


def _lead(summary: Mapping[str, Any]) -> str:
    classes = _rows(summary, "classes")
    steps = f"{plural(summary['num_steps'], 'step')}, " if summary.get("num_steps") else ""
    largest = ", ".join(f"{one['name']} {percent(one['share'])}" for one in classes[:3])
    words = f"{steps}{ms(summary.get('window_seconds'))} ms. Of the time of {_what(summary)}: {largest}."
    if summary.get("measures") != "kernels":
        return f"{words} No device took part: what would be said of one is n/a."
    busy, late = summary.get("busy_share"), summary.get("host_bound_share")
    return (
        f"{words} Devices were busy {percent(busy)} of the window, and for {percent(late)} of it they waited until the "
        "host had launched what came next."
    )


def _facts(summary: Mapping[str, Any]) -> Table:
    plain_step, profiled = summary.get("plain_step_seconds"), summary.get("profiled_step_seconds")
    slower = share(profiled, plain_step)
    remark = "" if slower is None else f"{fixed(slower)} times as long: the profiler itself takes time"
    window, wait = summary.get("window_seconds"), summary.get("synchronisation_seconds")
    rows = [
        ("window (ms)", ms(window), f"{plain(summary.get('source'))}, {plain(summary.get('num_steps'))} steps"),
        ("step without profiler (ms)", ms(plain_step), "" if plain_step is None else "the same steps, mean"),
        ("step with profiler (ms)", ms(profiled), remark),
        ("devices busy", percent(summary.get("busy_share")), "of the window; work side by side counts once"),
        ("host-bound", percent(summary.get("host_bound_share")), "of the window: idle until the host had launched"),
        ("launches per step", fixed(summary.get("launches_per_step"), 1), _in_all(summary.get("num_launches"))),
        (
            "synchronisations per step", fixed(summary.get("synchronisations_per_step"), 1),
            _in_all(summary.get("num_synchronisations"), f", the host waited {ms(wait)} ms"),
        ),
        ("peak memory", size(dig(summary, "memory", "peak_bytes")), _memory_words(summary)),
    ]  # fmt: skip
    if (outside := summary.get("outside_seconds")) is not None:
        rows.append(("outside operators", percent(share(outside, window)), "of the window: Python, waiting for data"))
    file = " (trace/summary.json)" if plain_step is not None else ""
    return Table(f"The window.{file}", ("quantity", "value", "remark"), tuple(rows))


def _memory_words(summary: Mapping[str, Any]) -> str:
    parts = dict(dig(summary, "memory", "parts") or {})
    if not dig(summary, "memory", "since_start"):
        return ", ".join(f"{name} {size(value)}" for name, value in parts.items())
    there = ", ".join(f"{name} {size(value)}" for name, value in parts.items() if name != REST)
    return f"{REST}; there before: {there}" if there else REST


def _in_all(count: Any, more: str = "") -> str:
    return "" if count is None else f"{whole(count)} in all{more}"


def _classes(summary: Mapping[str, Any]) -> Iterator[Part]:
    classes, steps = _rows(summary, "classes"), number(summary.get("num_steps"))
    names = [one["name"] for one in reversed(classes)]
    each = [1000 * one["seconds"] / (steps or 1) for one in reversed(classes)]
    unit = "ms per step" if steps else "ms"
    bars = {
        "type": "bar", "orientation": "h", "y": names, "x": each, "marker": {"color": charts.COLORS[0]},
        "hovertemplate": f"%{{x:.4~g}} {unit}<extra></extra>",
    }  # fmt: skip
    look = charts.layout(
        unit, "", height=90 + 26 * len(names), xaxis={"showgrid": True, "rangemode": "tozero"}, showlegend=False,
        yaxis={"showgrid": False, "ticksuffix": "  "}, hovermode="closest", bargap=0.4,
    )  # fmt: skip
    yield Chart(f"Time of {_what(summary)}, {unit}.", (bars,), look)
    rows = tuple(
        (
            one["name"], ms(one["seconds"]), ms(share(one["seconds"], steps)), whole(one["num"]),
            ms(share(one["seconds"], one["num"]), 4), percent(one["share"]),
        )
        for one in classes
    )  # fmt: skip
    header = ("class", "time (ms)", "per step (ms)", "count", "mean (ms)", "share")
    yield Table(f"Time of {_what(summary)}, by class.", header, rows)
    yield Text(LEGEND + ("" if summary.get("measures") == "kernels" else OWN_TIME))


def _phases(summary: Mapping[str, Any]) -> Iterator[Part]:
    found, window = _rows(summary, "phases"), summary.get("window_seconds")
    if not found:
        return
    header = ["phase", "count", "host (ms)", "of the window"]
    rows = [
        [one["name"], whole(one["num"]), ms(one["host_seconds"]), percent(share(one["host_seconds"], window))]
        for one in found
    ]
    if any(one.get("device_seconds") is not None for one in found):
        header += ["device work launched (ms)", "device idle (ms)"]
        for row, one in zip(rows, found, strict=True):
            row += [ms(one.get("device_seconds")), ms(one.get("idle_seconds"))]
    caption = "Phases of the steps, on the host's clock; of a capture, its named ranges."
    yield Table(caption, tuple(header), tuple(map(tuple, rows)))


def _gaps(summary: Mapping[str, Any]) -> Iterator[Part]:
    rows = []
    for device in _rows(summary, "devices"):
        name = f"{device['index']}: {plain(device.get('name'))}"
        lower = 0.0
        for bound, num, seconds in device["gaps"]:
            words = f"over {ms(lower)} ms" if bound is None else f"{ms(lower)} to {ms(bound)} ms"
            rows.append((name, words, whole(num), ms(seconds), percent(share(seconds, summary.get("window_seconds")))))
            lower = bound
        late = device.get("host_bound_seconds")
        rows.append((name, "of all: host-bound", "", ms(late), percent(share(late, summary.get("window_seconds")))))
        rows.append((name, "longest", "1", ms(device["longest_gap_seconds"]), ""))
    if rows:
        header = ("device", "gap", "count", "time (ms)", "of the window")
        yield Table("Gaps: time between two pieces of work of a device.", header, tuple(rows))


def _transfers(summary: Mapping[str, Any]) -> Iterator[Part]:
    rows = tuple(
        (one["direction"], whole(one["num"]), ms(one["seconds"]), size(one.get("num_bytes")))
        for one in _rows(summary, "transfers")
    )
    if rows:
        yield Table("Memory operations by direction.", ("direction", "count", "time (ms)", "size"), rows)


def _memory(summary: Mapping[str, Any]) -> Iterator[Part]:
    points = dig(summary, "memory", "points") or ()
    if not points:
        return
    since = ", since the profiler began" if dig(summary, "memory", "since_start") else ""
    times, sizes = [1000 * time for time, _ in points], [taken / MEBI for _, taken in points]
    curve = charts.line("allocated", times, sizes, charts.COLORS[0], line={"width": 1.5, "shape": "hv"}, mode="lines")
    look = charts.layout("ms since the window began", "MiB", showlegend=False, yaxis={"rangemode": "tozero"})
    where = plain(dig(summary, "memory", "kind"))
    yield Chart(f"Memory allocated on the {where}{since}; thinned, highs and lows are kept.", (curve,), look)


def _names(summary: Mapping[str, Any]) -> Iterator[Part]:
    for key, caption, folded in (
        ("top", f"The {len(_rows(summary, 'top'))} names that took longest.", False),
        ("calls", "What the host called of CUDA, the longest first.", True),
    ):
        rows = tuple(
            (one["kind"], ms(one["seconds"]), whole(one["num"]), ms(share(one["seconds"], one["num"]), 4),
             percent(one["share"]), one["name"])
            for one in _rows(summary, key)
        )  # fmt: skip
        if rows:
            header = ("class", "time (ms)", "count", "mean (ms)", "share", "name")
            yield Table(caption, header, rows, folded=folded)
