"""Comparison -> Page: which variant wins, by how much, how sure that is, and why.

In: a Comparison, in whose runs anything may be missing or null. Out: a Page whose sections follow a reader's questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivetune.compare import MEASURES
from fivetune.report import variant_charts as charts
from fivetune.report.differences import examples_section, machine_tables, settings_tables
from fivetune.report.load import DEVICE_GAUGES, HOST_GAUGES, Gauge, Load
from fivetune.report.load_charts import Lane, lanes_chart, lines_told, look_of, step_bars
from fivetune.report.render import render
from fivetune.report.scaling import scaling_section
from fivetune.report.scores import label
from fivetune.report.telemetry import MEANINGS, breakdown, measured_steps, verdicts_table
from fivetune.report.variants import COSTS, against_tables, measure, outcome, variants_tables
from fivetune.report.wording import UNKNOWN, fixed, percent, plural, short
from fivetune.rundir import write_text
from fivetune.types import Comparison, Page, Run, Section, Table, Text, Variant
from fivetune.values import known

Part = Any


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison; the file is there whole or not at all."""
    write_text(path, render(build_comparison(comparison)))
    return path


def build_comparison(comparison: Comparison) -> Page:
    """The page of a comparison."""
    sections = (
        outcome_section(comparison),
        warnings_section(comparison),
        variants_section(comparison),
        Section("Settings", tuple(settings_tables(comparison))),
        time_section(comparison.variants),
        curves_section(comparison),
        load_section(comparison.variants),
        steps_section(comparison.variants),
        scaling_section(comparison.variants),
        pareto_section(comparison),
        verdicts_section(comparison.variants),
        examples_section(comparison),
        Section("Machine", tuple(machine_tables(comparison.variants))),
        definitions_section(),
    )
    return Page(
        title=comparison.title,
        sections=tuple(section for section in sections if section.parts),
        subtitle=f"Comparison \u00b7 {label(comparison.metric)} \u00b7 baseline {comparison.baseline}",
        badges=_badges(comparison),
    )


def _badges(comparison: Comparison) -> tuple[Text, ...]:
    runs = sum(len(variant.runs) for variant in comparison.variants)
    failed = sum(len(variant.failures) for variant in comparison.variants)
    warned = len(comparison.warnings)
    badges = [
        Text(plural(len(comparison.variants), "variant")),
        Text(plural(runs, "run")),
        Text(plural(warned, "warning") if warned else "same work", "warning" if warned else "good"),
    ]
    return (*badges, *([Text(f"{failed} missing", "warning")] if failed else ()))


def outcome_section(comparison: Comparison) -> Section:
    """What was compared and what wins."""
    chart = charts.scores_chart(
        comparison.variants,
        comparison.metric,
        f"{label(comparison.metric)} of each variant: the mean of the runs' best evaluations with its 95 % interval, "
        "the mean of their last evaluations, and the best of each single run.",
    )
    scored = any(known(trace["x"]) for trace in chart.data)
    return Section("Outcome", (Text(" ".join(outcome(comparison)), "lead"), *([chart] if scored else ())))


def warnings_section(comparison: Comparison) -> Section:
    """What differs besides what was varied, and what became of runs that did not finish."""
    failures = [f"{variant.name}: {why}" for variant in comparison.variants for why in variant.failures]
    told = [*comparison.warnings, *failures]
    if told:
        return Section("Warnings", tuple(Text(text, "warning") for text in told))
    words = (
        "All variants did the same work: nothing differs but what was varied. Looked at: order of the data, examples, "
        "tokens and updates, global batch, evaluation set, task version, versions of packages, kind of device."
    )
    return Section("Warnings", (Text(words, "good"),))


def variants_section(comparison: Comparison) -> Section:
    """All figures of all variants, and beside the baseline."""
    return Section("Variants", (*variants_tables(comparison), *against_tables(comparison)))


