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
    several = [(int(size), variant) for variant in variants if (size := get_measure(variant, SIZE).value or 0) > 1]
    several.sort(key=lambda pair: pair[0])
    notes: list[Text] = []
    lines: dict[str, list[tuple[int, Measure]]] = {}
    rows: list[Sequence[Cell]] = []
    losses: list[Sequence[Cell]] = []
    phases = [phase for phase in MEANINGS if any(phase in variant.scaling_losses for _, variant in several)]
    for size, variant in several:
        efficiency, speed = get_measure(variant, EFFICIENCY), get_measure(variant, SPEED)
        if efficiency.value is None:
            words = f"{variant.name}: no run with the same settings on one device, so its scaling is unknown."
            notes.append(Text(words))
            continue
        low, high = efficiency.low and size * efficiency.low, efficiency.high and size * efficiency.high
        speed_up = Measure(size * efficiency.value, low, high, efficiency.num)
        # A line of the chart is named by its strategy, and by the varied settings other than devices.
        settings = {key: format_setting(key, value) for key, value in variant.settings.items()}
        named = [value for key, value in settings.items() if key.startswith("strategy")]
        for key, value in settings.items():
            if not key.startswith(PARALLELISM_KEYS + BATCH_KEYS):
                named.append(f"{key.rpartition('.')[2]} {value}")
        lines.setdefault(", ".join(named) or "measured", [(1, Measure(1.0))]).append((size, speed_up))
        devices = (str(size), float(size))
        # More than linear speed-up is a sign of less work, not of speed.
        suspect = " (not the same work)" if efficiency.value > MAX_EFFICIENCY else ""
        cells = [
            (format_with_range(format_measure, MEASURES[name], one), one.value)
            for name, one in ((SPEED, speed), (EFFICIENCY, efficiency))
        ]
        rows.append((variant.name + suspect, devices, *cells))
        if variant.scaling_losses:
            shares = [variant.scaling_losses.get(phase) for phase in phases]
            shares.insert(0, 1 - sum(variant.scaling_losses.values()))
            losses.append((variant.name, devices, *((format_percent(share), share) for share in shares)))
    if not rows:
        return build_section("Scaling", notes)
    caption = "Speed-up over the same settings on one device, in examples per second."
    parts: list[Part] = [build_scaling_chart(lines, caption)]
    caption = "Efficiency: examples per second by the number of devices, divided by those of one device."
    parts.append(build_sortable_table(caption, ("variant", "devices", "examples per second", "efficiency"), rows))
    if losses:
        parts.append(build_sortable_table(LOSSES, ("variant", "devices", "efficiency", *phases), losses))
    return build_section("Scaling", parts, notes)
