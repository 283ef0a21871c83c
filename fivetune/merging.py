"""Several answers to one question, one from each passage, made one.

In: prediction lines of the examples that share a group: the snippets of a question, the windows of a long context.
Out: one line for the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivetune.metrics import normalize_answer
from fivetune.metrics.bioasq import NUM_RANKS
from fivetune.types import Line


def merge(lines: Sequence[Line], *, question: str, ranked: bool) -> Line:
    """One line for all passages of a question.

    The passage counts whose answer is the most confident among those that answer at all; where none does, the answer
    is none. The least no-answer score is the question's: one passage that holds the answer is enough. `ranked` also
    lists up to 5 different answers with the confidence of the best passage that gives each; the first is the
    prediction. An empty answer is never ranked.

    >>> passages = [{"id": "q-1", "prediction": "", "confidence": 0.9, "no_answer_score": 0.8},
    ...             {"id": "q-2", "prediction": "Rollo", "confidence": 0.6, "no_answer_score": 0.1},
    ...             {"id": "q-3", "prediction": "the Rollo", "confidence": 0.2, "no_answer_score": 0.5}]
    >>> merge(passages, question="q", ranked=True)["candidates"]
    [{'text': 'Rollo', 'score': 0.6}]
    >>> line = merge(passages, question="q", ranked=False)
    >>> line["id"], line["prediction"], line["no_answer_score"], line["num_passages"]
    ('q', 'Rollo', 0.1, 3)
    """
    chosen = max(lines, key=lambda line: (bool(line["prediction"]), line["confidence"]))
    merged = {**chosen, "id": question, "num_passages": len(lines)}
    if "no_answer_score" in chosen:
        nearest = min(lines, key=lambda line: line["no_answer_score"])
        merged["no_answer_score"] = nearest["no_answer_score"]
        merged |= {"answer": nearest["answer"]} if "answer" in nearest else {}
    if ranked:
        merged["candidates"] = ranking(lines)
        best = next(iter(merged["candidates"]), {"text": "", "score": 0.0})
        merged |= {"prediction": best["text"], "confidence": best["score"]}
    return merged


def ranking(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Up to 5 answers that differ after SQuAD's normalisation, the most confident first."""
    given = [
        candidate
        for line in lines
        for candidate in line.get("candidates") or [{"text": line["prediction"], "score": line["confidence"]}]
    ]
    best: dict[str, dict[str, Any]] = {}
    for candidate in sorted(given, key=lambda one: -one["score"]):
        if candidate["text"]:
            best.setdefault(normalize_answer(candidate["text"]) or candidate["text"], candidate)
    return list(best.values())[:NUM_RANKS]
