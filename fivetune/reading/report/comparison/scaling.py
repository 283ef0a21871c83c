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
from fivetune.reading.report.page.parts import Cell, Part, Section, Text, build_section, build_sortable_table
from fivetune.reading.report.page.series import Series
from fivetune.reading.report.page.wording import format_percent, format_setting
from fivetune.reading.report.run.speed import MEANINGS

SIZE, EFFICIENCY = "world_size", "scaling_efficiency"
MAX_EFFICIENCY = 1.05  # a higher efficiency indicates different work
LOSSES = (
    "Where the rest of the efficiency went, as shares of the step: a phase loses what it takes beyond its time on one "
    "device divided by the number of devices. Each row adds up to 100 %. Forward and backward lose where micro-batches "
    "become small, where a strategy communicates inside them, or where the devices share cores, memory or power; the "
    "optimizer loses where every device updates the whole model."
)


def build_scaling_section(variants: Sequence[Variant]) -> Section:
    """Build the section on speed-up and efficiency of variants on several devices, against the same settings on one."""
    several: list[tuple[int, Variant]] = []
    phases: set[str] = set()
    for variant in variants:
        size = int(get_measure(variant, SIZE).value or 0)
        if size > 1:
            several.append((size, variant))
            phases.update(variant.scaling_losses)
    several.sort(key=lambda pair: pair[0])
    shown = [phase for phase in MEANINGS if phase in phases]
    notes: list[Text] = []
    lines: dict[str, list[tuple[int, Measure]]] = {}
    rows: list[Sequence[Cell]] = []
    losses: list[Sequence[Cell]] = []
    for size, variant in several:
        efficiency = get_measure(variant, EFFICIENCY)
        speed = get_measure(variant, SPEED)
        if efficiency.value is None:
            words = f"{variant.name}: no run with the same settings on one device, so its scaling is unknown."
            notes.append(Text(words))
            continue
        low = None if efficiency.low is None else size * efficiency.low
        high = None if efficiency.high is None else size * efficiency.high
        speed_up = Measure(size * efficiency.value, low, high, efficiency.num)
        # A line of the chart is named by its strategy, and by the varied settings other than devices.
        strategy: list[str] = []
        others: list[str] = []
        for key, value in variant.settings.items():
            words = format_setting(key, value)
            if key.startswith("strategy"):
                strategy.append(words)
            elif not key.startswith(PARALLELISM_KEYS + BATCH_KEYS):
                others.append(f"{key.rpartition('.')[2]} {words}")
        line = ", ".join(strategy + others) or "measured"
        lines.setdefault(line, [(1, Measure(1.0))]).append((size, speed_up))
        devices = (str(size), float(size))
        # More than linear speed-up is a sign of less work, not of speed.
        suspect = " (not the same work)" if efficiency.value > MAX_EFFICIENCY else ""
        cells: list[Cell] = [variant.name + suspect, devices]
        for name, one in ((SPEED, speed), (EFFICIENCY, efficiency)):
            cells.append((format_with_range(format_measure, MEASURES[name], one), one.value))
        rows.append(cells)
        if variant.scaling_losses:
            shares: Series = [1 - sum(variant.scaling_losses.values())]
            shares += [variant.scaling_losses.get(phase) for phase in shown]
            losses.append((variant.name, devices, *((format_percent(share), share) for share in shares)))
    if not rows:
        return build_section("Scaling", notes)
    caption = "Speed-up over the same settings on one device, in examples per second."
    parts: list[Part] = [build_scaling_chart(lines, caption)]
    caption = "Efficiency: examples per second by the number of devices, divided by those of one device."
    parts.append(build_sortable_table(caption, ("variant", "devices", "examples per second", "efficiency"), rows))
    if losses:
        parts.append(build_sortable_table(LOSSES, ("variant", "devices", "efficiency", *shown), losses))
    return build_section("Scaling", parts, notes)
