"""The page of a comparison: the best variant, its margin with interval, and the causes.

In: a Comparison, whose runs may lack any record. Out: a Page whose sections follow a reader's questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from fivetune.reading.report.page.charts import (
    BAR_AXIS,
    HIDDEN,
    MUTED,
    Trace,
    build_chart,
    build_marks_trace,
)
from fivetune.reading.report.page.parts import (
    Cell,
    Chart,
    Page,
    Part,
    Section,
    Table,
    Text,
    build_section,
    build_sortable_table,
    collect_quiet_sections,
)
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    escape_hidden,
    format_decimal,
    format_percent,
    format_plural,
    format_significant,
)
from fivetune.reading.report.run.load import DEVICE_GAUGES, HOST_GAUGES, Gauge, Load
from fivetune.reading.report.run.load_charts import choose_line_style, iter_lanes_charts, list_used_values
from fivetune.reading.report.run.problems import build_verdicts_table
from fivetune.reading.report.run.scores import get_score_label
from fivetune.reading.report.run.speed import (
    MEANINGS,
    compute_step_breakdown,
    draw_step_time_chart,
    select_measured_steps,
)
from fivetune.rundir.records import Run, StepRecord
from fivetune.types import Verdict

GAUGES = (*DEVICE_GAUGES, *HOST_GAUGES)
PHASE_TIMES = "Time of a run by phase, the median over the variant's runs. (status.json)"


def build_comparison_page(comparison: Comparison) -> Page:
    """Build the page of a comparison."""
    variants = comparison.variants
    sections = (
        build_section("Outcome", _iter_outcome_parts(comparison)),
        build_section("Warnings", _build_warning_texts(comparison)),
        build_section("Variants", build_variants_tables(comparison), build_baseline_tables(comparison)),
        build_section("Settings", build_settings_tables(comparison)),
        build_section("Training time", charts.build_phase_times_chart(variants, PHASE_TIMES)),
        build_run_curves_section(comparison),
        build_variant_load_section(variants),
        build_section("Step time", _iter_step_time_parts(variants)),
        build_scaling_section(variants),
        build_section("Pareto front", _iter_pareto_charts(comparison)),
        build_section("Verdicts", _iter_verdict_parts(variants)),
        build_changed_examples_section(comparison),
        build_section("Machine", build_machine_tables(variants)),
        build_section("Definitions", Table("The terms of this page.", ("term", "meaning"), TERMS)),
    )
    badges = [
        Text(format_plural(len(variants), "variant")),
        Text(format_plural(sum(len(variant.runs) for variant in variants), "run")),
    ]
    if comparison.warnings:
        badges.append(Text(format_plural(len(comparison.warnings), "warning"), "warning"))
    else:
        badges.append(Text("same work", "good"))
    num_missing = sum(len(variant.failures) for variant in variants)
    if num_missing:
        badges.append(Text(f"{num_missing} missing", "warning"))
    return Page(
        title=comparison.title,
        sections=collect_quiet_sections(sections),
        subtitle=f"Comparison \u00b7 {get_score_label(comparison.metric)} \u00b7 baseline {comparison.baseline}",
        badges=tuple(badges),
    )


def _iter_outcome_parts(comparison: Comparison) -> Iterator[Part]:
    """Yield the compared variants and the best one, and their scores."""
    yield Text(" ".join(describe_outcome(comparison)), "lead")
    if has_nonzero_scores(comparison):
        name = get_score_label(comparison.metric)
        yield charts.build_variant_scores_chart(
            comparison.variants,
            comparison.metric,
            f"{name} of each variant: the mean of the runs' best evaluations with its 95 % interval, if the runs are "
            "one or three and more, the mean of their last evaluations, and the best of each single run.",
        )


def _build_warning_texts(comparison: Comparison) -> list[Text]:
    """Build the differences other than the varied settings, and the failed runs."""
    warnings = list(comparison.warnings)
    for variant in comparison.variants:
        warnings += [f"{variant.name}: {why}" for why in variant.failures]
    if warnings:
        return [Text(text, "warning") for text in warnings]
    words = (
        "All variants did the same work: only the varied settings differ. Compared: order of the data, examples, "
        "tokens and updates, global batch, evaluation set, task version, versions of packages, kind of device."
    )
    return [Text(words, "good")]


def build_run_curves_section(comparison: Comparison) -> Section:
    """Build the section on losses and scores of all runs, by step and by time; a sentence for scores that are all 0."""
    variants = comparison.variants
    metric = comparison.metric
    name = get_score_label(metric)
    nats = "nats per target token"
    caption = "Loss on the evaluation data, of every run. (evals.jsonl)"
    eval_loss = charts.build_run_curves_chart(
        variants, charts.get_eval_losses, caption, x="step", y=nats, group="step", log=True
    )
    caption = "Loss on the training data, of every run, smoothed. (steps.jsonl)"
    train_loss = charts.build_run_curves_chart(
        variants, charts.get_training_losses, caption, x="step", y=nats, group="step", log=True
    )
    # A curve of zeros says less than a sentence.
    if not has_nonzero_scores(comparison):
        scored = any(get_measure(variant, SCORE).value is not None for variant in variants)
        zero = Text(f"{name} is 0 in every evaluation of every run, so it is not drawn.") if scored else None
        return build_section("Curves", eval_loss, train_loss, zero)

    def get_eval_scores(run: Run) -> charts.Points:
        return charts.get_eval_scores(run, metric)

    def get_scores_over_time(run: Run) -> charts.Points:
        return charts.get_scores_over_time(run, metric)

    caption = f"{name} on the evaluation data, of every run. (evals.jsonl)"
    score = charts.build_run_curves_chart(variants, get_eval_scores, caption, x="step", y=name, group="step")
    caption = f"{name} over the time spent in training steps: which run reaches a score first."
    score_over_time = charts.build_run_curves_chart(
        variants, get_scores_over_time, caption, x="minutes", y=name, group="trained"
    )
    return build_section("Curves", eval_loss, score, train_loss, score_over_time)


def build_variant_load_section(variants: Sequence[Variant]) -> Section:
    """Build the section on load: devices and hosts in the first run of each variant, and means of all runs."""
    loads = [[Load(run.telemetry) for run in variant.runs] for variant in variants]
    several = any(len(variant.runs) > 1 for variant in variants)
    what = "the first run of each variant" if several else "each run"
    named = [(variant.name, own[0] if own else None) for variant, own in zip(variants, loads, strict=True)]
    parts: list[Part] = [*iter_lanes_charts(named, GAUGES, what)]
    # Mean and maximum of each quantity, which stays away where no run has it.
    header = ["variant", "run"]
    rows: list[list[Cell]] = []
    for variant in variants:
        for run in variant.runs:
            rows.append([variant.name, run.name])
    for gauge in GAUGES:
        for word in gauge.fields.values():
            cells = [_format_mean_and_max(load, gauge, word) for own in loads for load in own]
            if any(mean is not None for _, mean in cells):
                quantity = f"{gauge.title}, {word}" if word else gauge.title
                header.append(f"{quantity} ({gauge.unit})")
                for row, cell in zip(rows, cells, strict=True):
                    row.append(cell)
    if header[2:]:
        caption = (
            "Mean over the whole run; second line: the highest sample. Only devices that the run used; several "
            "devices, hosts or processes are averaged. (telemetry.jsonl)"
        )
        parts.append(build_sortable_table(caption, header, rows))
    return build_section("Load", parts)


def _format_mean_and_max(load: Load, gauge: Gauge, word: str) -> tuple[str, float | None]:
    """Format mean and maximum of a quantity over the devices that a run used, and return the mean."""
    values = list_used_values(load, gauge, word)
    if not values:
        return UNKNOWN, None
    mean = sum(values) / len(values)
    return f"{format_significant(mean)}\nhighest {format_significant(max(values))}", mean


def _iter_step_time_parts(variants: Sequence[Variant]) -> Iterator[Part]:
    """Yield the mean time of a step by part, for each variant."""
    found: dict[str, dict[str, float]] = {}
    for variant in variants:
        measured: list[StepRecord] = []
        for run in variant.runs:
            measured += select_measured_steps(run.steps)
        breakdown = compute_step_breakdown(measured)
        if breakdown:
            found[variant.name] = breakdown
    if not found:
        return
    caption = "Mean time of a step by part, over all runs of a variant, without the warm-up. (steps.jsonl)"
    yield draw_step_time_chart(found, caption)
    names = [part for part in MEANINGS if any(part in row for row in found.values())]
    rows: list[Sequence[Cell]] = []
    for name, row in found.items():
        whole = sum(row.values())
        cells: list[Cell] = [name, (format_significant(1e3 * whole), whole)]
        for part in names:
            share = row[part] / whole if part in row else None
            cells.append((format_percent(share), share))
        rows.append(cells)
    caption = "The numbers of the chart, parts as shares of the step."
    yield build_sortable_table(caption, ("variant", "step (ms)", *names), rows)


def _iter_pareto_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield a chart of the score against each cost that is known: time, energy, money.

    Variants on the Pareto front of score and time have filled marks, and their front is a line.
    """
    if comparison.disturbed or comparison.incomparable or not has_nonzero_scores(comparison):
        return
    variants = comparison.variants
    name = get_score_label(comparison.metric)
    # A cost that one variant alone has compares nothing.
    known: list[str] = []
    for cost in COSTS:
        if sum(get_measure(variant, cost).value is not None for variant in variants) > 1:
            known.append(cost)
    for cost in known:
        traces: list[Trace] = []
        front: list[tuple[float, float]] = []
        for place, variant in enumerate(variants):
            spent = get_measure(variant, cost)
            reached = get_measure(variant, SCORE)
            if spent.value is None or reached.value is None:
                continue
            if variant.pareto:
                front.append((spent.value, reached.value))
            color = choose_line_style(place)[0]
            marker = {
                "symbol": "circle" if variant.pareto else "circle-open",
                "size": 11,
                "color": color,
                "line": {"width": 2, "color": color},
            }
            mark = build_marks_trace(
                [spent.value],
                [reached.value],
                marker,
                "%{y:.2f} at %{x:.4~g}",
                name=escape_hidden(variant.name),
                meta=escape_hidden(variant.name),
                error_x=charts.build_measure_bars([spent], color),
                error_y=charts.build_measure_bars([reached], color),
                line={"color": color},
            )
            traces.append(mark)
        of = f"{MEASURES[cost].label} ({MEASURES[cost].unit})".removesuffix(" ()")
        caption = f"{name} over {of}."
        if cost == COSTS[0]:
            caption += " Filled marks are on the Pareto front: no other variant dominates them in score and time."
            stairs = {"color": MUTED, "width": 1.5, "dash": "dot", "shape": "hv"}
            front.sort()
            xs = [cost for cost, _ in front]
            ys = [score for _, score in front]
            traces.insert(0, {**HIDDEN, "name": "Pareto front", "x": xs, "y": ys, "line": stairs})
        yield build_chart(
            caption,
            traces,
            of,
            name,
            wide=len(known) == 1,
            group=f"cost {cost}",
            height=340,
            hovermode="closest",
            showlegend=False,
            xaxis=BAR_AXIS,
        )


def _iter_verdict_parts(variants: Sequence[Variant]) -> Iterator[Part]:
    """Yield the verdicts of each variant; nothing without any run."""
    found: dict[str, Sequence[Verdict]] = {}
    healthy: list[str] = []
    for variant in variants:
        if variant.verdicts:
            found[variant.name] = variant.verdicts
        elif variant.runs:
            healthy.append(variant.name)
    if healthy:
        yield Text(f"No problem found in {'; '.join(healthy)}.", "good")
    if found:
        rows: list[Sequence[Cell]] = []
        for name, verdicts in found.items():
            for one in verdicts:
                gain = UNKNOWN if one.gain is None else f"{format_decimal(one.gain)} x"
                rows.append((name, one.message, one.advice, (gain, one.gain)))
        caption = "Problems of each variant, the most important first, and the predicted effect of the change."
        yield build_sortable_table(caption, ("variant", "verdict", "what to do", "predicted"), rows)
        yield build_verdicts_table(found, named=True)


TERMS = (
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
