"""The verdicts of the diagnosis: the section on limits, and the table of their evidence.

In: Verdicts. Out: a Section, a Table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fivetune.report.page.parts import Part, Section, Table, Text
from fivetune.report.page.wording import (
    UNKNOWN,
    format_decimal,
    format_percent,
    format_setting,
    format_significant,
)
from fivetune.rundir.records import Run
from fivetune.types import Verdict

Step = dict[str, Any]


def build_limits_section(run: Run, verdicts: Sequence[Verdict]) -> Section:
    """Build the section on the verdicts of the diagnosis: problem, change, predicted speed-up; empty without steps."""
    if not run.steps and not verdicts:
        return Section("Limits", ())
    parts: list[Part] = []
    for verdict in verdicts:
        parts.append(Text(f"{verdict.message} {verdict.advice}{_format_gain(verdict)}", "warning"))
    if not verdicts:
        words = "No problem with speed, devices or losses was found. Scores and warnings have sections of their own."
        parts.append(Text(words, "good"))
    else:
        parts.append(build_verdicts_table({"": verdicts}, named=False))
    return Section("Limits", tuple(parts))


def _format_gain(verdict: Verdict) -> str:
    return "" if verdict.gain is None else f" Predicted: {format_decimal(verdict.gain)} times as fast."


def build_verdicts_table(found: Mapping[str, Sequence[Verdict]], *, named: bool) -> Table:
    """Build a folded table of measured value, threshold and change by verdict; `named` adds a column of variants."""
    rows: list[tuple[str, ...]] = []
    for name, verdicts in found.items():
        for verdict in verdicts:
            change = ", ".join(f"{key} {format_setting(key, value)}" for key, value in verdict.change.items())
            figures = (
                format_significant(verdict.figure),
                format_significant(verdict.threshold),
                format_percent(verdict.confidence, 0),
            )
            gain = UNKNOWN if verdict.gain is None else f"{format_decimal(verdict.gain)} x"
            cells = (verdict.rule.replace("_", " "), *figures, change or "no setting", gain)
            rows.append((name, *cells) if named else cells)
    header = ("rule", "measured", "threshold", "confidence", "change", "predicted speed-up")
    caption = "The evidence: the measured value and the threshold of each rule. (steps.jsonl, telemetry.jsonl)"
    return Table(caption, ("variant", *header) if named else header, tuple(rows), folded=True)
