"""Reasons to doubt a run's scores: the section on warnings.

In: a Run. Out: sentences, the most important first, and their Section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fivetune.report.page.parts import Section, Text
from fivetune.report.page.wording import (
    format_count,
    format_percent,
    format_plural,
    merge_repeats,
)
from fivetune.report.run.data import count_examples
from fivetune.report.run.rates import build_rates_table, find_rate_warnings, recompute_written_rates
from fivetune.report.run.scores import (
    EvalRecord,
    choose_best_eval,
    find_baseline_eval,
)
from fivetune.rundir.figures import select_current_evals, select_evals_by_step
from fivetune.rundir.records import DataSummary, Run
from fivetune.values import divide

UNKNOWN_LIMIT = 0.001


def find_warnings(run: Run, reference_runs: Sequence[Run] = ()) -> list[str]:
    """Return warnings about scores and data from the records; problems of the training are up to the diagnosis."""
    best = choose_best_eval(run)
    return [
        *find_rate_warnings(recompute_written_rates(best, run.read_predictions(best))),
        *_find_size_warnings(run, best, reference_runs),
        *_find_data_warnings(run.data),
    ]


def _find_size_warnings(run: Run, best: EvalRecord | None, reference_runs: Sequence[Run]) -> list[str]:
    """Warn of evaluations on different numbers of examples, unless they have other data and are not compared."""
    sizes = Counter(record.num_examples for record in select_evals_by_step(select_current_evals(run.evals)))
    sentences: list[str] = []
    if len(sizes) > 1:
        listed = ", ".join(sorted((format_count(num) for num in sizes), key=lambda text: (len(text), text)))
        sentences.append(f"The evaluations differ in size ({listed} examples): part of the difference is chance.")
    for other in reference_runs:
        theirs = choose_best_eval(other)
        if best and theirs and theirs.num_examples != best.num_examples:
            sentences.append(
                f"The run {other.name} was evaluated on {format_plural(theirs.num_examples, 'example')}, "
                f"this one on {format_count(best.num_examples)}."
            )
    return sentences


def _find_data_warnings(data: DataSummary) -> list[str]:
    sentences: list[str] = []
    for split, facts in (("train", data.train), ("eval", data.eval)):
        if facts is None:
            continue
        lost, bad, clipped = facts.num_answers_lost, facts.num_skipped_bad, facts.num_clipped_targets
        if lost:
            part = format_percent(divide(lost, count_examples(facts)))
            sentences.append(
                f"{split}: in {format_plural(lost, 'example')} ({part}) truncation cut the answer out of the input. "
                "Raise data.max_input_tokens."
            )
        if facts.num_blank_golds:
            sentences.append(
                f"{split}: {format_plural(facts.num_blank_golds, 'record')} have a blank gold answer beside others: an "
                "empty prediction is right there."
            )
        if clipped:
            sentences.append(
                f"{split}: {format_plural(clipped, 'target')} longer than data.max_target_tokens lost the end."
            )
        if bad:
            read = format_plural(facts.num_read, "record")
            sentences.append(f"{split}: {format_count(bad)} of {read} could not be used and were left out.")
        unknown = divide(facts.num_unknown_tokens, facts.num_input_tokens)
        if unknown is not None and unknown > UNKNOWN_LIMIT:
            sentences.append(f"{split}: {format_percent(unknown, 2)} of the input tokens are unknown to the tokenizer.")
    return sentences


def select_own_warnings(run: Run) -> list[str]:
    """Return the run's own warnings, without those on truncation if data.json has the counts."""
    has_counts = run.data != DataSummary()
    counted = {one.message for one in run.status.warnings if has_counts and one.kind == "truncation"}
    return merge_repeats(text for text in run.warnings if text not in counted)


def build_warnings_section(run: Run, doubts: Sequence[str]) -> Section:
    table = build_rates_table(
        *(
            recompute_written_rates(one, run.read_predictions(one))
            for one in (choose_best_eval(run), find_baseline_eval(run))
        )
    )
    rates = () if table is None else (table,)
    if not doubts:
        text = (
            "No warning. Checked: the rates of a broken run, answers lost to truncation, skipped records, "
            "evaluations of different size."
        )
        return Section("Warnings", (Text(text, "good"), *rates))
    return Section("Warnings", (*(Text(text, "warning") for text in doubts), *rates))
