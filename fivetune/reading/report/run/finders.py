"""Results of `fivetune find-lr` and `fivetune find-batch` -> Sections of their own page and of a run's report.

In: the tables of <run>.find-lr.json and <run>.find-batch.json. Out: Sections and Pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

from fivetune.reading.report.page.charts import COLORS, MUTED, build_layout, build_line_trace, build_step_marker
from fivetune.reading.report.page.parts import Chart, Figure, Page, Section, Table, Text
from fivetune.reading.report.page.wording import (
    format_bytes,
    format_count,
    format_large_count,
    format_percent,
    format_plain,
    format_significant,
)
from fivetune.rundir.reader import find_result_flaw
from fivetune.values import as_finite_number, get_nested

TITLES = {"find-lr": "Learning-rate range test", "find-batch": "Micro-batch size"}


def build_finder_page(name: str, found: Mapping[str, Any], *, run: str) -> Page:
    """Build the page of one finder.

    Args:
        name: `find-lr` or `find-batch`; found: the table of its result (`rundir.finders`).
        run: the run directory, for the subtitle.
    """
    return Page(title=TITLES[name], sections=build_finder_sections({name: found}), subtitle=run)


def build_finder_sections(found: Mapping[str, Mapping[str, Any]]) -> tuple[Section, ...]:
    """Build a section for each finder with a result, by command (`find-lr`); a damaged result is named instead."""
    makers = {"find-lr": _build_lr_section, "find-batch": _build_batch_section}
    sections: list[Section] = []
    for name, make in makers.items():
        if name in found:
            flaw = find_result_flaw(name, found[name])
            damage = Text(f"The result of {name} is damaged: {flaw}. It is left out.", "warning")
            sections.append(Section(TITLES[name], (damage,)) if flaw else make(found[name]))
    return tuple(sections)


def _build_lr_section(found: Mapping[str, Any]) -> Section:
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
    return Section(TITLES["find-lr"], (Text(words, "note"), *figures, Chart(caption, traces, look)))


def _convert_to_log_axis(marks: dict[str, Any]) -> dict[str, Any]:
    """Convert marks to a log axis: Plotly takes the place of an annotation as a logarithm, that of a shape as it is."""
    return {**marks, "annotations": [one | {"x": log10(one["x"])} for one in marks["annotations"]]} if marks else {}


def _build_batch_section(found: Mapping[str, Any]) -> Section:
    """Build the section of a BatchTest's table: the chosen size, and tokens per second over the sizes."""
    speeds = found["speeds"]
    sizes = [one["batch_size"] for one in speeds]
    rates = [one["tokens_per_second"] for one in speeds]
    best = max(rates)
    words = (
        f"Micro-batches of {format_count(found['batch_size'])} examples. {found['rule']} {_describe_largest_fit(found)}"
    )
    traces = (
        build_line_trace("Throughput", sizes, rates, COLORS[0], mode="lines+markers"),
        build_line_trace(
            "95 % of the best", [sizes[0], sizes[-1]], [0.95 * best] * 2, MUTED, mode="lines", line={"dash": "dash"}
        ),
    )
    ticks = {"type": "log", "tickvals": sizes, "ticktext": [str(one) for one in sizes]}
    chosen = build_step_marker(found["batch_size"], f"chosen {found['batch_size']}")
    look = build_layout(
        "examples per forward pass, log scale",
        "tokens/s",
        height=320,
        hovermode="closest",
        xaxis=ticks,
        yaxis={"rangemode": "tozero"},
        **_convert_to_log_axis(chosen),
    )
    caption = (
        f"Tokens per second, forward and backward, on {format_plain(found['device'])} in "
        f"{format_plain(found['precision'])}."
    )
    rows = tuple(
        (str(one), format_large_count(rate), format_percent(rate / best))
        for one, rate in zip(sizes, rates, strict=True)
    )
    table = Table(
        "Throughput by micro-batch size.", ("examples per forward pass", "tokens per second", "of the best"), rows
    )
    return Section(TITLES["find-batch"], (Text(words, "note"), Chart(caption, traces, look), table))


def _describe_largest_fit(found: Mapping[str, Any]) -> str:
    """Describe the largest micro-batch that fits into memory, and why no larger one does."""
    measured = format_bytes(get_nested(found, "fit", "measured_bytes"))
    return (
        f"The largest that fits: {format_count(get_nested(found, 'fit', 'batch_size'))} ({measured}); "
        f"{get_nested(found, 'fit', 'why')}."
    )
