"""Loss, scores, learning rate and gradient norm over the steps: the section on learning.

In: steps and evaluations of a Run. Out: a Section of charts, with their numbers in tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Chart, Part, Section, Table, Text, build_section
from fivetune.reading.report.page.series import (
    Series,
    choose_smoothing_span,
    describe_smoothing,
    select_evenly,
    select_latest_by_step,
    smooth_series,
)
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_duration,
    format_percent,
    format_significant,
)
from fivetune.reading.report.run.scores import (
    EvalRecord,
    choose_best_eval,
    find_main_score_key,
    get_score_label,
    list_score_keys,
    select_headline_scores,
)
from fivetune.rundir.figures import find_eval_changes, select_evals_by_step
from fivetune.rundir.layout import OWN_SPLITS
from fivetune.rundir.records import Run
from fivetune.values import as_finite_number, get_nested, select_finite

NUM_VALUES = 13


def build_learning_section(run: Run, reference_runs: Sequence[Run]) -> Section:
    """Build the section: charts over the steps, and tables of their numbers."""
    parts = list(_iter_learning_parts(run, reference_runs))
    return build_section("Learning", parts or Text("No step was recorded, so there is nothing to draw.", "note"))


def _iter_learning_parts(run: Run, reference_runs: Sequence[Run]) -> Iterator[Part]:
    steps, evals = select_latest_by_step(run.steps), select_evals_by_step(run.evals)
    at = [float(record.step) for record in steps]
    losses: Series = [record.loss for record in steps]
    last = max((record.step for record in steps), default=0)
    if steps:  # the loss on both sets, in nats per target token
        traces = charts.build_smoothed_traces("Training loss", at, losses, charts.COLORS[0])
        points = _list_points(evals)
        places, eval_losses = [step for step, _ in points], [record and record.loss for _, record in points]
        if select_finite(eval_losses):
            color = charts.COLORS[1]
            more = {"mode": "lines+markers", "marker": {"color": color, "size": 7, "symbol": "diamond"}}
            more["line"] = {"dash": "dot"}
            traces.append(charts.build_line_trace("Evaluation loss", places, eval_losses, color, **more))
        axis = charts.choose_axis_scale(losses)
        unit = charts.name_unit("nats per target token", axis)
        words = describe_smoothing(len(losses))
        caption = f"Loss on the training data{words}, and on the evaluation data. (steps.jsonl, evals.jsonl)"
        yield charts.build_chart(caption, traces, "step", unit, xaxis=_build_step_axis(max([*at, *places])), yaxis=axis)
    yield from _iter_score_parts(run, evals, reference_runs, last)
    if not steps:
        return
    taken, norms = [record.effective_lr for record in steps], [record.grad_norm for record in steps]
    rates: dict[str, Series] = {"learning rate": [record.lr for record in steps]}
    words = "The learning rate."
    if select_finite(taken):
        rates["effective learning rate"] = taken
        words = "The scheduled learning rate, and the effective one: with the optimizer's parameter scaling."
    yield charts.build_step_chart(rates, at, words, unit="learning rate", smoothed=False)
    if known := select_finite(norms):
        limit = as_finite_number(get_nested(run.config, "train", "max_grad_norm"))
        words = f"Norm of the gradient before clipping{describe_smoothing(len(norms))}."
        if limit is not None:
            share = format_percent(sum(norm > limit for norm in known) / len(known))
            words += f" {share} of the steps were clipped at {format_significant(limit)}."
        yield charts.build_step_chart({"gradient norm": norms}, at, words, unit="norm", smoothed=True, limit=limit)
    else:
        yield Text("Gradient norm: not recorded.")
    smoothed = smooth_series(losses, choose_smoothing_span(len(losses)))
    rows: list[Sequence[str]] = []
    for i in select_evenly(len(steps), NUM_VALUES):
        record = steps[i]
        numbers = (losses[i], smoothed[i], record.lr, record.effective_lr, record.grad_norm)
        rows.append((format_count(record.step), *map(format_significant, numbers)))
    header = ("step", "loss", "loss, smoothed", "learning rate", "effective learning rate", "gradient norm")
    yield Table("Values at evenly spaced steps. (steps.jsonl)", header, rows, folded=True)


def _build_step_axis(last_step: float) -> dict[str, Any]:
    """Build the x axis that all charts of steps and evaluations share."""
    return {"range": [-0.02 * last_step, 1.02 * last_step]} if last_step else {}


def _iter_score_parts(
    run: Run, evals: Sequence[EvalRecord], reference_runs: Sequence[Run], last_step: float
) -> Iterator[Part]:
    """Yield the chart of scores (points) over the steps and its table; a sentence where there is no curve."""
    keys = [key for key in list_score_keys(evals) if not key.startswith("best")]
    if not keys:
        yield Text("No evaluation was made, so there are no scores to draw.", "note")
        return
    if len(evals) == 1:
        yield Text("One evaluation was made, so its scores have no curve; they are in the verdict.")
    else:
        yield _draw_score_curves(run, keys, evals, reference_runs, last_step)
    # A step may have an evaluation of the whole set and of a subset, and again after a resume: all are listed.
    every = {(one.step, one.split, one.num_examples, one.basis): one for one in run.evals if one.split in OWN_SPLITS}
    bases = list(dict.fromkeys(one.basis for one in every.values()))  # in the order in which they began
    changed = len(bases) > 1
    rows = [
        (
            format_count(one.step),
            *([format_count(bases.index(one.basis) + 1)] if changed else ()),
            format_count(one.num_examples),
            format_decimal(one.loss, 3),
            *(format_decimal(get_score(one, key)) for key in keys),
            format_percent(one.rates.get("cap_hit")),
            format_duration(one.seconds),
        )
        for one in sorted(every.values(), key=lambda one: one.step)
    ]
    labels = [get_score_label(key) for key in keys]
    header = ("step", *(["set"] if changed else ()), "examples", "loss", *labels, "cut off", "time")
    words = " A set is the evaluation data with the settings of the evaluation; a resume changed it." if changed else ""
    yield Table(f"Every evaluation.{words} (evals.jsonl)", header, rows, folded=True)


def _draw_score_curves(
    run: Run, keys: Sequence[str], evals: Sequence[EvalRecord], reference_runs: Sequence[Run], last_step: float
) -> Chart:
    """Draw scores over steps 0 to `last_step`, the best step marked, other runs as horizontal lines."""
    # Exact match of the two kinds of questions runs beside F1 of them: more lines would hide each other.
    shown = [key for key in keys if key not in ("HasAns_exact", "NoAns_exact")]
    points, main, best = _list_points(evals), find_main_score_key(run), choose_best_eval(run)
    at = [step for step, _ in points]
    last = max(*at, last_step)
    traces: list[charts.Trace] = []
    for i, key in enumerate(select_headline_scores(run, shown or keys)):
        color, style = charts.COLORS[i % len(charts.COLORS)], charts.DASHES[i // 2 % len(charts.DASHES)]
        more = {"line": {"dash": style}, "mode": "lines+markers"}
        values = [get_score(record, key) for _, record in points]
        traces.append(charts.build_line_trace(get_score_label(key), at, values, color, **more))
    for other in reference_runs:
        if main and (level := get_score(choose_best_eval(other), main)) is not None:
            more = {"mode": "lines", "line": {"dash": "longdash", "width": 1.5}}
            name = f"{other.name}: {get_score_label(main)}"
            traces.append(charts.build_line_trace(name, [0, last], [level, level], charts.MUTED, **more))
    changes = find_eval_changes(evals)  # from these steps on, evaluations have other data or settings
    markers = [charts.build_step_marker(step, "other evaluation", yanchor="top", y=1) for step in changes]
    if best:
        side = "right" if best.step > last / 2 else "left"
        markers.insert(0, charts.build_step_marker(best.step, "best", xanchor=side))
    layout: dict[str, Any] = {"xaxis": _build_step_axis(last), "yaxis": {"range": [-3, 103]}}
    layout |= {name: [part for marker in markers for part in marker[name]] for name in ("shapes", "annotations")}
    caption = "Scores on the evaluation data over the steps; step 0 is the model before fine-tuning."
    if changes:
        listed = " and ".join(map(format_count, changes))
        caption += f" At step {listed} a resume changed the evaluation: scores before and after it are not comparable."
    return charts.build_chart(caption, traces, "step", "score (%)", height=330, **layout)


def _list_points(evals: Sequence[EvalRecord]) -> list[tuple[float, EvalRecord | None]]:
    """List steps and evaluations to draw, with a gap (None) where data, settings or the number of examples change."""
    changes = find_eval_changes(evals)
    points: list[tuple[float, EvalRecord | None]] = []
    for before, record in zip([None, *evals], evals, strict=False):
        is_other_set = before is not None and before.num_examples != record.num_examples
        points += [(float(record.step), None)] if is_other_set or record.step in changes else []
        points.append((float(record.step), record))
    return points
