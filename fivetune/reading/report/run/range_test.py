"""The result of `fivetune find-lr` -> a Section of its own page and of a run's report.

In: the table of <run>.find-lr.json. Out: Sections and Pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

from fivetune.reading.report.page.charts import COLORS, build_layout, build_line_trace, build_step_marker
from fivetune.reading.report.page.parts import Chart, Figure, Page, Section, Text
from fivetune.reading.report.page.wording import (
    format_count,
    format_significant,
)
from fivetune.rundir.reader import find_range_test_flaw
from fivetune.values import as_finite_number

TITLE = "Learning-rate range test"


def build_range_test_page(found: Mapping[str, Any], *, run: str) -> Page:
    """Build the page of a range test.

    Args:
        found: the table of its result (`rundir.range_test`).
        run: run directory, for the subtitle.
    """
    return Page(title=TITLE, sections=build_range_test_sections(found), subtitle=run)


def build_range_test_sections(found: Mapping[str, Any]) -> tuple[Section, ...]:
    """Build the section of a range test; none without a result, and a damaged result is named instead."""
    if not found:
        return ()
    if flaw := find_range_test_flaw(found):
        return (Section(TITLE, (Text(f"The result of find-lr is damaged: {flaw}. It is left out.", "warning"),)),)
    return (_build_section(found),)


def _build_section(found: Mapping[str, Any]) -> Section:
    """Build the section of a RangeTest's table: the chosen rate, and the loss (nats per token) over the rates."""
    rates, losses, smoothed = found["lrs"], found["losses"], found["smoothed"]
    choice = as_finite_number(found.get("lr"))
    words = (
        "No rate can be chosen: the loss did not fall."
        if choice is None
        else (f"Learning rate {choice:g}. {found['rule']}")
    )
    traces = (
        build_line_trace("Loss, each step", rates, losses, COLORS[0], line={"width": 1}, opacity=0.45, mode="lines"),
        build_line_trace("Loss, smoothed", rates, smoothed, COLORS[0], mode="lines"),
    )
    top = max(losses[0], min(smoothed))
    chosen = {} if choice is None else build_step_marker(choice, f"chosen {choice:g}", y=0.02)
    look = build_layout(
        "learning rate, log scale",
        "nats per target token",
        height=340,
        hovermode="closest",
        xaxis={"type": "log", "exponentformat": "power", "dtick": 1},
        yaxis={"range": [0, 1.6 * top]},
        **_convert_to_log_axis(chosen),
    )
    caption = f"Loss while the rate grows by a constant factor per step. Ended because {found['stopped']}."
    figures = (
        Figure("Chosen rate", format_significant(choice), "a tenth of the rate at the lowest loss"),
        Figure(
            "Steepest descent",
            format_significant(found.get("steepest")),
            "where the loss falls fastest, for comparison",
        ),
        Figure("Steps", format_count(len(rates)), f"{format_significant(rates[0])} to {format_significant(rates[-1])}"),
    )
    return Section(TITLE, (Text(words, "note"), *figures, Chart(caption, traces, look)))


def _convert_to_log_axis(marks: dict[str, Any]) -> dict[str, Any]:
    """Convert marks to a log axis: Plotly takes the place of an annotation as a logarithm, that of a shape as it is."""
    return {**marks, "annotations": [one | {"x": log10(one["x"])} for one in marks["annotations"]]} if marks else {}
