"""Loss, scores, learning rate and gradient norm over the steps: the section on learning.

In: steps and evaluations of a Run. Out: charts, with their numbers in tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Chart, Part, Table, Text
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


def iter_learning_parts(run: Run, reference_runs: Sequence[Run]) -> Iterator[Part]:
    """Yield charts over the steps, and tables of their numbers."""
    steps = select_latest_by_step(run.steps)
    evals = select_evals_by_step(run.evals)
    last = max((record.step for record in steps), default=0)
    if not steps:
        yield from _iter_score_parts(run, evals, reference_runs, last)
        return
    at = [float(record.step) for record in steps]
    losses: Series = [record.loss for record in steps]
    yield _draw_losses_chart(at, losses, evals)
    yield from _iter_score_parts(run, evals, reference_runs, last)
    rates: dict[str, Series] = {"learning rate": [record.lr for record in steps]}
    words = "The learning rate."
    effective: Series = [record.effective_lr for record in steps]
    if select_finite(effective):
        rates["effective learning rate"] = effective
        words = "The scheduled learning rate, and the effective one: with the optimizer's parameter scaling."
    yield charts.build_step_chart(rates, at, words, unit="learning rate", smoothed=False)
    norms: Series = [record.grad_norm for record in steps]
    known = select_finite(norms)
    if known:
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
        numbers = (record.loss, smoothed[i], record.lr, record.effective_lr, record.grad_norm)
        rows.append((format_count(record.step), *map(format_significant, numbers)))
    header = ("step", "loss", "loss, smoothed", "learning rate", "effective learning rate", "gradient norm")
    yield Table("Values at evenly spaced steps. (steps.jsonl)", header, rows, folded=True)


def _draw_losses_chart(at: Sequence[float], losses: Series, evals: Sequence[EvalRecord]) -> Chart:
    """Draw the loss on the training data over the steps `at`, and on the evaluation data (nats per target token)."""
    traces = charts.build_smoothed_traces("Training loss", at, losses, charts.COLORS[0])
    points = _list_points(evals)
    places = [step for step, _ in points]
    eval_losses = [record.loss if record else None for _, record in points]
    if select_finite(eval_losses):
        color = charts.COLORS[1]
        marker = {"color": color, "size": 7, "symbol": "diamond"}
        line = {"dash": "dot"}
        trace = charts.build_line_trace(
            "Evaluation loss", places, eval_losses, color, mode="lines+markers", marker=marker, line=line
        )
        traces.append(trace)
    axis = charts.choose_axis_scale(losses)
    unit = charts.name_unit("nats per target token", axis)
    words = describe_smoothing(len(losses))
    caption = f"Loss on the training data{words}, and on the evaluation data. (steps.jsonl, evals.jsonl)"
    return charts.build_chart(caption, traces, "step", unit, xaxis=_build_step_axis(max([*at, *places])), yaxis=axis)


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
    every: dict[Hashable, EvalRecord] = {}
    for record in run.evals:
        if record.split in OWN_SPLITS:
            every[record.step, record.split, record.num_examples, record.basis] = record
    bases = list(dict.fromkeys(record.basis for record in every.values()))  # in the order in which they began
    labels = [get_score_label(key) for key in keys]
    header = ["step", "examples", "loss", *labels, "cut off", "time"]
    caption = "Every evaluation."
    is_changed = len(bases) > 1
    if is_changed:
        header.insert(1, "set")
        caption += " A set is the evaluation data with the settings of the evaluation; a resume changed it."
    rows: list[Sequence[str]] = []
    for record in sorted(every.values(), key=lambda record: record.step):
        cells = [format_count(record.step), format_count(record.num_examples), format_decimal(record.loss, 3)]
        cells += [format_decimal(get_score(record, key)) for key in keys]
        cells += [format_percent(record.rates.get("cap_hit")), format_duration(record.seconds)]
        if is_changed:
            cells.insert(1, format_count(bases.index(record.basis) + 1))
        rows.append(cells)
    yield Table(f"{caption} (evals.jsonl)", header, rows, folded=True)


def _draw_score_curves(
    run: Run, keys: Sequence[str], evals: Sequence[EvalRecord], reference_runs: Sequence[Run], last_step: float
) -> Chart:
    """Draw scores over steps 0 to `last_step`, the best step marked, other runs as horizontal lines."""
    # Exact match of the two kinds of questions runs beside F1 of them: more lines would hide each other.
    shown = [key for key in keys if key not in ("HasAns_exact", "NoAns_exact")]
    points = _list_points(evals)
    main = find_main_score_key(run)
    best = choose_best_eval(run)
    at = [step for step, _ in points]
    last = max(*at, last_step)
    traces: list[charts.Trace] = []
    for i, key in enumerate(select_headline_scores(run, shown or keys)):
        color = charts.COLORS[i % len(charts.COLORS)]
        line = {"dash": charts.DASHES[i // 2 % len(charts.DASHES)]}
        values = [get_score(record, key) for _, record in points]
        label = get_score_label(key)
        traces.append(charts.build_line_trace(label, at, values, color, mode="lines+markers", line=line))
    for other in reference_runs:
        level = get_score(choose_best_eval(other), main) if main else None
        if main and level is not None:
            line = {"dash": "longdash", "width": 1.5}
            name = f"{other.name}: {get_score_label(main)}"
            levels: Series = [level, level]
            traces.append(charts.build_line_trace(name, [0, last], levels, charts.MUTED, mode="lines", line=line))
    changes = find_eval_changes(evals)  # from these steps on, evaluations have other data or settings
    markers = [charts.build_step_marker(step, "other evaluation", yanchor="top", y=1) for step in changes]
    if best:
        side = "right" if best.step > last / 2 else "left"
        markers.insert(0, charts.build_step_marker(best.step, "best", xanchor=side))
    layout: dict[str, Any] = {"xaxis": _build_step_axis(last), "yaxis": {"range": [-3, 103]}}
    for name in ("shapes", "annotations"):
        layout[name] = [part for marker in markers for part in marker[name]]
    caption = "Scores on the evaluation data over the steps; step 0 is the model before fine-tuning."
    if changes:
        listed = " and ".join(map(format_count, changes))
        caption += f" At step {listed} a resume changed the evaluation: scores before and after it are not comparable."
    return charts.build_chart(caption, traces, "step", "score (%)", height=330, **layout)


def _list_points(evals: Sequence[EvalRecord]) -> list[tuple[float, EvalRecord | None]]:
    """List steps and evaluations to draw, with a gap (None) where data, settings or the number of examples change."""
    changes = find_eval_changes(evals)
    points: list[tuple[float, EvalRecord | None]] = []
    before: EvalRecord | None = None
    for record in evals:
        is_other_set = before is not None and before.num_examples != record.num_examples
        if is_other_set or record.step in changes:
            points.append((float(record.step), None))
        points.append((float(record.step), record))
        before = record
    return points
