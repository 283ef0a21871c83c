"""Calibration, risk and coverage, and the no-answer threshold: the section on confidence.

In: the prediction lines of the best evaluation and the name of a score. Out: a Section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Figure, Part, Section, Table, Text, build_section
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_large_count,
    format_percent,
    format_plural,
    format_signed,
    format_significant,
)
from fivetune.reading.report.run.scores import get_score_label
from fivetune.reading.report.run.silence import iter_silence_parts
from fivetune.rundir.abstention_file import Abstention
from fivetune.rundir.records import EvalRecord, Prediction
from fivetune.scores.analysis.bootstrap import format_p_value
from fivetune.scores.analysis.calibration import (
    FittedTemperature,
    calibrate_lines,
    calibrate_prediction,
    compute_calibration_error,
    compute_reliability,
    compute_risk_coverage,
    restore_lines,
)
from fivetune.scores.analysis.threshold import tune_threshold

CALIBRATED = 0.01  # difference of mean confidence and accuracy below which a model is neither over- nor underconfident
BIN_HOVER = "confidence %{customdata[0]:.1f} %, right %{y:.1f} %, %{customdata[1]:,} predictions"
COVERAGES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
MEANING = (
    "Confidence is the probability of the whole answer: of a label among the labels of the task, of a written answer "
    "the product of the probabilities of its tokens, of a span that of its first and last token."
)


def build_confidence_section(
    lines: Sequence[Prediction],
    key: str | None,
    *,
    record: EvalRecord | None = None,
    applied: float = 1.0,
    kept: Abstention | None = None,
    folder: str = "RUN",
) -> Section:
    """Build the section: calibration, score of the most confident answers, gain of a no-answer threshold.

    Args:
        key: name of the score of each line (0-1); 1 is right.
        record: evaluation of the lines.
        applied: temperature of model/, at which confidences are shown.
        kept: errors by confidence of model/; None without them.
        folder: path of the run, as commands name it.
    """
    if not lines or key is None:
        return build_section("Confidence")
    own = restore_lines(lines, record.temperature if record else None)
    fitted = calibrate_lines(own, key)
    shown = [calibrate_prediction(line, applied) for line in own]
    sure: list[float] = []
    values: list[float] = []
    for line in shown:
        if line.confidence is not None and key in line.scores:
            sure.append(line.confidence)
            values.append(line.scores[key])
    if sure:
        return build_section(
            "Confidence",
            _iter_calibration_parts(sure, values, key, fitted, applied),
            iter_silence_parts(own, key, record, kept, applied, folder),
            _iter_threshold_parts(shown),
        )
    has_none = all(line.confidence is None for line in lines)
    lacking = "confidences" if has_none else f"{get_score_label(key)} per prediction"
    words = f"The prediction lines hold no {lacking}, so calibration is not known. Evaluate again to have it."
    return build_section("Confidence", Text(words), _iter_threshold_parts(shown))


def _describe_temperature(fitted: FittedTemperature | None, applied: float) -> tuple[str, str]:
    """Return the remark on the calibration error, and a sentence on the temperature; "" for what is unknown."""
    given = f" It is given at temperature {format_decimal(applied)}, which model/ holds"
    if fitted is None:
        return "", "" if applied == 1 else f"{given}."
    before = format_percent(fitted.error_before)
    after = format_percent(fitted.error_after)
    halves = (
        f"on halves of the predictions that it was not fitted on, the calibration error is {after}, without it {before}"
    )
    if applied != 1:
        return f"; {before} without temperature", f"{given}: {halves}."
    if fitted.helps:
        return "", f" Temperature {format_decimal(fitted.temperature)} would help, but model/ holds none: {halves}."
    return "", f" No temperature makes it better: {halves}."


def _iter_calibration_parts(
    sure: Sequence[float], values: Sequence[float], key: str, fitted: FittedTemperature | None, applied: float
) -> Iterator[Part]:
    """Yield the calibration of predictions, and the score of the most confident ones.

    Args:
        sure: confidence of each prediction (0-1).
        values: score of each prediction (0-1), named `key`.
    """
    right = [value >= 1 for value in values]
    bins = compute_reliability(sure, right)
    curve = compute_risk_coverage(sure, values)
    ideal = compute_risk_coverage(values, values)
    accuracy = sum(right) / len(right)
    mean = sum(sure) / len(sure)
    tendency = ""
    if abs(mean - accuracy) >= CALIBRATED:
        tendency = ": overconfident" if mean > accuracy else ": underconfident"
    remark, sentence = _describe_temperature(fitted, applied)
    words = f"{MEANING}{sentence} Measured on {format_plural(len(sure), 'prediction')}."
    if all(right):
        words += " All of them are right, so there is no risk to draw."
    yield Text(words)
    error = compute_calibration_error(bins)
    if fitted and applied != 1:
        error = fitted.error_after
    best = f"{format_decimal(100 * ideal.area, 1)} if ranked perfectly"
    yield Figure("Calibration error", format_percent(error), f"ECE, 10 bins; 0 is best{remark}")
    yield Figure("Mean confidence", format_percent(mean), f"{format_percent(accuracy)} are right{tendency}")
    yield Figure("Area under risk", format_decimal(100 * curve.area, 1), best)
    bars = {
        "type": "bar",
        "name": "Predictions",
        "x": [50 * (one.low + one.high) for one in bins],
        "y": [100 * one.accuracy for one in bins],
        "width": [90 * (one.high - one.low) for one in bins],
        "customdata": [[100 * one.confidence, one.num] for one in bins],
        "text": [format_large_count(one.num) for one in bins],
        "marker": {"color": charts.COLORS[0], "opacity": 0.75},
        "hovertemplate": BIN_HOVER,
    }
    style = {"mode": "lines", "line": {"dash": "dash"}, "hoverinfo": "skip", "hovertemplate": None}
    diagonal = charts.build_line_trace("Perfectly calibrated", [0, 100], [0.0, 100.0], charts.MUTED, **style)
    caption = (
        "Share of right predictions by confidence. On the diagonal the model is calibrated; below it, it is "
        "overconfident."
    )
    yield charts.build_chart(
        caption,
        (bars, diagonal),
        "confidence (%)",
        "right (%)",
        wide=False,
        height=320,
        hovermode="closest",
        xaxis={"range": [0, 100]},
        yaxis={"range": [0, 108]},
    )
    if all(right):
        return
    traces: list[charts.Trace] = []
    for name, one, color, dash in (
        ("Ranked by confidence", curve, charts.COLORS[0], "solid"),
        ("Ranked perfectly", ideal, charts.MUTED, "dash"),
    ):
        xs = (100 * one.coverage).tolist()
        ys = (100 * one.risk).tolist()
        traces.append(charts.build_line_trace(name, xs, ys, color, mode="lines", line={"dash": dash}))
    caption = (
        f"Risk ({get_score_label(key)}, points below 100) over coverage: if only the most confident predictions are "
        "kept, and if they were ranked perfectly."
    )
    yield charts.build_coverage_chart(caption, traces, "coverage (%)", "risk (points)")
    rows: list[Sequence[str]] = []
    for coverage in COVERAGES:
        num = max(round(coverage * len(curve.coverage)), 1)
        score = format_decimal(100 * (1 - curve.risk[num - 1]))
        least = format_significant(float(curve.least_confidence[num - 1]))
        rows.append((format_percent(coverage, 0), format_count(num), score, least))
    header = ("answered", "examples", get_score_label(key), "confidence at least")
    yield Table("The score if only the most confident predictions are kept.", header, rows, folded=True)


def _iter_threshold_parts(lines: Sequence[Prediction]) -> Iterator[Part]:
    """Yield the gain of a threshold of the no-answer score; nothing without such scores."""
    if all(line.no_answer_score is None for line in lines):
        return
    tunings = [tune_threshold(lines, "exact"), tune_threshold(lines, "f1")]
    found = [tuned for tuned in tunings if tuned is not None]
    yield Text("No-answer threshold", "heading")
    if not found:
        yield Text("No threshold is tuned: both halves need questions with and without answers.")
        return
    yield Text(
        "Predictions whose no-answer score is above the threshold become no answer. The threshold is tuned on "
        f"{format_plural(found[0].num_tuned, 'question')}, drawn by a hash of their ids, and measured on the other "
        f"{format_count(found[0].num_held_out)}."
    )
    header = ("score", "threshold", "tuning half", "held-out half, no threshold", "held-out half, threshold")
    rows: list[Sequence[str]] = []
    helps = False
    for tuned in found:
        gain = tuned.gain
        helps |= gain.low > 0
        rows.append(
            (
                get_score_label(tuned.name),
                format_significant(tuned.threshold),
                format_decimal(tuned.tuned),
                format_decimal(tuned.plain),
                format_decimal(tuned.held_out),
                format_signed(gain.difference),
                f"{format_signed(gain.low)} to {format_signed(gain.high)}",
                format_p_value(gain.p_value),
            )
        )
    caption = f"{'Gain' if helps else 'No gain beyond chance'} of the threshold. p: probability of such a gain if the "
    caption += "threshold changes nothing."
    yield Table(caption, (*header, "gain", "95 % interval", "p"), rows, folded=not helps)
