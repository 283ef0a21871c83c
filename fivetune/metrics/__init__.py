"""Metrics, one family per file: predictions and references of a whole corpus in, Scores out.

A metric's file holds one frozen options class and its `CASES`:

    main               its headline score, such as "f1"
    score_names        every score that it can produce
    higher_is_better   of its scores: which evaluation is the best
    source             whose rules these are
    score(predictions, references, *, no_answer_scores=None) -> Scores
    CASES              predictions, references and the corpus scores they must give, with where the numbers came from

`references[i]` holds all right answers of example i; ("",) says that the right answer is no answer. Percentages are
0-100, each example's own scores 0-1. What the families share is below: the SQuAD normalisation, token F1 and means.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from fivetune import plugins
from fivetune.types import Scores

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class Metric(Protocol):
    """What the options class of every file in this folder offers."""

    main: ClassVar[str]
    score_names: ClassVar[tuple[str, ...]]
    higher_is_better: ClassVar[bool]
    source: ClassVar[str]

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        no_answer_scores: Sequence[float] | None = None,
    ) -> Scores: ...


class Case(NamedTuple):
    """A worked example of a metric; `source` says where the expected numbers came from."""

    predictions: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    expected: Mapping[str, float]
    source: str
    no_answer_scores: tuple[float, ...] | None = None


class Scorer:
    """Several metrics, looked up once; scores under the names that `score_names` gives.

    >>> Scorer(["squad", "exact_match"]).score(["the cat", "dog"], [["cat"], ["dog"]]).corpus
    {'exact': 100.0, 'f1': 100.0, 'total': 2, 'exact_match': 50.0}
    """

    def __init__(self, metrics: Sequence[str]) -> None:
        named = _printed_names(metrics)
        self._metrics: list[tuple[Metric, dict[str, str]]] = [
            (plugins.load("metrics", metric)(), names) for metric, names in named.items()
        ]

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        no_answer_scores: Sequence[float] | None = None,
    ) -> Scores:
        """What all the metrics say, merged."""
        corpus: dict[str, float] = {}
        each: list[dict[str, float]] = [{} for _ in predictions]
        for metric, names in self._metrics:
            scores = metric.score(predictions, references, no_answer_scores=no_answer_scores)
            corpus.update({names[name]: value for name, value in scores.corpus.items()})
            for merged, own in zip(each, scores.each, strict=True):
                merged.update({names[name]: value for name, value in own.items()})
        return Scores(corpus, each)


def score_all(
    metrics: Sequence[str],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    no_answer_scores: Sequence[float] | None = None,
) -> Scores:
    """Score one corpus by several metrics at once."""
    return Scorer(metrics).score(predictions, references, no_answer_scores=no_answer_scores)


def score_names(metrics: Sequence[str]) -> tuple[str, ...]:
    """Every score that these metrics can produce together; of two equal names the later gets its metric's in front.

    >>> score_names(["squad", "exact_match"])
    ('exact', 'f1', 'total', 'exact_match')
    """
    return tuple(dict.fromkeys(name for names in _printed_names(metrics).values() for name in names.values()))


def higher_is_better(metrics: Sequence[str], score: str) -> bool:
    """Whether more is better of a score, as the metric says that gives it under this name.

    >>> higher_is_better(["squad", "exact_match"], "exact_match")
    True
    """
    giving = next(metric for metric, names in _printed_names(metrics).items() if score in names.values())
    return plugins.load("metrics", giving).higher_is_better


def _printed_names(metrics: Sequence[str]) -> dict[str, dict[str, str]]:
    """Metric -> its own score name -> the name in the merged result; `total` is the same for all and stays one."""
    taken = {"total"}
    printed: dict[str, dict[str, str]] = {}
    for metric in metrics:
        own = plugins.load("metrics", metric).score_names
        printed[metric] = {name: f"{metric}_{name}" if name in taken - {"total"} else name for name in own}
        taken.update(own)
    return printed


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then the words a, an, the, then surplus space: both SQuAD scripts' rule.

    >>> normalize_answer(" The Duke of  Normandy's (a title)")
    'duke of normandys title'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of the shares of words that the two have in common, each word as often as it occurs in both.

    F1 = 2PR / (P + R), P = common / len(prediction), R = common / len(reference); 0.0 if nothing is common.

    >>> token_f1(["in", "1066"], ["1066"])  # P = 1/2, R = 1
    0.6666666666666666
    >>> token_f1([], [])
    0.0
    """
    num_common = sum((Counter(prediction) & Counter(reference)).values())
    if num_common == 0:
        return 0.0
    precision = num_common / len(prediction)
    recall = num_common / len(reference)
    return 2 * precision * recall / (precision + recall)


def percent(values: Iterable[float], total: int) -> float:
    """100 * sum / total, added up from left to right.

    The order is part of the result's last digit, and `sum` rounds otherwise from Python 3.12 on.

    >>> percent([1, 0.5, 0], 3)
    50.0
    """
    added = 0.0
    for value in values:
        added += value
    return 100.0 * added / total
