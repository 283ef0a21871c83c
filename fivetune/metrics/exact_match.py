"""Exact match of whole texts, for tasks without rules of their own.

In: one prediction and all right texts per example. Out: exact_match, the share of predictions that equal one of them.
Runs of space count as one: T5's tokenizer does not keep them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from fivetune.metrics import Case, Details, mean_scores
from fivetune.plugins import Options
from fivetune.types import Scores


class ExactMatch(Options):
    """Exact match."""

    main: ClassVar[str] = "exact_match"
    score_names: ClassVar[tuple[str, ...]] = ("exact_match", "total")
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "string equality after squeezing space"

    ignore_case: bool = Field(default=False, description="compare without regard to upper and lower case")

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Percentage over all examples; `details` are not read."""
        assert predictions, "nothing to score"
        each: list[dict[str, float]] = [
            {"exact_match": int(self._fold(prediction) in map(self._fold, golds))}
            for prediction, golds in zip(predictions, references, strict=True)
        ]
        return mean_scores(each)

    def _fold(self, text: str) -> str:
        squeezed = " ".join(text.split())
        return squeezed.casefold() if self.ignore_case else squeezed


CASES = (
    Case(
        predictions=("positive", "Negative", " two  words ", ""),
        references=(("positive",), ("negative",), ("two words",), ("neutral", "none")),
        expected={"exact_match": 50.0, "total": 4},
        source="by hand",
    ),
)
