"""Where the time of one run went: the sections on its limits, its steps, its devices and hosts.

In: a Run with steps and telemetry. Out: Sections; a run without telemetry has no section on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fivetune.report.load import DEVICE_GAUGES, HOST_GAUGES, Gauge, Load, Track
from fivetune.report.load_charts import PARTS, Lane, lanes_chart, step_bars
from fivetune.report.series import by_step, quantile
from fivetune.report.wording import UNKNOWN, fixed, percent, plural, setting, short, whole
from fivetune.types import Run, Section, Table, Text, Verdict
from fivetune.values import dig, known, number

Part = Any
Step = dict[str, Any]
IDLE = 10.0  # per cent: below it a device does next to nothing
MEANINGS = {
    "data": "waiting for the next batch",
    "host": "work of the host in between",
    "copy": "copying the batch to the device",
    "forward": "forward pass and loss",
    "backward": "backward pass",
    "exchange": "exchanging gradients between processes",
    "optimizer": "clipping and the optimizer's update",
    "other": "the rest of the step",
}


def limits_section(run: Run, verdicts: Sequence[Verdict]) -> Section:
    """What limits or spoils the run, what to change, and what that is predicted to give; nothing without steps."""
    if not run.steps and not verdicts:
        return Section("Limits", ())
    parts: list[Part] = []
    for verdict in verdicts:
        parts.append(Text(f"{verdict.says} {verdict.advice}{_gain(verdict)}", "warning"))
    if not verdicts:
        words = "No rule about speed, devices or losses found anything to change."
        parts.append(Text(f"{words} The answers are another matter: see the scores, and the warnings if any.", "good"))
    else:
        parts.append(verdicts_table({"": verdicts}, named=False))
    return Section("Limits", tuple(parts))


def _gain(verdict: Verdict) -> str:
    return "" if verdict.gain is None else f" Predicted: {fixed(verdict.gain)} times as fast."


def verdicts_table(found: Mapping[str, Sequence[Verdict]], *, named: bool) -> Table:
    """The evidence behind verdicts, folded; `named` gives a column to what they are about."""
    rows = []
    for name, verdicts in found.items():
        for verdict in verdicts:
            change = ", ".join(f"{key} {setting(key, value)}" for key, value in verdict.change.items())
            figures = (short(verdict.figure), short(verdict.threshold), percent(verdict.confidence, 0))
            gain = UNKNOWN if verdict.gain is None else f"{fixed(verdict.gain)} x"
            cells = (verdict.rule.replace("_", " "), *figures, change or "no setting", gain)
            rows.append((name, *cells) if named else cells)
    header = ("rule", "measured", "speaks from", "confidence", "change", "predicted speed-up")
    caption = "The evidence: what each rule measured, and from where on it speaks. (steps.jsonl, telemetry.jsonl)"
    return Table(caption, ("variant", *header) if named else header, tuple(rows), folded=True)


def steps_section(run: Run) -> Section:
    """What an average step's time goes into, and how much it varies."""
    measured = measured_steps(run.steps)
    parts = breakdown(measured)
    if not parts:
        return Section("Step time", ())
    warm_up = sum(bool(record.get("warm_up")) for record in by_step(run.steps))
    left_out = f" {plural(warm_up, 'warm-up step')} left out." if warm_up else ""
    caption = f"Mean seconds of a step by part, over {plural(len(measured), 'step')}.{left_out} (steps.jsonl)"
    return Section("Step time", (step_bars({"a step": parts}, caption), _parts_table(measured, parts)))


def measured_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps whose parts were measured, without those of the warm-up."""
    return [step for step in by_step(steps) if dig(step, "phase_seconds") and not step.get("warm_up")]


def breakdown(measured: Sequence[Step]) -> dict[str, float]:
    """Mean seconds of a step by part; what the parts leave of the whole step is "other"."""
    if not measured:
        return {}
    means = {part: values for part in PARTS if (values := _mean(known(_seconds(measured, part)))) is not None}
    wholes = known([number(step.get("step_seconds")) for step in measured])
    rest = (_mean(wholes) or 0.0) - sum(means.values())
    return means | ({"other": rest} if rest > 0.005 * sum(means.values()) else {})


def _seconds(measured: Sequence[Step], part: str) -> list[float | None]:
    return [number(dig(step, "phase_seconds", part)) for step in measured]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _parts_table(measured: Sequence[Step], parts: Mapping[str, float]) -> Table:
    everything = sum(parts.values())
    rows = []
    for part, mean in parts.items():
        values = known(_seconds(measured, part))
        marks = [short(None if (mark := quantile(values, q)) is None else 1e3 * mark) for q in (0.5, 0.99)]
        rows.append((f"{part}: {MEANINGS[part]}", percent(mean / everything), short(1e3 * mean), *marks))
    header = ("part of a step", "share", "mean (ms)", "median (ms)", "p99 (ms)")
    return Table("The numbers of the chart; 99 % of the steps lie below p99.", header, tuple(rows))


def load_section(run: Run) -> Section:
    """Utilisation, memory, temperature, power and traffic over the time of the run, with its phases shaded."""
    load = Load(run.telemetry)
    parts: list[Part] = []
    for heading, gauges in (("Devices", DEVICE_GAUGES), ("Hosts", HOST_GAUGES)):
        found = {gauge.title: (gauge, tracks) for gauge in gauges if (tracks := load.tracks(gauge))}
        if found:
            parts.append(Text(heading, "heading"))
            parts += [_gauge_chart(gauge, tracks, load) for gauge, tracks in found.values()]
            parts.append(_load_table(list(found.values())))
    return Section("Load", tuple(parts))


def _gauge_chart(gauge: Gauge, tracks: Sequence[Track], load: Load) -> Part:
    caption = f"{gauge.title}. {gauge.says}"
    return lanes_chart(gauge, [Lane("run", tracks, load.spans())], caption, wide=False, group="load")


def _load_table(found: Sequence[tuple[Gauge, Sequence[Track]]]) -> Table:
    rows = []
    for gauge, tracks in found:
        for track in tracks:
            values = known(track.values)
            marks = (_mean(values), quantile(values, 0.05), quantile(values, 0.95), max(values))
            idle = sum(value < IDLE for value in values) / len(values) if gauge.unit == "%" else None
            name = f"{gauge.title} ({gauge.unit}){': ' if track.name else ''}{track.name}"
            rows.append((name, *(short(mark) for mark in marks), percent(idle), whole(len(values))))
    header = ("what", "mean", "p5", "p95", "highest", f"below {IDLE:.0f} %", "samples")
    caption = "The numbers of the charts: 5 % of the samples lie below p5, 95 % below p95. (telemetry.jsonl)"
    return Table(caption, header, tuple(rows), folded=True)
