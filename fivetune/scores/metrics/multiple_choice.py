"""Multiple-choice accuracy of free text: a prediction counts as the option that is most similar to it.

In: one predicted text and the right option's text per question; from the details `choices`, the texts of the options.
Out: accuracy, and verbatim, the share of predictions that equal an option. Similarity is UnifiedQA's: equal texts
first, then equal without quotes, then the share of common words; ties go to the first option. Without `choices` the
prediction must equal the right text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fivetune.scores.metrics import UNANSWERED, Case, Details, PerExample

_QUOTES = str.maketrans("", "", "\"'")
_LOST = re.compile(r"[{}^\\`\u2047<]")  # characters that T5's vocabulary lacks, and the sign of an unknown token


class MultipleChoice(PerExample):
    """Multiple-choice accuracy by similarity."""

    main = "accuracy"
    score_names = ("accuracy", "verbatim", "total")
    source = "evaluation/evaluate_v2.py of allenai/unifiedqa (Khashabi et al. 2020)"

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return whether the most similar option is right, and whether it is verbatim (0 or 1). Reads `choices`.

        >>> MultipleChoice().score_one("in the river", ["the river Seine"], {"choices": ["Paris", "The river Seine"]})
        {'accuracy': 1, 'verbatim': 0}
        """
        if prediction == UNANSWERED:  # its similarity to every option is 0, so the first one would be taken
            return {"accuracy": 0, "verbatim": 0}
        written = _normalize_choice(prediction)
        # Without options the prediction is the only one: it must equal the right text.
        options = list(map(_normalize_choice, details.get("choices") or [prediction]))
        chosen = max(options, key=lambda option: compute_similarity(option, written))
        return {"accuracy": int(chosen in map(_normalize_choice, references)), "verbatim": int(written in options)}


def compute_similarity(one: str, other: str) -> float:
    """Return 3 for equal texts, 2 if only quotes and unknown characters differ, else the share of common words.

    >>> (compute_similarity("paris", "paris"), compute_similarity("'paris'", "paris"),
    ...  compute_similarity("the seine", "seine"))
    (3.0, 2.0, 0.5)
    """
    if one == other:
        return 3.0
    one = _LOST.sub(" ", one.translate(_QUOTES))
    other = _LOST.sub(" ", other.translate(_QUOTES))
    if one == other:
        return 2.0
    words = one.split(" ")
    others = other.split(" ")
    return len(set(words) & set(others)) / max(len(words), len(others))


def _normalize_choice(text: str) -> str:
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
