"""Accuracy of yes/no answers.

In: one predicted text and the gold word per question. Out: accuracy over all questions, and yes_accuracy and
no_accuracy over the questions with this gold answer: a constant yes scores 100 and 0. Only the first word counts,
ignoring case and punctuation: "Yes, it is." is yes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.scores.metrics import Case, Details, MetricOptions, normalize_answer
from fivetune.types import DrawnRows, Scores


class YesNo(MetricOptions):
    """Accuracy of yes/no answers, over all and per answer."""

    main = "accuracy"
    score_names = ("accuracy", "yes_accuracy", "no_accuracy", "total")
    source = "accuracy as for BoolQ (Clark et al. 2019); reading the first word is FiveTune's"

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return percentages; yes_accuracy and no_accuracy only if there are such questions. `details` are not read."""
        import numpy as np

        assert predictions, "nothing to score"
        words = np.array([_extract_first_word(golds[0]) for golds in references])  # which answer a question asks for
        each: list[dict[str, float]] = []
        for prediction, golds in zip(predictions, references, strict=True):
            is_right = _extract_first_word(prediction) in map(_extract_first_word, golds)
            each.append({"accuracy": int(is_right)})
        right = np.array([one["accuracy"] for one in each])

        def resample(rows: DrawnRows) -> dict[str, float]:
            drawn = right[rows]
            asked = words[rows]
            parts = {"accuracy": drawn, "yes_accuracy": drawn[asked == "yes"], "no_accuracy": drawn[asked == "no"]}
            return {name: 100 * float(part.mean()) for name, part in parts.items() if len(part)}

        sizes = {f"{word}_accuracy": int((words == word).sum()) for word in ("yes", "no")}
        return Scores({**resample(np.arange(len(each))), "total": len(each)}, each, resample, sizes)


def _extract_first_word(text: str) -> str:
    return normalize_answer(text).partition(" ")[0]


CASES = (
    Case(
        predictions=("Yes, it is.", "yes", "no", "perhaps", "nothing"),
        references=(("yes",), ("no",), ("no",), ("yes",), ("no",)),
        expected={"accuracy": 40.0, "yes_accuracy": 50.0, "no_accuracy": 100 / 3, "total": 5},
        source="by hand: the first and the third",
    ),
)
