"""Merging of a question's answers from several passages: the snippets of a question, the windows of a long context.

In: (row, Prediction) of passages. Out: one Prediction per question, as soon as its last passage is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fivetune.rundir.records import Candidate, Prediction
from fivetune.scores.metrics import normalize_answer
from fivetune.scores.metrics.bioasq import NUM_RANKS


def merge_questions(
    passages: Iterable[tuple[int, Prediction]], groups: NDArray[np.int64], rows: NDArray[np.int64], *, ranked: bool
) -> Iterator[tuple[int, Prediction | None]]:
    """Yield number and Prediction of a question after its last passage, and (number, None) after every other passage.

    Args:
        groups: [n] number of the question of each row.
        rows: rows of all passages.
        ranked: whether several answers to a question are ranked (`merge_passages`).
    """
    missing = np.bincount(groups[rows])  # passages of each question that are not answered yet
    waiting: dict[int, list[Prediction]] = {}
    for row, passage in passages:
        question = int(groups[row])
        waiting.setdefault(question, []).append(passage)
        missing[question] -= 1
        if missing[question]:
            yield question, None
            continue
        answered = waiting.pop(question)
        if len(answered) == 1 and not ranked:
            yield question, answered[0]
        else:
            yield question, merge_passages(answered, question=answered[0].id, ranked=ranked)


def merge_passages(passages: Sequence[Prediction], *, question: str, ranked: bool) -> Prediction:
    """Merge the predictions of all passages of a question into one.

    The prediction is the most confident nonempty one; empty if all are. The question has the lowest no-answer score of
    its passages, because one passage with the answer is enough; it is the confidence if there is no answer. `ranked`
    also lists up to 5 different answers, each with the confidence of its best passage; the first is the prediction.
    Empty answers are never ranked.

    >>> passages = [Prediction(id="q-1", prediction="", confidence=0.9, no_answer_score=0.8),
    ...             Prediction(id="q-2", prediction="Rollo", confidence=0.6, no_answer_score=0.1),
    ...             Prediction(id="q-3", prediction="the Rollo", confidence=0.2, no_answer_score=0.5)]
    >>> merge_passages(passages, question="q", ranked=True).candidates
    (Candidate(text='Rollo', score=0.6),)
    >>> merged = merge_passages(passages, question="q", ranked=False)
    >>> merged.id, merged.prediction, merged.no_answer_score, merged.num_passages
    ('q', 'Rollo', 0.1, 3)
    """
    # Any answer before none, then the confidence.
    chosen = max(passages, key=lambda one: (bool(one.prediction), one.confidence or 0.0))
    merged = replace(chosen, id=question, num_passages=len(passages))
    # One passage with the answer is enough: the question's score is the lowest of its passages.
    scored = [one for one in passages if one.no_answer_score is not None]
    if chosen.no_answer_score is not None:
        nearest = min(scored, key=lambda one: one.no_answer_score or 0.0)
        answer = merged.answer if nearest.answer is None else nearest.answer
        merged = replace(merged, no_answer_score=nearest.no_answer_score, answer=answer)
        if not merged.prediction:
            merged = replace(merged, confidence=nearest.no_answer_score)
    if ranked:
        candidates = rank_answers(passages)
        best = candidates[0] if candidates else Candidate("", 0.0)
        merged = replace(merged, candidates=candidates, prediction=best.text, confidence=best.score)
    return merged


def rank_answers(passages: Sequence[Prediction]) -> tuple[Candidate, ...]:
    """Rank up to 5 answers that differ after SQuAD's normalisation, most confident first.

    Scores are shares of one whole: probabilities of different passages that add up to more than 1 are divided by their
    sum, over all different answers.
    """
    given: list[Candidate] = []
    for one in passages:
        given.extend(one.candidates or [Candidate(one.prediction, one.confidence or 0.0)])
    best: dict[str, Candidate] = {}
    for candidate in sorted(given, key=lambda one: -one.score):
        if candidate.text:
            # An answer of articles and punctuation alone, such as "?", is nothing after normalisation.
            best.setdefault(normalize_answer(candidate.text) or candidate.text, candidate)
    whole = max(1.0, sum(one.score for one in best.values()))
    return tuple(replace(one, score=one.score / whole) for one in list(best.values())[:NUM_RANKS])
