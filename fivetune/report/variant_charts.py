"""Charts of a comparison: scores with their intervals, training time, curves of all runs, scaling and Pareto front.

In: Variants, each drawn in its own colour and dash throughout the page. Out: Charts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fivetune.compare.measures import best_eval, series
from fivetune.report.charts import COLORS, INK, MUTED, Trace, label, layout, log_axis
from fivetune.report.load_charts import budget, curve, look_of, rounded
from fivetune.report.scores import label as score_name
from fivetune.report.scores import score
from fivetune.report.series import Series, by_step, column, quantile, smooth, window
from fivetune.report.variants import LAST, SCORE, measure
from fivetune.report.wording import visible
from fivetune.types import Chart, Measure, Run, Variant
from fivetune.values import dig, known, number

MOST_HOVERED = 24  # lines whose values can be read in one box
PHASE_COLORS = {"train": COLORS[0], "evaluate": COLORS[1], "checkpoint": COLORS[2], "prepare": COLORS[4]}

Points = tuple[Sequence[float], Series]


def _rows(num: int) -> dict[str, Any]:
    """Layout of charts with a row per variant, the first on top."""
    axis = {"autorange": "reversed", "type": "category", "showgrid": True, "ticksuffix": "  ", "dtick": 1}
    return {"height": 120 + 32 * num, "yaxis": axis}


def scores_chart(variants: Sequence[Variant], name: str, caption: str) -> Chart:
    """A row per variant: best score with its interval, the last evaluation, and the best of each single run."""
    names = [label(variant.name) for variant in variants]
    colors = [look_of(i)[0] for i in range(len(variants))]
    best = [measure(variant, SCORE) for variant in variants]
    singles = [
        (row, score(best_eval(run, name), name))
        for row, variant in zip(names, variants, strict=True)
        for run in variant.runs
    ]
    seen = [(row, value) for row, value in singles if value is not None]
    dots = {"type": "scatter", "mode": "markers", "hovertemplate": "%{x:.2f}<extra>%{fullData.name}</extra>"}
    traces: list[Trace] = [
        dots | {
            "name": "single runs", "y": [row for row, _ in seen], "x": [value for _, value in seen],
            "marker": {"symbol": "line-ns-open", "size": 9, "color": MUTED},
        },
        dots | {
            "name": "last evaluation", "y": names, "x": [measure(variant, LAST).value for variant in variants],
            "marker": {"symbol": "diamond-open", "size": 14, "color": INK},
        },
        dots | {
            "name": "best evaluation", "y": names, "x": [one.value for one in best], "error_x": _bars(best),
            "marker": {"size": 10, "color": colors},
        },
    ]  # fmt: skip
    look = layout(
        label(score_name(name)),
        "",
        hovermode="closest",
        xaxis={"showgrid": True, "showline": False},
        **_rows(len(names)),
    )
    return Chart(caption, tuple(traces), look)


def _bars(found: Sequence[Measure], color: str = MUTED) -> dict[str, Any]:
    """Error bars from value to `low` and `high`; none where these are not known."""
    given = [(one.value or 0.0, one.low, one.high) for one in found]
    return {
        "type": "data", "symmetric": False, "color": color, "thickness": 1.3, "width": 4,
        "array": [0.0 if high is None else high - value for value, _, high in given],
        "arrayminus": [0.0 if low is None else value - low for value, low, _ in given],
    }  # fmt: skip


def time_chart(variants: Sequence[Variant], caption: str) -> Chart | None:
    """Stacked bars: the median over a variant's runs of the minutes in each phase; None if no run tells."""
    found = [_phase_minutes(variant.runs) for variant in variants]
    phases = list(dict.fromkeys(phase for table in found for phase in table))
    phases.sort(key=lambda phase: [*PHASE_COLORS, phase].index(phase))
    if not phases:
        return None
    long = max(sum(table.values()) for table in found) >= 3
    scale, unit = (1.0, "minutes") if long else (60.0, "seconds")
    traces = tuple(
        {
            "type": "bar",
            "orientation": "h",
            "name": label(phase),
            "y": [label(variant.name) for variant in variants],
            "x": rounded([scale * table[phase] if phase in table else None for table in found]),
            "marker": {"color": PHASE_COLORS.get(phase, MUTED)},
            "hovertemplate": "%{x:.3~g}",
        }
        for phase in phases
    )
    axis = {"showgrid": True, "rangemode": "tozero"}
    look = layout(unit, "", barmode="stack", hovermode="y unified", bargap=0.35, xaxis=axis, **_rows(len(found)))
    look["yaxis"] |= {"showgrid": False}
    look["legend"] |= {"traceorder": "normal"}
    return Chart(caption, traces, look)


def _phase_minutes(runs: Sequence[Run]) -> dict[str, float]:
    tables = [dig(run.status, "seconds_by_phase") or {} for run in runs]
    phases = dict.fromkeys(phase for table in tables for phase in table)
    found = {phase: known([number(table.get(phase)) for table in tables]) for phase in phases}
    return {phase: (quantile(values, 0.5) or 0.0) / 60 for phase, values in found.items() if values}


