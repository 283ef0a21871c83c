"""What is wrong with a run and what to do about it, the cause first and each once; and the evidence for it.

In: a Run and its verdicts. Out: Problems, and a Section of rates and measured values.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fivetune.reading.diagnosis.rules import CONSEQUENCES, is_severe
from fivetune.reading.report.page.parts import Problem, Section, Table, build_section
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_flags,
    format_percent,
    format_plural,
    format_setting,
    format_significant,
)
from fivetune.reading.report.run.rates import build_rates_table, find_rate_warnings, recompute_written_rates
from fivetune.reading.report.run.scores import (
    choose_best_eval,
    find_baseline_eval,
)
from fivetune.rundir.figures import select_current_evals, select_evals_by_step
from fivetune.rundir.records import Run
from fivetune.types import Verdict
from fivetune.values import divide, get_nested

UNKNOWN_LIMIT = 0.001
NO_CHANGE: Mapping[str, Any] = {}
NO_RULES: set[str] = set()
COVERED = {
    "truncation": {"truncated_inputs", "truncated_targets", "lost_answers"},
    "diverged": {"diverged", "not_finite"},
    "frozen_loss": {"frozen", "updates_below_precision", "diverged", "not_finite"},
    "cores": {"shared_cores"},
}
"""Kinds of warnings of a run, and the verdicts that say the same better."""
BY_RATE = {"diverged", "not_finite", "frozen", "updates_below_precision"}
"""Verdicts whose cause is the learning rate, if pre-flight has warned of it (the kind RATE)."""
RATE, RECORDS, CHARACTERS = "learning rate", "records", "characters"


def list_problems(
    run: Run, verdicts: Sequence[Verdict], reference_runs: Sequence[Run] = (), notes: Sequence[str] = ()
) -> list[Problem]:
    """List what is wrong: what ended the run, then by severity; of two that say the same, one.

    Args:
        verdicts: of the diagnosis.
        notes: problems found while reading.
    """
    rules = {verdict.rule for verdict in verdicts}
    rate = next((one.message for one in run.status.warnings if one.kind == RATE and rules & BY_RATE), "")
    because = f"{rate.removeprefix(f'{RATE}: ')}. " if rate else ""
    severe: list[Problem] = []
    mild: list[Problem] = []
    if run.status.state == "failed" and run.status.why:
        ended = [one for one in verdicts if one.rule == "not_finite" and run.status.nonfinite_step is not None]
        change: Mapping[str, Any] = ended[0].change if ended else NO_CHANGE
        severe.append(Problem(run.status.why, because if change else "", format_flags(change), "bad"))
        verdicts = [verdict for verdict in verdicts if verdict not in ended]
        because = "" if change else because
    for verdict in verdicts:
        advice = f"{because}{verdict.advice}" if verdict.rule in BY_RATE else verdict.advice
        because = "" if verdict.rule in BY_RATE else because
        gain = "" if verdict.gain is None else f" Predicted: {format_decimal(verdict.gain)} times as fast."
        is_bad = is_severe(verdict)
        found = Problem(
            verdict.message, f"{advice}{gain}", format_flags(verdict.change), "bad" if is_bad else "warning"
        )
        (severe if is_bad else mild).append(found)
    rules |= {one for rule in rules for one in CONSEQUENCES.get(rule, ())}
    own = select_own_warnings(run, rules)
    return [*severe, *map(Problem, (*notes, *find_warnings(run, reference_runs, rules), *own)), *mild]


def find_warnings(run: Run, reference_runs: Sequence[Run] = (), rules: Collection[str] = ()) -> Iterator[str]:
    """Yield warnings about scores and data from the records; problems of the training are up to the diagnosis.

    Args:
        rules: of the verdicts, whose warnings are left out.
    """
    best = choose_best_eval(run)
    lines = run.read_predictions(best)
    yield from find_rate_warnings(recompute_written_rates(best, lines), lines, rules)
    # Evaluations of other data are not compared, so their sizes may differ.
    sizes = {record.num_examples for record in select_evals_by_step(select_current_evals(run.evals))}
    if len(sizes) > 1:
        listed = ", ".join(map(format_count, sorted(sizes)))
        yield f"The evaluations differ in size ({listed} examples): part of the difference is chance."
    for other in reference_runs:
        theirs = choose_best_eval(other)
        if best and theirs and theirs.num_examples != best.num_examples:
            yield (
                f"The run {other.name} was evaluated on {format_plural(theirs.num_examples, 'example')}, "
                f"this one on {format_count(best.num_examples)}."
            )
    # What pre-flight has warned of is among the run's own warnings; what length limits cut is up to the diagnosis.
    told = {warning.kind for warning in run.status.warnings}
    for split, facts in (("train", run.data.train), ("eval", run.data.eval)):
        if facts is None:
            continue
        blank, bad = facts.num_blank_golds, facts.num_skipped_bad
        if blank and RECORDS not in told:
            yield (
                f"{split}: {format_plural(blank, 'record')} have a blank gold answer beside others: an "
                "empty prediction is right there."
            )
        if bad and RECORDS not in told:
            read = format_plural(facts.num_read, "record")
            yield f"{split}: {format_count(bad)} of {read} could not be used and were left out."
        unknown = divide(facts.num_unknown_tokens, facts.num_input_tokens)
        if unknown is not None and unknown > UNKNOWN_LIMIT and CHARACTERS not in told:
            yield f"{split}: {format_percent(unknown, 2)} of the input tokens are unknown to the tokenizer."


def select_own_warnings(run: Run, rules: Collection[str] = ()) -> list[str]:
    """Return the run's own warnings without those that a verdict repeats.

    Args:
        rules: of the verdicts.
    """
    repeated = {
        one.message
        for one in run.status.warnings
        if COVERED.get(one.kind, NO_RULES) & set(rules) or (one.kind == RATE and BY_RATE & set(rules))
    }
    return [text for text in run.warnings if text not in repeated]


def build_evidence_section(run: Run, verdicts: Sequence[Verdict]) -> Section:
    """Build the section on what the problems rest on: rates of a broken run, measured values of the diagnosis."""
    evals = (choose_best_eval(run), find_baseline_eval(run))
    rates = build_rates_table(*(recompute_written_rates(one, run.read_predictions(one)) for one in evals))
    return build_section("Evidence", rates, build_verdicts_table({"": verdicts}, named=False) if verdicts else None)


def build_verdicts_table(found: Mapping[str, Sequence[Verdict]], *, named: bool) -> Table:
    """Build a folded table of measured value, threshold and change by verdict; `named` adds a column of variants."""
    rows: list[Sequence[str]] = []
    for name, verdicts in found.items():
        for verdict in verdicts:
            change = ", ".join(f"{key} {format_setting(key, value)}" for key, value in verdict.change.items())
            rows.append(
                (
                    *((name,) if named else ()),
                    verdict.rule.replace("_", " "),
                    format_significant(verdict.figure),
                    format_significant(verdict.threshold),
                    format_percent(verdict.confidence, 0),
                    change or "no setting",
                    UNKNOWN if verdict.gain is None else f"{format_decimal(verdict.gain)} x",
                )
            )
    header = ("rule", "measured", "threshold", "confidence", "change", "predicted speed-up")
    caption = "The evidence: the measured value and the threshold of each rule. (steps.jsonl, telemetry.jsonl)"
    return Table(caption, ("variant", *header) if named else header, rows, folded=True)


def describe_resume(run: Run) -> str:
    """Return the command that continues a run; "" for one that has ended or cannot be continued."""
    folder = shlex.quote(str(get_nested(run.config, "run", "dir") or run.name))
    return f"fivetune train {folder} --resume" if run.status.state == "interrupted" and run.status.begun else ""
