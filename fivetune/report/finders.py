"""What `fivetune find-lr` and `fivetune find-batch` found -> Sections, for their own page and for the run's report.

In: the tables of <run>.find-lr.json and <run>.find-batch.json. Out: Sections and Pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

from fivetune.report.charts import COLORS, MUTED, layout, line, mark_step
from fivetune.report.wording import amount, percent, plain, short, size, whole
from fivetune.types import Chart, Figure, Page, Section, Table, Text
from fivetune.values import dig, number

TITLES = {"find-lr": "Learning-rate range test", "find-batch": "Micro-batch size"}


def finder_page(name: str, found: Mapping[str, Any], *, run: str) -> Page:
    """The page of one finder: `find-lr` or `find-batch`."""
    return Page(title=TITLES[name], sections=finder_sections({name: found}), subtitle=run)


def finder_sections(found: Mapping[str, Mapping[str, Any]]) -> tuple[Section, ...]:
    """A section for each finder that was run."""
    makers = {"find-lr": _lr_section, "find-batch": _batch_section}
    return tuple(make(found[name]) for name, make in makers.items() if found.get(name))


def _lr_section(found: Mapping[str, Any]) -> Section:
    rates, losses, smoothed = found["lrs"], found["losses"], found["smoothed"]
    choice = number(found.get("lr"))
    words = "No rate can be told from this test: the loss did not fall." if choice is None else (
        f"Learning rate {choice:g}. {found['rule']}")  # fmt: skip
    traces = (
        line("Loss, each step", rates, losses, COLORS[0], line={"width": 1}, opacity=0.45, mode="lines"),
        line("Loss, smoothed", rates, smoothed, COLORS[0], mode="lines"),
    )
    top = max(losses[0], min(smoothed)) if losses else 1.0
    chosen = {} if choice is None else mark_step(choice, f"chosen {choice:g}", y=0.02)
    look = layout(
        "learning rate, log scale", "nats per target token", height=340, hovermode="closest",
        xaxis={"type": "log", "exponentformat": "power", "dtick": 1},
        yaxis={"range": [0, 1.6 * top]}, **_on_log_axis(chosen),
    )  # fmt: skip
    caption = f"Loss while the rate grows by a constant factor per step. Its end: {found['stopped']}."
    figures = (
        Figure("Chosen rate", short(choice), "a tenth of the rate at the lowest loss"),
        Figure("Steepest descent", short(found.get("steepest")), "where the loss falls fastest, for comparison"),
        Figure("Steps", whole(len(rates)), f"{short(rates[0])} to {short(rates[-1])}"),
    )
    return Section(TITLES["find-lr"], (Text(words, "note"), *figures, Chart(caption, traces, look)))


def _on_log_axis(marks: dict[str, Any]) -> dict[str, Any]:
    """Plotly wants the place of an annotation, not of a shape, as its logarithm."""
    return {**marks, "annotations": [one | {"x": log10(one["x"])} for one in marks["annotations"]]} if marks else {}


def _batch_section(found: Mapping[str, Any]) -> Section:
    speeds = found["speeds"]
    sizes = [one["batch_size"] for one in speeds]
    rates = [one["tokens_per_second"] for one in speeds]
    best = max(rates)
    words = f"Micro-batches of {whole(found['batch_size'])} examples. {found['rule']} {_reason(found)}"
    traces = (
        line("Throughput", sizes, rates, COLORS[0], mode="lines+markers"),
        line("95 % of the best", [sizes[0], sizes[-1]], [0.95 * best] * 2, MUTED, mode="lines", line={"dash": "dash"}),
    )
    ticks = {"type": "log", "tickvals": sizes, "ticktext": [str(one) for one in sizes]}
    chosen = mark_step(found["batch_size"], f"chosen {found['batch_size']}")
    look = layout("examples per forward pass, log scale", "tokens/s", height=320, hovermode="closest", xaxis=ticks,
                  yaxis={"rangemode": "tozero"}, **_on_log_axis(chosen))  # fmt: skip
    caption = f"Tokens per second, forward and backward, on {plain(found['device'])} in {plain(found['precision'])}."
    rows = tuple((str(one), amount(rate), percent(rate / best)) for one, rate in zip(sizes, rates, strict=True))
    table = Table("What was measured.", ("examples per forward pass", "tokens per second", "of the best"), rows)
    return Section(TITLES["find-batch"], (Text(words, "note"), Chart(caption, traces, look), table))


def _reason(found: Mapping[str, Any]) -> str:
    measured = size(dig(found, "fit", "measured_bytes"))
    return f"The largest that fits: {whole(dig(found, 'fit', 'batch_size'))} ({measured}); {dig(found, 'fit', 'why')}."
