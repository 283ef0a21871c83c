"""Rates that reveal a broken run: what they are called, and from where on they are a warning.

In: evaluations. Out: a Table of their rates, and sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivetune.report.scores import Eval, score
from fivetune.report.wording import UNKNOWN, percent, plural, share
from fivetune.types import Line, Table
from fivetune.values import dig, number


class Rate(NamedTuple):
    """A share of the predictions: its name, the share above which `warning` is said, if there is one."""

    name: str
    limit: float | None = None
    warning: str = ""


RATES = {
    "cap_hit": Rate(
        "cut off at the length cap", 0.01,
        "{share} of the predictions were cut off at {cap}. "
        "Raise eval.max_new_tokens, or look for repetition in them.",
    ),
    "sentinel": Rate(
        "holding a sentinel token", 0.0,
        "{share} of the predictions hold sentinel tokens (<extra_id_N>) of pre-training.",
    ),
    "unknown_characters": Rate(
        "holding an unknown token", 0.001,
        "{share} of the predictions hold unknown tokens: the tokenizer cannot write what the targets ask for.",
    ),
    "not_in_context": Rate(
        "answer not in the context", 0.05,
        "{share} of the answers given do not stand in the context that they are to be taken from.",
    ),
    "left_label_set": Rate(
        "none of the labels, written freely", 0.01,
        "{share} of the predictions would be none of the labels if the model wrote freely: the label probabilities "
        "rest on texts that it does not want to write.",
    ),
    "empty": Rate("empty"),
    "teacher_forced_exact": Rate("target exact, teacher-forced"),
    "free_running_exact": Rate("target exact, free-running"),
}  # fmt: skip
EMPTY_LIMIT, EMPTY_BEYOND_UNANSWERABLE = 0.01, 0.1
DECODING_GAP = 0.01


def rate(record: Eval | None, name: str) -> float | None:
    """A rate (0-1) of an evaluation; None where it has none."""
    return number(dig(record, "rates", name))


def of_written(record: Eval | None, lines: Sequence[Line]) -> Eval | None:
    """The evaluation with its rates of exact targets over the answers that were written, if some were chosen.

    A label is chosen by its probability among the labels, so that nothing was generated to compare with.
    """
    written = [line for line in lines if "left_label_set" not in line]
    if record is None or len(written) == len(lines):
        return record
    rates = dict(record.get("rates") or {})
    for name in ("teacher_forced_exact", "free_running_exact"):
        flags = [bool(line[name]) for line in written if line.get(name) is not None]
        rates[name] = share(sum(flags), len(flags))
    return {**record, "rates": rates}


def rate_warnings(best: Eval | None) -> list[str]:
    """Sentences on the rates of the best evaluation; none about the model before fine-tuning."""
    if best is None or best["step"] == 0:
        return []
    cap = plural(dig(best, "max_new_tokens"), "token")
    over = {
        name: value
        for name, known in RATES.items()
        if known.limit is not None and (value := rate(best, name)) is not None and value > known.limit
    }
    told = [RATES[name].warning.format(share=percent(value), cap=cap) for name, value in over.items()]
    return [*told, *_empty(best), *_decoding_gap(best)]


def _empty(best: Eval) -> list[str]:
    """Empty predictions, where no more than the unanswerable questions should have one."""
    empty, unanswerable = rate(best, "empty"), score(best, "NoAns_total")
    if empty is None:
        return []
    if not unanswerable:
        return [f"{percent(empty)} of the predictions are empty."] if empty > EMPTY_LIMIT else []
    expected = unanswerable / (score(best, "total") or unanswerable)
    if empty - expected <= EMPTY_BEYOND_UNANSWERABLE:
        return []
    return [
        f"{percent(empty)} of the questions were left unanswered, but only {percent(expected)} have no answer: "
        "the model abstains too often."
    ]


def _decoding_gap(best: Eval) -> list[str]:
    """Greedy decoding writes each target whose tokens are all the likeliest; if not, something is in between."""
    forced, free = rate(best, "teacher_forced_exact"), rate(best, "free_running_exact")
    if forced is None or free is None or forced - free <= DECODING_GAP:
        return []
    return [
        f"Given the target so far, the model would write {percent(forced)} of the targets exactly, but generation "
        f"wrote only {percent(free)}. Look at eval.max_new_tokens, at what generation suppresses, and at the precision."
    ]


def rates_table(best: Eval | None, baseline: Eval | None) -> Table | None:
    """All rates that the best evaluation has, beside those before fine-tuning."""
    rows = tuple(
        (
            known.name,
            percent(rate(best, name)),
            percent(rate(baseline, name)),
            UNKNOWN if known.limit is None else percent(known.limit),
        )
        for name, known in RATES.items()
        if rate(best, name) is not None
    )
    caption = "Shares of the predictions that reveal a broken run, at the best evaluation. (rates in evals.jsonl)"
    return Table(caption, ("predictions", "share", "before fine-tuning", "warned of above"), rows) if rows else None
