"""Exact match and F1 of the causal question answering benchmark Webis-CausalQA-22.

In: one predicted answer and all gold answers per question. Out: em and f1, each the best over the gold answers after
SQuAD's normalisation; F1 is 0 where both sides are empty, as in SQuAD v1.1 and unlike v2.0. The benchmark's ROUGE-L is
{name: rouge, types: [rougeL], normalize: true}; where its script reports the middle of a random bootstrap, that gives
the mean which the bootstrap estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fivetune.metrics import Case, Details, mean_scores, normalize_answer, token_f1
from fivetune.plugins import Options
from fivetune.types import Scores


class Causalqa(Options):
    """The CausalQA benchmark's exact match and F1."""

    main: ClassVar[str] = "f1"
    score_names: ClassVar[tuple[str, ...]] = ("em", "f1", "total")
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "measures.py of webis-de/coling22-benchmark-for-causal-question-answering (Bondarenko 2022)"

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
    >>> _score_one("The heavy rain!", ["heavy rain", "snow"]), _score_one("", ["the"])
    ({'em': 1, 'f1': 1.0}, {'em': 1, 'f1': 0.0})
    """
    predicted = normalize_answer(prediction)
    golds = [normalize_answer(reference) for reference in references]
    return {
        "em": max(int(predicted == gold) for gold in golds),
        "f1": max(token_f1(predicted.split(), gold.split()) for gold in golds),
    }


CASES = (
    Case(
        predictions=("The heavy rain!", "because of heavy rain", ""),
        references=(("a heavy rain", "snow"), ("heavy rain of march",), ("the",)),
        expected={"em": 100 * 2 / 3, "f1": 100 * (1 + 3 / 4 + 0) / 3, "total": 3},
        source="by hand: of 4 and 4 words 3 are common; nothing equals nothing, with F1 0",
    ),
)
