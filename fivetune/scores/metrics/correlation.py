"""Correlation of numbers that are written as text: Pearson's r, Spearman's rho, and the share that are numbers.

In: one predicted text and the gold number per example; of several gold numbers the nearest one counts. Out: with
predictions x and gold numbers y

    pearson = 100 sum((x - mean x) (y - mean y)) / sqrt(sum((x - mean x)^2) sum((y - mean y)^2))
    spearman = pearson of the ranks, equal numbers having the mean of their ranks
    parsed = share of predictions that are numbers

Both correlations are 0 where all predictions or all gold numbers are equal. A prediction that is no number counts as a
number below all gold ones, by a fifth of their range: for the golds 0 to 5 of STS-B it is -1, as in T5's evaluation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from fivetune.errors import DataError
from fivetune.scores.metrics import Case, Details, MetricOptions, average_array, average_column
from fivetune.types import DrawnRows, Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MISSING_SHARE = 0.2  # of the range of the gold numbers, by which a prediction that is no number lies below them

# A comma before three digits may separate thousands, and then says nothing sure.
_NUMBER = re.compile(r"[-+−]?(?:\d+\.?\d*|\.\d+|0?,\d+|\d+,(?!\d{3}(?!\d))\d*)(?:e[-+]?\d+)?", re.IGNORECASE)


class Correlation(MetricOptions):
    """Pearson and Spearman correlation of numbers."""

    main = "pearson"
    score_names = ("pearson", "spearman", "parsed", "total")
    source = (
        "pearsonr and spearmanr of scipy.stats times 100, as GLUE reports them; a text that is no number as in T5's "
        "string_to_float (Raffel et al. 2020), whose default is -1 for the golds 0 to 5"
    )

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return correlations over all examples; an example has `parsed` alone. `details` are not read.

        Raises DataError for an example without a gold number.
        """
        import numpy as np

        assert predictions, "nothing to score"
        golds = [*map(_read_golds, references)]
        known = [*chain.from_iterable(golds)]
        missing = min(known) - MISSING_SHARE * (max(known) - min(known))
        each: list[dict[str, float]] = []
        pairs: list[tuple[float, float]] = []
        for text, of_one in zip(predictions, golds, strict=True):
            number = parse_number(text)
            each.append({"parsed": int(number is not None)})
            written = missing if number is None else number
            pairs.append((written, min(of_one, key=lambda gold: abs(gold - written))))
        written, asked = np.array(pairs).T
        parsed = np.array([one["parsed"] for one in each])

        def resample(rows: DrawnRows) -> dict[str, float]:
            x, y = written[rows], asked[rows]
            return {
                "pearson": 100 * compute_pearson(x, y),
                "spearman": 100 * compute_pearson(rank_numbers(x), rank_numbers(y)),
                "parsed": 100 * average_array(parsed[rows]),
            }

        corpus = {**resample(np.arange(len(each))), "parsed": average_column(each, "parsed"), "total": len(each)}
        return Scores(corpus, each, resample)


def parse_number(text: str) -> float | None:
    """Return the number that a whole text is, with a decimal point or comma; None for others, and for infinity.

    >>> parse_number(" 3.8 "), parse_number("−0,5"), parse_number("3.8 of 5"), parse_number("1,200")
    (3.8, -0.5, None, None)
    """
    plain = text.strip()
    if not _NUMBER.fullmatch(plain):
        return None
    number = float(plain.replace(",", ".").replace("−", "-"))
    return number if math.isfinite(number) else None


def _read_golds(texts: Sequence[str]) -> list[float]:
    """Return the numbers among the gold texts of an example. Raises DataError if there is none."""
    numbers = [number for number in map(parse_number, texts) if number is not None]
    if not numbers:
        raise DataError(f"metrics: correlation: the gold answer {texts[0]!r} is no number. Give numbers, such as 3.8.")
    return numbers


def compute_pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the correlation (-1 to 1) of two arrays [n]; 0.0 where one of them is constant.

    >>> import numpy as np
    >>> compute_pearson(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])), compute_pearson(np.ones(2), np.arange(2))
    (1.0, 0.0)
    """
    import numpy as np

    if len(x) == 0 or x.min() == x.max() or y.min() == y.max():
        return 0.0
    x = x - x.mean()
    y = y - y.mean()
    # Each side is divided by its own norm, so that no product of large or small numbers overflows.
    found = float((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)))
    return round(found, 12)  # exactly 1 for equal arrays, whatever the order of the sums


def rank_numbers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value of an array [n], from 1; equal values have the mean of their ranks.

    >>> import numpy as np
    >>> rank_numbers(np.array([0.5, 3.0, 0.5, 1.0])).tolist()
    [1.5, 4.0, 1.5, 3.0]
    """
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]


CASES = (
    Case(
        predictions=("1", "2", "3", "4", "5"),
        references=(("10",), ("9",), ("2.5",), ("6",), ("4",)),
        expected={"pearson": -74.26106572325057, "spearman": -70.0, "parsed": 100.0},
        source="pearsonr([1, 2, 3, 4, 5], [10, 9, 2.5, 6, 4]), an example of scipy.stats; ranks by hand: "
        "1 - 6 * 34 / (5 * 24)",
    ),
    Case(
        predictions=("1", "2", "3", "4", "5"),
        references=(("5",), ("6",), ("7",), ("8",), ("7",)),
        expected={"pearson": 600 / 52**0.5, "spearman": 82.0782681668123},
        source="spearmanr([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]), an example of scipy.stats with a tie; Pearson by hand",
    ),
    Case(
        predictions=("5.0", "no idea", "2,5"),
        references=(("5",), ("0",), ("2.5",)),
        expected={"pearson": 100 * 15 / (12.5 * 109 / 6) ** 0.5, "spearman": 100.0, "parsed": 200 / 3},
        source="by hand: x = 5, -1, 2.5, and y = 5, 0, 2.5",
    ),
    Case(
        predictions=("2", "2", "2"),
        references=(("1",), ("2",), ("3",)),
        expected={"pearson": 0.0, "spearman": 0.0, "parsed": 100.0},
        source="by hand: constant predictions tell nothing apart",
    ),
)
