"""Which labels a model mixes up: confusion matrix, and precision, recall and F1 of each label.

In: prediction lines of a label task. Out: a Confusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fivetune.metrics.classification import Confusion, gold_labels
from fivetune.types import Line


def confusion(lines: Sequence[Line]) -> Confusion | None:
    """Right label against prediction, of lines of a label task, the most frequent gold label first; None without any.

    A line is one of a label task if its `meta` has the label set, or if it says whether the model left it.

    >>> pairs = [("a", "a"), ("a", "b"), ("b", "b")]
    >>> found = confusion([{"references": [a], "prediction": b, "meta": {"labels": ["a", "b"]}} for a, b in pairs])
    >>> found.labels, found.precision("b"), found.recall("a"), round(found.f1("a"), 4)
    (('a', 'b'), 0.5, 0.5, 0.6667)
    """
    known = [line for line in lines if _has_labels(line) and line.get("references")]
    said = [str(line.get("prediction") or "") for line in known]
    golds = gold_labels(said, [list(map(str, line["references"])) for line in known])
    counts = Counter(zip(golds, said, strict=True))
    support = Counter(golds)
    labels = sorted({*golds, *said}, key=lambda label: (-support[label], label))
    return Confusion(tuple(labels), counts) if known else None


def _has_labels(line: Line) -> bool:
    return "left_label_set" in line or "labels" in (line.get("meta") or {})
