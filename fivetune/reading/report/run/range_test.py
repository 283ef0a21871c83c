"""The result of `fivetune find-lr` -> a Section of its own page and of a run's report.

In: the table of <run>.find-lr.json. Out: Sections and Pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivetune.reading.report.page.charts import COLORS, build_chart, build_line_trace, build_step_marker
from fivetune.reading.report.page.parts import Figure, Page, Section, Text, build_section
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
    """Build the section of a range test: the chosen rate, and the loss (nats per token) over the rates.

    None without a result, and a damaged result is named instead.
    """
    if not found:
        return ()
    if flaw := find_range_test_flaw(found):
        return (build_section(TITLE, Text(f"The result of find-lr is damaged: {flaw}. It is left out.", "warning")),)
    rates, losses, smoothed = found["lrs"], found["losses"], found["smoothed"]
    style = {"line": {"width": 1}, "opacity": 0.45}
    traces = (
        build_line_trace("Loss, each step", rates, losses, COLORS[0], mode="lines", **style),
        build_line_trace("Loss, smoothed", rates, smoothed, COLORS[0], mode="lines"),
    )
    choice = as_finite_number(found.get("lr"))
    words, marks = "No rate can be chosen: the loss did not fall.", dict[str, Any]()
    if choice is not None:
        words = f"Learning rate {choice:g}. {found['rule']}"
        marks = build_step_marker(choice, f"chosen {choice:g}", y=0.02)
    caption = f"Loss while the rate grows by a constant factor per step. Ended because {found['stopped']}."
    steepest = format_significant(found.get("steepest"))
    ends = f"{format_significant(rates[0])} to {format_significant(rates[-1])}"
    figures = (
        Figure("Chosen rate", format_significant(choice), "a tenth of the rate at the lowest loss"),
        Figure("Steepest descent", steepest, "where the loss falls fastest, for comparison"),
        Figure("Steps", format_count(len(rates)), ends),
    )
    chart = build_chart(
        caption,
        traces,
        "learning rate, log scale",
        "nats per target token",
        height=340,
        hovermode="closest",
        xaxis={"type": "log"},
        yaxis={"range": [0, 1.6 * max(losses[0], min(smoothed))]},
        **marks,
    )
    return (build_section(TITLE, Text(words), figures, chart),)
