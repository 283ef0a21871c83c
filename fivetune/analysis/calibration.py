"""Calibration of confidence: reliability bins, expected calibration error, risk-coverage curve.

In: one confidence (0-1) and one score (0-1) per prediction. Out: calibration error and curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
    sure, right = np.asarray(confidence, dtype=float), np.asarray(correct, dtype=float)
    place = np.clip(np.ceil(sure * num_bins) - 1, 0, num_bins - 1).astype(int)
    return [
        Bin(i / num_bins, (i + 1) / num_bins, int(np.sum(own)), float(sure[own].mean()), float(right[own].mean()))
        for i in np.unique(place).tolist()
        if (own := place == i).any()
    ]


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
    order = np.argsort(-np.asarray(confidence, dtype=float), kind="stable")
    sure, loss = np.asarray(confidence, dtype=float)[order], 1 - np.asarray(score, dtype=float)[order]
    _, group, sizes = np.unique(-sure, return_inverse=True, return_counts=True)
    expected = (np.bincount(group, weights=loss) / sizes)[group]
    counts = np.arange(1, len(sure) + 1)
    risk = np.cumsum(expected) / counts
    return RiskCoverage(counts / len(sure), risk, sure, float(risk.mean()))
