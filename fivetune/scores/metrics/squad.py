"""Exact match and F1 of SQuAD v1.1: every question has an answer.

In: one predicted answer and all gold answers per question. Out: exact and f1, each the best over the gold answers.
Unlike in v2.0, a gold answer that is empty after normalisation counts, and F1 is 0 if both sides are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.scores.metrics import Case, Details, PerExample, compute_best_match, normalize_answer


class SQuAD(PerExample):
    """SQuAD v1.1's exact match and F1."""

    main = "f1"
    score_names = ("exact", "f1", "total")
    source = "evaluate-v1.1.py of SQuAD (Rajpurkar et al. 2016)"

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return exact match and F1 (0-1), each against its best gold answer; `details` are not read.

        >>> SQuAD().score_one("Norman dukes", ["the Norman duke", "dukes"], {})
        {'exact': 0, 'f1': 0.6666666666666666}
        """
        exact, f1 = compute_best_match(normalize_answer(prediction), list(map(normalize_answer, references)))
        return {"exact": exact, "f1": f1}


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
        source="evaluate-v1.1.py: two empty texts match exactly, but have no common word",
    ),
)
