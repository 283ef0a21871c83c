"""What a no-answer threshold is worth: tuned on one half of the questions, reported on the other.

In: prediction lines with `no_answer_score`. Out: the threshold and the scores with and without it.
A threshold reported on the questions that it was tuned on flatters: squad_v2's best_* do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from fivetune.analysis.bootstrap import Difference, paired
from fivetune.metrics.squad_v2 import best_threshold
from fivetune.types import Line, Scores


class Tuned(NamedTuple):
    """A threshold on `no_answer_score` above which a prediction becomes no answer.

    `tuned` is the score (points) at the threshold on the `num_tuned` questions that chose it; `plain` without and
    `held_out` with the threshold on the `num_held_out` others, `gain` their difference, paired.
    """

    name: str
    threshold: float
    num_tuned: int
    tuned: float
    num_held_out: int
    plain: float
    held_out: float
    gain: Difference


def tuned_threshold(lines: Sequence[Line], name: str) -> Tuned | None:
    """Tune on the half that a hash of the id draws, so that the split never depends on the order of the lines.

    Args:
        name: the score per question (0-1) to maximise: "exact" or "f1".

    Returns None unless both halves hold questions with and without answers.
    """
    usable = sorted((line for line in lines if _is_usable(line, name)), key=lambda line: str(line["id"]))
    chosen = [line for line in usable if _is_drawn(str(line["id"]))]
    others = [line for line in usable if not _is_drawn(str(line["id"]))]
    if any(len({is_answerable(line) for line in half}) < 2 for half in (chosen, others)):
        return None
    tuned, threshold = best_threshold(
        [line["scores"][name] for line in chosen],
        predictions=[line["prediction"] for line in chosen],
        answerable=[is_answerable(line) for line in chosen],
        no_answer_scores=[line["no_answer_score"] for line in chosen],
    )
    before = _scores([float(line["scores"][name]) for line in others], name)
    after = _scores([_at(threshold, line, name) for line in others], name)
    gain = paired(after, before)[name]
    return Tuned(name, threshold, len(chosen), tuned, len(others), before.corpus[name], after.corpus[name], gain)


def is_answerable(line: Line) -> bool:
    return any(line["references"])


def _is_usable(line: Line, name: str) -> bool:
    known = line.get("scores") and line.get("references") is not None and line.get("prediction") is not None
    return bool(known) and name in line["scores"] and line.get("no_answer_score") is not None


def _is_drawn(key: str) -> bool:
    return sha256(f"threshold:{key}".encode("utf-8", "surrogatepass")).digest()[0] % 2 == 0


def _at(threshold: float, line: Line, name: str) -> float:
    if line["no_answer_score"] <= threshold:
        return float(line["scores"][name])
    return float(not is_answerable(line))


def _scores(values: Sequence[float], name: str) -> Scores:
    return Scores({name: 100 * sum(values) / len(values)}, [{name: value} for value in values])
