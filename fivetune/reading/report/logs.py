"""The load of machines side by side, from runs and from logs of other tools: pictures, and a table for a paper.

In: telemetry by name. Out: a Page, and Results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fivetune.reading.report.page.charts import build_bars_chart
from fivetune.reading.report.page.parts import (
    Chart,
    Measured,
    Page,
    Problem,
    Results,
    Text,
    build_plain_table,
    build_section,
)
from fivetune.reading.report.page.wording import format_plural, format_significant
from fivetune.reading.report.run.load import DEVICE_GAUGES, Gauge, Load
from fivetune.reading.report.run.load_charts import iter_lanes_charts, list_used_values
from fivetune.rundir.records import TelemetryRecord
from fivetune.types import Verdict
from fivetune.values import select_finite

SHARES = (
    Gauge("CPU utilisation", "%", 100, {"cpu_utilisation": ""}, "Mean over the cores of the host."),
    Gauge("Host memory in use", "%", 100, {"ram_share": "memory", "swap_share": "swap"}, "Share of the capacity."),
)
GAUGES = (*DEVICE_GAUGES, *SHARES)
TEMPERATURE = next(gauge for gauge in GAUGES if "temperature_celsius" in gauge.fields)


def build_logs_page(
    logs: Mapping[str, Sequence[TelemetryRecord]], verdicts: Mapping[str, Sequence[Verdict]]
) -> tuple[Page, Results]:
    """Build the page of one or several logs or runs, and its table of means and maxima.

    Args:
        logs: name -> telemetry.
        verdicts: name -> what `diagnose` found.
    """
    loads = {name: Load(records) for name, records in logs.items()}
    problems: list[Text | Problem] = []
    for name, found in verdicts.items():
        problems += [Problem(f"{name}: {one.message}", one.advice) for one in found]
        if not found:
            problems.append(Text(f"{name}: no problem found.", "good"))
    results = _build_results(loads)
    what = "each log" if len(logs) > 1 else next(iter(logs))
    page = Page(
        title="Load of " + ", ".join(logs) if len(logs) < 4 else f"Load of {len(logs)} logs",
        sections=(
            build_section("Verdict", problems),
            build_section(
                "Load",
                iter_lanes_charts([*loads.items()], GAUGES, what),
                _draw_highest_temperatures(loads),
                build_plain_table(results, results.caption),
            ),
        ),
    )
    return page, results


def _draw_highest_temperatures(loads: Mapping[str, Load]) -> Iterator[Chart]:
    """Draw the highest temperature of each of several logs as a bar."""
    highest: dict[str, float] = {}
    for name, load in loads.items():
        values = list_used_values(load, TEMPERATURE, "")
        if values:
            highest[name] = max(values)
    if len(highest) > 1:
        bars = dict(reversed(highest.items()))
        caption = "Highest temperature of a GPU in each log."
        yield build_bars_chart(bars, caption, unit=TEMPERATURE.unit, hover="%{x}", height=110 + 34 * len(bars))


def _build_results(loads: Mapping[str, Load]) -> Results:
    """Build mean and highest value of each quantity of each device and host."""
    rows: list[list[str | Measured]] = []
    for name, load in loads.items():
        for gauge in GAUGES:
            for track in load.build_tracks(gauge):
                values = select_finite(track.values)
                row: list[str | Measured] = [name, gauge.title, track.name or "host", gauge.unit]
                for value in (fmean(values), max(values)):
                    row.append(Measured(format_significant(value), value))
                row.append(str(len(values)))
                rows.append(row)
    header = ("log", "quantity", "of", "unit", "mean", "highest", "samples")
    caption = f"Load of {format_plural(len(loads), 'log')}: mean and highest sample of each device and of the host."
    return Results(caption, header, rows)