def time_section(variants: Sequence[Variant]) -> Section:
    """How long training took, and with what."""
    caption = "Where the time of a run went: the median over the variant's runs, by phase. (status.json)"
    chart = charts.time_chart(variants, caption)
    return Section("Training time", (chart,) if chart else ())


def curves_section(comparison: Comparison) -> Section:
    """Losses and scores of all runs over the steps and over time."""
    variants, metric = comparison.variants, comparison.metric
    name, nats = label(metric), "nats per target token"
    found = (
        charts.curves_chart(variants, charts.eval_losses, "Loss on the evaluation data, of every run. (evals.jsonl)",
                            x="step", y=nats, group="step", log=True),
        charts.curves_chart(variants, lambda run: charts.eval_scores(run, metric),
                            f"{name} on the evaluation data, of every run. (evals.jsonl)",
                            x="step", y=name, group="step"),
        charts.curves_chart(variants, charts.training_losses, "Loss on the training data, of every run, smoothed. "
                            "(steps.jsonl)", x="step", y=nats, group="step", log=True),
        charts.curves_chart(variants, lambda run: charts.scores_by_time(run, metric),
                            f"The same {name} over the time spent in training steps: which run reaches a score first.",
                            x="minutes", y=name, group="trained"),
    )  # fmt: skip
    return Section("Curves", tuple(chart for chart in found if chart))


def load_section(variants: Sequence[Variant]) -> Section:
    """What devices and hosts did over the first run of each variant, its phases shaded, and figures of all runs."""
    loads = [[Load(run.telemetry) for run in variant.runs] for variant in variants]
    first = [(place, variants[place], found[0]) for place, found in enumerate(loads) if found]
    parts: list[Part] = []
    for gauge in (*DEVICE_GAUGES, *HOST_GAUGES):
        lanes = [
            Lane(variant.name, tracks, load.spans(), look_of(place))
            for place, variant, load in first
            if (tracks := load.tracks(gauge))
        ]
        if lanes:
            run = "the first run of each variant" if any(len(one.runs) > 1 for one in variants) else "each run"
            caption = f"{gauge.title}, {run}. {gauge.says}{lines_told(lanes)}"
            parts.append(lanes_chart(gauge, lanes, caption, wide=True, group="load"))
    table = _load_table(variants, loads)
    return Section("Load", (*parts, *([table] if table else ())))


def _load_table(variants: Sequence[Variant], loads: Sequence[Sequence[Load]]) -> Table | None:
    """Mean and highest value of each quantity of each run, over all devices that it used."""
    runs = [(variant.name, run.name) for variant in variants for run in variant.runs]
    told = [(gauge, word) for gauge in (*DEVICE_GAUGES, *HOST_GAUGES) for word in gauge.fields.values()]
    found = [[_mean_and_most(load, gauge, word) for gauge, word in told] for own in loads for load in own]
    shown = [i for i in range(len(told)) if any(row[i][0] is not None for row in found)]
    if not shown:
        return None
    rows = tuple((*names, *(_pair(*figures[i]) for i in shown)) for names, figures in zip(runs, found, strict=True))
    values = tuple((None, None, *(figures[i][0] for i in shown)) for figures in found)
    header = ("variant", "run", *(_titled(*told[i]) for i in shown))
    caption = (
        "Mean over the whole run, and below it the highest sample, of the devices that the run used; several devices, "
        "hosts or processes are averaged. (telemetry.jsonl)"
    )
    return Table(caption, header, rows, values=values)


def _titled(gauge: Gauge, word: str) -> str:
    return f"{gauge.title}{', ' if word else ''}{word} ({gauge.unit})"


def _mean_and_most(load: Load, gauge: Gauge, word: str) -> tuple[float | None, float | None]:
    tracks = [track for track in load.tracks(gauge) if track.word == word and track.used]
    values = [value for track in tracks for value in known(track.values)]
    return (sum(values) / len(values), max(values)) if values else (None, None)


