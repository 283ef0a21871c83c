"""A search -> Page: the best trial, how the scores went, which settings mattered, and every trial.

In: a Search. Out: a Page for `render`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fivetune.report.charts import COLORS, MUTED, label, layout, line
from fivetune.report.scores import label as score_label
from fivetune.report.wording import duration, fixed, percent, plural, setting
from fivetune.types import Chart, Figure, Page, Search, Section, Table, Text, Trial
from fivetune.values import number

Part = Any
OVER = ("finished", "pruned", "failed")
MAX_CURVES = 40


def search_page(found: Search) -> Page:
    """The page of a study, finished or not."""
    sections = (_result(found), _history(found), _settings(found), _trials(found))
    return Page(
        title=found.name,
        sections=tuple(section for section in sections if section.parts),
        subtitle=f"Search for the best {score_label(found.metric)}",
        badges=tuple(
            Text(f"{num} {state}", {"finished": "good", "failed": "warning"}.get(state, "note"))
            for state in (*OVER, "running", "waiting")
            if (num := sum(one.state == state for one in found.trials))
        ),
    )


def _result(found: Search) -> Section:
    best = found.best
    if best is None:
        return Section("Result", (Text("No trial has finished yet, so nothing is known.", "lead"),))
    seconds = [one.seconds for one in found.trials if one.seconds is not None]
    first = next((one for one in found.trials if one.score is not None), None)
    gain = ""
    if first is not None and first is not best and best.score is not None and first.score is not None:
        gain = f" The first trial had {fixed(first.score)}."
    words = f"Trial {best.number} is the best of {plural(len(found.trials), 'trial')}: {fixed(best.score)}.{gain}"
    rows = tuple((key, setting(key, value)) for key, value in best.settings.items())
    return Section("Result", (
        Text(words, "lead"),
        Figure(score_label(found.metric), fixed(best.score), f"trial {best.number}, {best.run}"),
        Figure("Trials", str(len(found.trials)), f"{sum(one.state == 'pruned' for one in found.trials)} pruned"),
        Figure("Time of all trials", duration(sum(seconds) if seconds else None), "one after the other"),
        Table("The best settings; best.yaml holds the whole recipe.", ("setting", "value"), rows),
    ))  # fmt: skip


def _history(found: Search) -> Section:
    scored = [one for one in found.trials if one.score is not None]
    if not scored:
        return Section("History", ())
    return Section("History", (_history_chart(found, scored), *_curves_chart(found, scored)))


def _history_chart(found: Search, scored: Sequence[Trial]) -> Chart:
    """Score of each trial, and the best finished one so far."""
    better = max if found.higher_is_better else min
    finished = [one for one in scored if one.state == "finished"]
    best = list(accumulate([one.score for one in finished if one.score is not None], better))
    traces: list[dict[str, Any]] = []
    if finished:
        steps = {"mode": "lines", "line": {"shape": "hv", "dash": "dot"}}
        traces.append(line("best so far", [one.number for one in finished], list(best), MUTED, **steps))
    for state, symbol in (("finished", "circle"), ("pruned", "circle-open"), ("running", "triangle-up-open")):
        chosen = [one for one in scored if one.state == state]
        if chosen:
            traces.append(_dots(state, [one.number for one in chosen], chosen, symbol=symbol))
    look = layout("trial", score_label(found.metric), hovermode="closest", height=320)
    caption = "Score of each trial; pruned ones were stopped early, and show the best they had reached."
    return Chart(caption, tuple(traces), look)


def _dots(name: str, xs: Sequence[Any], trials: Sequence[Trial], *, symbol: str = "circle") -> dict[str, Any]:
    told = ["<br>".join(label(f"{key} {setting(key, value)}") for key, value in one.settings.items()) for one in trials]
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(xs), "y": [one.score for one in trials],
        "text": [f"trial {one.number}<br>{text}" for one, text in zip(trials, told, strict=True)],
        "marker": {"color": COLORS[0], "size": 9, "symbol": symbol},
        "hovertemplate": "%{y:.2f}, %{text}<extra></extra>",
    }  # fmt: skip


def _curves_chart(found: Search, scored: Sequence[Trial]) -> list[Chart]:
    """Scores over the steps: what the pruner saw."""
    shown = [one for one in scored if len(one.curve) > 1][-MAX_CURVES:]
    if not shown:
        return []
    traces = []
    for one in shown:
        is_best = found.best is not None and one.number == found.best.number
        style = {"width": 3 if is_best else 1, "dash": "dot" if one.state == "pruned" else "solid"}
        steps, scores = [float(step) for step, _ in one.curve], [score for _, score in one.curve]
        traces.append(line(f"trial {one.number}", steps, list(scores), COLORS[0] if is_best else MUTED, line=style))
    caption = "Scores over the steps: the best trial in colour, pruned ones dotted."
    look = layout("step", score_label(found.metric), hovermode="closest", showlegend=False, height=320)
    return [Chart(caption, tuple(traces), look)]


def _settings(found: Search) -> Section:
    parts: list[Part] = []
    if found.importances:
        parts.append(_importance_chart(found))
        rows = tuple((key, percent(value)) for key, value in _by_weight(found))
        caption = "What share of the good scores' distance from the rest each setting explains (PED-ANOVA)."
        parts.append(Table(caption, ("setting", "importance"), rows, folded=True))
    else:
        parts.append(Text("Too few trials have finished to say which settings mattered (four are needed).", "note"))
    scored = [one for one in found.trials if one.state == "finished" and one.score is not None]
    keys = dict.fromkeys(key for one in scored for key in one.settings)
    parts += [_slice_chart(found, scored, key) for key in keys]
    return Section("Settings that mattered", tuple(parts))


def _by_weight(found: Search) -> list[tuple[str, float]]:
    return sorted(found.importances.items(), key=lambda pair: -pair[1])


def _importance_chart(found: Search) -> Chart:
    pairs = _by_weight(found)[::-1]
    bars = {
        "type": "bar", "orientation": "h", "y": [label(key) for key, _ in pairs],
        "x": [100 * value for _, value in pairs], "marker": {"color": COLORS[0]},
        "hovertemplate": "%{x:.1f} %<extra></extra>",
    }  # fmt: skip
    look = layout(
        "importance (%)", "", height=110 + 34 * len(pairs), showlegend=False, hovermode="closest", bargap=0.4,
        xaxis={"showgrid": True, "range": [0, 102]}, yaxis={"showgrid": False, "ticksuffix": "  "},
    )  # fmt: skip
    return Chart("Importance of each setting for the score, over the finished trials.", (bars,), look)


def _slice_chart(found: Search, scored: Sequence[Trial], key: str) -> Chart:
    """One dot per finished trial: the setting's value against the score."""
    chosen = [one for one in scored if key in one.settings]
    values = [one.settings[key] for one in chosen]
    numbers = [number(value) for value in values]
    axis: dict[str, Any] = {"type": "category"}
    if None not in numbers:
        low, high = min(filter(None, numbers), default=0), max(filter(None, numbers), default=0)
        axis = {"type": "log"} if 0 not in numbers and low > 0 and high / low > 20 else {"type": "linear"}
    else:
        values = [setting(key, value) for value in values]
    look = layout(key, score_label(found.metric), hovermode="closest", showlegend=False, xaxis=axis)
    return Chart(f"{key} and the score.", (_dots(key, values, chosen),), look, wide=False)


def _trials(found: Search) -> Section:
    keys = list(dict.fromkeys(key for one in found.trials for key in one.settings))
    rows = tuple(
        (
            str(one.number), one.state, fixed(one.score), str(len(one.curve)), duration(one.seconds),
            *(setting(key, one.settings[key]) if key in one.settings else "" for key in keys), one.why,
        )
        for one in in_order(found)
    )  # fmt: skip
    header = ("trial", "state", found.metric, "evaluations", "time", *keys, "why")
    return Section("Trials", (Table("All trials, the best first.", header, rows),))


def in_order(found: Search) -> list[Trial]:
    """Finished trials by score, then the others by number."""
    sign = -1 if found.higher_is_better else 1
    return sorted(
        found.trials,
        key=lambda one: (one.state != "finished", sign * one.score if one.state == "finished" and one.score else 0.0),
    )
