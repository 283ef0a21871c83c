"""The page of a search: the best trial, scores over trials, importance of settings, and every trial.

In: a Search. Out: a Page for `render_html`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fivetune.reading.report.page.charts import COLORS, MUTED, build_layout, build_line_trace, escape_label
from fivetune.reading.report.page.parts import Chart, Figure, Page, Part, Problem, Section, Table, Text
from fivetune.reading.report.page.wording import (
    format_decimal,
    format_duration,
    format_percent,
    format_plural,
    format_setting,
)
from fivetune.reading.report.run.scores import get_score_label as score_label
from fivetune.types import Search, Trial
from fivetune.values import as_finite_number

ENDED_STATES = ("finished", "pruned", "failed")
MAX_CURVES = 40
SYMBOLS = {"finished": "circle", "pruned": "circle-open", "running": "triangle-up-open"}


def build_search_page(found: Search, *, recipe: str = "", doubt: str = "") -> Page:
    """Build the page of a study, finished or not.

    Args:
        recipe: path of the file with the best settings.
        doubt: the reason why the score of the best trial does not count; "" without one.
    """
    sections = (
        _build_result_section(found, recipe, doubt),
        _build_history_section(found),
        _build_settings_section(found),
        _build_trials_section(found),
    )
    return Page(
        title=found.name,
        sections=tuple(section for section in sections if section.parts),
        subtitle=f"Search for the best {score_label(found.metric)}",
        badges=tuple(
            Text(f"{num} {state}", {"finished": "good", "failed": "warning"}.get(state, "note"))
            for state in (*ENDED_STATES, "running", "waiting")
            if (num := sum(one.state == state for one in found.trials))
        ),
    )


def _build_result_section(found: Search, recipe: str, doubt: str) -> Section:
    best = found.best
    if best is None:
        return Section("Result", (Text("No trial has finished yet.", "lead"),))
    seconds = [one.seconds for one in found.trials if one.seconds is not None]
    of_all = f"the best of {format_plural(len(found.trials), 'trial')}: {format_decimal(best.score)}"
    if found.starts_from_recipe and best.number == 0:
        others = "" if len(found.trials) == 1 else " No trial beat the recipe."
        words = f"Trial 0, the recipe's own values, is {of_all}.{others}"
    else:
        words = f"Trial {best.number} is {of_all}.{_describe_first(found)}"
    rows = tuple((key, format_setting(key, value)) for key, value in best.settings.items())
    return Section(
        "Result",
        (
            Text(words, "lead"),
            *(
                [Problem(doubt, "Other values of these settings may not help: correct this first.", kind="bad")]
                if doubt
                else ()
            ),
            *([Text(f"fivetune train {shlex.quote(recipe)}", "code")] if recipe else ()),
            Figure(score_label(found.metric), format_decimal(best.score), f"trial {best.number}, {best.run}"),
            Figure("Trials", str(len(found.trials)), f"{sum(one.state == 'pruned' for one in found.trials)} pruned"),
            Figure("Time of all trials", format_duration(sum(seconds) if seconds else None), "sum over the trials"),
            Table("The best settings; best.yaml holds the whole recipe.", ("setting", "value"), rows),
        ),
    )


def _describe_first(found: Search) -> str:
    first = next((one for one in found.trials if one.score is not None), None)
    if first is None or first is found.best:
        return ""
    name = "The recipe's own values" if found.starts_from_recipe and first.number == 0 else "The first trial"
    return f" {name} had {format_decimal(first.score)}."


def _build_history_section(found: Search) -> Section:
    scored = [one for one in found.trials if one.score is not None]
    if not scored:
        return Section("History", ())
    return Section("History", (_draw_history_chart(found, scored), *_draw_curves_charts(found, scored)))


def _draw_history_chart(found: Search, scored: Sequence[Trial]) -> Chart:
    """Draw the score of each trial, and the best score of finished trials so far."""
    better = max if found.higher_is_better else min
    finished = [one for one in scored if one.state == "finished"]
    best = list(accumulate([one.score for one in finished if one.score is not None], better))
    traces: list[dict[str, Any]] = []
    if finished:
        steps = {"mode": "lines", "line": {"shape": "hv", "dash": "dot"}}
        numbers = [one.number for one in finished]
        if numbers[-1] < found.trials[-1].number:  # it is the best of the later trials too
            numbers, best = [*numbers, found.trials[-1].number], [*best, best[-1]]
        traces.append(build_line_trace("best so far", numbers, list(best), MUTED, **steps))
    traces += _build_dots_traces([(one.number, one) for one in scored])
    axis = {"dtick": max(1, len(found.trials) // 12), "tick0": 0}
    look = build_layout("trial", score_label(found.metric), hovermode="closest", height=320, xaxis=axis)
    caption = "Score of each trial; of a pruned one, the best score before it was stopped."
    return Chart(caption, tuple(traces), look)


def _build_dots_traces(points: Sequence[tuple[Any, Trial]]) -> list[dict[str, Any]]:
    """Build a trace of dots for each state that trials have; a point is its place on the x axis, and the trial."""
    traces: list[dict[str, Any]] = []
    for state, symbol in SYMBOLS.items():
        own = [(x, one) for x, one in points if one.state == state]
        if own:
            traces.append(_build_dots_trace(state, [x for x, _ in own], [one for _, one in own], symbol))
    return traces


def _build_dots_trace(name: str, xs: Sequence[Any], trials: Sequence[Trial], symbol: str) -> dict[str, Any]:
    settings = [
        "<br>".join(escape_label(f"{key} {format_setting(key, value)}") for key, value in one.settings.items())
        for one in trials
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(xs),
        "y": [one.score for one in trials],
        "text": [f"trial {one.number}<br>{text}" for one, text in zip(trials, settings, strict=True)],
        "marker": {"color": COLORS[0], "size": 9, "symbol": symbol},
        "hovertemplate": "%{y:.2f}, %{text}<extra></extra>",
    }


def _draw_curves_charts(found: Search, scored: Sequence[Trial]) -> list[Chart]:
    """Scores over the steps, as the pruner compares them."""
    shown = [one for one in scored if len(one.curve) > 1][-MAX_CURVES:]
    if not shown:
        return []
    traces: list[dict[str, Any]] = []
    for one in shown:
        is_best = found.best is not None and one.number == found.best.number
        style = {"width": 3 if is_best else 1, "dash": "dot" if one.state == "pruned" else "solid"}
        steps, scores = [float(step) for step, _ in one.curve], [score for _, score in one.curve]
        traces.append(
            build_line_trace(f"trial {one.number}", steps, list(scores), COLORS[0] if is_best else MUTED, line=style)
        )
    caption = "Scores over the steps: the best trial in colour, pruned ones dotted."
    look = build_layout("step", score_label(found.metric), hovermode="closest", showlegend=False, height=320)
    return [Chart(caption, tuple(traces), look)]


def _build_settings_section(found: Search) -> Section:
    parts: list[Part] = []
    if found.importances:
        parts.append(_draw_importance_chart(found))
        rows = tuple((key, format_percent(value)) for key, value in _sort_importances(found))
        caption = "Importance of each setting for a place among the best trials (PED-ANOVA), as shares."
        parts.append(Table(caption, ("setting", "importance"), rows, folded=True))
    else:
        parts.append(Text("Importance of the settings is not known: it needs four finished trials.", "note"))
    scored = [one for one in found.trials if one.state in ("finished", "pruned") and one.score is not None]
    keys = dict.fromkeys(key for one in scored for key in one.settings)
    parts += [_draw_slice_chart(found, scored, key) for key in keys]
    return Section("Importance of settings", tuple(parts))


def _sort_importances(found: Search) -> list[tuple[str, float]]:
    return sorted(found.importances.items(), key=lambda pair: -pair[1])


def _draw_importance_chart(found: Search) -> Chart:
    pairs = _sort_importances(found)[::-1]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [escape_label(key) for key, _ in pairs],
        "x": [100 * value for _, value in pairs],
        "marker": {"color": COLORS[0]},
        "hovertemplate": "%{x:.1f} %<extra></extra>",
    }
    look = build_layout(
        "importance (%)",
        "",
        height=110 + 34 * len(pairs),
        showlegend=False,
        hovermode="closest",
        bargap=0.4,
        xaxis={"showgrid": True, "range": [0, 102]},
        yaxis={"showgrid": False, "ticksuffix": "  "},
    )
    return Chart("Importance of each setting for the score, over the finished trials.", (bars,), look)


def _draw_slice_chart(found: Search, scored: Sequence[Trial], key: str) -> Chart:
    """Draw one dot per trial, hollow for a pruned one: the setting's value against the score."""
    chosen = [one for one in scored if key in one.settings]
    values = [one.settings[key] for one in chosen]
    numbers = [as_finite_number(value) for value in values]
    axis: dict[str, Any] = {"type": "category"}
    if None not in numbers:
        axis = {"type": "log", "dtick": 1, "tickformat": "~g"} if key in found.log_settings else {"type": "linear"}
    else:
        values = [format_setting(key, value) for value in values]
    traces = _build_dots_traces(list(zip(values, chosen, strict=True)))
    look = build_layout(key, score_label(found.metric), hovermode="closest", showlegend=False, xaxis=axis)
    hollow = " Hollow: pruned, the best score before that." if len(traces) > 1 else ""
    return Chart(f"Score by {key}.{hollow}", tuple(traces), look, wide=False)


def _build_trials_section(found: Search) -> Section:
    keys = list(dict.fromkeys(key for one in found.trials for key in one.settings))
    rows = tuple(
        (
            str(one.number),
            one.state,
            format_decimal(one.score),
            str(len(one.curve)),
            format_duration(one.seconds),
            *(format_setting(key, one.settings[key]) if key in one.settings else "" for key in keys),
            one.why,
        )
        for one in sort_trials(found)
    )
    header = ("trial", "state", found.metric, "evaluations", "time", *keys, "why")
    return Section("Trials", (Table("All trials, the best first.", header, rows),))


def sort_trials(found: Search) -> list[Trial]:
    """Sort finished trials by score, then the others by number."""
    sign = -1 if found.higher_is_better else 1
    return sorted(
        found.trials,
        key=lambda one: (one.state != "finished", sign * one.score if one.state == "finished" and one.score else 0.0),
    )
