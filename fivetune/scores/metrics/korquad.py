"""Exact match and F1 by the rules of KorQuAD 1.0: Korean answers are compared by characters.

In: one predicted answer and all gold answers per question. Out: korquad_exact and korquad_f1, the best over the gold
answers. A Korean word carries its particles (서울 is "Seoul", 서울에 "in Seoul"), so words in common say little. For an
unanswerable question only a prediction that is empty after normalisation is right, as in SQuAD v2.0; KorQuAD itself has
no such questions.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from fivetune.scores.metrics import Case, Details, PerExample, compute_token_f1

_MARKS = dict.fromkeys(map(ord, "'\"《》<>〈〉()‘’"), " ") | dict.fromkeys(
    ord(char) for char in string.punctuation if char not in "'\"<>()"
)
"""Quotes and brackets become spaces, other ASCII punctuation is deleted."""


class KorQuAD(PerExample):
    """KorQuAD 1.0's exact match and F1."""

    main = "korquad_f1"
    score_names = ("korquad_exact", "korquad_f1", "total")
    source = "evaluate-v1.0.py of KorQuAD (Lim, Kim and Lee 2019)"

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return exact match and F1 over characters (0-1); `details` are not read.

        >>> KorQuAD().score_one("서울에", ["서울"], {})  # 2 of 3 and 2 of 2 characters
        {'korquad_exact': 0, 'korquad_f1': 0.8}
        """
        predicted = normalize_korean(prediction)
        if not any(references):  # unanswerable
            right = int(not predicted)
            return {"korquad_exact": right, "korquad_f1": right}
        golds = [normalize_korean(reference) for reference in references]
        # The tokens are characters, without the spaces between words.
        letters = predicted.replace(" ", "")
        f1 = max(compute_token_f1(letters, gold.replace(" ", "")) for gold in golds)
        return {"korquad_exact": int(predicted in golds), "korquad_f1": f1}


def normalize_korean(text: str) -> str:
    """Lower-case, turn quotes and brackets into spaces, drop other ASCII punctuation and surplus space.

    >>> normalize_korean("《춘향전》(U.S. 'Mac')")
    '춘향전 us mac'
    """
    return " ".join(text.translate(_MARKS).lower().split())


CASES = (
    Case(
        predictions=("1989년", "《임종석》", "서울특별시", "New-York", "'맥' (Mac)", "부산"),
        references=(("1989년 2월",), ("임종석", "임 의장"), ("서울",), ("newyork",), ("맥 mac",), ("서울",)),
        expected={"korquad_exact": 50.0, "korquad_f1": 100 * (5 / 6 + 1 + 4 / 7 + 1 + 1) / 6, "total": 6},
        source="by hand: 5 of 5 and 5 of 7 characters; 2 of 5 and 2 of 2; a hyphen is deleted, a bracket divides",
    ),
    Case(
        predictions=("", "x"),
        references=(("",), ("",)),
        expected={"korquad_exact": 50.0, "korquad_f1": 50.0},
        source="by hand: unanswerable questions as in SQuAD v2.0",
    ),
)
