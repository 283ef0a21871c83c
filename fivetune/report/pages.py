"""Run -> Page: which sections a report has, in the order of a reader's questions.

In: a Run as read back, in which anything may be missing or null. Out: a Page of printable parts; the templates
calculate nothing. What is missing is "n/a", or a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivetune.report import charts, findings
from fivetune.report.confidence import confidence_section
from fivetune.report.curves import learning_section, speed_section, tokens_per_second
from fivetune.report.examples import examples_section
from fivetune.report.finders import finder_sections
from fivetune.report.lengths import data_section, num_rows
from fivetune.report.provenance import about, definitions_section, machine_section, settings_section
from fivetune.report.rates import of_written, rates_table
from fivetune.report.scores import (
    Eval,
    baseline_eval,
    best_eval,
    first_scores,
    interval,
    label,
    main_evals,
    points,
    predictions_of,
    score,
    score_keys,
    score_of_lines,
)
from fivetune.report.series import by_step, column, quantile, smooth, window
from fivetune.report.slices import labels_section, slices_section
from fivetune.report.telemetry import limits_section, load_section, steps_section
from fivetune.report.trace import trace_section
from fivetune.report.wording import UNKNOWN, amount, duration, fixed, percent, plain, plural, share, short, size, whole
from fivetune.telemetry.verdict import verdicts_of
from fivetune.types import Chart, Figure, Page, Run, Section, Table, Text
from fivetune.values import dig, known, number

Part = Any
STATES = {"finished": "good", "interrupted": "warning", "failed": "warning"}  # any other: a note


def build_page(run: Run, *, beside: Sequence[Run] = (), notes: Sequence[str] = ()) -> Page:
    """The report of one run.

    Args:
        beside: other runs whose best scores are shown as further baselines.
        notes: what went wrong while reading; shown among the warnings.
    """
    doubts = [*notes, *findings.warnings(run, beside), *findings.own_warnings(run)]
    lines = predictions_of(run, best_eval(run))
    key = score_of_lines(run, lines)
    sections = (
        verdict_section(run, beside),
        figures_section(run),
        _warnings_section(run, doubts),
        limits_section(run, verdicts_of(run)),
        learning_section(run, beside),
        speed_section(run),
        trace_section(run.trace),
        steps_section(run),
        load_section(run),
        *finder_sections(run.found),
        data_section(run),
        confidence_section(lines, key),
        slices_section(lines, key),
        labels_section(lines),
        examples_section(run, lines),
        settings_section(run),
        machine_section(run),
        definitions_section(score_keys(main_evals(run))),
    )
    return Page(
        title=str(dig(run.config, "report", "title") or run.name),
        sections=tuple(section for section in sections if section.parts),
        subtitle=about(run),
        badges=_badges(run, len(doubts)),
    )


def _badges(run: Run, num_warnings: int) -> tuple[Text, ...]:
    state, resumes = plain(dig(run.status, "state")), number(dig(run.status, "num_resumes"))
    badges = [Text(state, STATES.get(state, "note"))]
    if resumes:
        badges.append(Text(f"resumed {plural(resumes, 'time')}", "note"))
    badges.append(
        Text(plural(num_warnings, "warning") if num_warnings else "no warnings", "warning" if num_warnings else "good")
    )
    return tuple(badges)


def verdict_section(run: Run, beside: Sequence[Run]) -> Section:
    """A few sentences, the two or three scores that count, and all scores beside their baselines."""
    best, baseline = best_eval(run), baseline_eval(run)
    parts: list[Part] = [Text(" ".join(findings.verdict(run, beside)), "lead")]
    if best is None:
        return Section("Verdict", tuple(parts))
    keys = score_keys([best])
    parts += [_headline(key, best, baseline) for key in first_scores(run, keys)]
    parts += _dots(keys, best, baseline, _others(run, beside))
    columns = [(findings.BASELINE, baseline), *_others(run, beside).items()]
    header = (
        "score",
        f"this run, step {whole(best['step'])}",
        "95 % interval",
        *(name for name, _ in columns),
        "change",
    )
    rows = [
        (
            label(key),
            points(score(best, key)),
            _interval_text(best, key),
            *(points(score(record, key)) for _, record in columns),
            findings.difference(score(best, key), score(baseline, key)),
        )
        for key in keys
    ]
    caption = "All scores of the best evaluation beside the baselines; change is against the model before fine-tuning. "
    parts.append(Table(caption + "(evals.jsonl)", header, tuple(rows)))
    return Section("Verdict", tuple(parts))


def _headline(key: str, best: Eval, baseline: Eval | None) -> Figure:
    if best is baseline:
        return Figure(label(key), points(score(best, key), 1), findings.BASELINE)
    before = score(baseline, key)
    was = "no baseline" if before is None else f"{points(before, 1)} before"
    return Figure(label(key), points(score(best, key), 1), was)


def _interval_text(record: Eval, key: str) -> str:
    edges = interval(record, key)
    return "" if edges is None else f"{fixed(edges[0], 1)} to {fixed(edges[1], 1)}"


def _others(run: Run, beside: Sequence[Run]) -> dict[str, Eval | None]:
    """Column -> scores of what stands beside the run: other runs, and published figures (report.expected)."""
    others = {other.name: best_eval(other) for other in beside}
    expected = dig(run.config, "report", "expected")
    return others | {"published": {"scores": expected}} if expected else others


def _dots(keys: Sequence[str], best: Eval, baseline: Eval | None, others: dict[str, Eval | None]) -> list[Chart]:
    if not keys:
        return []
    columns = {findings.BASELINE: baseline} if baseline and baseline is not best else {}
    columns |= others
    columns["this run"] = best
    series = {name: [score(record, key) for key in keys] for name, record in columns.items()}
    caption = "This run's best evaluation (filled, with 95 % intervals of the evaluation) beside its baselines."
    return [charts.dots_chart([label(key) for key in keys], series, [interval(best, key) for key in keys], caption)]


def figures_section(run: Run) -> Section:
    """What it took: steps, time, throughput, memory."""
    steps = by_step(run.steps)
    last = steps[-1] if steps else {}
    losses = column(steps, "loss")
    level = known(smooth(losses, window(len(losses))))
    epochs = share(last.get("num_examples_seen"), num_rows(dig(run.data, "train")))
    rates, mfu, peak = tokens_per_second(steps), known(column(steps, "mfu")), known(column(steps, "peak_bytes"))
    first_loss = next(iter(known(losses)), None)
    planned, training = whole(dig(run.status, "num_steps")), percent(_phase_share(run, "train"))
    figures = [
        Figure("Steps", whole(dig(run.status, "step")), _unless_unknown("of {} planned", planned)),
        Figure("Examples seen", whole(last.get("num_examples_seen")), _unless_unknown("{} epochs", fixed(epochs, 2))),
        Figure("Time", duration(dig(run.status, "seconds")), _unless_unknown("{} of it training", training)),
        Figure(
            "Training loss", short(level[-1] if level else None), f"nats per target token, {short(first_loss)} at first"
        ),
        Figure("Throughput", amount(quantile(known(rates), 0.5)), "tokens per second, median"),
        Figure("Peak memory", size(max(peak, default=None)), "highest of all steps"),
        Figure("Model", amount(dig(run.machine, "num_parameters")), "parameters"),
        Figure("Precision", plain(dig(run.machine, "precision")), f"attention: {plain(dig(run.machine, 'attention'))}"),
    ]
    if mfu:
        figures.append(Figure("MFU", percent(quantile(mfu, 0.5)), "of the device's peak, median"))
    return Section("Key figures", tuple(figures))


def _unless_unknown(words: str, value: str) -> str:
    return "" if value == UNKNOWN else words.format(value)


def _phase_share(run: Run, name: str) -> float | None:
    return share(dig(run.status, "seconds_by_phase", name), dig(run.status, "seconds"))


def _warnings_section(run: Run, doubts: Sequence[str]) -> Section:
    table = rates_table(*(of_written(one, predictions_of(run, one)) for one in (best_eval(run), baseline_eval(run))))
    rates = () if table is None else (table,)
    if not doubts:
        text = (
            "Nothing to warn about. Looked for: losses that are not finite or frozen, the rates of a broken run, "
            "scores gained by abstaining, answers lost to truncation, skipped records, evaluations of different size."
        )
        return Section("Warnings", (Text(text, "good"), *rates))
    return Section("Warnings", (*(Text(text, "warning") for text in doubts), *rates))
