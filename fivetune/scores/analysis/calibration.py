"""Calibration of confidence: reliability bins, expected calibration error, risk-coverage curve, temperature.

In: one confidence (0-1) and one score (0-1) per prediction. Out: calibration error, curves, a temperature.

Temperature (Guo et al. 2017, with the two classes "this answer" and "any other"): with p the model's own probability of
its answer, the confidence is

    q = 1 / (1 + exp(-logit(p) / T)),    logit(p) = log(p / (1 - p))

and every other answer to the question, no answer among them, keeps its share of the rest: p_i (1 - q) / (1 - p). The
order of answers stays, and a list adds up to 1 at most if it did. T > 1 takes confidences towards 1/2, T = 1 does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.threshold import is_drawn

MIN_OF_EACH = 10  # right and wrong predictions in each half, without which a temperature says nothing
LARGEST_LOGIT = 36.0  # of a probability that a double distinguishes from 1
COLDEST, HOTTEST = 0.05, 20.0  # temperatures


class Bin(NamedTuple):
    """Predictions with a confidence in (low, high]: their number, mean confidence and accuracy (0-1)."""

    low: float
    high: float
    num: int
    confidence: float
    accuracy: float


class RiskCoverage(NamedTuple):
    """Risk-coverage curve: mean risk of the most confident predictions, by the share that is answered.

    Args:
        coverage: [n] share of all predictions that are answered, 1/n to 1.
        risk: [n] mean of 1 - score over the answered predictions.
        least_confidence: [n] lowest confidence among the answered predictions.
        area: mean risk over all coverages (AURC); 0 if all predictions are right.
    """

    coverage: NDArray[np.float64]
    risk: NDArray[np.float64]
    least_confidence: NDArray[np.float64]
    area: float


def compute_reliability(confidence: Sequence[float], correct: Sequence[bool], *, num_bins: int = 10) -> list[Bin]:
    """Return the non-empty equal-width bins over (0, 1]; a confidence of 0 belongs to the first.

    >>> compute_reliability([0.95, 0.92, 0.3], [True, False, False])[1]
    Bin(low=0.9, high=1.0, num=2, confidence=0.935, accuracy=0.5)
    """
    sure = np.asarray(confidence, dtype=float)
    right = np.asarray(correct, dtype=float)
    place = np.clip(np.ceil(sure * num_bins) - 1, 0, num_bins - 1).astype(int)  # a bin holds its upper edge
    bins: list[Bin] = []
    for i in np.unique(place).tolist():
        own = place == i
        accuracy = float(right[own].mean())
        bins.append(Bin(i / num_bins, (i + 1) / num_bins, int(np.sum(own)), float(sure[own].mean()), accuracy))
    return bins


def compute_calibration_error(bins: Sequence[Bin]) -> float:
    """Compute the expected calibration error: sum over bins of num / total * |accuracy - confidence| (Guo et al. 2017).

    >>> # 2/3 * 0.435 + 1/3 * 0.3
    >>> round(compute_calibration_error(compute_reliability([0.95, 0.92, 0.3], [True, False, False])), 4)
    0.39
    """
    total = sum(one.num for one in bins)
    return sum(one.num * abs(one.accuracy - one.confidence) for one in bins) / total


def compute_risk_coverage(confidence: Sequence[float], score: Sequence[float]) -> RiskCoverage:
    """Compute the risk-coverage curve (Geifman and El-Yaniv 2017); ties in confidence are averaged over their order.

    >>> curve = compute_risk_coverage([0.9, 0.2, 0.5, 0.5], [1, 0, 1, 0])
    >>> curve.risk.round(4).tolist(), round(curve.area, 4)  # of the two at 0.5, half an error each
    ([0.0, 0.25, 0.3333, 0.5], 0.2708)
    """
    sure = np.asarray(confidence, dtype=float)
    order = np.argsort(-sure, kind="stable")
    sure = sure[order]
    loss = 1 - np.asarray(score, dtype=float)[order]
    # Predictions of equal confidence come in any order: each has the mean loss of its group.
    _, group, sizes = np.unique(-sure, return_inverse=True, return_counts=True)
    expected = (np.bincount(group, weights=loss) / sizes)[group]
    counts = np.arange(1, len(sure) + 1)
    risk = np.cumsum(expected) / counts
    return RiskCoverage(counts / len(sure), risk, sure, float(risk.mean()))


class FittedTemperature(NamedTuple):
    """The temperature of a set of predictions, and what it is worth on predictions that it was not fitted on.

    Args:
        temperature: fitted on all predictions.
        num: predictions.
        error_before, error_after: expected calibration error without a temperature, and with the temperature of the
            half that a prediction is not in.
        nats_before, nats_after: mean -log of the confidence in what came true, likewise.
    """

    temperature: float
    num: int
    error_before: float
    error_after: float
    nats_before: float
    nats_after: float

    @property
    def helps(self) -> bool:
        """Whether both measures are lower with it."""
        return self.error_after < self.error_before and self.nats_after < self.nats_before


def apply_temperature(probabilities: ArrayLike, temperature: float) -> NDArray[np.float64]:
    """Return the confidences of probabilities at a temperature; `1 / temperature` takes it back.

    >>> apply_temperature([0.9, 0.5], 2.0).round(3).tolist(), apply_temperature([0.75, 0.5], 0.5).round(3).tolist()
    ([0.75, 0.5], [0.9, 0.5])
    """
    return expit(_compute_logits(probabilities) / temperature)


def calibrate_prediction(prediction: Prediction, temperature: float) -> Prediction:
    """Return a prediction with its confidence at a temperature; candidates and no answer share the rest.

    >>> from fivetune.rundir.records import Candidate
    >>> candidates = (Candidate("Rollo", 0.9), Candidate("Rolf", 0.06))
    >>> found = calibrate_prediction(
    ...     Prediction(id="q", prediction="Rollo", confidence=0.9, candidates=candidates, no_answer_score=0.02), 2.0)
    >>> round(found.confidence, 3), [round(one.score, 3) for one in found.candidates], round(found.no_answer_score, 3)
    (0.75, [0.75, 0.15], 0.05)
    """
    before = prediction.confidence
    if before is None or temperature == 1:
        return prediction
    after = float(apply_temperature(before, temperature))
    scale = (1 - after) / (1 - before) if before < 1 else 0.0

    def scale_share(text: str, score: float) -> float:
        # The prediction itself is one of its candidates.
        is_same = text == prediction.prediction and math.isclose(score, before, rel_tol=1e-3)
        return after if is_same else score * scale

    candidates = [replace(one, score=scale_share(one.text, one.score)) for one in prediction.candidates]
    leaning = prediction.no_answer_score
    if leaning is not None:
        leaning = scale_share("", leaning)
    return replace(prediction, confidence=after, candidates=tuple(candidates), no_answer_score=leaning)


def fit_temperature(probabilities: ArrayLike, correct: ArrayLike) -> float:
    """Return the temperature with the lowest mean -log of the confidence in what came true.

    That is a logistic regression on logit(p) without intercept, which is convex in 1 / T; its slope is bisected.

    >>> round(fit_temperature([0.9] * 4 + [0.1] * 4, [1, 1, 1, 0, 0, 0, 0, 1]), 3)  # 3 of 4: from 0.9 to 0.75
    2.0
    """
    logits = _compute_logits(probabilities)
    right = np.asarray(correct, dtype=float)
    low = 1 / HOTTEST
    high = 1 / COLDEST
    for _ in range(60):  # halvings, more than a double has bits
        middle = (low + high) / 2
        slope = float(np.sum((expit(logits * middle) - right) * logits))
        if slope > 0:
            high = middle
        else:
            low = middle
    return 2 / (low + high)


def measure_temperature(
    ids: Sequence[str], probabilities: Sequence[float], correct: Sequence[bool]
) -> FittedTemperature | None:
    """Fit a temperature, and measure it with each half of the predictions at the temperature of the other half.

    The halves are drawn by a hash of the ids. None unless both have 10 right and 10 wrong predictions.
    """
    known = np.asarray(probabilities, dtype=float)
    right = np.asarray(correct, dtype=bool)
    first = np.array([is_drawn(key) for key in ids], dtype=bool)
    halves = (first, ~first)
    for half in halves:
        if min(np.sum(right[half]), np.sum(~right[half])) < MIN_OF_EACH:
            return None
    # Each half at the other's temperature: a fit looks too good on its own half.
    tempered = known.copy()
    for fitted_on, measured_on in (halves, halves[::-1]):
        temperature = fit_temperature(known[fitted_on], right[fitted_on])
        tempered[measured_on] = apply_temperature(known[measured_on], temperature)
    error_before, nats_before = _measure(known, right)
    error_after, nats_after = _measure(tempered, right)
    return FittedTemperature(
        fit_temperature(known, right), len(known), error_before, error_after, nats_before, nats_after
    )


def calibrate_lines(lines: Sequence[Prediction], key: str) -> FittedTemperature | None:
    """Fit a temperature to the predictions of an evaluation, whose confidences are the model's own.

    Args:
        key: name of the score of each line (0-1); 1 is right.
    """
    ids: list[str] = []
    sure: list[float] = []
    correct: list[bool] = []
    for line in lines:
        if line.confidence is not None and key in line.scores:
            ids.append(line.id)
            sure.append(line.confidence)
            correct.append(line.scores[key] >= 1)
    return measure_temperature(ids, sure, correct)


def restore_lines(lines: Sequence[Prediction], temperature: float | None) -> list[Prediction]:
    """Return the predictions of an evaluation with the model's own probabilities.

    Args:
        temperature: temperature of their confidences, from the EvalRecord.
    """
    if not temperature:
        return list(lines)
    return [calibrate_prediction(line, 1 / temperature) for line in lines]


def choose_scored_name(lines: Sequence[Prediction], metric: str) -> str | None:
    """Return the score that says whether a prediction is right: `metric`, else the first that each line has.

    >>> choose_scored_name([Prediction(id="q", scores={"accuracy": 1.0})], "macro_f1")
    'accuracy'
    """
    scores = lines[0].scores if lines else {}
    if metric in scores:
        return metric
    return next(iter(scores), None)


def _measure(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the expected calibration error, and the mean -log of the confidence in what came true."""
    error = compute_calibration_error(compute_reliability(confidence.tolist(), right.tolist()))
    logits = _compute_logits(confidence) * np.where(right, 1, -1)
    return error, float(np.mean(np.logaddexp(0, -logits)))


def _compute_logits(probabilities: ArrayLike) -> NDArray[np.float64]:
    """Return log(p / (1 - p)), at most LARGEST_LOGIT away from 0."""
    known = np.asarray(probabilities, dtype=float)
    with np.errstate(divide="ignore"):
        return np.clip(np.log(known) - np.log1p(-known), -LARGEST_LOGIT, LARGEST_LOGIT)


def expit(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-logits)), the probability of log-odds."""
    return 1 / (1 + np.exp(-logits))
