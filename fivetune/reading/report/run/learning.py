"""Loss, scores, learning rate and gradient norm over the steps: the section on learning.

In: steps and evaluations of a Run. Out: a Section of charts, with their numbers in tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Part, Section, Table, Text
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
    format_points,
    get_score_label,
    list_score_keys,
    read_score,
    select_headline_scores,
    select_main_evals,
)
from fivetune.rundir.figures import find_eval_changes
from fivetune.rundir.layout import OWN_SPLITS
from fivetune.rundir.records import Run, StepRecord
from fivetune.values import as_finite_number, divide, get_nested, select_finite

NUM_VALUES = 13


def build_learning_section(run: Run, reference_runs: Sequence[Run]) -> Section:
    """Build the section: charts over the steps, and tables of their numbers."""
    steps, evals = select_latest_by_step(run.steps), select_main_evals(run)
    parts: list[Part] = []
    if steps:
        losses, at = [record.loss for record in steps], [float(record.step) for record in steps]
        eval_losses = [(step, record and record.loss) for step, record in _list_points(evals)]
        words = describe_smoothing(len(losses))
        caption = f"Loss on the training data{words}, and on the evaluation data. (steps.jsonl, evals.jsonl)"
        parts.append(charts.build_loss_chart(at, losses, eval_losses, caption))
    parts += _build_score_curves(run, evals, reference_runs)
    if steps:
        parts += _draw_rate_and_norm_charts(run, steps)
        parts.append(_build_steps_table(steps))
    return Section("Learning", tuple(parts) or (Text("No step was recorded, so there is nothing to draw.", "note"),))


def _build_score_curves(run: Run, evals: Sequence[EvalRecord], reference_runs: Sequence[Run]) -> list[Part]:
    """Build the chart of scores (points) over the steps and its table; a sentence where there is no curve."""
    keys = [key for key in list_score_keys(evals) if not key.startswith("best")]
    if not keys:
        return [Text("No evaluation was made, so there are no scores to draw.", "note")]
    header = ("step", "examples", "loss", *(get_score_label(key) for key in keys), "cut off", "time")
    every = {(one.step, one.split, one.num_examples, one.basis): one for one in run.evals if one.split in OWN_SPLITS}
    ordered = sorted(every.values(), key=lambda one: one.step)
    rows = tuple(_format_eval_row(one, keys) for one in ordered)
    bases = list(dict.fromkeys(one.basis for one in every.values()))  # in the order in which they began
    words = ""
    if bases[1:]:
        words = " A set is the evaluation data with the settings of the evaluation; a resume changed it."
        header = (header[0], "set", *header[1:])
        rows = tuple(
            (row[0], format_count(bases.index(one.basis) + 1), *row[1:]) for one, row in zip(ordered, rows, strict=True)
        )
    table = Table(f"Every evaluation.{words} (evals.jsonl)", header, rows, folded=True)
    if len(evals) == 1:
        return [Text("One evaluation was made, so its scores have no curve; they are in the verdict."), table]
    shown = [key for key in keys if key not in ("HasAns_exact", "NoAns_exact")]
    points, main, best = _list_points(evals), find_main_score_key(run), choose_best_eval(run)
    at = [step for step, _ in points]
    curves = {
        get_score_label(key): (at, [read_score(record, key) for _, record in points])
        for key in select_headline_scores(run, shown or keys)
    }
    levels = {
        f"{other.name}: {get_score_label(main)}": level
        for other in reference_runs
        if main and (level := read_score(choose_best_eval(other), main)) is not None
    }
    changes = find_eval_changes(evals)
    caption = "Scores on the evaluation data over the steps; step 0 is the model before fine-tuning."
    if changes:
        listed = " and ".join(map(format_count, changes))
        caption += f" At step {listed} a resume changed the evaluation: scores before and after it are not comparable."
    chart = charts.build_score_curves_chart(
        curves,
        caption,
        best_step=best.step if best else None,
        levels=levels,
        last_step=max([*at, *(record.step for record in select_latest_by_step(run.steps))]),
        changes=changes,
    )
    return [chart, table]


def _list_points(evals: Sequence[EvalRecord]) -> list[tuple[float, EvalRecord | None]]:
    """List steps and evaluations to draw, with a gap (None) where data, settings or the number of examples change."""
    changes = find_eval_changes(evals)
    points: list[tuple[float, EvalRecord | None]] = []
    for before, record in zip([None, *evals], evals, strict=False):
        is_other_set = before is not None and before.num_examples != record.num_examples
        points += [(float(record.step), None)] if is_other_set or record.step in changes else []
        points.append((float(record.step), record))
    return points


def _format_eval_row(record: EvalRecord, keys: Sequence[str]) -> tuple[str, ...]:
    """Format an evaluation as a row: step, examples, loss in nats per token, scores, share cut off, time."""
    return (
        format_count(record.step),
        format_count(record.num_examples),
        format_decimal(record.loss, 3),
        *(format_points(read_score(record, key)) for key in keys),
        format_percent(record.rates.get("cap_hit")),
        format_duration(record.seconds),
    )


def _draw_rate_and_norm_charts(run: Run, steps: Sequence[StepRecord]) -> list[Part]:
    """Draw the learning rate, and the norm of the gradient with its limit; a sentence if no norm is recorded."""
    at = [float(record.step) for record in steps]
    rates: dict[str, Series] = {"learning rate": [record.lr for record in steps]}
    taken = [record.effective_lr for record in steps]
    if select_finite(taken):
        rates["effective learning rate"] = taken
    norms, limit = (
        [record.grad_norm for record in steps],
        as_finite_number(get_nested(run.config, "train", "max_grad_norm")),
    )
    clipped = [norm for norm in select_finite(norms) if limit is not None and norm > limit]
    clipping = (
        ""
        if limit is None
        else (
            f" {format_percent(divide(len(clipped), len(select_finite(norms))))} of the steps were "
            f"clipped at {format_significant(limit)}."
        )
    )
    rate_words = (
        "The scheduled learning rate, and the effective one: with the optimizer's parameter scaling."
        if select_finite(taken)
        else "The learning rate."
    )
    rate_chart = charts.build_step_chart(rates, at, rate_words, unit="learning rate", smoothed=False)
    if not select_finite(norms):
        return [rate_chart, Text("Gradient norm: not recorded.")]
    norm_words = f"Norm of the gradient before clipping{describe_smoothing(len(norms))}.{clipping}"
    norm_chart = charts.build_step_chart(
        {"gradient norm": norms}, at, norm_words, unit="norm", smoothed=True, limit=limit
    )
    return [rate_chart, norm_chart]


def _build_steps_table(steps: Sequence[StepRecord]) -> Table:
    """Build the table of NUM_VALUES evenly spaced steps."""
    losses = [record.loss for record in steps]
    smoothed = smooth_series(losses, choose_smoothing_span(len(losses)))
    rows: list[tuple[str, ...]] = []
    for i in select_evenly(len(steps), NUM_VALUES):
        record = steps[i]
        numbers = (losses[i], smoothed[i], record.lr, record.effective_lr, record.grad_norm)
        rows.append((format_count(record.step), *(format_significant(value) for value in numbers)))
    header = ("step", "loss", "loss, smoothed", "learning rate", "effective learning rate", "gradient norm")
    return Table("Values at evenly spaced steps. (steps.jsonl)", header, tuple(rows), folded=True)
