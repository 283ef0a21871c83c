"""Accuracy of final numbers, by GSM8K's script and by lenient rules.

In: one predicted text and the gold number per question, each a bare number or a text with the number after "####".
Out: accuracy, which compares the digits without commas; and accuracy_lenient, which compares the values (18.0 equals
18; $ and a final full stop are ignored) and reads the last number of a text without "####". A prediction that is right
by the script is also right leniently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from fivetune.scores.metrics import Case, Details, PerExample

LENIENT_GAP = 5  # points between the two accuracies, from which on the form of the answers matters

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_BARE = re.compile(r"\s*(-?[0-9.,]+)\s*")
_NUMBER = re.compile(r"(?P<sign>(?<![\w)])[-−])?\$?(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


class GSM8K(PerExample):
    """GSM8K's accuracy, strict and lenient."""

    main = "accuracy"
    score_names = ("accuracy", "accuracy_lenient", "total")
    source = "dataset.py of openai/grade-school-math (Cobbe et al. 2021); lenient: FiveTune"

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return whether the number is right (0 or 1), strictly and leniently; `details` are not read.

        >>> GSM8K().score_one("18.0", ["18"], {}), GSM8K().score_one("#### 18", ["18"], {})
        ({'accuracy': 0, 'accuracy_lenient': 1}, {'accuracy': 1, 'accuracy_lenient': 1})
        """
        written = extract_final_number(prediction)
        value = extract_lenient_number(prediction)
        right = written is not None and written in map(extract_final_number, references)
        close = value is not None and value in map(extract_lenient_number, references)
        return {"accuracy": int(right), "accuracy_lenient": int(right or close)}


def extract_final_number(text: str) -> str | None:
    """Return the number after the first "#### ", or a text that is only a number, without commas; else None.

    >>> (extract_final_number("6 * 200 = 1,200 eggs. #### 1,200"), extract_final_number(" -3 "),
    ...  extract_final_number("18 eggs"))
    ('1200', '-3', None)
    """
    found = _MARKED.search(text) or _BARE.fullmatch(text)
    if not found:
        return None
    return found[1].replace(",", "") or None  # commas alone are no number


def extract_lenient_number(text: str) -> Decimal | None:
    """Return the value of the first number after "####", else of the last number in the text; None without any.

    >>> (extract_lenient_number("He has 5-3 = 2, so it costs -$1,018.50."),
    ...  extract_lenient_number("####18. That is 9 * 2."))
    (Decimal('-1018.50'), Decimal('18'))
    """
    # The answer follows the mark, or else the calculation that ends with it.
    marked = _NUMBER.search(text.partition("####")[2])
    numbers = [marked] if marked else list(_NUMBER.finditer(text))
    if not numbers:
        return None
    value = Decimal(numbers[-1]["digits"].replace(",", ""))
    if numbers[-1]["sign"]:
        return value.copy_negate()
    return value


def describe_lenient_gap(scores: Mapping[str, float]) -> str:
    """Return a sentence if accuracy is LENIENT_GAP points or more below accuracy_lenient, else "".

    >>> describe_lenient_gap({"accuracy": 0.0, "accuracy_lenient": 56.25})  # doctest: +ELLIPSIS
    'accuracy 0.00 beside accuracy_lenient 56.25: the official rules read a number only after "#### ", ...'
    """
    official = scores.get("accuracy")
    lenient = scores.get("accuracy_lenient")
    if official is None or lenient is None or lenient - official < LENIENT_GAP:
        return ""
    return (
        f"accuracy {official:.2f} beside accuracy_lenient {lenient:.2f}: the official rules read a number only after "
        '"#### ", or in a text that is only a number. Let the predictions end that way, or compare accuracy_lenient.'
    )


CASES = (
    Case(
        predictions=(
            *("6 * 3 = 18 #### 18", "1,200", "#### -5", "18."),
            *("It is $18.00", "#### 17 or 18", "no idea", ""),
        ),
        references=(("18",), ("1200",), ("-5",), ("18",), ("He needs 18. #### 18",), ("18",), ("18",), ("18",)),
        expected={"accuracy": 100 * 3 / 8, "accuracy_lenient": 100 * 5 / 8, "total": 8},
        source="by hand, after openai/grade-school-math: the first three; leniently '18.' and '$18.00' too",
    ),
)
