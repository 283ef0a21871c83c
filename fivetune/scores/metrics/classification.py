"""Classification: accuracy, F1 over the labels, and a confusion matrix with precision, recall and F1 of each label.

In: one predicted label and the gold labels per example; of several gold labels the predicted one counts if it is among
them, else the first. The label set is `labels` of the first example's details, else the gold labels in sorted order. A
prediction outside the set is wrong, and counts against the gold label only.

    precision = right / predicted    recall = right / gold    F1 = 2 right / (predicted + gold)    0 if both are 0
    macro_f1 = mean of the F1 of labels that occur    weighted_f1 = their mean weighted by the number of gold examples

A label occurs if it is the gold label or the prediction of an example: as in scikit-learn, one that no example asks for
and that is never predicted does not enter macro_f1. Labels {a, b, c}, gold a a b, predicted a b b: F1 of a is 2/3, of b
2/3, c does not occur, macro_f1 is 66.7 and not 44.4. With `count_absent` c has the F1 0, as in BioASQ's scorer, whose
mean is over yes and no in any batch. A bootstrap sample is scored by the same rule, on the labels that it has drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from fivetune.scores.metrics import Case, Details, MetricOptions, average_column, compute_percent, compute_pooled_size
from fivetune.types import DrawnRows, Resampler, Scores


@dataclass(frozen=True, slots=True)
class ConfusionMatrix:
    """`counts[gold, predicted]` over all examples, and the scored labels; predictions may be other texts.

    >>> found = ConfusionMatrix(("low", "high"), Counter({("low", "low"): 1, ("low", "?"): 1, ("high", "high"): 1}))
    >>> (found.count_support("low"), found.compute_precision("low"), found.compute_recall("low"),
    ...  round(found.compute_f1("low"), 4))
    (2, 1.0, 0.5, 0.6667)
    """

    labels: tuple[str, ...]
    counts: Counter[tuple[str, str]]

    def count_support(self, label: str) -> int:
        """Return the number of examples with this gold label."""
        return sum(num for (gold, _), num in self.counts.items() if gold == label)

    def count_predicted(self, label: str) -> int:
        """Return the number of predictions of this label."""
        return sum(num for (_, predicted), num in self.counts.items() if predicted == label)

    def is_used(self, label: str) -> bool:
        """Return whether an example has this label, as its gold label or as its prediction."""
        return any(label in pair for pair, num in self.counts.items() if num)

    def compute_precision(self, label: str) -> float | None:
        """Return the share (0-1) of this label's predictions that are right; None if it is never predicted."""
        num = self.count_predicted(label)
        return self.counts[label, label] / num if num else None

    def compute_recall(self, label: str) -> float | None:
        """Return the share (0-1) of this label's examples that are predicted as such; None without examples."""
        num = self.count_support(label)
        return self.counts[label, label] / num if num else None

    def compute_f1(self, label: str) -> float:
        """Return 2 * right / (support + predicted), the harmonic mean of precision and recall; 0 if both are 0."""
        return 2 * self.counts[label, label] / max(self.count_support(label) + self.count_predicted(label), 1)


class Classification(MetricOptions):
    """Accuracy and F1 of labels.

    >>> details = [{"labels": ["a", "b", "c"]}] * 3
    >>> [round(metric.score(["a", "b", "b"], [["a"], ["a"], ["b"]], details=details).corpus["macro_f1"], 1)
    ...  for metric in (Classification(), Classification(count_absent=True))]
    [66.7, 44.4]
    """

    main = "accuracy"
    score_names = ("accuracy", "macro_f1", "weighted_f1", "total")
    source = "f1_score of scikit-learn over the labels of the set that occur, zero_division=0"

    count_absent: bool = Field(
        default=False, description="macro_f1 counts a label that is neither gold nor predicted with an F1 of 0"
    )

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return percentages over all examples. Reads `labels`, the label set."""
        assert predictions, "nothing to score"
        golds = choose_gold_labels(predictions, references)
        labels = sorted(set(golds))
        if details and details[0].get("labels"):
            labels = list(details[0]["labels"])
        found = ConfusionMatrix(tuple(labels), Counter(zip(golds, predictions, strict=True)))
        # As in scikit-learn, an unused label does not enter the mean.
        counted = [label for label in labels if self.count_absent or found.is_used(label)]
        weighted = [found.compute_f1(label) * found.count_support(label) for label in labels]
        each: list[dict[str, float]] = []
        for prediction, gold in zip(predictions, golds, strict=True):
            each.append({"accuracy": int(prediction == gold)})
        corpus = {
            "accuracy": average_column(each, "accuracy"),
            "macro_f1": compute_percent(map(found.compute_f1, counted), max(len(counted), 1)),
            "weighted_f1": compute_percent(weighted, max(sum(map(found.count_support, labels)), 1)),
            "total": len(each),
        }
        sizes = {"macro_f1": compute_pooled_size(map(found.count_support, counted))} if counted else {}
        return Scores(corpus, each, _build_resampler(predictions, golds, labels, count_absent=self.count_absent), sizes)


def choose_gold_labels(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[str]:
    """Return one gold label per example: the predicted one if it is among them, else the first."""
    golds: list[str] = []
    for prediction, right in zip(predictions, references, strict=True):
        golds.append(prediction if prediction in right else right[0])
    return golds


def compute_label_rates(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the shares (0-1) of the most frequent gold label and of the most frequent prediction.

    `majority_label` is the accuracy of always predicting the most frequent gold label; `one_label` is 1 if all
    predictions are equal. {} without gold labels.

    >>> compute_label_rates(["yes", "yes", "yes", "no"], [["yes"], ["no"], ["yes"], ["yes"]])
    {'majority_label': 0.75, 'one_label': 0.75}
    """
    golds = Counter(right[0] for right in references if right)
    if not golds:
        return {}
    counts = Counter(predictions)
    return {
        "majority_label": max(golds.values()) / golds.total(),
        "one_label": max(counts.values()) / counts.total(),
    }


