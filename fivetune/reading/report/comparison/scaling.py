"""Speed-up over devices against the ideal, relative to measured runs on one device.

In: Variants with their measures. Out: a Section; empty if no variant ran on more than one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.reading.compare import MEASURES
from fivetune.reading.compare.records import Measure, Variant
from fivetune.reading.compare.scaling import BATCH_KEYS, PARALLELISM_KEYS
from fivetune.reading.report.comparison.charts import build_scaling_chart
from fivetune.reading.report.comparison.variants import SPEED, format_measure, format_with_range, get_measure
from fivetune.reading.report.page.parts import Section, Table, Text
from fivetune.reading.report.page.wording import format_percent, format_setting
from fivetune.reading.report.run.speed import MEANINGS

SIZE, EFFICIENCY = "world_size", "scaling_efficiency"
MAX_EFFICIENCY = 1.05  # a higher efficiency indicates different work


def build_scaling_section(variants: Sequence[Variant]) -> Section:
    """Build the section on speed-up and efficiency of variants on several devices, against the same settings on one."""
    several = [(int(size), variant) for variant in variants if (size := get_measure(variant, SIZE).value or 0) > 1]
    several.sort(key=lambda pair: pair[0])
    known = [(size, variant) for size, variant in several if get_measure(variant, EFFICIENCY).value is not None]
    unknown = [variant.name for _, variant in several if get_measure(variant, EFFICIENCY).value is None]
    notes = [
        Text(f"{name}: no run with the same settings on one device, so its scaling is unknown.") for name in unknown
    ]
    if not known:
        return Section("Scaling", tuple(notes))
    lines: dict[str, list[tuple[int, Measure]]] = {}
    for size, variant in known:
        speed_up = _scale_measure(get_measure(variant, EFFICIENCY), size)
        lines.setdefault(_describe_line(variant), [(1, Measure(1.0))]).append((size, speed_up))
    caption = "Speed-up over the same settings on one device, in examples per second."
    tables = (_build_efficiency_table(known), *_build_losses_table(known))
    return Section("Scaling", (build_scaling_chart(lines, caption), *tables, *notes))


def _scale_measure(one: Measure, factor: float) -> Measure:
    value, low, high = (None if edge is None else factor * edge for edge in (one.value, one.low, one.high))
    return Measure(value, low, high, one.num)


def _describe_line(variant: Variant) -> str:
    """Describe a line of the chart: the strategy, and the varied settings other than devices."""
    settings = {key: format_setting(key, value) for key, value in variant.settings.items()}
    words = [
        f"{key.rpartition('.')[2]} {value}"
        for key, value in settings.items()
        if not key.startswith(PARALLELISM_KEYS + BATCH_KEYS)
    ]
    return ", ".join([value for key, value in settings.items() if key.startswith("strategy")] + words) or "measured"


def _build_efficiency_table(known: Sequence[tuple[int, Variant]]) -> Table:
    rows: list[tuple[str, ...]] = []
    values: list[tuple[float | None, ...]] = []
    for size, variant in known:
        efficiency, speed = get_measure(variant, EFFICIENCY), get_measure(variant, SPEED)
        suspect = " (not the same work)" if (efficiency.value or 0.0) > MAX_EFFICIENCY else ""
        cells = (
            format_with_range(format_measure, MEASURES[name], one)
            for name, one in ((SPEED, speed), (EFFICIENCY, efficiency))
        )
        rows.append((variant.name + suspect, str(size), *cells))
        values.append((None, float(size), speed.value, efficiency.value))
    caption = "Efficiency: examples per second by the number of devices, divided by those of one device."
    return Table(
        caption, ("variant", "devices", "examples per second", "efficiency"), tuple(rows), values=tuple(values)
    )


def _build_losses_table(known: Sequence[tuple[int, Variant]]) -> list[Table]:
    """Build the table of efficiency and losses by phase; none if no variant has measured phases."""
    measured = [(size, variant) for size, variant in known if variant.scaling_losses]
    phases = [phase for phase in MEANINGS if any(phase in variant.scaling_losses for _, variant in measured)]
    rows: list[tuple[str, ...]] = []
    values: list[tuple[float | None, ...]] = []
    for size, variant in measured:
        losses = [variant.scaling_losses.get(phase) for phase in phases]
        efficiency = 1 - sum(variant.scaling_losses.values())
        rows.append((variant.name, str(size), *(format_percent(one) for one in (efficiency, *losses))))
        values.append((None, float(size), efficiency, *losses))
    caption = (
        "Where the rest of the efficiency went, as shares of the step: a phase loses what it takes beyond its time on "
        "one device divided by the number of devices. Each row adds up to 100 %. Forward and backward lose where "
        "micro-batches become small, where a strategy communicates inside them, or where the devices share cores, "
        "memory or power; the optimizer loses where every device updates the whole model."
    )
    return (
        [Table(caption, ("variant", "devices", "efficiency", *phases), tuple(rows), values=tuple(values))]
        if rows
        else []
    )
