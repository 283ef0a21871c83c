"""Tags: precision, recall and F1 over sets of tags, and the share of sets that match exactly.

In: predicted and gold tags as one text, "python, pandas"; of several gold texts the one with the best F1 counts. Case,
order, repeats and surplus space are ignored.

    micro_precision = right / predicted    micro_recall = right / gold    micro_f1 = 2 right / (predicted + gold)

with the numbers of right, predicted and gold tags summed over all examples; 0 for a denominator of 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from fivetune.metrics import Case, Details, compute_percent
from fivetune.plugins import Options
from fivetune.types import DrawnRows, Scores


class Tags(Options):
    """Micro-averaged F1 of tags."""

    main: ClassVar[str] = "micro_f1"
    score_names: ClassVar[tuple[str, ...]] = ("micro_precision", "micro_recall", "micro_f1", "exact_set", "total")
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "f1_score of scikit-learn on indicator columns, average='micro', zero_division=0"

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return percentages over all examples; an example's micro_f1 is its own F1. `details` are not read."""
        import numpy as np

        assert predictions, "nothing to score"
        counts = [
            _count_matches(parse_tag_set(p), map(parse_tag_set, right))
            for p, right in zip(predictions, references, strict=True)
        ]
        each: list[dict[str, float]] = [
            {"micro_f1": _compute_f1(*one), "exact_set": int(one[0] == one[1] == one[2])} for one in counts
        ]
        corpus = {
            **_compute_micro_scores(*map(sum, zip(*counts, strict=True))),
            "exact_set": compute_percent((one["exact_set"] for one in each), len(each)),
            "total": len(each),
        }
        table = np.array([(*one, scores["exact_set"]) for one, scores in zip(counts, each, strict=True)], dtype=float)

        def resample(rows: DrawnRows) -> dict[str, float]:
            *sums, exact = (np.bincount(rows, minlength=len(table)) @ table).tolist()
            return {**_compute_micro_scores(*sums), "exact_set": 100 * exact / len(rows)}

        return Scores(corpus, each, resample)


def parse_tag_set(text: str) -> frozenset[str]:
    """Parse a comma-separated text into its set of tags, in lower case.

    >>> sorted(parse_tag_set(" Python, pandas,python,, data  frame"))
    ['data frame', 'pandas', 'python']
    """
    return frozenset(filter(None, (" ".join(part.split()).casefold() for part in text.split(","))))


def _count_matches(predicted: frozenset[str], golds: Iterable[frozenset[str]]) -> tuple[int, int, int]:
    """Return the numbers (right, predicted, gold) for the gold set with the best F1."""
    counts = [(len(predicted & gold), len(predicted), len(gold)) for gold in golds]
    return max(counts, key=lambda one: (_compute_f1(*one), one[0]))


def _compute_f1(right: int, predicted: int, gold: int) -> float:
    """Return the F1 of one example; 1 if both sides are empty."""
    return 2 * right / (predicted + gold) if predicted + gold else 1.0


def _compute_micro_scores(right: float, predicted: float, gold: float) -> dict[str, float]:
    return {
        "micro_precision": 100 * right / max(predicted, 1),
        "micro_recall": 100 * right / max(gold, 1),
        "micro_f1": 200 * right / max(predicted + gold, 1),
    }


CASES = (
    Case(
        predictions=("python, pandas", "Java", "", "c, c++"),
        references=(("pandas, python",), ("java, repeat",), ("git",), ("c", "c++, c, clang")),
        expected={"micro_precision": 100.0, "micro_recall": 500 / 8, "micro_f1": 1000 / 13, "exact_set": 25.0},
        source="by hand: 5 right of 5 predicted and 8 gold; the second gold set of c, c++ is best (F1 4/5, not 2/3)",
    ),
)
