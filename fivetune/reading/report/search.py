"""The page of a search: the best trial, scores over trials, importance of settings, and every trial.

In: a Search. Out: a Page for `render_html`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from fivetune.reading.report.page.charts import (
    COLORS,
    MUTED,
    Trace,
    build_bars_chart,
    build_chart,
    build_line_trace,
    build_marks_trace,
)
from fivetune.reading.report.page.parts import (
    Chart,
    Figure,
    Measured,
    Page,
    Part,
    Problem,
    Results,
    Section,
    Table,
    Text,
    build_plain_table,
    build_section,
    collect_quiet_sections,
)
from fivetune.reading.report.page.series import Series
from fivetune.reading.report.page.wording import (
    escape_hidden,
    format_decimal,
    format_duration,
    format_percent,
    format_plural,
    format_setting,
)
from fivetune.reading.report.run.scores import get_score_label
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
    states = [trial.state for trial in found.trials]
    kinds = {"finished": "good", "failed": "warning"}
    badges: list[Text] = []
    for state in (*ENDED_STATES, "running", "waiting"):
        if state in states:
            badges.append(Text(f"{states.count(state)} {state}", kinds.get(state, "note")))
    sections = (
        _build_result_section(found, recipe, doubt),
        build_section("History", _draw_history_charts(found)),
        build_section("Importance of settings", _iter_importance_parts(found)),
        build_section("Trials", build_plain_table(build_search_results(found), "All trials, the best first.")),
    )
    return Page(
        title=found.name,
        sections=collect_quiet_sections(sections),
        subtitle=f"Search for the best {get_score_label(found.metric)}",
        badges=tuple(badges),
    )


def build_search_results(found: Search) -> Results:
    """Build all trials with their settings as a table, the best first."""
    keys: dict[str, Any] = {}
    for trial in found.trials:
        keys |= trial.settings
    rows: list[list[str | Measured]] = []
    for trial in sort_trials(found):
        row: list[str | Measured] = [str(trial.number), trial.state, Measured(format_decimal(trial.score), trial.score)]
        row += [str(len(trial.curve)), Measured(format_duration(trial.seconds), trial.seconds)]
        for key in keys:
            row.append(format_setting(key, trial.settings[key]) if key in trial.settings else "")
        row.append(trial.why)
        rows.append(row)
    header = ("trial", "state", found.metric, "evaluations", "time", *keys, "why")
    caption = (
        f"{format_plural(len(rows), 'trial')} of a search for the best {get_score_label(found.metric)}, the best "
        "first; of a pruned one, the best score before it was stopped. The best score is chosen on the same examples, "
        "so that it is biased upwards."
    )
    return Results(caption, header, rows, {"time": "s"})


def _build_result_section(found: Search, recipe: str, doubt: str) -> Section:
    best = found.best
    if best is None:
        return build_section("Result", Text("No trial has finished yet.", "lead"))
    num = len(found.trials)
    seconds = [trial.seconds for trial in found.trials if trial.seconds is not None]
    of_all = f"the best of {format_plural(num, 'trial')}: {format_decimal(best.score)}"
    first = next((trial for trial in found.trials if trial.score is not None), best)
    if found.starts_from_recipe and best.number == 0:
        words = f"Trial 0, the recipe's own values, is {of_all}."
        if num > 1:
            words += " No trial beat the recipe."
    elif first is best:
        words = f"Trial {best.number} is {of_all}."
    else:
        is_recipe = found.starts_from_recipe and first.number == 0
        name = "The recipe's own values" if is_recipe else "The first trial"
        words = f"Trial {best.number} is {of_all}. {name} had {format_decimal(first.score)}."
    advice = "Other values of these settings may not help: correct this first."
    num_pruned = sum(one.state == "pruned" for one in found.trials)
    return build_section(
        "Result",
        Text(words, "lead"),
        Problem(doubt, advice, kind="bad") if doubt else None,
        Text(f"fivetune train {shlex.quote(recipe)}", "code") if recipe else None,
        Figure(get_score_label(found.metric), format_decimal(best.score), f"trial {best.number}, {best.run}"),
        Figure("Trials", str(num), f"{num_pruned} pruned"),
        Figure("Time of all trials", format_duration(sum(seconds) if seconds else None), "sum over the trials"),
        Table(
            "The best settings; best.yaml holds the whole recipe.",
            ("setting", "value"),
            [(key, format_setting(key, value)) for key, value in best.settings.items()],
        ),
    )


def _draw_history_charts(found: Search) -> Iterator[Chart]:
    """Draw the score of each trial with the best score of finished trials so far, and the scores over the steps."""
    scored = [one for one in found.trials if one.score is not None]
    if not scored:
        return
    score = get_score_label(found.metric)
    traces = _build_trials_traces([(one.number, one) for one in scored])
    choose = max if found.higher_is_better else min
    so_far: float | None = None
    numbers: list[float] = []
    best: Series = []
    for trial in scored:
        if trial.state != "finished" or trial.score is None:
            continue
        so_far = trial.score if so_far is None else choose(so_far, trial.score)
        numbers.append(trial.number)
        best.append(so_far)
    if numbers:
        if numbers[-1] < found.trials[-1].number:  # it is the best of the later trials too
            numbers.append(found.trials[-1].number)
            best.append(best[-1])
        style = {"shape": "hv", "dash": "dot"}
        traces.insert(0, build_line_trace("best so far", numbers, best, MUTED, mode="lines", line=style))
    caption = "Score of each trial; of a pruned one, the best score before it was stopped."
    yield build_chart(caption, traces, "trial", score, hovermode="closest", height=320)
    curves: list[Trace] = []
    curved = [trial for trial in scored if len(trial.curve) > 1]
    for trial in curved[-MAX_CURVES:]:  # as the pruner compares them
        is_best = found.best is not None and trial.number == found.best.number
        style = {"width": 3 if is_best else 1, "dash": "dot" if trial.state == "pruned" else "solid"}
        steps = [float(step) for step, _ in trial.curve]
        scores: Series = [score for _, score in trial.curve]
        color = COLORS[0] if is_best else MUTED
        curves.append(build_line_trace(f"trial {trial.number}", steps, scores, color, line=style))
    if curves:
        caption = "Scores over the steps: the best trial in colour, pruned ones dotted."
        yield build_chart(caption, curves, "step", score, hovermode="closest", showlegend=False, height=320)


def _build_trials_traces(points: Sequence[tuple[Any, Trial]]) -> list[Trace]:
    """Build a trace of dots for each state that trials have; a point is its place on the x axis, and the trial."""
    traces: list[Trace] = []
    for state, symbol in SYMBOLS.items():
        xs: list[Any] = []
        scores: Series = []
        texts: list[str] = []
        for x, trial in points:
            if trial.state == state:
                xs.append(x)
                scores.append(trial.score)
                lines = [f"trial {trial.number}"]
                for key, value in trial.settings.items():
                    lines.append(escape_hidden(f"{key} {format_setting(key, value)}"))
                texts.append("\n".join(lines))
        if xs:
            marker = {"color": COLORS[0], "size": 9, "symbol": symbol}
            hover = "%{y:.2f}, %{text}"
            traces.append(build_marks_trace(xs, scores, marker, hover, name=state, text=texts))
    return traces


def _iter_importance_parts(found: Search) -> Iterator[Part]:
    """Yield the importance of the settings, and a chart of each: its value against the score, a dot per trial."""
    if found.importances:
        ordered = sorted(found.importances.items(), key=lambda pair: -pair[1])
        yield build_bars_chart(
            {key: 100 * value for key, value in reversed(ordered)},
            "Importance of each setting for the score, over the finished trials.",
            unit="importance (%)",
            hover="%{x:.1f} %",
            height=110 + 34 * len(ordered),
            axis={"showgrid": True, "range": [0, 102]},
        )
        rows = [(key, format_percent(value)) for key, value in ordered]
        caption = "Importance of each setting for a place among the best trials (PED-ANOVA), as shares."
        yield Table(caption, ("setting", "importance"), rows, folded=True)
    else:
        yield Text("Importance of the settings is not known: it needs four finished trials.", "note")
    by_key: dict[str, list[Trial]] = {}
    for trial in found.trials:
        if trial.state in ("finished", "pruned") and trial.score is not None:
            for key in trial.settings:
                by_key.setdefault(key, []).append(trial)
    for key, chosen in by_key.items():
        values = [trial.settings[key] for trial in chosen]
        axis: dict[str, Any] = {"type": "linear"}
        if any(as_finite_number(value) is None for value in values):
            values = [format_setting(key, value) for value in values]
            axis = {"type": "category"}
        elif key in found.log_settings:
            axis = {"type": "log"}
        traces = _build_trials_traces(list(zip(values, chosen, strict=True)))
        caption = f"Score by {key}."
        if len(traces) > 1:
            caption += " Hollow: pruned, the best score before that."
        score = get_score_label(found.metric)
        yield build_chart(caption, traces, key, score, wide=False, hovermode="closest", showlegend=False, xaxis=axis)


def sort_trials(found: Search) -> list[Trial]:
    """Sort finished trials by score, then the others by number."""
    sign = -1 if found.higher_is_better else 1
    finished = [trial for trial in found.trials if trial.state == "finished"]
    others = [trial for trial in found.trials if trial.state != "finished"]
    return sorted(finished, key=lambda trial: sign * (trial.score or 0.0)) + others
