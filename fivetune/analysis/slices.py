"""For whom a model works: scores by kind of question, length, truncation, language and source.

In: prediction lines, and which of their scores counts. Out: one Slice per value, with a 95 % interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fivetune.analysis.bootstrap import intervals, wilson
from fivetune.types import Line, Scores

MAX_VALUES = 12
FEW = 20  # so few values say too little about their spread for a bootstrap
ANSWER_WORDS = (1, 2, 3, 5, 10)
INPUT_TOKENS = (64, 128, 256, 384, 512, 1024, 2048)
OTHER = "other"

QUESTION_WORDS = {
    "en": "who whom whose what when where why how which",
    "es": "quién quiénes qué cuándo dónde cómo cuál cuáles cuánto cuánta cuántos cuántas",
    "de": "wer wen wem wessen was wann wo warum wie welche welcher welches welchen wieso",
    "fr": "qui que quoi quand où pourquoi comment quel quelle quels quelles combien",
}
_KNOWN = {word for words in QUESTION_WORDS.values() for word in words.split()}
_PHRASES = {("how", "many"), ("how", "much"), ("how", "long"), ("por", "qué")}
_WORD = re.compile(r"[^\W\d_]+")


class Slice(NamedTuple):
    """Predictions that have one thing in common: mean score and 95 % interval in points of 0-100."""

    name: str
    value: str
    num: int
    score: float
    low: float
    high: float


def slices(lines: Sequence[Line], score: str, *, seed: int = 0) -> dict[str, list[Slice]]:
    """The scored lines by everything that is known of them; a name without slices is known of none.

    Values are in their natural order, free ones by number of predictions, from the 13th on together as "other".

    >>> found = slices([{"references": ["a b"], "scores": {"f1": 1}}, {"references": ["c"], "scores": {"f1": 0}}], "f1")
    >>> [(one.value, one.num, one.score) for one in found["answer length"]]
    [('1 word', 1, 0.0), ('2 words', 1, 100.0)]
    """
    scored = [line for line in lines if (line.get("scores") or {}).get(score) is not None]
    return {name: _slices_by(name, value_of, scored, score, seed) for name, value_of in DIMENSIONS.items()}


def _slices_by(
    name: str, value_of: Callable[[Line], str | None], lines: Sequence[Line], score: str, seed: int
) -> list[Slice]:
    groups: dict[str, list[float]] = {}
    for line in lines:
        value = value_of(line)
        if value is not None:
            groups.setdefault(value, []).append(float(line["scores"][score]))
    by_number = sorted(groups, key=lambda value: (value == OTHER, -len(groups[value]), value))
    kept = [value for value in by_number[:MAX_VALUES] if value != OTHER]
    rest = [number for value in by_number if value not in kept for number in groups[value]]
    shown = {value: groups[value] for value in sorted(kept, key=lambda value: _place(name, value, kept))}
    if rest:
        shown[OTHER] = rest
    return [_slice(name, value, numbers, seed) for value, numbers in shown.items()]


def _place(name: str, value: str, kept: Sequence[str]) -> int:
    order = ORDERS.get(name, kept)
    return order.index(value)


def _slice(name: str, value: str, numbers: Sequence[float], seed: int) -> Slice:
    mean = sum(numbers) / len(numbers)
    if len(numbers) < FEW or set(numbers) <= {0.0, 1.0}:
        low, high = (100 * edge for edge in wilson(min(mean, 1.0), len(numbers)))
    else:
        low, high = intervals(Scores({"score": 100 * mean}, [{"score": n} for n in numbers]), seed=seed)["score"]
    return Slice(name, value, len(numbers), 100 * mean, low, high)


# --- what a line belongs to; None where nothing is known ---


def question_word(question: str) -> str:
    """The first question word of a question, in English, Spanish, German or French; else "other".

    >>> [question_word(q) for q in ("In what year?", "How many people came?", "¿Por qué vino?", "Name one.")]
    ['what', 'how many', 'por qué', 'other']
    """
    words = _WORD.findall(question.casefold())
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if (word, following) in _PHRASES:
            return f"{word} {following}"
        if word in _KNOWN:
            return word
    return OTHER


def _question_word(line: Line) -> str | None:
    question = _meta(line, "question")
    return question_word(question) if isinstance(question, str) and question else None


def bucket(number: int, edges: Sequence[int], unit: str) -> str:
    """The bucket of a count, each up to and including its edge.

    >>> bucket(1, (1, 2, 5), "word"), bucket(4, (1, 2, 5), "word"), bucket(9, (1, 2, 5), "word")
    ('1 word', '3-5 words', 'over 5 words')
    """
    return next((words for edge, words in _buckets(edges, unit).items() if number <= edge), f"over {edges[-1]} {unit}s")


def _buckets(edges: Sequence[int], unit: str) -> dict[int, str]:
    first = [low + 1 for low in (0, *edges[:-1])]
    return {
        edge: f"{edge} {unit}{'s' if edge > 1 else ''}" if low == edge else f"{low}-{edge} {unit}s"
        for low, edge in zip(first, edges, strict=True)
    }


def _answer_length(line: Line) -> str | None:
    references = line.get("references")
    if not references:
        return None
    first = next(filter(None, references), "")
    return bucket(len(first.split()), ANSWER_WORDS, "word") if first else "no answer"


def _input_length(line: Line) -> str | None:
    num = line.get("num_input_tokens")
    if num is None or _is_merged(line):
        return None
    return bucket(num + (line.get("num_clipped_tokens") or 0), INPUT_TOKENS, "token")


def _truncated(line: Line) -> str | None:
    if line.get("num_clipped_tokens") is None or _is_merged(line):
        return None
    if line.get("answer_clipped"):
        return "truncated, answer lost"
    return "truncated" if line["num_clipped_tokens"] else "whole"


def _answerable(line: Line) -> str | None:
    known = _meta(line, "answerable")
    if known is None and line.get("references"):
        known = any(line["references"])
    return None if known is None else "answerable" if known else "unanswerable"


def _is_merged(line: Line) -> bool:
    """Whether the line is the answer out of several inputs; it tells the length of one of them only."""
    return line.get("num_passages", 1) > 1


def _meta(line: Line, key: str) -> Any:
    return (line.get("meta") or {}).get(key)


def _text_of(key: str) -> Callable[[Line], str | None]:
    return lambda line: None if _meta(line, key) in (None, "") else str(_meta(line, key))


DIMENSIONS: dict[str, Callable[[Line], str | None]] = {
    "question word": _question_word,
    "answer length": _answer_length,
    "input length": _input_length,
    "truncation": _truncated,
    "answerable": _answerable,
    "language": _text_of("language"),
    "source task": _text_of("source_task"),
}
ORDERS: dict[str, Sequence[str]] = {
    "answer length": ["no answer", *_buckets(ANSWER_WORDS, "word").values(), f"over {ANSWER_WORDS[-1]} words"],
    "input length": [*_buckets(INPUT_TOKENS, "token").values(), f"over {INPUT_TOKENS[-1]} tokens"],
    "truncation": ["whole", "truncated", "truncated, answer lost"],
    "answerable": ["answerable", "unanswerable"],
}
