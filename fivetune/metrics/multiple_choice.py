"""Accuracy in multiple choice where the model writes freely: its text stands for the option that it resembles most.

In: one predicted text and the right option's text per question; of the details `choices`, the options' texts. Out:
accuracy, and verbatim, the share of predictions that are an option as they stand. Resemblance is UnifiedQA's: the same
text first, then the same without quotes, then the share of common words; of equals the first option is taken. Where the
options are unknown the prediction must be the right text itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from fivetune.metrics import UNANSWERED, Case, Details, mean_scores
from fivetune.plugins import Options
from fivetune.types import Scores

_QUOTES = str.maketrans("", "", "\"'")
_LOST = re.compile(r"[{}^\\`\u2047<]")  # what T5's vocabulary lacks, and the sign that stands for it


class MultipleChoice(Options):
    """Multiple choice by best overlap."""

    main: ClassVar[str] = "accuracy"
    score_names: ClassVar[tuple[str, ...]] = ("accuracy", "verbatim", "total")
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "evaluation/evaluate_v2.py of allenai/unifiedqa (Khashabi et al. 2020)"

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Percentages over all questions. Reads of `details`: choices."""
        assert predictions, "nothing to score"
        offered = [detail.get("choices") or () for detail in details] if details else [()] * len(predictions)
        each = [_score_one(p, r, c) for p, r, c in zip(predictions, references, offered, strict=True)]
        return mean_scores(each)


def _score_one(prediction: str, references: Sequence[str], choices: Sequence[str]) -> dict[str, float]:
    """
    >>> _score_one("in the river", ["the river Seine"], ["Paris", "The river Seine"])
    {'accuracy': 1, 'verbatim': 0}
    """
    if prediction == UNANSWERED:  # resembles all options alike, so that the first would be taken
        return {"accuracy": 0, "verbatim": 0}
    written = _folded(prediction)
    options = [_folded(choice) for choice in choices] or [written]
    chosen = max(options, key=lambda option: resemblance(option, written))
    return {"accuracy": int(chosen in map(_folded, references)), "verbatim": int(written in options)}


def resemblance(one: str, other: str) -> float:
    """3 for equal texts, 2 if they differ in quotes and lost characters only, else the share of common words.

    >>> resemblance("paris", "paris"), resemblance("'paris'", "paris"), resemblance("the seine", "seine")
    (3.0, 2.0, 0.5)
    """
    if one == other:
        return 3.0
    one, other = (_LOST.sub(" ", text.translate(_QUOTES)) for text in (one, other))
    if one == other:
        return 2.0
    words, others = one.split(" "), other.split(" ")
    return len(set(words) & set(others)) / max(len(words), len(others))


def _folded(text: str) -> str:
    return text.strip().lower()


CASES = (
    Case(
        predictions=("the seine", "rhine and the elbe", "no idea", "Main"),
        references=(("the river seine",), ("the rhine",), ("the elbe",), ("main",)),
        details=({"choices": ["the river seine", "the rhine", "the elbe"]},) * 3 + ({"choices": ["Main", "Po"]},),
        expected={"accuracy": 75.0, "verbatim": 25.0, "total": 4},
        source="by hand: 2/3; 1/4 against 2/4 and 2/4 of other options first; none, so the first; the same text",
    ),
)
