"""The scores of a file of predictions for a paper: a table, and charts of scores and labels.

In: scores with intervals, and those of other predictions with the differences. Out: Results, and a Page of charts.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivetune.reading.report.page.charts import build_score_dots_chart
from fivetune.reading.report.page.parts import Measured, Page, Results, build_section
from fivetune.reading.report.page.series import Series
from fivetune.reading.report.page.wording import format_plural
from fivetune.reading.report.run.methods import build_measured
from fivetune.reading.report.run.scores import get_score_label
from fivetune.reading.report.run.slices import iter_confusion_parts
from fivetune.scores.analysis.bootstrap import Difference, format_p_value
from fivetune.scores.metrics import is_selectable_score
from fivetune.scores.metrics.classification import ConfusionMatrix

MARKS = {"*": "marks a difference of which the 95 % interval (paired bootstrap over the examples) excludes 0"}


def build_score_page(
    task: str,
    num: int,
    scores: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
    others: Mapping[str, float],
    differences: Mapping[str, Difference],
    labels: ConfusionMatrix | None,
) -> tuple[Page, Results]:
    """Build the charts of scores and labels, and a table of all scores.

    Args:
        task: name of the task whose metrics gave the scores.
        num: number of examples.
        others: scores of the predictions to compare with; {} without any.
    """
    names = [name for name in scores if is_selectable_score(name)]
    rows: list[list[str | Measured]] = []
    for name in names:
        row: list[str | Measured] = [get_score_label(name), build_measured(scores[name], intervals.get(name))]
        if others:
            row.append(build_measured(others.get(name), None))
            change = differences.get(name)
            known = (change.low, change.high) if change else None
            row.append(build_measured(change.difference if change else None, known, is_signed=True))
            row.append(format_p_value(change.p_value) if change else "")
        rows.append(row)
    header = ("score", "these predictions", "against", "difference", "p")
    caption = f"Scores of {task} on {format_plural(num, 'example')}, with 95 % intervals over the examples."
    results = Results(caption, header if others else header[:2], rows, marks=MARKS)
    drawn = [name for name in names if 0 <= scores[name] <= 100]
    columns: dict[str, Series] = {}
    if others:
        columns["against"] = [others.get(name) for name in drawn]
    columns["these predictions"] = [scores[name] for name in drawn]
    edges = [intervals.get(name) for name in drawn]
    chart = build_score_dots_chart(list(map(get_score_label, drawn)), columns, edges, caption)
    parts = iter_confusion_parts(labels) if labels else None
    return Page(f"score {task}", (build_section("Scores", chart), build_section("Labels", parts))), results
