"""Scores of parts of the examples, and of single labels: the sections on slices and labels.

In: the prediction lines of the best evaluation and the score that counts. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Part, Section, Table, Text, build_section
from fivetune.reading.report.page.wording import (
    escape_hidden,
    format_count,
    format_decimal,
    format_large_count,
    format_percent,
    format_plural,
)
from fivetune.reading.report.run.scores import get_score_label
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.labels import build_confusion
from fivetune.scores.analysis.slices import Slice, compute_slices
from fivetune.scores.metrics.classification import ConfusionMatrix

MAX_LABELS = 20


def build_slices_section(lines: Sequence[Prediction], key: str | None) -> Section:
    """Build the section: a score by kind of question, length, truncation, language and source, with intervals.

    Args:
        key: name of the score of each line (0-1; printed in points); None gives a section without parts.
    """
    values = [line.scores[key] for line in lines if key and key in line.scores]
    if key is None or not values:
        return build_section("Slices")
    found = compute_slices(lines, key)
    # A dimension divides nothing if all examples have one value, or if none is recorded.
    shown: list[Slice] = []
    alike: list[str] = []
    unknown: list[str] = []
    for name, group in found.items():
        if len(group) > 1:
            shown += group
        elif group:
            alike.append(f"{name} ({group[0].value})")
        else:
            unknown.append(name)
    notes: list[Text] = []
    if alike:
        notes.append(Text(f"All examples have the same {', '.join(alike)}."))
    if unknown:
        notes.append(Text(f"Not recorded in the predictions: {', '.join(unknown)}."))
    if not shown:
        return build_section("Slices", notes)
    mean = 100 * sum(values) / len(values)
    caption = (
        f"{get_score_label(key)} of subsets of the {format_plural(len(values), 'example')}, with 95 % intervals; the "
        f"line is the mean of all, {format_decimal(mean, 1)}. Wide intervals: few examples."
    )
    kinds = list(dict.fromkeys(one.name for one in shown))
    rows: list[Sequence[str]] = []
    traces: list[charts.Trace] = []
    for one in shown:
        color = charts.COLORS[kinds.index(one.name) % len(charts.COLORS)]
        bars = charts.build_error_bars([one.score], [(one.low, one.high)], color)
        label = escape_hidden(f"{one.name}: {one.value}")
        marker = {"color": color, "size": 9}
        hover = f"%{{x:.2f}}, {format_large_count(one.num)} examples"
        traces.append(charts.build_marks_trace([one.score], [label], marker, hover, error_x=bars))
        edges = f"{format_decimal(one.low, 1)} to {format_decimal(one.high, 1)}"
        rows.append((one.name, one.value, format_count(one.num), format_decimal(one.score), edges))
    header = ("slice", "value", "examples", get_score_label(key), "95 % interval")
    words = (
        "Count, score and interval of each slice. Intervals are Wilson's for scores of 0 or 1 and for fewer than 20 "
        "examples, else from a bootstrap."
    )
    chart = charts.build_chart(
        caption,
        traces,
        "score (%)",
        "",
        height=90 + 24 * len(shown),
        hovermode="closest",
        showlegend=False,
        xaxis=charts.SCORE_AXIS,
        yaxis=charts.ROW_AXIS,
        shapes=[charts.build_limit_line("x", mean, "dash")],
    )
    return build_section("Slices", chart, Table(words, header, rows, folded=True), notes)


def build_labels_section(lines: Sequence[Prediction]) -> Section:
    """Build the section: confusion matrix, precision and recall of labels; no parts for tasks that write answers."""
    found = build_confusion(lines)
    return build_section("Labels", iter_confusion_parts(found) if found else None)


def iter_confusion_parts(found: ConfusionMatrix) -> Iterator[Part]:
    """Yield the confusion matrix as a chart, and precision and recall of each label as a table."""
    shown = found.labels[:MAX_LABELS]
    rest = len(found.labels) - len(shown)
    more = f" The {format_plural(rest, 'rarest label')} are left out." if rest else ""
    caption = f"Number of examples by gold label (row) and predicted label (column).{more}"
    counts: list[list[int]] = []
    shares: list[list[float]] = []  # per cent of the row
    for gold in shown:
        row = [found.counts[gold, said] for said in shown]
        support = max(found.count_support(gold), 1)
        counts.append(row)
        shares.append([100 * num / support for num in row])
    labels = [escape_hidden(name) or "(empty)" for name in shown]
    cells = {
        "type": "heatmap",
        "x": labels,
        "y": labels,
        "z": shares,
        "text": counts,
        "colorscale": [[0, "var(--soft)"], [1, charts.COLORS[0]]],
        "zmin": 0,
        "zmax": 100,
        "hovertemplate": "gold %{y}, predicted %{x}: %{text:,} (%{z:.1f} % of the row)",
    }
    axis = {"type": "category", "showgrid": False, "showline": False}
    yield charts.build_chart(
        caption,
        [cells],
        "predicted",
        "gold",
        height=150 + 34 * len(shown),
        showlegend=False,
        hovermode="closest",
        xaxis=axis,
        yaxis={**axis, "autorange": "reversed"},
    )
    rows: list[Sequence[str]] = []
    for name in found.labels:  # the rare ones included
        rows.append(
            (
                name,
                format_count(found.count_support(name)),
                format_count(found.count_predicted(name)),
                format_percent(found.compute_precision(name)),
                format_percent(found.compute_recall(name)),
                format_percent(found.compute_f1(name)),
            )
        )
    caption = "Each label: examples with it as gold label, predictions of it, precision, recall and F1."
    header = ("label", "examples", "predicted", "precision", "recall", "F1")
    yield Table(caption, header, rows)
