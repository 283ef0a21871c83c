"""Exact match and F1 of SQuAD v2.0, where some questions have no answer.

In: one predicted answer ("" = no answer) and all gold answers (("",) = unanswerable) per question, and from the details
optional no-answer scores. Out: exact and f1 over all, over answerable (HasAns) and unanswerable (NoAns) questions, and
with no-answer scores the best exact and f1 over all thresholds on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from fivetune.scores.metrics import (
    UNANSWERED,
    Case,
    Details,
    MetricOptions,
    add_prefix,
    average_scores,
    build_mean_resampler,
    compute_token_f1,
    normalize_answer,
)
from fivetune.types import DrawnRows, Scores


class SQuADV2(MetricOptions):
    """SQuAD v2.0's exact match and F1."""

    main = "f1"
    score_names = (
        *("exact", "f1", "total"),
        *("HasAns_exact", "HasAns_f1", "HasAns_total"),
        *("NoAns_exact", "NoAns_f1", "NoAns_total"),
        *("best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"),
    )
    source = "evaluate-v2.0.py of SQuAD (Rajpurkar et al. 2018)"

    no_answer_threshold: float = Field(
        default=1.0, description="a no-answer score above it turns the prediction into no answer (the official default)"
    )

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return percentages; HasAns_* and NoAns_* only if there are such questions, best_* with no-answer scores.

        Reads `no_answer_score`, used if every question has one, and `answer`, the best answer other than abstaining,
        which the threshold search scores in place of the prediction.
        """
        import numpy as np

        assert predictions, "nothing to score"
        details = details or ()
        answerable = [any(golds) for golds in references]
        # A missing prediction cannot abstain: no threshold makes it right.
        costly = [known or p == UNANSWERED for known, p in zip(answerable, predictions, strict=True)]
        each = [_score_one(p, golds) for p, golds in zip(predictions, references, strict=True)]
        best: dict[str, float] = {}
        leanings: list[Any] = [one.get("no_answer_score") for one in details]
        if leanings and None not in leanings:
            # The search scores the answers as if none abstained; a threshold then decides who does.
            answers = [one.get("answer", p) for one, p in zip(details, predictions, strict=True)]
            forced = [_score_one(answer, golds) for answer, golds in zip(answers, references, strict=True)]
            for name in ("exact", "f1"):
                values = [scores[name] for scores in forced]
                best[f"best_{name}"], best[f"best_{name}_thresh"] = find_best_threshold(
                    values, predictions=answers, answerable=costly, no_answer_scores=leanings
                )
            for i, leaning in enumerate(leanings):
                if leaning > self.no_answer_threshold:  # the prediction becomes no answer
                    each[i] = dict.fromkeys(each[i], 0 if costly[i] else 1)
        overall = average_scores(each)
        corpus = dict(overall.corpus)
        sizes: dict[str, float] = {}
        for kind, wanted in (("HasAns", True), ("NoAns", False)):
            own = [scores for i, scores in enumerate(each) if answerable[i] == wanted]
            if own:
                corpus |= add_prefix(kind, average_scores(own).corpus)
                sizes |= {f"{kind}_exact": len(own), f"{kind}_f1": len(own)}
        resample_means = build_mean_resampler(overall)
        has_answer = np.array(answerable)

        def resample(rows: DrawnRows) -> dict[str, float]:
            """Score all questions drawn, the answerable and the unanswerable ones; best_* is left out."""
            every = np.asarray(rows)
            scores = resample_means(every)
            answered = has_answer[every]
            for kind, drawn in (("HasAns", every[answered]), ("NoAns", every[~answered])):
                if len(drawn):  # a sample may have drawn none of a kind
                    scores |= add_prefix(kind, resample_means(drawn))
            return scores

        return Scores(corpus | best, each, resample, sizes)


def find_best_threshold(
    values: Sequence[float],
    *,
    predictions: Sequence[str],
    answerable: Sequence[bool],
    no_answer_scores: Sequence[float],
) -> tuple[float, float]:
    """Return the best percentage over all thresholds t, and t; a no-answer score above t abstains.

    Abstaining everywhere is right for the unanswerable questions. From there predictions are admitted in the order of
    their no-answer scores: an answerable question adds its value, an answer to an unanswerable one subtracts 1. The
    threshold is the score of the last admitted prediction, 0.0 without any. Questions of equal no-answer score are
    admitted together, because no threshold separates them (evaluate-v2.0.py also stops between them, and then reports
    a score that its threshold does not give).

    values            1.0   0     0       right answers 1, 3 if all abstain: 2 of 3 unanswerable
    no_answer_scores  0.1   0.2   0.9     admit the first: 3 of 3; the second costs 1
    >>> find_best_threshold([1.0, 0, 0], predictions=["x", "y", "z"], answerable=[True, False, False],
    ...                no_answer_scores=[0.1, 0.2, 0.9])
    (100.0, 0.1)
    """
    current: float = sum(not has_answer for has_answer in answerable)
    best = current
    threshold = 0.0
    # The predictions that are least inclined to abstain come first.
    order = sorted(range(len(values)), key=no_answer_scores.__getitem__)
    for place, i in enumerate(order):
        if answerable[i]:
            current += values[i]
        elif predictions[i]:
            current -= 1
        is_last_of_tie = place + 1 == len(order) or no_answer_scores[order[place + 1]] != no_answer_scores[i]
        if is_last_of_tie and current > best:
            best = current
            threshold = no_answer_scores[i]
    return 100.0 * best / len(values), threshold


def _score_one(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return the best over gold answers not empty after normalisation; without any only the empty answer is right.

    >>> _score_one("", ("",)), _score_one("the", ("the", "a cat"))
    ({'exact': 1, 'f1': 1.0}, {'exact': 0, 'f1': 0.0})
    """
    predicted = normalize_answer(prediction)
    golds = [gold for gold in map(normalize_answer, references) if gold] or [""]
    return {
        "exact": max(int(predicted == gold) for gold in golds),
        "f1": max(_compute_f1(predicted, gold) for gold in golds),
    }


