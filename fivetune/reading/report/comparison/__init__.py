"""The page of a comparison: the best variant, its margin with interval, and the causes.

In: a Comparison, whose runs may lack any record. Out: a Page whose sections follow a reader's questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fivetune.reading.compare import MEASURES
from fivetune.reading.compare.records import Comparison, Variant
from fivetune.reading.report.comparison import charts
from fivetune.reading.report.comparison.differences import (
    build_changed_examples_section,
    build_machine_tables,
    build_settings_tables,
)
from fivetune.reading.report.comparison.scaling import build_scaling_section
from fivetune.reading.report.comparison.variants import (
    COSTS,
    SCORE,
    build_baseline_tables,
    build_variants_tables,
    describe_outcome,
    get_measure,
    has_nonzero_scores,
)
from fivetune.reading.report.page.parts import Page, Part, Section, Table, Text
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_decimal,
    format_percent,
    format_plural,
    format_significant,
)
from fivetune.reading.report.run.load import DEVICE_GAUGES, HOST_GAUGES, Gauge, Load
from fivetune.reading.report.run.load_charts import Lane, choose_line_style, describe_line_styles, draw_lanes_chart
from fivetune.reading.report.run.problems import build_verdicts_table
from fivetune.reading.report.run.scores import get_score_label
from fivetune.reading.report.run.speed import (
    MEANINGS,
    compute_step_breakdown,
    draw_step_time_chart,
    select_measured_steps,
)
from fivetune.rundir import write_text
from fivetune.rundir.records import Run, StepRecord
from fivetune.values import select_finite


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison atomically."""
    write_text(path, render_html(build_comparison_page(comparison)))
    return path


def build_comparison_page(comparison: Comparison) -> Page:
    """Build the page of a comparison."""
    sections = (
        build_outcome_section(comparison),
        build_differences_section(comparison),
        build_variants_section(comparison),
        Section("Settings", tuple(build_settings_tables(comparison))),
        build_training_time_section(comparison.variants),
        build_run_curves_section(comparison),
        build_variant_load_section(comparison.variants),
        build_step_times_section(comparison.variants),
        build_scaling_section(comparison.variants),
        build_pareto_section(comparison),
        build_variant_verdicts_section(comparison.variants),
        build_changed_examples_section(comparison),
        Section("Machine", tuple(build_machine_tables(comparison.variants))),
        build_terms_section(),
    )
    return Page(
        title=comparison.title,
        sections=tuple(section for section in sections if section.parts),
        subtitle=f"Comparison \u00b7 {get_score_label(comparison.metric)} \u00b7 baseline {comparison.baseline}",
        badges=_build_badges(comparison),
    )


def _build_badges(comparison: Comparison) -> tuple[Text, ...]:
    runs = sum(len(variant.runs) for variant in comparison.variants)
    failed = sum(len(variant.failures) for variant in comparison.variants)
    warned = len(comparison.warnings)
    badges = [
        Text(format_plural(len(comparison.variants), "variant")),
        Text(format_plural(runs, "run")),
        Text(format_plural(warned, "warning") if warned else "same work", "warning" if warned else "good"),
    ]
    return (*badges, *([Text(f"{failed} missing", "warning")] if failed else ()))


def build_outcome_section(comparison: Comparison) -> Section:
    """Build the section on the compared variants and the best one."""
    chart = charts.build_variant_scores_chart(
        comparison.variants,
        comparison.metric,
        f"{get_score_label(comparison.metric)} of each variant: the mean of the runs' best evaluations with its "
        "95 % interval, if the runs are one or three and more, "
        "the mean of their last evaluations, and the best of each single run.",
    )
    scored = has_nonzero_scores(comparison)
    return Section("Outcome", (Text(" ".join(describe_outcome(comparison)), "lead"), *([chart] if scored else ())))


def build_differences_section(comparison: Comparison) -> Section:
    """Build the section on differences other than the varied settings, and on failed runs."""
    failures = [f"{variant.name}: {why}" for variant in comparison.variants for why in variant.failures]
    warnings = [*comparison.warnings, *failures]
    if warnings:
        return Section("Warnings", tuple(Text(text, "warning") for text in warnings))
    words = (
        "All variants did the same work: only the varied settings differ. Compared: order of the data, examples, "
        "tokens and updates, global batch, evaluation set, task version, versions of packages, kind of device."
    )
    return Section("Warnings", (Text(words, "good"),))


def build_variants_section(comparison: Comparison) -> Section:
    """Build the section on all measures of all variants, and their differences to the baseline."""
    return Section("Variants", (*build_variants_tables(comparison), *build_baseline_tables(comparison)))


