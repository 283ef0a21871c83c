"""For whom the model works: the sections on slices and on labels.

In: the prediction lines of the best evaluation and the score that counts. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivetune.analysis.labels import Confusion, confusion
from fivetune.analysis.slices import Slice, slices
from fivetune.report import charts
from fivetune.report.scores import label
from fivetune.report.wording import fixed, percent, plural, whole
from fivetune.types import Line, Section, Table, Text
from fivetune.values import dig, number

MAX_LABELS = 20


def slices_section(lines: Sequence[Line], key: str | None) -> Section:
    """The score that counts by kind of question, length, truncation, language and source, each with its interval."""
    values = [value for line in lines if key and (value := number(dig(line, "scores", key))) is not None]
    if key is None or not values:
        return Section("Slices", ())
    found = slices(lines, key)
    told = [one for group in found.values() if len(group) > 1 for one in group]
    parts: list[Any] = [Text(text) for text in _left_out(found)]
    if told:
        mean = 100 * sum(values) / len(values)
        caption = (
            f"{label(key)} of parts of the {plural(len(values), 'example')}, with 95 % intervals; the line is the mean "
            f"of all, {fixed(mean, 1)}. Where intervals are wide, there are few examples."
        )
        parts.insert(0, charts.slices_chart(told, mean, caption))
        rows = tuple(
            (one.name, one.value, whole(one.num), fixed(one.score), f"{fixed(one.low, 1)} to {fixed(one.high, 1)}")
            for one in told
        )
        header = ("slice", "value", "examples", label(key), "95 % interval")
        parts.insert(1, Table("The numbers of the chart: count, score and interval of each slice. Intervals are "
                              "Wilson's for scores of 0 or 1 and for fewer than 20 examples, else from a bootstrap.",
                              header, rows, folded=True))  # fmt: skip
    return Section("Slices", tuple(parts))


def _left_out(found: dict[str, list[Slice]]) -> list[str]:
    alike = [f"{name} ({group[0].value})" for name, group in found.items() if len(group) == 1]
    unknown = [name for name, group in found.items() if not group]
    sentences = []
    if alike:
        sentences.append(f"All examples are alike in {', '.join(alike)}.")
    if unknown:
        sentences.append(f"The prediction lines say nothing about {', '.join(unknown)}.")
    return sentences


def labels_section(lines: Sequence[Line]) -> Section:
    """Which labels are mixed up, and how well each is found; empty for tasks that write answers."""
    found = confusion(lines)
    if found is None:
        return Section("Labels", ())
    shown = found.labels[:MAX_LABELS]
    rest = len(found.labels) - len(shown)
    more = f" The {plural(rest, 'rarest label')} are left out." if rest else ""
    caption = f"Of the examples of each gold label (row), how many got which label (column).{more}"
    return Section("Labels", (charts.confusion_chart(found, shown, caption), _labels_table(found)))


def _labels_table(found: Confusion) -> Table:
    rows = tuple(
        (
            name,
            whole(found.support(name)),
            whole(found.predicted(name)),
            percent(found.precision(name)),
            percent(found.recall(name)),
            percent(found.f1(name)),
        )
        for name in found.labels
    )
    caption = "Each label: how many have it, how many were given it, how often that was right, and how many were found."
    return Table(caption, ("label", "examples", "predicted", "precision", "recall", "F1"), rows)
