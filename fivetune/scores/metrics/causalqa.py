"""Exact match and F1 of the causal question answering benchmark Webis-CausalQA-22.

In: one predicted answer and all gold answers per question. Out: em and f1, each the best over the gold answers after
SQuAD's normalisation; F1 is 0 if both sides are empty, as in SQuAD v1.1 and unlike v2.0. The benchmark's ROUGE-L is
{name: rouge, types: [rougeL], normalize: true}: the mean, of which the benchmark's script reports a bootstrap estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.scores.metrics import Case, Details, PerExample, compute_best_match, normalize_answer


class CausalQA(PerExample):
    """The CausalQA benchmark's exact match and F1."""

    main = "f1"
    score_names = ("em", "f1", "total")
    source = "measures.py of webis-de/coling22-benchmark-for-causal-question-answering (Bondarenko 2022)"

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return exact match and F1 (0-1), each against its best gold answer; `details` are not read.

        >>> CausalQA().score_one("The heavy rain!", ["heavy rain", "snow"], {})
        {'em': 1, 'f1': 1.0}
        >>> CausalQA().score_one("", ["the"], {})
        {'em': 1, 'f1': 0.0}
        """
        exact, f1 = compute_best_match(normalize_answer(prediction), list(map(normalize_answer, references)))
        return {"em": exact, "f1": f1}


CASES = (
    Case(
        predictions=("The heavy rain!", "because of heavy rain", ""),
        references=(("a heavy rain", "snow"), ("heavy rain of march",), ("the",)),
        expected={"em": 100 * 2 / 3, "f1": 100 * (1 + 3 / 4 + 0) / 3, "total": 3},
        source="by hand: of 4 and 4 words 3 are common; empty equals empty, with F1 0",
    ),
)