def build_training_time_section(variants: Sequence[Variant]) -> Section:
    """Build the section on the duration of each phase of a run."""
    caption = "Time of a run by phase, the median over the variant's runs. (status.json)"
    chart = charts.build_phase_times_chart(variants, caption)
    return Section("Training time", (chart,) if chart else ())


def build_run_curves_section(comparison: Comparison) -> Section:
    """Build the section on losses and scores of all runs, by step and by time; a sentence for scores that are all 0."""
    variants, metric = comparison.variants, comparison.metric
    name, nats = get_score_label(metric), "nats per target token"
    draw = partial(charts.build_run_curves_chart, variants)
    caption = "Loss on the evaluation data, of every run. (evals.jsonl)"
    eval_loss = draw(charts.get_eval_losses, caption, x="step", y=nats, group="step", log=True)
    caption = "Loss on the training data, of every run, smoothed. (steps.jsonl)"
    train_loss = draw(charts.get_training_losses, caption, x="step", y=nats, group="step", log=True)
    if not has_nonzero_scores(comparison):
        scored = any(get_measure(variant, SCORE).value is not None for variant in variants)
        zero = Text(f"{name} is 0 in every evaluation of every run, so it is not drawn.") if scored else None
        return Section("Curves", tuple(part for part in (eval_loss, train_loss, zero) if part))
    caption = f"{name} on the evaluation data, of every run. (evals.jsonl)"
    score = draw(lambda run: charts.get_eval_scores(run, metric), caption, x="step", y=name, group="step")
    caption = f"{name} over the time spent in training steps: which run reaches a score first."
    score_over_time = draw(
        lambda run: charts.get_scores_over_time(run, metric), caption, x="minutes", y=name, group="trained"
    )
    return Section("Curves", tuple(chart for chart in (eval_loss, score, train_loss, score_over_time) if chart))


def build_variant_load_section(variants: Sequence[Variant]) -> Section:
    """Build the section on load: devices and hosts in the first run of each variant, and means of all runs."""
    loads = [[Load(run.telemetry) for run in variant.runs] for variant in variants]
    first = [(place, variants[place], found[0]) for place, found in enumerate(loads) if found]
    parts: list[Part] = []
    for gauge in (*DEVICE_GAUGES, *HOST_GAUGES):
        lanes = [
            Lane(variant.name, tracks, load.list_phase_intervals(), choose_line_style(place))
            for place, variant, load in first
            if (tracks := load.build_tracks(gauge))
        ]
        if lanes:
            run = "the first run of each variant" if any(len(one.runs) > 1 for one in variants) else "each run"
            caption = f"{gauge.title}, {run}. {gauge.description}{describe_line_styles(lanes)}"
            parts.append(draw_lanes_chart(gauge, lanes, caption, wide=True, group="load"))
    table = _build_load_table(variants, loads)
    return Section("Load", (*parts, *([table] if table else ())))


def _build_load_table(variants: Sequence[Variant], loads: Sequence[Sequence[Load]]) -> Table | None:
    """Build the table of mean and maximum of each quantity by run, over the devices that it used."""
    runs = [(variant.name, run.name) for variant in variants for run in variant.runs]
    quantities = [(gauge, word) for gauge in (*DEVICE_GAUGES, *HOST_GAUGES) for word in gauge.fields.values()]
    found = [[_compute_mean_and_max(load, gauge, word) for gauge, word in quantities] for own in loads for load in own]
    shown = [i for i in range(len(quantities)) if any(row[i][0] is not None for row in found)]
    if not shown:
        return None
    rows = tuple(
        (*names, *(_format_mean_and_max(*figures[i]) for i in shown))
        for names, figures in zip(runs, found, strict=True)
    )
    values = tuple((None, None, *(figures[i][0] for i in shown)) for figures in found)
    header = ("variant", "run", *(_format_column_title(*quantities[i]) for i in shown))
    caption = (
        "Mean over the whole run; second line: the highest sample. Only devices that the run used; several devices, "
        "hosts or processes are averaged. (telemetry.jsonl)"
    )
    return Table(caption, header, rows, values=values)


def _format_column_title(gauge: Gauge, word: str) -> str:
    return f"{gauge.title}{', ' if word else ''}{word} ({gauge.unit})"


def _compute_mean_and_max(load: Load, gauge: Gauge, word: str) -> tuple[float | None, float | None]:
    tracks = [track for track in load.build_tracks(gauge) if track.quantity == word and track.used]
    values = [value for track in tracks for value in select_finite(track.values)]
    return (sum(values) / len(values), max(values)) if values else (None, None)


