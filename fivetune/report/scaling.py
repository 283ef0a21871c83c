"""Speed-up over devices against the ideal, from the measured runs on one device.

In: Variants with their measures. Out: a Section; empty where no variant ran on more than one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.compare import MEASURES
from fivetune.report.variant_charts import scaling_chart
from fivetune.report.variants import SPEED, measure, ranged, worded
from fivetune.report.wording import setting
from fivetune.types import Measure, Section, Table, Text, Variant

SIZE, EFFICIENCY = "world_size", "scaling_efficiency"
PLACEMENT = ("launch.", "strategy", "train.batch_size", "train.global_batch_size")
TOO_GOOD = 1.05  # efficiency from which on the work cannot have been the same


def scaling_section(variants: Sequence[Variant]) -> Section:
    """Speed-up and efficiency of every variant on several devices, against its like on one device."""
    several = [(int(size), variant) for variant in variants if (size := measure(variant, SIZE).value or 0) > 1]
    several.sort(key=lambda pair: pair[0])
    known = [(size, variant) for size, variant in several if measure(variant, EFFICIENCY).value is not None]
    alone = [variant.name for size, variant in several if measure(variant, EFFICIENCY).value is None]
    notes = [Text(f"{name} has no like on one device, so its scaling is not known.") for name in alone]
    if not known:
        return Section("Scaling", tuple(notes))
    lines: dict[str, list[tuple[int, Measure]]] = {}
    for size, variant in known:
        speed_up = _times(measure(variant, EFFICIENCY), size)
        lines.setdefault(_line(variant), [(1, Measure(1.0))]).append((size, speed_up))
    caption = "How many times as fast as the same settings on one device, by examples really processed."
    return Section("Scaling", (scaling_chart(lines, caption), _table(known), *notes))


def _times(one: Measure, factor: float) -> Measure:
    value, low, high = (None if edge is None else factor * edge for edge in (one.value, one.low, one.high))
    return Measure(value, low, high, one.num)


def _line(variant: Variant) -> str:
    """What a line of the chart stands for: the strategy, and the settings that are not about devices."""
    settings = {key: setting(key, value) for key, value in variant.settings.items()}
    words = [f"{key.rpartition('.')[2]} {value}" for key, value in settings.items() if not key.startswith(PLACEMENT)]
    return ", ".join([value for key, value in settings.items() if key.startswith("strategy")] + words) or "measured"


def _table(known: Sequence[tuple[int, Variant]]) -> Table:
    rows, values = [], []
    for size, variant in known:
        efficiency, speed = measure(variant, EFFICIENCY), measure(variant, SPEED)
        suspect = " (not the same work)" if (efficiency.value or 0.0) > TOO_GOOD else ""
        cells = (ranged(worded, MEASURES[name], one) for name, one in ((SPEED, speed), (EFFICIENCY, efficiency)))
        rows.append((variant.name + suspect, str(size), *cells))
        values.append((None, float(size), speed.value, efficiency.value))
    caption = "Efficiency: examples per second by the number of devices, divided by those of one device."
    return Table(caption, ("variant", "devices", "examples per second", "efficiency"), tuple(rows),
                 values=tuple(values))  # fmt: skip