def _pair(mean: float | None, most: float | None) -> str:
    return UNKNOWN if mean is None else f"{short(mean)}\nhighest {short(most)}"


def steps_section(variants: Sequence[Variant]) -> Section:
    """What an average step's time goes into, of each variant."""
    found = {one.name: parts for one in variants if (parts := breakdown(_measured(one.runs)))}
    if not found:
        return Section("Step time", ())
    caption = "Mean time of a step by part, over all runs of a variant, without the warm-up. (steps.jsonl)"
    parts = [part for part in MEANINGS if any(part in row for row in found.values())]
    rows, values = [], []
    for name, row in found.items():
        everything = sum(row.values())
        shares = [row[part] / everything if part in row else None for part in parts]
        rows.append((name, short(1e3 * everything), *(percent(share) for share in shares)))
        values.append((None, everything, *shares))
    header = ("variant", "step (ms)", *parts)
    table = Table("The numbers of the chart, parts as shares of the step.", header, tuple(rows), values=tuple(values))
    return Section("Step time", (step_bars(found, caption), table))


def _measured(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [step for run in runs for step in measured_steps(run.steps)]


def pareto_section(comparison: Comparison) -> Section:
    """Score beside what it costs: time, energy, money."""
    name, parts = label(comparison.metric), []
    told = [cost for cost in COSTS if sum(measure(one, cost).value is not None for one in comparison.variants) > 1]
    for cost in told:
        first = cost == COSTS[0]
        front = " Filled marks are on the Pareto front: no other variant is both better and quicker." if first else ""
        of = f"{MEASURES[cost].label} ({MEASURES[cost].unit})".removesuffix(" ()")
        caption = f"{name} over {of}.{front}"
        wide = len(told) == 1
        parts.append(charts.pareto_chart(comparison.variants, cost, caption, x=of, y=name, front=first, wide=wide))
    return Section("Pareto front", tuple(parts))


def verdicts_section(variants: Sequence[Variant]) -> Section:
    """What limits or spoils each variant."""
    found = {one.name: one.verdicts for one in variants if one.verdicts}
    if not any(one.runs for one in variants):
        return Section("Verdicts", ())
    healthy = [one.name for one in variants if one.runs and not one.verdicts]
    parts: list[Part] = []
    if healthy:
        parts.append(Text(f"No rule found anything that limits or spoils {'; '.join(healthy)}.", "good"))
    if found:
        told = [(name, one) for name, verdicts in found.items() for one in verdicts]
        rows = tuple(
            (name, one.says, one.advice, UNKNOWN if one.gain is None else f"{fixed(one.gain)} x") for name, one in told
        )
        values = tuple((None, None, None, one.gain) for _, one in told)
        caption = "What limits or spoils each variant, the most important first, and what the change would give."
        header = ("variant", "verdict", "what to do", "predicted")
        parts += [Table(caption, header, rows, values=values), verdicts_table(found, named=True)]
    return Section("Verdicts", tuple(parts))


def definitions_section() -> Section:
    """What the words on the page mean."""
    rows = (
        ("95 % interval", "Of a score: how far it would move with other seeds; of a single run, with other examples."),
        ("range", "Of times, speeds and the like: the least and the most of the variant's runs."),
        ("against the baseline", "Scores, losses and shares: the variant's minus the baseline's, of runs with the same "
         "seed. The rest: the variant's divided by the baseline's."),
        ("best, last", "The evaluation that a run chose its weights by, and the one after its last step. The best is "
         "chosen on the same examples, so it flatters; the last does not. Where eval.max_examples limits evaluations, "
         "the best one is repeated on all examples, the last one is not."),
        ("examples per second", "Examples that were really processed, by the time that training steps took."),
        ("Pareto front", "Variants to which no other is as good and as quick, and better in one of the two."),
    )  # fmt: skip
    return Section("Definitions", (Table("What the words on this page mean.", ("word", "meaning"), rows),))