def _format_mean_and_max(mean: float | None, most: float | None) -> str:
    return UNKNOWN if mean is None else f"{format_significant(mean)}\nhighest {format_significant(most)}"


def build_step_times_section(variants: Sequence[Variant]) -> Section:
    """Build the section on the mean time of a step by part, for each variant."""
    found = {
        one.name: parts for one in variants if (parts := compute_step_breakdown(_collect_measured_steps(one.runs)))
    }
    if not found:
        return Section("Step time", ())
    caption = "Mean time of a step by part, over all runs of a variant, without the warm-up. (steps.jsonl)"
    parts = [part for part in MEANINGS if any(part in row for row in found.values())]
    rows: list[tuple[str, ...]] = []
    values: list[tuple[float | None, ...]] = []
    for name, row in found.items():
        everything = sum(row.values())
        shares = [row[part] / everything if part in row else None for part in parts]
        rows.append((name, format_significant(1e3 * everything), *(format_percent(share) for share in shares)))
        values.append((None, everything, *shares))
    header = ("variant", "step (ms)", *parts)
    table = Table("The numbers of the chart, parts as shares of the step.", header, tuple(rows), values=tuple(values))
    return Section("Step time", (draw_step_time_chart(found, caption), table))


def _collect_measured_steps(runs: Sequence[Run]) -> list[StepRecord]:
    return [step for run in runs for step in select_measured_steps(run.steps)]


def build_pareto_section(comparison: Comparison) -> Section:
    """Build the section on score against cost: time, energy, money."""
    if comparison.disturbed or comparison.incomparable or not has_nonzero_scores(comparison):
        return Section("Pareto front", ())
    name = get_score_label(comparison.metric)
    parts: list[Part] = []
    known = [cost for cost in COSTS if sum(get_measure(one, cost).value is not None for one in comparison.variants) > 1]
    for cost in known:
        first = cost == COSTS[0]
        front = (
            " Filled marks are on the Pareto front: no other variant dominates them in score and time." if first else ""
        )
        of = f"{MEASURES[cost].label} ({MEASURES[cost].unit})".removesuffix(" ()")
        caption = f"{name} over {of}.{front}"
        wide = len(known) == 1
        parts.append(
            charts.build_pareto_chart(comparison.variants, cost, caption, x=of, y=name, front=first, wide=wide)
        )
    return Section("Pareto front", tuple(parts))


def build_variant_verdicts_section(variants: Sequence[Variant]) -> Section:
    """Build the section on the verdicts of each variant."""
    found = {one.name: one.verdicts for one in variants if one.verdicts}
    if not any(one.runs for one in variants):
        return Section("Verdicts", ())
    healthy = [one.name for one in variants if one.runs and not one.verdicts]
    parts: list[Part] = []
    if healthy:
        parts.append(Text(f"No problem found in {'; '.join(healthy)}.", "good"))
    if found:
        pairs = [(name, one) for name, verdicts in found.items() for one in verdicts]
        rows = tuple(
            (name, one.message, one.advice, UNKNOWN if one.gain is None else f"{format_decimal(one.gain)} x")
            for name, one in pairs
        )
        values = tuple((None, None, None, one.gain) for _, one in pairs)
        caption = "Problems of each variant, the most important first, and the predicted effect of the change."
        header = ("variant", "verdict", "what to do", "predicted")
        parts += [Table(caption, header, rows, values=values), build_verdicts_table(found, named=True)]
    return Section("Verdicts", tuple(parts))


def build_terms_section() -> Section:
    """Build the section with the definitions of terms."""
    rows = (
        ("95 % interval", "Of a score: its variation with other seeds, from three on; of a single run, and by example, "
         "with other examples for the same trained models."),
        ("range", "Of times, speeds and other figures: minimum and maximum of the variant's runs."),
        ("against the baseline", "Scores, losses and shares: the variant's minus the baseline's, of runs with the "
         "same seed. Other figures: the variant's divided by the baseline's."),
        ("best, last", "The evaluation that chose a run's weights, and the one after its last step. The best is "
         "chosen on the same examples, so it is biased upwards; the last is not. Where eval.max_examples limits "
         "evaluations, the best one is repeated on all examples; the last one is then not shown beside it."),
        ("examples per second", "Examples processed / seconds of the training steps, without padding and warm-up."),
        ("Pareto front", "Variants that no other dominates, as at least as good and as fast, and better in one."),
    )  # fmt: skip
    return Section("Definitions", (Table("The terms of this page.", ("term", "meaning"), rows),))
