"""Confusion matrix of a label task, with precision, recall and F1 of each label.

In: prediction lines of a label task. Out: a ConfusionMatrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fivetune.rundir.records import Prediction
from fivetune.scores.metrics.classification import ConfusionMatrix, choose_gold_labels


def build_confusion(lines: Sequence[Prediction]) -> ConfusionMatrix | None:
    """Count gold label against prediction, the most frequent gold label first; None without lines of a label task.

    A line belongs to a label task if its `meta` has the label set, or if it has a value of `left_label_set`.

    >>> pairs = [("a", "a"), ("a", "b"), ("b", "b")]
    >>> found = build_confusion([Prediction(id="", references=(a,), prediction=b, meta={"labels": ["a", "b"]})
    ...     for a, b in pairs])
    >>> found.labels, found.compute_precision("b"), found.compute_recall("a"), round(found.compute_f1("a"), 4)
    (('a', 'b'), 0.5, 0.5, 0.6667)
    """
    predicted: list[str] = []
    references: list[Sequence[str]] = []
    for line in lines:
        if line.references and (line.left_label_set is not None or "labels" in line.meta):
            predicted.append(line.prediction)
            references.append(line.references)
    if not predicted:
        return None
    golds = choose_gold_labels(predicted, references)
    # A label that is only predicted has a column too, after all gold ones.
    support = Counter(golds)
    labels = sorted({*golds, *predicted}, key=lambda label: (-support[label], label))
    return ConfusionMatrix(tuple(labels), Counter(zip(golds, predicted, strict=True)))