def curves_chart(
    variants: Sequence[Variant],
    points: Callable[[Run], Points],
    caption: str,
    *,
    x: str,
    y: str,
    group: str,
    log: bool = False,
) -> Chart | None:
    """A line per run, all runs of a variant alike; None if there is no point."""
    found = [(place, variant, run, points(run)) for place, variant in enumerate(variants) for run in variant.runs]
    found = [one for one in found if known(one[3][1])]
    if not found:
        return None
    limit = budget(len(found))
    traces = []
    for place, variant, run, (xs, ys) in found:
        name = variant.name if len(variant.runs) == 1 else f"{variant.name}, {_seed(run)}"
        own = {"name": label(name), "meta": visible(variant.name)}
        own |= {"mode": "lines+markers"} if len(xs) <= 30 else {}
        traces.append(curve(variant.name, xs, ys, look_of(place), limit=limit) | own)
    axis = log_axis([value for *_, (_, ys) in found for value in ys]) if log else {}
    scale = ", log scale" if axis.get("type") == "log" else ""
    mode = "x unified" if len(found) <= MOST_HOVERED else "closest"
    look = layout(x, y + scale, height=330, showlegend=False, hovermode=mode, yaxis=axis)
    return Chart(caption, tuple(traces), look, group=group)


def _seed(run: Run) -> str:
    seed = dig(run.config, "run", "seed")
    return run.name if seed is None else f"seed {seed}"


def training_losses(run: Run) -> Points:
    """Step and smoothed training loss."""
    steps = by_step(run.steps)
    losses = column(steps, "loss")
    return [float(record["step"]) for record in steps], smooth(losses, window(len(losses)))


def eval_losses(run: Run) -> Points:
    """Step and loss of each evaluation."""
    evals = series(run)
    return [float(record["step"]) for record in evals], [number(record.get("loss")) for record in evals]


def eval_scores(run: Run, name: str) -> Points:
    """Step and score of each evaluation."""
    evals = series(run)
    return [float(record["step"]) for record in evals], [score(record, name) for record in evals]


def scores_by_time(run: Run, name: str) -> Points:
    """Minutes of training done before each evaluation, and its score; evaluations after unknown times are left out."""
    spent, done = {0.0: 0.0}, 0.0
    for record in by_step(run.steps):
        done += number(record.get("step_seconds")) or 0.0
        spent[float(record["step"])] = done / 60
    found = [(spent[step], value) for step, value in zip(*eval_scores(run, name), strict=True) if step in spent]
    return [minutes for minutes, _ in found], [value for _, value in found]


def scaling_chart(lines: Mapping[str, Sequence[tuple[int, Measure]]], caption: str) -> Chart:
    """Speed-up over devices of each line, and the ideal: as many times as fast as there are devices."""
    most = max(num for line in lines.values() for num, _ in line)
    ideal: Trace = {
        "type": "scatter", "mode": "lines", "name": "ideal", "x": [1, most], "y": [1, most],
        "line": {"color": MUTED, "dash": "dash", "width": 1.5}, "hoverinfo": "skip",
    }  # fmt: skip
    traces = [ideal]
    for place, (name, line) in enumerate(lines.items()):
        color, dash = look_of(place)
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": label(name), "x": [num for num, _ in line],
             "y": rounded([one.value for _, one in line]), "error_y": _bars([one for _, one in line], color),
             "line": {"color": color, "dash": dash, "width": 2}, "marker": {"color": color, "size": 8},
             "hovertemplate": "%{y:.3~g} times with %{x}"}
        )  # fmt: skip
    axis = {"dtick": 1 if most <= 8 else None, "range": [0.8, most + 0.2]}
    look = layout("devices", "times as fast as one", height=340, xaxis=axis, yaxis={"rangemode": "tozero"})
    return Chart(caption, tuple(traces), look)


def pareto_chart(
    variants: Sequence[Variant], cost: str, caption: str, *, x: str, y: str, front: bool, wide: bool
) -> Chart:
    """Score over cost, a mark per variant, those of the front filled and, with `front`, joined."""
    found = [
        (place, variant, measure(variant, cost), measure(variant, SCORE))
        for place, variant in enumerate(variants)
        if measure(variant, cost).value is not None and measure(variant, SCORE).value is not None
    ]
    traces: list[Trace] = []
    if front:
        line = sorted((one.value or 0.0, two.value or 0.0) for _, variant, one, two in found if variant.pareto)
        stairs = {"color": MUTED, "width": 1.5, "dash": "dot", "shape": "hv"}
        traces.append(
            {"type": "scatter", "mode": "lines", "name": "Pareto front", "x": [a for a, _ in line],
             "y": [b for _, b in line], "line": stairs, "hoverinfo": "skip"}
        )  # fmt: skip
    for place, variant, spent, reached in found:
        color = look_of(place)[0]
        symbol, edge = "circle" if variant.pareto else "circle-open", {"width": 2, "color": color}
        marker = {"symbol": symbol, "size": 11, "color": color, "line": edge}
        traces.append(
            {"type": "scatter", "mode": "markers", "name": label(variant.name), "meta": visible(variant.name),
             "x": [spent.value], "y": [reached.value], "error_x": _bars([spent], color),
             "error_y": _bars([reached], color), "line": {"color": color}, "marker": marker,
             "hovertemplate": "%{y:.2f} at %{x:.4~g}<extra>%{fullData.name}</extra>"}
        )  # fmt: skip
    look = layout(x, y, height=340, hovermode="closest", showlegend=False, xaxis={"rangemode": "tozero",
                  "showgrid": True})  # fmt: skip
    return Chart(caption, tuple(traces), look, wide=wide, group=f"cost {cost}")
