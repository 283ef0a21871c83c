"""Predictions -> the examples that a reader should see, and counts of what went wrong.

In: prediction lines as evaluate.py writes them. Out: Examples, Tables, and the section that holds them.
The choice is deterministic: it depends on the ids alone, not on their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from fivetune.analysis.slices import DIMENSIONS
from fivetune.report.scores import baseline_eval, best_eval, predictions_of
from fivetune.report.wording import fixed, grouped, percent, plain, plural, share, whole
from fivetune.types import Example, Run, Section, Table, Text
from fivetune.values import dig, number

NUM_WORST, NUM_RANDOM = 200, 100
MAX_INPUT_CHARS = 2000
TAGS = ("truncation", "answerable", "language", "source task")
KINDS = (
    ("right", "right"),
    ("near", "near miss (F1 of 0.5 or more)"),
    ("wrong answer", "wrong answer to an answerable question"),
    ("abstained", "no answer to an answerable question"),
    ("invented", "an answer to an unanswerable question"),
)

Prediction = dict[str, Any]


def examples_section(run: Run, lines: Sequence[Prediction]) -> Section:
    """What came out, by kind, and predictions to browse: the worst and random others."""
    best, baseline = best_eval(run), baseline_eval(run)
    if not lines:
        reason = (
            "No evaluation was made" if best is None else "The best evaluation left no predictions in the run directory"
        )
        return Section("Examples", (Text(f"{reason}, so there are no examples to show."),))
    before = predictions_of(run, baseline) if baseline and baseline is not best else []
    tables = [table for table in (kinds_table(lines), moves_table(before, lines)) if table is not None]
    lowest = worst(lines)
    others = sample(lines, lowest)
    words = f"{plural(len(others), 'prediction')} drawn by chance, of {whole(len(lines))} at the best evaluation."
    if lowest:
        words = f"The {whole(len(lowest))} lowest scored that are not right, and {words}"
    chosen = [shown(line, "lowest scores") for line in lowest] + [shown(line, "random") for line in others]
    return Section("Examples", (*tables, Text("Single predictions", "heading"), Text(words), *chosen))


def quality(prediction: Prediction) -> float | None:
    """What a prediction is ranked by: the mean of its scores (0-1), so that F1 breaks the ties of exact match."""
    values = [
        value
        for key in (dig(prediction, "scores") or {})
        if (value := number(dig(prediction, "scores", key))) is not None
    ]
    return sum(values) / len(values) if values else None


def worst(predictions: Sequence[Prediction], num: int = NUM_WORST) -> list[Prediction]:
    """The lowest scored that are not right, equal ones in an order drawn from their ids."""
    scored = [(value, _draw(p, "worst"), p) for p in predictions if (value := quality(p)) is not None and value < 1]
    return [p for _, _, p in sorted(scored, key=lambda row: row[:2])[:num]]


def sample(predictions: Sequence[Prediction], without: Sequence[Prediction], num: int = NUM_RANDOM) -> list[Prediction]:
    """Random ones, drawn by their ids, that are not shown already."""
    shown = {str(p.get("id")) for p in without}
    return sorted((p for p in predictions if str(p.get("id")) not in shown), key=lambda p: _draw(p, "sample"))[:num]


def _draw(prediction: Prediction, salt: str) -> str:
    return sha256(f"{salt}:{prediction.get('id')}".encode("utf-8", "surrogatepass")).hexdigest()


def kind(prediction: Prediction) -> str | None:
    """Which of KINDS a question-answering prediction is; None if it was not scored by exact match and F1."""
    exact, f1 = number(dig(prediction, "scores", "exact")), number(dig(prediction, "scores", "f1"))
    if exact is None or f1 is None:
        return None
    if exact == 1:
        return "right"
    if not gold(prediction):
        return "invented"
    if not prediction.get("prediction"):
        return "abstained"
    return "near" if f1 >= 0.5 else "wrong answer"


def gold(prediction: Prediction) -> tuple[str, ...]:
    """All gold answers that say something; () for an unanswerable question."""
    return tuple(str(reference) for reference in prediction.get("references") or [] if reference)


def shown(prediction: Prediction, chosen: str) -> Example:
    """One prediction as the page shows it; `chosen` says why it is among those shown."""
    value = quality(prediction)
    scores = [f"{key} {fixed(dig(prediction, 'scores', key))}" for key in dig(prediction, "scores") or {}]
    sure = number(prediction.get("confidence"))
    scores += [] if sure is None else [f"confidence {fixed(sure)}"]
    cut = ["cut off at the length cap"] if prediction.get("hit_cap") else []
    verdict = "unscored" if value is None else "right" if value == 1 else "near" if value >= 0.25 else "wrong"
    return Example(
        id=plain(prediction.get("id")),
        inputs=shortened(str(prediction.get("inputs") or "")),
        prediction=shortened(str(prediction.get("prediction") or "")),
        references=tuple(grouped(shortened(reference) for reference in gold(prediction))),
        verdict=verdict,
        remark=", ".join([*scores, *cut]) or "not scored",
        tags={"chosen": chosen, **{name: tag for name in TAGS if (tag := DIMENSIONS[name](prediction)) is not None}},
    )


def shortened(text: str) -> str:
    """A text cut to what a page can hold, with the number of characters left out."""
    rest = len(text) - MAX_INPUT_CHARS
    return text if rest <= 0 else f"{text[:MAX_INPUT_CHARS]} ... ({whole(rest)} more characters)"


def kinds_table(predictions: Sequence[Prediction]) -> Table | None:
    """How often each kind of outcome occurred."""
    counts = Counter(kind(prediction) for prediction in predictions)
    scored = sum(counts.values()) - counts[None]
    if not scored:
        return None
    rows = tuple((words, whole(counts[key]), percent(share(counts[key], scored))) for key, words in KINDS)
    return Table("Predictions of the best evaluation by kind.", ("outcome", "examples", "share"), rows)


def moves_table(before: Sequence[Prediction], after: Sequence[Prediction]) -> Table | None:
    """What became of each example between two evaluations, by exact match."""
    earlier = {str(p.get("id")): number(dig(p, "scores", "exact")) for p in before}
    moves: Counter[tuple[bool, bool]] = Counter()
    for prediction in after:
        old, new = earlier.get(str(prediction.get("id"))), number(dig(prediction, "scores", "exact"))
        if old is not None and new is not None:
            moves[old == 1, new == 1] += 1
    if not moves:
        return None
    words = {
        (False, True): "fixed: wrong before, right now",
        (True, False): "broken: right before, wrong now",
        (True, True): "right both times",
        (False, False): "wrong both times",
    }
    everything = sum(moves.values())
    rows = tuple((text, whole(moves[key]), percent(share(moves[key], everything))) for key, text in words.items())
    return Table(
        "The same examples before fine-tuning and at the best evaluation.", ("change", "examples", "share"), rows
    )
