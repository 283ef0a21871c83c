"""Read the label set of a classification task from its data, and describe uneven labels.

In: sources and the task. Out: label -> target word, in sorted order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from fivetune.data.records import read_records
from fivetune.errors import ConfigError
from fivetune.tasks import normalize_label
from fivetune.tasks.classification import Classification

MAX_LABELS = 1_000
UNEVEN = 10  # ratio of the most frequent label's examples to the rarest one's, from which on labels are uneven


def read_label_set(
    task: Classification, sources: Sequence[str], columns: Mapping[str, str], *, max_records: int | None = None
) -> dict[str, str]:
    """Return the labels of some files in sorted order, each with itself as target word.

    Of spellings that differ in case or white space the most frequent one counts. Raises ConfigError for fewer than two
    labels, or for more than MAX_LABELS: such a column is no label.
    """
    writings: dict[str, Counter[str]] = defaultdict(Counter)
    num_read = 0
    for source in sources:
        for record in read_records(source, columns=columns, on_bad=lambda bad: None):
            if num_read == max_records:
                break
            num_read += 1
            if text := task.read_label(record):
                writings[normalize_label(text)][text] += 1
        if len(writings) > MAX_LABELS:
            raise ConfigError(
                f"task.label: the column {task.label!r} holds more than {MAX_LABELS:,} different texts. A label is one "
                "of a few. Name the column of the label, or set task.name: jsonl for free text."
            )
    if len(writings) < 2:
        held = ", ".join(repr(text) for counts in writings.values() for text in counts) or "no label"
        raise ConfigError(
            f"task.label: the column {task.label!r} of {', '.join(sources)} holds {held}. A classification needs two "
            "labels or more. Name the column of the label with task.label."
        )
    found = sorted(min(counts, key=lambda text: (-counts[text], text)) for counts in writings.values())
    return {label: label for label in found}


def describe_imbalance(counts: Mapping[str, int]) -> str:
    """Return a sentence if the most frequent label is UNEVEN times as frequent as the rarest or more, else "".

    >>> describe_imbalance({"high": 700, "low": 50})
    'labels are uneven: high has 93.3 % of 750 examples, low 6.7 %; accuracy rewards high, macro_f1 weighs all alike'
    >>> describe_imbalance({"high": 60, "low": 40})
    ''
    """
    if not counts or max(counts.values()) < UNEVEN * max(min(counts.values()), 1):
        return ""
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    total = sum(counts.values())
    return (
        f"labels are uneven: {most} has {counts[most] / total:.1%} of {total:,} examples, "
        f"{least} {counts[least] / total:.1%}; accuracy rewards {most}, macro_f1 weighs all alike"
    ).replace("%", " %")
