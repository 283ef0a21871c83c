"""Exact match of whole texts, for tasks without a metric of their own.

In: one prediction and all gold texts per example. Out: exact_match, the share of predictions that equal one of them.
White space is collapsed, because T5's tokenizer does not distinguish runs of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from fivetune.scores.metrics import Case, Details, PerExample


class ExactMatch(PerExample):
    """Exact match of whole texts."""

    main = "exact_match"
    score_names = ("exact_match", "total")
    source = "string equality after collapsing white space"

    ignore_case: bool = Field(default=False, description="ignore case")

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return whether the prediction equals one of the gold texts (0 or 1); `details` are not read."""
        return {"exact_match": int(self._normalize(prediction) in map(self._normalize, references))}

    def _normalize(self, text: str) -> str:
        squeezed = " ".join(text.split())
        if self.ignore_case:
            squeezed = squeezed.casefold()
        return squeezed


CASES = (
    Case(
        predictions=("positive", "Negative", " two  words ", ""),
        references=(("positive",), ("negative",), ("two words",), ("neutral", "none")),
        expected={"exact_match": 50.0, "total": 4},
        source="by hand",
    ),
)