def describe_majority(scores: Mapping[str, float], rates: Mapping[str, float], label_counts: Mapping[str, int]) -> str:
    """Return a sentence if the accuracy is not above that of always predicting the most frequent gold label, else "".

    >>> describe_majority({"accuracy": 68.75}, {"majority_label": 0.6875, "one_label": 1.0}, {"yes": 11, "no": 5})
    'accuracy 68.75 is as good as always predicting yes (68.75)'
    """
    accuracy = scores.get("accuracy")
    share = rates.get("majority_label")
    # 1e-9: rounding must not tell equal percentages apart.
    if accuracy is None or share is None or accuracy > 100 * share + 1e-9 or not label_counts:
        return ""
    label = max(label_counts, key=label_counts.__getitem__)
    how = "as good as" if accuracy > 100 * share - 1e-9 else "worse than"
    return f"accuracy {accuracy:.2f} is {how} always predicting {label} ({100 * share:.2f})"


def _build_resampler(
    predictions: Sequence[str], golds: Sequence[str], labels: Sequence[str], *, count_absent: bool
) -> Resampler:
    """Return a Resampler that counts the (gold, predicted) pairs of drawn rows; index `size` is any other text."""
    import numpy as np

    # Numbers in place of labels: a bootstrap counts the pairs a thousand times.
    index = {label: i for i, label in enumerate(labels)}
    size = len(labels)
    found = np.array([index.get(prediction, size) for prediction in predictions])
    right = np.array([index.get(gold, size) for gold in golds])
    pairs = right * (size + 1) + found  # one number per pair, for one count of all
    correct = np.array([prediction == gold for prediction, gold in zip(predictions, golds, strict=True)])

    def resample(rows: DrawnRows) -> dict[str, float]:
        counts = np.bincount(pairs[rows], minlength=(size + 1) ** 2).reshape(size + 1, size + 1)
        support = counts.sum(axis=1)[:size]
        predicted = counts.sum(axis=0)[:size]
        f1 = 200 * counts.diagonal()[:size] / np.maximum(support + predicted, 1)
        num_counted = size if count_absent else np.count_nonzero(support + predicted)
        weighted = float((f1 * support).sum() / max(support.sum(), 1))
        macro = float(f1.sum() / max(num_counted, 1))
        return {"accuracy": 100 * float(correct[rows].mean()), "macro_f1": macro, "weighted_f1": weighted}

    return resample


_SYSTEM_E = {("none", "none"): 4336, ("none", "high"): 664, ("low", "none"): 6, ("low", "low"): 4994,
             ("high", "none"): 284, ("high", "high"): 4716}  # fmt: skip
_PUBLISHED = [pair for pair, number in _SYSTEM_E.items() for _ in range(number)]

CASES = (
    Case(
        predictions=tuple(predicted for _, predicted in _PUBLISHED),
        references=tuple((gold,) for gold, _ in _PUBLISHED),
        expected={"accuracy": 14046 / 150, "macro_f1": 93.63211912287971, "total": 15000},
        source="confusion matrix of pedro-r-marques/tutorial-t5-fine-tune: accuracy 0.9364; F1 by scikit-learn",
    ),
    Case(
        predictions=("yes", "no", "maybe", "perhaps", "yes"),
        references=(("yes",), ("yes",), ("no",), ("no",), ("no", "yes")),
        expected={"accuracy": 40.0, "macro_f1": 80 / 3, "weighted_f1": 48.0, "total": 5},
        source="by hand: F1 of yes 2 * 2 / (2 + 3), of no 0, of maybe 0 (never gold, once predicted)",
        details=({"labels": ["yes", "no", "maybe"]},) * 5,
    ),
    Case(
        predictions=("a", "b", "b"),
        references=(("a",), ("a",), ("b",)),
        expected={"accuracy": 200 / 3, "macro_f1": 200 / 3, "weighted_f1": 200 / 3, "total": 3},
        source="f1_score(gold, predicted, average='macro') of scikit-learn: c is neither gold nor predicted",
        details=({"labels": ["a", "b", "c"]},) * 3,
    ),
)
