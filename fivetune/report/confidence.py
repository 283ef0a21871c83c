"""How far the model's own confidence can be trusted: the section on confidence.

In: the prediction lines of the best evaluation and the score that counts. Out: a Section.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivetune.analysis.bootstrap import Difference
from fivetune.analysis.calibration import RiskCoverage, calibration_error, reliability, risk_coverage
from fivetune.analysis.threshold import Tuned, tuned_threshold
from fivetune.report import charts
from fivetune.report.scores import label
from fivetune.report.wording import change, fixed, percent, plain, plural, short, whole
from fivetune.types import Figure, Line, Section, Table, Text
from fivetune.values import dig, number

COVERAGES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
MEANING = (
    "Confidence is the probability of the label for tasks with labels, and for written answers the mean probability "
    "per token: exp(log-probability / number of tokens)."
)


def confidence_section(lines: Sequence[Line], key: str | None) -> Section:
    """Calibration, what the surest answers are worth, and what a no-answer threshold is worth.

    Args:
        key: the score of each line (0-1) that counts; 1 is right.
    """
    if not lines or key is None:
        return Section("Confidence", ())
    kinds = {"left_label_set" in line for line in lines if line.get("confidence") is not None}
    if len(kinds) > 1:  # a label's probability and a text's mean one per token cannot be pooled
        parts = [
            part for name, own in _parts_of(lines).items() for part in (Text(name, "heading"), *_calibration(own, key))
        ]
    else:
        parts = _calibration(lines, key)
    return Section("Confidence", (*parts, *_threshold_parts(lines)))


def _parts_of(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each part of a mixture, whose confidences may be of different kinds."""
    parts: dict[str, list[Line]] = {}
    for line in lines:
        parts.setdefault(plain(dig(line, "meta", "source_task")), []).append(line)
    return parts


def _calibration(lines: Sequence[Line], key: str) -> list[Any]:
    pairs = [(sure, value) for line in lines if (sure := number(line.get("confidence"))) is not None
             and (value := number(dig(line, "scores", key))) is not None]  # fmt: skip
    return _calibration_parts(pairs, key) if pairs else [Text(_why_none(lines, key))]


def _why_none(lines: Sequence[Line], key: str) -> str:
    lacking = "confidences" if all(line.get("confidence") is None for line in lines) else f"{label(key)} per prediction"
    return f"The prediction lines hold no {lacking}, so calibration is not known. Evaluate again to have it."


def _calibration_parts(pairs: Sequence[tuple[float, float]], key: str) -> list[Any]:
    sure, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    right = [value >= 1 for value in values]
    bins, curve, ideal = reliability(sure, right), risk_coverage(sure, values), risk_coverage(values, values)
    accuracy, mean = sum(right) / len(right), sum(sure) / len(sure)
    tendency = "too sure" if mean > accuracy else "not sure enough"
    figures = (
        Figure("Calibration error", percent(calibration_error(bins)), "ECE, 10 bins; 0 is best"),
        Figure("Mean confidence", percent(mean), f"{percent(accuracy)} are right: {tendency}"),
        Figure("Area under risk", fixed(100 * curve.area, 1), f"{fixed(100 * ideal.area, 1)} if sorted perfectly"),
    )
    drawn = (
        charts.reliability_chart(bins, "How often predictions of a confidence are right. On the line, it means what "
                                 "it says; below it, the model is too sure."),
        charts.risk_chart(curve, ideal, f"What is lost ({label(key)}, points below 100) if only the surest are "
                          "answered, and if they were sorted perfectly."),
    )  # fmt: skip
    return [Text(f"{MEANING} Measured on {plural(len(pairs), 'prediction')}."), *figures, *drawn,
            _coverage_table(curve, key)]  # fmt: skip


def _coverage_table(curve: RiskCoverage, key: str) -> Table:
    num = len(curve.coverage)
    rows = []
    for coverage in COVERAGES:
        last = max(round(coverage * num), 1) - 1
        rows.append(
            (
                percent(coverage, 0),
                whole(last + 1),
                fixed(100 * (1 - curve.risk[last]), 2),
                short(float(curve.least_confidence[last])),
            )
        )
    header = ("answered", "examples", label(key), "confidence at least")
    return Table("The score if only the surest predictions are kept.", header, tuple(rows), folded=True)


def _threshold_parts(lines: Sequence[Line]) -> list[Any]:
    if not any(line.get("no_answer_score") is not None for line in lines):
        return []
    found = [tuned for name in ("exact", "f1") if (tuned := tuned_threshold(lines, name)) is not None]
    heading = Text("No-answer threshold", "heading")
    if not found:
        reason = "A no-answer threshold needs questions with and without answers in both halves; these have not."
        return [heading, Text(reason)]
    first = found[0]
    words = (
        "A threshold on the no-answer score turns predictions above it into no answer. It was chosen on "
        f"{plural(first.num_tuned, 'question')}, drawn by a hash of their ids, and is reported on the other "
        f"{whole(first.num_held_out)}, which had no part in choosing it."
    )
    header = (
        "score",
        "threshold",
        "tuning half",
        "other half, plain",
        "other half, threshold",
        "gain",
        "95 % interval",
    )
    return [heading, Text(words), Table("What the threshold is worth. p tests that it changes nothing.",
                                        (*header, "p"), tuple(_threshold_row(tuned) for tuned in found))]  # fmt: skip


def _threshold_row(tuned: Tuned) -> tuple[str, ...]:
    return (
        label(tuned.name), short(tuned.threshold), fixed(tuned.tuned), fixed(tuned.plain), fixed(tuned.held_out),
        change(tuned.gain.difference), _range(tuned.gain), fixed(tuned.gain.p_value, 3),
    )  # fmt: skip


def _range(gain: Difference) -> str:
    return f"{change(gain.low)} to {change(gain.high)}"
