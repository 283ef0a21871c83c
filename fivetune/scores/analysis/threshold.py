"""Gain of a no-answer threshold, tuned on one half of the questions and reported on the other.

In: prediction lines with `no_answer_score`. Out: the threshold and the scores with and without it.
A score on the questions that chose the threshold is optimistic; best_* of squad_v2 are such scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.bootstrap import Difference, compare_paired
from fivetune.scores.metrics import average_scores
from fivetune.scores.metrics.squad_v2 import find_best_threshold


class TunedThreshold(NamedTuple):
    """A threshold on `no_answer_score` above which a prediction becomes no answer.

    Scores are in points: `tuned` with the threshold on the `num_tuned` questions that chose it; `plain` without and
    `held_out` with the threshold on the `num_held_out` other questions; `gain` is held_out - plain, paired.
    """

    name: str
    threshold: float
    num_tuned: int
    tuned: float
    num_held_out: int
    plain: float
    held_out: float
    gain: Difference


def tune_threshold(lines: Sequence[Prediction], name: str) -> TunedThreshold | None:
    """Tune on a half drawn by a hash of the id, so that the split does not depend on the order of the lines.

    Args:
        name: the score per question (0-1) to maximise: "exact" or "f1".

    Returns None unless both halves contain questions with and without answers.
    """
    chosen: list[Prediction] = []
    others: list[Prediction] = []
    # In the order of the ids: the bootstrap draws lines by their numbers.
    for line in sorted(lines, key=lambda line: line.id):
        if name in line.scores and line.no_answer_score is not None:
            half = chosen if is_drawn(line.id) else others
            half.append(line)
    for half in (chosen, others):
        if len(set(map(is_answerable, half))) < 2:
            return None
    tuned, threshold = find_best_threshold(
        [line.scores[name] for line in chosen],
        predictions=[line.prediction for line in chosen],
        answerable=list(map(is_answerable, chosen)),
        no_answer_scores=[line.no_answer_score or 0.0 for line in chosen],
    )
    # The half that did not choose the threshold shows its worth.
    plain: list[dict[str, float]] = []
    held_out: list[dict[str, float]] = []
    for line in others:  # above the threshold a question is not answered
        is_kept = (line.no_answer_score or 0.0) <= threshold
        plain.append({name: line.scores[name]})
        held_out.append({name: line.scores[name] if is_kept else float(not is_answerable(line))})
    before = average_scores(plain)
    after = average_scores(held_out)
    gain = compare_paired(after, before)[name]
    return TunedThreshold(
        name, threshold, len(chosen), tuned, len(others), before.corpus[name], after.corpus[name], gain
    )


def is_answerable(line: Prediction) -> bool:
    return any(line.references)


def is_drawn(key: str) -> bool:
    """Draw half of all ids by a hash."""
    return sha256(f"threshold:{key}".encode("utf-8", "surrogatepass")).digest()[0] % 2 == 0
