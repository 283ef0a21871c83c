"""BioASQ's measures for factoid questions: strict and lenient accuracy, and mean reciprocal rank.

In: the best answer, all synonyms of the gold answer, and from the details `candidates`, ranked answers of which the
first five count. Case is ignored. Out: strict_accuracy (the first answer is right), lenient_accuracy (one of the five
is right) and mrr (1 / rank of the first right one), as percentages.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.scores.metrics import Case, Details, PerExample

NUM_RANKS = 5
"""Number of ranked answers that BioASQ scores."""


class BioASQ(PerExample):
    """BioASQ's measures for factoid questions."""

    main = "mrr"
    score_names = ("strict_accuracy", "lenient_accuracy", "mrr", "total")
    source = "BioASQ Evaluation-Measures, task B phase B (Task1bData.java): strings are equal in lower case"

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return both accuracies and 1 / rank (0-1). Reads `candidates`; without them only the prediction counts.

        >>> BioASQ().score_one("BRCA2", ["brca1"], {"candidates": ["BRCA2", "BRCA1"]})
        {'strict_accuracy': 0, 'lenient_accuracy': 1, 'mrr': 0.5}
        """
        ranked = details.get("candidates") or [prediction]
        right = {gold.lower() for gold in references}
        for rank, answer in enumerate(ranked[:NUM_RANKS], start=1):
            if answer.lower() in right:
                return {"strict_accuracy": int(rank == 1), "lenient_accuracy": 1, "mrr": 1 / rank}
        return {"strict_accuracy": 0, "lenient_accuracy": 0, "mrr": 0.0}


CASES = (
    Case(
        predictions=("dystrophin", "BRCA2", "TP53", "p53"),
        references=(("dystrophin", "DMD"), ("BRCA1",), ("Tp53",), ("TP53", "p53")),
        details=(
            {"candidates": ["dystrophin", "utrophin"]},
            {"candidates": ["BRCA2", "BRCA1"]},
            {"candidates": ["TP53"]},
            {"candidates": ["MDM2", "x", "y", "z", "w", "p53"]},
        ),
        expected={"strict_accuracy": 50.0, "lenient_accuracy": 75.0, "mrr": 100 * (1 + 1 / 2 + 1) / 4, "total": 4},
        source="by hand: ranks 1, 2, 1 (case does not count), none (the sixth does not count)",
    ),
    Case(
        predictions=("Rollo", ""),
        references=(("Rollo",), ("Seine",)),
        expected={"strict_accuracy": 50.0, "lenient_accuracy": 50.0, "mrr": 50.0},
        source="by hand: without candidates only the prediction counts",
    ),
)
