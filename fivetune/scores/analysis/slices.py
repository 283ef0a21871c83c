"""Scores by slice of the data: question word, length, truncation, language and source.

In: predictions, and the name of a score. Out: one Slice per value, with a 95 % interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.bootstrap import compute_intervals, compute_wilson_interval
from fivetune.types import Scores

MAX_VALUES = 12
MIN_BOOTSTRAP_VALUES = 20  # fewer values give no reliable spread for a bootstrap
ANSWER_WORDS = (1, 2, 3, 5, 10)
INPUT_TOKENS = (64, 128, 256, 384, 512, 1024, 2048)
OTHER = "other"

QUESTION_WORDS = {
    "en": "who whom whose what when where why how which",
    "es": "quién quiénes qué cuándo dónde cómo cuál cuáles cuánto cuánta cuántos cuántas",
    "de": "wer wen wem wessen was wann wo warum wie welche welcher welches welchem welchen wieso",
    "fr": "qui que quoi quand où pourquoi comment quel quelle quels quelles combien",
    "pt": "quem que quê quando onde como qual quais quanto quanta quantos quantas porquê",
}
FUNCTION_WORDS = {
    "en": "the a an of is are was were did does do has have had can to in on at for by from and or it its he she they "
    "his her their that this there be been",
    "es": "el la los las un una de del al en es era fue son fueron ha se su y o con para por lo más",
    "de": "der die das den dem des ein eine einen einem einer ist sind war waren wurde wurden hat haben wird werden in "
    "im am zu zum zur von vom mit für und oder es er sie man sich",
    "fr": "le la les l un une des du de d au aux en est sont était a ont il elle on ce se son sa ses et ou dans pour",
    "pt": "o a os as um uma de do da dos das em no na nos nas é são era foi foram há se seu sua e ou com por para ao à",
}
_QUESTION_WORDS = {language: frozenset(words.split()) for language, words in QUESTION_WORDS.items()}
_ALL_WORDS = {name: words | set(FUNCTION_WORDS[name].split()) for name, words in _QUESTION_WORDS.items()}
_PHRASES = {("how", "many"), ("how", "much"), ("how", "long"), ("por", "qué"), ("por", "que"), ("por", "quê")}
_WORD = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Slice(NamedTuple):
    """Predictions with one property in common: mean score and 95 % interval in points of 0-100."""

    name: str
    value: str
    num: int
    score: float
    low: float
    high: float


def compute_slices(lines: Sequence[Prediction], score: str, *, seed: int = 0) -> dict[str, list[Slice]]:
    """Group the scored lines by each property; a property that no line has gets an empty list.

    Values keep their natural order; free ones are sorted by number of predictions, from the 13th on pooled as "other".

    >>> found = compute_slices([Prediction(id="1", references=("a b",), scores={"f1": 1.0}),
    ...     Prediction(id="2", references=("c",), scores={"f1": 0.0})], "f1")
    >>> [(one.value, one.num, one.score) for one in found["answer length"]]
    [('1 word', 1, 0.0), ('2 words', 1, 100.0)]
    """
    found: dict[str, list[Slice]] = {}
    for name, value_of in DIMENSIONS.items():
        groups: dict[str, list[float]] = {}
        for line in lines:
            if score not in line.scores:
                continue
            value = value_of(line)
            if value is not None:
                groups.setdefault(value, []).append(line.scores[score])
        found[name] = _build_slices(name, groups, seed)
    return found


def _build_slices(name: str, groups: Mapping[str, Sequence[float]], seed: int) -> list[Slice]:
    """Build the slices of a property from the scores of each of its values."""
    # The most frequent values are shown, the others pooled: a slice of few says nothing.
    by_number = sorted(groups, key=lambda value: (value == OTHER, -len(groups[value]), value))
    kept = [value for value in by_number[:MAX_VALUES] if value != OTHER]
    order = list(ORDERS.get(name, kept))
    shown: dict[str, Sequence[float]] = {value: groups[value] for value in sorted(kept, key=order.index)}
    rest: list[float] = []
    for value in by_number:
        if value not in kept:
            rest += groups[value]
    if rest:
        shown[OTHER] = rest
    found: list[Slice] = []
    for value, numbers in shown.items():
        mean = sum(numbers) / len(numbers)
        # Wilson's interval is exact for values of 0 or 1.
        if len(numbers) < MIN_BOOTSTRAP_VALUES or set(numbers) <= {0.0, 1.0}:
            edges = compute_wilson_interval(min(mean, 1.0), len(numbers))
            low = 100 * edges[0]
            high = 100 * edges[1]
        else:
            scores = Scores({"score": 100 * mean}, [{"score": number} for number in numbers])
            low, high = compute_intervals(scores, seed=seed)["score"]
        found.append(Slice(name, value, len(numbers), 100 * mean, low, high))
    return found


# --- the slice of a line; None if unknown ---


def find_question_word(question: str, language: str = "") -> str:
    """Return the first question word of the last interrogative sentence, in its language; "other" if there is none.

    Question words depend on the language: German "was" is an English auxiliary, Portuguese "que" and "como" are Spanish
    conjunctions. If QUESTION_WORDS lacks `language`, the language is detected: the one with the most function and
    question words in the sentence, of equals the first in QUESTION_WORDS.

    >>> [find_question_word(q) for q in ("In what year?", "How many people came?", "¿Por qué vino?", "Name one.")]
    ['what', 'how many', 'por qué', 'other']
    >>> find_question_word("When she left, 4 remained. How old was Ann?"), find_question_word("Was ist das?")
    ('how', 'was')
    >>> find_question_word("Who led the Infantry No. 15?"), find_question_word("12 + 5 = ?"), find_question_word("")
    ('who', 'other', 'other')
    """
    # "Is it No. 15?" and "by 5 + 7 = ?" end in a sentence without words, which asks nothing.
    sentences = [one for one in _SENTENCE_END.split(question.strip()) if _WORD.search(one)]
    asking = next((one for one in reversed(sentences) if one.endswith("?")), question)
    words = _WORD.findall(asking.casefold())
    if language not in QUESTION_WORDS:
        num_known: dict[str, int] = {}
        for name, known in _ALL_WORDS.items():
            num_known[name] = sum(word in known for word in words)
        language = max(num_known, key=num_known.__getitem__)
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if (word, following) in _PHRASES and {word, following} & _QUESTION_WORDS[language]:
            return f"{word} {following}"
        if word in _QUESTION_WORDS[language]:
            return word
    return OTHER


def _get_question_word(line: Prediction) -> str | None:
    question = line.meta.get("question")
    if not isinstance(question, str) or not question:
        return None
    return find_question_word(question, str(line.meta.get("language") or ""))


def format_bucket(number: int, edges: Sequence[int], unit: str) -> str:
    """Return the label of the bucket of a count; an edge belongs to the bucket below it.

    >>> format_bucket(1, (1, 2, 5), "word"), format_bucket(4, (1, 2, 5), "word"), format_bucket(9, (1, 2, 5), "word")
    ('1 word', '3-5 words', 'over 5 words')
    """
    for edge, words in _build_bucket_labels(edges, unit).items():
        if number <= edge:
            return words
    return f"over {edges[-1]} {unit}s"


def _build_bucket_labels(edges: Sequence[int], unit: str) -> dict[int, str]:
    labels: dict[int, str] = {}
    first = 1
    for edge in edges:
        if edge == 1:
            labels[edge] = f"1 {unit}"
        elif first == edge:
            labels[edge] = f"{edge} {unit}s"
        else:
            labels[edge] = f"{first}-{edge} {unit}s"
        first = edge + 1
    return labels


def _get_answer_length(line: Prediction) -> str | None:
    if not line.references:
        return None
    first = next(filter(None, line.references), "")
    if not first:
        return "no answer"
    return format_bucket(len(first.split()), ANSWER_WORDS, "word")


def _get_input_length(line: Prediction) -> str | None:
    if line.num_input_tokens is None or _is_merged(line):
        return None
    # The length before truncation.
    return format_bucket(line.num_input_tokens + (line.num_clipped_tokens or 0), INPUT_TOKENS, "token")


def _get_truncation(line: Prediction) -> str | None:
    if line.num_clipped_tokens is None or _is_merged(line):
        return None
    if line.answer_clipped:
        return "truncated, answer lost"
    return "truncated" if line.num_clipped_tokens else "whole"


def _get_answerable(line: Prediction) -> str | None:
    """Whether a question has an answer; None for tasks without questions, such as classification."""
    known = line.meta.get("answerable")
    # Without the entry: questions, and whatever has an empty gold answer.
    if known is None and line.references and (line.meta.get("question") or not any(line.references)):
        known = any(line.references)
    if known is None:
        return None
    return "answerable" if known else "unanswerable"


def _is_merged(line: Prediction) -> bool:
    """Whether the answer was merged from several inputs; the recorded input length is that of one of them."""
    return (line.num_passages or 1) > 1


def _make_meta_getter(key: str) -> Callable[[Prediction], str | None]:
    def get(line: Prediction) -> str | None:
        value = line.meta.get(key)
        return None if value in (None, "") else str(value)

    return get


DIMENSIONS: dict[str, Callable[[Prediction], str | None]] = {
    "question word": _get_question_word,
    "answer length": _get_answer_length,
    "input length": _get_input_length,
    "truncation": _get_truncation,
    "answerable": _get_answerable,
    "language": _make_meta_getter("language"),
    "source task": _make_meta_getter("source_task"),
}
ORDERS: dict[str, Sequence[str]] = {
    "answer length": [
        "no answer",
        *_build_bucket_labels(ANSWER_WORDS, "word").values(),
        f"over {ANSWER_WORDS[-1]} words",
    ],
    "input length": [*_build_bucket_labels(INPUT_TOKENS, "token").values(), f"over {INPUT_TOKENS[-1]} tokens"],
    "truncation": ["whole", "truncated", "truncated, answer lost"],
    "answerable": ["answerable", "unanswerable"],
}
