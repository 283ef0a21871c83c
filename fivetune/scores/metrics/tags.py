"""Tags: precision, recall and F1 over sets of tags, and the share of sets that match exactly.

In: predicted and gold tags as one text, "python, pandas"; of several gold texts the one with the best F1 counts. Case,
order, repeats and surplus space are ignored; an empty text is the empty set.

    micro_precision = right / predicted    micro_recall = right / gold    micro_f1 = 2 right / (predicted + gold)

with the numbers of right, predicted and gold tags summed over all examples; 0 for a denominator of 0. macro_f1 is the
mean F1 of the tags, each over all examples that have it or are given it; sample_f1 the mean F1 of the examples.

Tags are separated by the option `separator`. Without it, an example's gold texts decide: by | if they contain one, else
by ; else by commas; and where they contain none, so that each is a single tag, the prediction decides in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from pydantic import Field

from fivetune.scores.metrics import Case, Details, MetricOptions, average_array, average_column, compute_pooled_size
from fivetune.types import DrawnRows, Scores

SEPARATORS = ("|", ";", ",")
"""Separators that are detected; a comma comes last, because tags and names contain it oftener than the others."""

TagSet = frozenset[str]


class Tags(MetricOptions):
    """F1 of tags: over all tags, by tag and by example."""

    main = "micro_f1"
    score_names = ("micro_precision", "micro_recall", "micro_f1", "macro_f1", "sample_f1", "exact_set", "total")
    source = (
        "f1_score of scikit-learn on indicator columns, average='micro', 'macro' and 'samples', zero_division=0; two "
        "empty sets have the sample F1 1"
    )

    separator: str | None = Field(
        default=None,
        min_length=1,
        description="what separates tags; null: what the gold texts contain of | ; and comma",
    )

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
        pairs = [self._choose_sets(*example) for example in zip(predictions, references, strict=True)]
        each: list[dict[str, float]] = []
        counted: list[tuple[float, ...]] = []
        for written, asked in pairs:
            right, predicted, gold = _count_tags(written, asked)
            f1 = _compute_f1(right, predicted, gold)
            is_exact = int(right == predicted == gold)
            each.append({"micro_f1": f1, "sample_f1": f1, "exact_set": is_exact})
            counted.append((right, predicted, gold, f1, is_exact))
        table = np.array(counted)
        names = sorted(set().union(*chain.from_iterable(pairs)))
        index = {name: i for i, name in enumerate(names)}
        # One entry for each tag of each side of each example: row, tag, and 1 if the tag is on both sides.
        entries: list[tuple[int, int, bool]] = []
        for row, (written, asked) in enumerate(pairs):
            entries += [(row, index[tag], tag in written and tag in asked) for tag in chain(written, asked)]
        rows_of, tags_of, is_right = np.array(entries, dtype=np.int64).reshape(-1, 3).T  # also without any entry

        def compute_macro_f1(weights: np.ndarray) -> float:
            """weights: [examples], how often each counts."""
            drawn = weights[rows_of]
            asked = np.bincount(tags_of, weights=drawn, minlength=len(names))
            right = np.bincount(tags_of, weights=drawn * is_right, minlength=len(names))
            # A tag that is right has an entry on both sides: the quotient is 2 right / (predicted + gold).
            f1 = right[asked > 0] / asked[asked > 0]
            return 100 * average_array(f1) if len(f1) else 0.0

        def resample(rows: DrawnRows) -> dict[str, float]:
            weights = np.bincount(rows, minlength=len(table))  # how often each example was drawn
            *sums, sample, exact = (weights @ table).tolist()
            return {
                **_compute_micro_scores(*sums),
                "macro_f1": compute_macro_f1(weights),
                "sample_f1": 100 * sample / len(rows),
                "exact_set": 100 * exact / len(rows),
            }

        corpus = {
            **_compute_micro_scores(*table[:, :3].sum(0).tolist()),
            "macro_f1": compute_macro_f1(np.ones(len(table))),
            "sample_f1": average_column(each, "sample_f1"),
            "exact_set": average_column(each, "exact_set"),
            "total": len(each),
        }
        shown = Counter(chain.from_iterable(gold for _, gold in pairs))
        sizes: dict[str, float] = {}
        if shown:  # an example may have several tags, but is no more than one example
            sizes["macro_f1"] = min(compute_pooled_size(shown.values()), len(each))
        return Scores(corpus, each, resample, sizes)

    def split(self, text: str, golds: Sequence[str] = ()) -> list[str]:
        """Return the tags of a text in lower case, in order; `golds` decide on an unknown separator before the text.

        >>> Tags().split("Billing; login"), Tags().split("a;b", ["c, d"]), Tags(separator=" / ").split("C / C++ / c")
        (['billing', 'login'], ['a;b'], ['c', 'c++'])
        """
        # A prediction's own marks decide last: a tag may contain them.
        separator = self.separator or find_separator(golds) or find_separator([text])
        parts = text.split(separator) if separator else [text]
        tags = [" ".join(part.split()).casefold() for part in parts]
        return list(dict.fromkeys(filter(None, tags)))

    def _choose_sets(self, prediction: str, references: Sequence[str]) -> tuple[TagSet, TagSet]:
        """Return the predicted set and the gold set with the best F1."""
        # One separator for both sides.
        known = references if find_separator(references) else (prediction,)
        predicted = frozenset(self.split(prediction, known))
        golds = [frozenset(self.split(text, known)) for text in references]
        # Of equal F1 the set with more right tags.
        best = max(golds, key=lambda gold: (_compute_f1(*_count_tags(predicted, gold)), len(predicted & gold)))
        return predicted, best


def find_separator(texts: Iterable[str]) -> str | None:
    """Return the first of SEPARATORS that one of the texts contains; None if there is none.

    >>> find_separator(["billing;login, lost"]), find_separator(["python, pandas"]), find_separator(["c++"])
    (';', ',', None)
    """
    found = set(chain.from_iterable(texts))
    return next((separator for separator in SEPARATORS if separator in found), None)


def _count_tags(predicted: TagSet, gold: TagSet) -> tuple[int, int, int]:
    """Return the numbers (right, predicted, gold)."""
    return len(predicted & gold), len(predicted), len(gold)


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
        expected={
            "micro_precision": 100.0,
            "micro_recall": 500 / 8,
            "micro_f1": 1000 / 13,
            "macro_f1": 500 / 8,
            "sample_f1": 100 * (1 + 2 / 3 + 0 + 4 / 5) / 4,
            "exact_set": 25.0,
        },
        source="by hand: 5 right of 5 predicted and 8 gold; the second gold set of c, c++ is best (F1 4/5, not 2/3); "
        "5 of 8 tags have F1 1, the others 0",
    ),
    Case(
        predictions=("billing;login", "Login", "", "x | y", "a, b"),
        references=(("billing;delivery",), ("login",), ("",), ("y|z",), ("a, b; c",)),
        expected={"micro_precision": 400 / 6, "micro_recall": 400 / 7, "micro_f1": 800 / 13, "exact_set": 40.0},
        source="by hand: right are billing, login, y and 'a, b': by ; the last prediction is one tag",
    ),
    Case(
        predictions=("a", "b", "a;b"),
        references=(("a",), ("a;b",), ("c",)),
        expected={"micro_f1": 400 / 8, "macro_f1": 100 * (2 / 4 + 2 / 3 + 0) / 3, "sample_f1": 100 * (1 + 2 / 3) / 3},
        source="by hand: a is right in 1 of 2 predicted and 2 gold, b in 1 of 2 and 1; the second has 1 of 1 and 2",
    ),
)
