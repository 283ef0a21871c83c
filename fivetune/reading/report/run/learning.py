"""Loss, scores, learning rate and gradient norm over the steps: the section on learning.

In: steps and evaluations of a Run. Out: a Section of charts, with their numbers in tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Part, Section, Table, Text, build_section
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
    steps, evals = select_latest_by_step(run.steps), select_evals_by_step(run.evals)
    at = [float(record.step) for record in steps]
    losses: Series = [record.loss for record in steps]
    parts: list[Part] = []
    if steps:
        eval_losses = [(step, record and record.loss) for step, record in _list_points(evals)]
        words = describe_smoothing(len(losses))
        caption = f"Loss on the training data{words}, and on the evaluation data. (steps.jsonl, evals.jsonl)"
        parts.append(charts.build_loss_chart(at, losses, eval_losses, caption))
    parts += _build_score_parts(run, evals, reference_runs, last_step=max((record.step for record in steps), default=0))
    if steps:
        taken, norms = [record.effective_lr for record in steps], [record.grad_norm for record in steps]
        rates: dict[str, Series] = {"learning rate": [record.lr for record in steps]}
        words = "The learning rate."
        if select_finite(taken):
            rates["effective learning rate"] = taken
            words = "The scheduled learning rate, and the effective one: with the optimizer's parameter scaling."
        parts.append(charts.build_step_chart(rates, at, words, unit="learning rate", smoothed=False))
        if known := select_finite(norms):
            limit = as_finite_number(get_nested(run.config, "train", "max_grad_norm"))
            words = f"Norm of the gradient before clipping{describe_smoothing(len(norms))}."
            if limit is not None:
                share = format_percent(sum(norm > limit for norm in known) / len(known))
                words += f" {share} of the steps were clipped at {format_significant(limit)}."
            norm = {"gradient norm": norms}
            parts.append(charts.build_step_chart(norm, at, words, unit="norm", smoothed=True, limit=limit))
        else:
            parts.append(Text("Gradient norm: not recorded."))
        smoothed = smooth_series(losses, choose_smoothing_span(len(losses)))
        rows: list[Sequence[str]] = []
        for i in select_evenly(len(steps), NUM_VALUES):
            record = steps[i]
            numbers = (losses[i], smoothed[i], record.lr, record.effective_lr, record.grad_norm)
            rows.append((format_count(record.step), *map(format_significant, numbers)))
        header = ("step", "loss", "loss, smoothed", "learning rate", "effective learning rate", "gradient norm")
        parts.append(Table("Values at evenly spaced steps. (steps.jsonl)", header, rows, folded=True))
    return build_section("Learning", parts or Text("No step was recorded, so there is nothing to draw.", "note"))


def _build_score_parts(
    run: Run, evals: Sequence[EvalRecord], reference_runs: Sequence[Run], *, last_step: float
) -> list[Part]:
    """Build the chart of scores (points) over the steps and its table; a sentence where there is no curve."""
    keys = [key for key in list_score_keys(evals) if not key.startswith("best")]
    if not keys:
        return [Text("No evaluation was made, so there are no scores to draw.", "note")]
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
    table = Table(f"Every evaluation.{words} (evals.jsonl)", header, rows, folded=True)
    if len(evals) == 1:
        return [Text("One evaluation was made, so its scores have no curve; they are in the verdict."), table]
    shown = [key for key in keys if key not in ("HasAns_exact", "NoAns_exact")]
    points, main, best = _list_points(evals), find_main_score_key(run), choose_best_eval(run)
    at = [step for step, _ in points]
    curves = {
        get_score_label(key): (at, [get_score(record, key) for _, record in points])
        for key in select_headline_scores(run, shown or keys)
    }
    levels: dict[str, float] = {}
    for other in reference_runs:
        if main and (level := get_score(choose_best_eval(other), main)) is not None:
            levels[f"{other.name}: {get_score_label(main)}"] = level
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
        last_step=max(*at, last_step),
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
