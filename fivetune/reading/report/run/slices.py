"""Scores of parts of the examples, and of single labels: the sections on slices and labels.

In: the prediction lines of the best evaluation and the score that counts. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Section, Table, Text
from fivetune.reading.report.page.wording import format_count, format_decimal, format_percent, format_plural
from fivetune.reading.report.run.scores import get_score_label
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.labels import ConfusionMatrix, build_confusion
from fivetune.scores.analysis.slices import Slice, compute_slices

MAX_LABELS = 20


def build_slices_section(lines: Sequence[Prediction], key: str | None) -> Section:
    """Build the section: a score by kind of question, length, truncation, language and source, with intervals.

    Args:
        key: name of the score of each line (0-1; printed in points); None gives a section without parts.
    """
    values = [line.scores[key] for line in lines if key and key in line.scores]
    if key is None or not values:
        return Section("Slices", ())
    found = compute_slices(lines, key)
    notes = [Text(text) for text in _describe_left_out_slices(found)]
    shown = [one for group in found.values() if len(group) > 1 for one in group]
    if not shown:
        return Section("Slices", tuple(notes))
    mean = 100 * sum(values) / len(values)
    caption = (
        f"{get_score_label(key)} of subsets of the {format_plural(len(values), 'example')}, with 95 % intervals; the "
        f"line is the mean of all, {format_decimal(mean, 1)}. Wide intervals: few examples."
    )
    rows = tuple(
        (
            one.name,
            one.value,
            format_count(one.num),
            format_decimal(one.score),
            f"{format_decimal(one.low, 1)} to {format_decimal(one.high, 1)}",
        )
        for one in shown
    )
    header = ("slice", "value", "examples", get_score_label(key), "95 % interval")
    words = (
        "Count, score and interval of each slice. Intervals are Wilson's for scores of 0 or 1 and for fewer than 20 "
        "examples, else from a bootstrap."
    )
    chart = charts.build_slices_chart(shown, mean, caption)
    return Section("Slices", (chart, Table(words, header, rows, folded=True), *notes))


def _describe_left_out_slices(found: dict[str, list[Slice]]) -> list[str]:
    """Return sentences on the dimensions that divide nothing: all examples have one value, or none is recorded."""
    alike = [f"{name} ({group[0].value})" for name, group in found.items() if len(group) == 1]
    unknown = [name for name, group in found.items() if not group]
    sentences: list[str] = []
    if alike:
        sentences.append(f"All examples have the same {', '.join(alike)}.")
    if unknown:
        sentences.append(f"Not recorded in the predictions: {', '.join(unknown)}.")
    return sentences


def build_labels_section(lines: Sequence[Prediction]) -> Section:
    """Build the section: confusion matrix, precision and recall of labels; no parts for tasks that write answers."""
    found = build_confusion(lines)
    if found is None:
        return Section("Labels", ())
    shown = found.labels[:MAX_LABELS]
    rest = len(found.labels) - len(shown)
    more = f" The {format_plural(rest, 'rarest label')} are left out." if rest else ""
    caption = f"Number of examples by gold label (row) and predicted label (column).{more}"
    return Section("Labels", (charts.build_confusion_chart(found, shown, caption), _build_labels_table(found)))


def _build_labels_table(found: ConfusionMatrix) -> Table:
    """Build the table of counts and scores of each label, the rare ones included."""
    rows = tuple(
        (
            name,
            format_count(found.count_support(name)),
            format_count(found.count_predicted(name)),
            format_percent(found.compute_precision(name)),
            format_percent(found.compute_recall(name)),
            format_percent(found.compute_f1(name)),
        )
        for name in found.labels
    )
    caption = "Each label: examples with it as gold label, predictions of it, precision, recall and F1."
    return Table(caption, ("label", "examples", "predicted", "precision", "recall", "F1"), rows)
