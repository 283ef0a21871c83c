"""Exact match and F1 of SQuAD v1.1: every question has an answer.

In: one predicted answer and all gold answers per question. Out: exact and f1, the best over the gold answers.
Against v2.0 a gold answer that normalises to nothing counts here, and F1 is 0 where both sides are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fivetune.metrics import Case, Details, mean_scores, normalize_answer, token_f1
from fivetune.plugins import Options
from fivetune.types import Scores


class Squad(Options):
    """SQuAD v1.1."""

    main: ClassVar[str] = "f1"
    score_names: ClassVar[tuple[str, ...]] = ("exact", "f1", "total")
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "evaluate-v1.1.py of SQuAD (Rajpurkar et al. 2016)"

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Percentages over all questions; `details` are not read."""
        assert predictions, "nothing to score"
        each = [_score_one(p, r) for p, r in zip(predictions, references, strict=True)]
        return mean_scores(each)


def _score_one(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """
    >>> _score_one("Norman dukes", ["the Norman duke", "dukes"])
    {'exact': 0, 'f1': 0.6666666666666666}
    """
    predicted = normalize_answer(prediction)
    golds = [normalize_answer(reference) for reference in references]
    return {
        "exact": max(int(predicted == gold) for gold in golds),
        "f1": max(token_f1(predicted.split(), gold.split()) for gold in golds),
    }


CASES = (
    Case(
        predictions=("France", "in the 10th century", "Rollo", ""),
        references=(("France",), ("10th and 11th centuries", "the 10th century"), ("Rolf", "Ragnvald"), ("Seine",)),
        expected={"exact": 25.0, "f1": 100 * (1 + 4 / 5) / 4, "total": 4},
        source="by hand: 'in 10th century' and '10th century' share 2 of 3 and 2 of 2 words, F1 4/5",
    ),
    Case(
        predictions=("", "the"),
        references=(("the",), ("A.",)),
        expected={"exact": 100.0, "f1": 0.0, "total": 2},
        source="evaluate-v1.1.py: nothing equals nothing exactly, but has no word in common with it",
    ),
)
