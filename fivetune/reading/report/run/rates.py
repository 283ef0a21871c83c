"""Rates that reveal a broken run: their labels, and the thresholds of their warnings.

In: evaluations. Out: a Table of their rates, and sentences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page.parts import Table
from fivetune.reading.report.page.wording import UNKNOWN, format_percent, format_plural
from fivetune.reading.report.run.scores import LABEL_SCORES, EvalRecord
from fivetune.rundir.records import Prediction
from fivetune.scores.metrics.gsm8k import describe_lenient_gap


class Rate(NamedTuple):
    """A share of the predictions: its name, and optionally a threshold with its `warning`."""

    name: str
    limit: float | None = None
    warning: str = ""


RATES = {
    "cap_hit": Rate(
        "cut off at the length cap",
        0.01,
        "{share} of the predictions were cut off at {cap}. Raise eval.max_new_tokens, or look for repetition in them.",
    ),
    "sentinel": Rate(
        "holding a sentinel token",
        0.0,
        "{share} of the predictions hold sentinel tokens (<extra_id_N>) of pre-training.",
    ),
    "unknown_characters": Rate(
        "holding an unknown token",
        0.001,
        "{share} of the predictions hold unknown tokens: the tokenizer cannot write what the targets ask for.",
    ),
    "not_in_context": Rate(
        "answer not in the context",
        0.05,
        "{share} of the answers given do not stand in the context that they are to be taken from.",
    ),
    "left_label_set": Rate(
        "none of the labels, written freely",
        0.01,
        "{share} of the predictions would be none of the labels if the model wrote freely: the label probabilities "
        "rest on texts that it does not want to write.",
    ),
    "one_label": Rate(
        "most frequent predicted label",
        0.999,
        "{share} of the predictions are the same label: the model does not tell the examples apart.",
    ),
    "majority_label": Rate("most frequent gold label"),
    "empty": Rate("empty"),
    "teacher_forced_exact": Rate("target exact, teacher-forced"),
    "free_running_exact": Rate("target exact, free-running"),
}
EMPTY_LIMIT, EMPTY_BEYOND_UNANSWERABLE = 0.01, 0.1
DECODING_GAP = 0.01


def read_majority_score(record: EvalRecord, key: str) -> float | None:
    """Return the score in points of always predicting the most frequent label; None for tasks without labels."""
    share = record.rates.get("majority_label") if key in LABEL_SCORES else None
    return None if share is None else 100 * share


def recompute_written_rates(record: EvalRecord | None, lines: Sequence[Prediction]) -> EvalRecord | None:
    """Return the evaluation with its rates of exact targets recomputed over generated answers only.

    A label that was chosen by its probability has no generated target to compare with.
    """
    written = [line for line in lines if line.left_label_set is None]
    if record is None or len(written) == len(lines):
        return record
    rates = dict(record.rates)
    for name in ("teacher_forced_exact", "free_running_exact"):
        flags = [getattr(line, name) for line in written]
        known = [flag for flag in flags if flag is not None]
        rates.pop(name, None)
        if known:
            rates[name] = sum(known) / len(known)
    return replace(record, rates=rates)


def find_rate_warnings(
    best: EvalRecord | None, lines: Sequence[Prediction] = (), rules: Collection[str] = ()
) -> Iterator[str]:
    """Yield the warnings of the best evaluation's rates; none for the model before fine-tuning.

    Args:
        lines: predictions of the evaluation.
        rules: names of verdicts; a verdict on labels says more than the rate.
    """
    if best is None or best.step == 0:
        return
    rates = best.rates
    cap = format_plural(best.max_new_tokens, "token")
    for name, known in RATES.items():
        is_told = name == "one_label" and "majority_label" in rules
        if known.limit is not None and not is_told and rates.get(name, 0.0) > known.limit:
            yield known.warning.format(share=format_percent(rates[name]), cap=cap)
    gap = describe_lenient_gap(best.scores)
    if gap:
        yield gap
    # No answer is right where a question has none; a text without labels is right where a gold answer is empty.
    empty = rates.get("empty")
    unanswerable = get_score(best, "NoAns_total")
    if empty is not None and unanswerable:
        expected = unanswerable / (get_score(best, "total") or unanswerable)
        if empty - expected > EMPTY_BEYOND_UNANSWERABLE:
            yield (
                f"{format_percent(empty)} of the questions were left unanswered, but only {format_percent(expected)} "
                "have no answer: the model abstains too often."
            )
    elif empty is not None and empty > EMPTY_LIMIT and not any("" in line.references for line in lines):
        yield f"{format_percent(empty)} of the predictions are empty."
    # Targets that are exact with teacher forcing, but not in generation: the cause is a setting or a fault.
    forced = rates.get("teacher_forced_exact")
    free = rates.get("free_running_exact")
    if forced is not None and free is not None and forced - free > DECODING_GAP:
        yield (
            f"Given the target so far, the model would write {format_percent(forced)} of the targets exactly, but "
            f"generation wrote only {format_percent(free)}. Look at eval.max_new_tokens, at what generation "
            "suppresses, and at the precision."
        )


def build_rates_table(best: EvalRecord | None, baseline: EvalRecord | None) -> Table | None:
    """Build a table of the rates of the best evaluation and of the one before fine-tuning."""
    rates = best.rates if best else {}
    before = baseline.rates if baseline else {}
    rows: list[Sequence[str]] = []
    is_above = False
    for name, known in RATES.items():
        if name in rates:
            is_above |= known.limit is not None and rates[name] > known.limit
            limit = UNKNOWN if known.limit is None else format_percent(known.limit)
            rows.append((known.name, format_percent(rates[name]), format_percent(before.get(name)), limit))
    if not rows:
        return None
    caption = "Shares of the predictions that reveal a broken run, at the best evaluation"
    caption += ". (rates in evals.jsonl)" if is_above else ": none is above its limit. (rates in evals.jsonl)"
    return Table(caption, ("predictions", "share", "before fine-tuning", "warning above"), rows, folded=not is_above)
