"""What is wrong with a run and what to do about it, the cause first and each once; and the evidence for it.

In: a Run and its verdicts. Out: Problems, and a Section of rates and measured values.
"""

from __future__ import annotations

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
from fivetune.reading.report.run.settings import name_run_folder
from fivetune.rundir.figures import select_current_evals, select_evals_by_step
from fivetune.rundir.records import EvalRecord, Run
from fivetune.types import Verdict
from fivetune.values import divide

UNKNOWN_LIMIT = 0.001
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
        verdicts: verdicts of the diagnosis.
        notes: problems found while reading.
    """
    rules = {verdict.rule for verdict in verdicts}
    # A warning of pre-flight about the learning rate is the cause of what it led to, and told with the first of these.
    because = ""
    if rules & BY_RATE:
        for warning in run.status.warnings:
            if warning.kind == RATE:
                because = f"{warning.message.removeprefix(f'{RATE}: ')}. "
                break
    severe: list[Problem] = []
    mild: list[Problem] = []
    if run.status.state == "failed" and run.status.why:
        change: Mapping[str, Any] = {}
        if run.status.nonfinite_step is not None:
            # The reason of the failure says what the verdict says.
            ended = [verdict for verdict in verdicts if verdict.rule == "not_finite"]
            verdicts = [verdict for verdict in verdicts if verdict.rule != "not_finite"]
            if ended:
                change = ended[0].change
        advice = ""
        if change:
            advice, because = because, ""
        severe.append(Problem(run.status.why, advice, format_flags(change), "bad"))
    for verdict in verdicts:
        advice = verdict.advice
        if verdict.rule in BY_RATE:
            advice, because = f"{because}{advice}", ""
        if verdict.gain is not None:
            advice += f" Predicted: {format_decimal(verdict.gain)} times as fast."
        flags = format_flags(verdict.change)
        if is_severe(verdict):
            severe.append(Problem(verdict.message, advice, flags, "bad"))
        else:
            mild.append(Problem(verdict.message, advice, flags))
    for rule in tuple(rules):
        rules |= CONSEQUENCES.get(rule, NO_RULES)
    warnings = [*notes, *find_warnings(run, reference_runs, rules), *select_own_warnings(run, rules)]
    return [*severe, *map(Problem, warnings), *mild]


def find_warnings(run: Run, reference_runs: Sequence[Run] = (), rules: Collection[str] = ()) -> Iterator[str]:
    """Yield warnings about scores and data from the records; problems of the training are up to the diagnosis.

    Args:
        rules: names of the verdicts, whose warnings are left out.
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
        if facts.num_blank_golds and RECORDS not in told:
            yield (
                f"{split}: {format_plural(facts.num_blank_golds, 'record')} have a blank gold answer beside others: an "
                "empty prediction is right there."
            )
        if facts.num_skipped_bad and RECORDS not in told:
            read = format_plural(facts.num_read, "record")
            yield f"{split}: {format_count(facts.num_skipped_bad)} of {read} could not be used and were left out."
        unknown = divide(facts.num_unknown_tokens, facts.num_input_tokens)
        if unknown is not None and unknown > UNKNOWN_LIMIT and CHARACTERS not in told:
            yield f"{split}: {format_percent(unknown, 2)} of the input tokens are unknown to the tokenizer."


def select_own_warnings(run: Run, rules: Collection[str] = ()) -> list[str]:
    """Return the run's own warnings without those that a verdict repeats.

    Args:
        rules: names of the verdicts.
    """
    covered = {**COVERED, RATE: BY_RATE}
    repeated: set[str] = set()
    for warning in run.status.warnings:
        if not covered.get(warning.kind, NO_RULES).isdisjoint(rules):
            repeated.add(warning.message)
    return [text for text in run.warnings if text not in repeated]


def build_evidence_section(run: Run, verdicts: Sequence[Verdict]) -> Section:
    """Build the section on what the problems rest on: rates of a broken run, measured values of the diagnosis."""
    records: list[EvalRecord | None] = []
    for record in (choose_best_eval(run), find_baseline_eval(run)):
        records.append(recompute_written_rates(record, run.read_predictions(record)))
    measured = build_verdicts_table({"": verdicts}, named=False) if verdicts else None
    return build_section("Evidence", build_rates_table(*records), measured)


def build_verdicts_table(found: Mapping[str, Sequence[Verdict]], *, named: bool) -> Table:
    """Build a folded table of measured value, threshold and change by verdict; `named` adds a column of variants."""
    header = ["rule", "measured", "threshold", "confidence", "change", "predicted speed-up"]
    if named:
        header.insert(0, "variant")
    rows: list[Sequence[str]] = []
    for name, verdicts in found.items():
        for verdict in verdicts:
            change = ", ".join(f"{key} {format_setting(key, value)}" for key, value in verdict.change.items())
            row = [
                verdict.rule.replace("_", " "),
                format_significant(verdict.figure),
                format_significant(verdict.threshold),
                format_percent(verdict.confidence, 0),
                change or "no setting",
                UNKNOWN if verdict.gain is None else f"{format_decimal(verdict.gain)} x",
            ]
            if named:
                row.insert(0, name)
            rows.append(tuple(row))
    caption = "The evidence: the measured value and the threshold of each rule. (steps.jsonl, telemetry.jsonl)"
    return Table(caption, header, rows, folded=True)


def list_next_commands(run: Run) -> list[str]:
    """List the commands that continue an interrupted run or use the model of a finished one; [] for other runs."""
    folder = name_run_folder(run)
    if run.status.state == "interrupted" and run.status.begun:
        return [f"fivetune train {folder} --resume"]
    if run.status.state != "finished" or not run.has_model:
        return []
    commands = {
        f"fivetune predict {folder} --input new.csv --output answers.csv": "answers for new records",
        f"fivetune evaluate {folder} --data.eval test.json": "the score on data that chose nothing",
        f"fivetune serve {folder}": "a page to try it, and answers by HTTP",
        f"fivetune push {folder} NAME/MODEL --dry-run": "what an upload to the hub would contain",
    }
    width = max(map(len, commands))
    return [f"{command:<{width}}  # {purpose}" for command, purpose in commands.items()]