def _compute_f1(predicted: str, gold: str) -> float:
    """Return token F1; if either side is empty, 1 if both are, else 0."""
    if not predicted or not gold:
        return float(predicted == gold)
    return compute_token_f1(predicted.split(), gold.split())


_MIXED = (("France",), ("10th and 11th centuries", "the 10th century"), ("",), ("",))

CASES = (
    Case(
        predictions=("France", "in the 10th century", "", "Rollo"),
        references=_MIXED,
        expected={
            "exact": 50.0,
            "f1": 70.0,
            "total": 4,
            "HasAns_exact": 50.0,
            "HasAns_f1": 90.0,
            "HasAns_total": 2,
            "NoAns_exact": 50.0,
            "NoAns_f1": 50.0,
            "NoAns_total": 2,
        },
        source="by hand: F1 1, 4/5, 1, 0",
    ),
    Case(
        predictions=("France", "in the 10th century", "", "Rollo"),
        references=_MIXED,
        details=tuple({"no_answer_score": leaning} for leaning in (0.1, 0.2, 0.9, 1.5)),
        expected={
            "exact": 75.0,
            "f1": 95.0,
            "NoAns_exact": 100.0,
            "HasAns_exact": 50.0,
            "best_exact": 75.0,
            "best_exact_thresh": 0.1,
            "best_f1": 95.0,
            "best_f1_thresh": 0.2,
        },
        source="by hand: 1.5 is above the threshold 1.0; best: 2 abstentions + 1 (exact) or + 1.8 (f1)",
    ),
    Case(
        predictions=("", "Rollo"),
        references=(("Rhine",), ("",)),
        details=({"no_answer_score": 0.6, "answer": "Rhine"}, {"no_answer_score": 0.9, "answer": "Rollo"}),
        expected={"exact": 0.0, "best_exact": 100.0, "best_exact_thresh": 0.6},
        source="by hand: the threshold 0.6 admits the answer Rhine, but not Rollo",
    ),
    Case(
        predictions=("Rollo", "Seine"),
        references=(("",), ("Rhine",)),
        details=({"no_answer_score": 0.3}, {"no_answer_score": 0.4}),
        expected={"exact": 0.0, "f1": 0.0, "best_exact": 50.0, "best_exact_thresh": 0.0, "best_f1_thresh": 0.0},
        source="by hand: nothing is gained by answering, so the threshold stays at its start, 0.0",
    ),
    Case(
        predictions=("", "the"),
        references=(("the",), ("",)),
        expected={"exact": 100.0, "f1": 100.0, "HasAns_total": 1, "NoAns_total": 1},
        source="evaluate-v2.0.py: gold answers empty after normalisation are dropped, then empty equals empty",
    ),
)
