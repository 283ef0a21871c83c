"""Tally of an evaluation: each question's scores, corpus scores, rates that reveal a broken run, the loss.

In: predictions with the numbers of their questions. Out: the same predictions with their scores, then the totals.
Memory holds short texts and counts, not the inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from fivetune.rundir.records import Prediction
from fivetune.scores.metrics import Scorer, collect_details
from fivetune.scores.metrics.classification import compute_label_rates
from fivetune.types import Scores

if TYPE_CHECKING:
    from fivetune.types import JsonTable

RATES = {
    "cap_hit": "hit_cap",
    "sentinel": "sentinel",
    "left_label_set": "left_label_set",
    "teacher_forced_exact": "teacher_forced_exact",
    "free_running_exact": "free_running_exact",
}
"""Rates of an EvalRecord, each the share of predictions with a flag set among those for which it is known."""


@dataclass(slots=True)
class TargetLoss:
    """Sum of -log p of all target tokens, in nats, and their number."""

    total: float = 0.0
    num_tokens: int = 0

    def add(self, loss: float, num_tokens: int) -> None:
        self.total += loss
        self.num_tokens += num_tokens

    @property
    def mean(self) -> float | None:
        return self.total / self.num_tokens if self.num_tokens else None


class Tally:
    """Accumulates the predictions of an evaluation."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._answered: list[tuple[int, str, Sequence[str], JsonTable]] = []  # question, answer, references, details
        self._num_set: Counter[str] = Counter()
        self._num_known: Counter[str] = Counter()
        self.num_clipped = 0

    @property
    def num_examples(self) -> int:
        return len(self._answered)

    def score_each(self, answered: Iterable[tuple[int, Prediction]]) -> Iterator[Prediction]:
        """Yield the predictions with their own scores, and add each to the tally."""
        for question, prediction in answered:
            details = collect_details(prediction)
            self._answered.append((question, prediction.prediction, prediction.references, details))
            self.num_clipped += bool(prediction.num_clipped_tokens)

            # Flags, None where a flag is not known: a rate is a share of the predictions for which it is.
            flags: dict[str, bool | None] = {rate: getattr(prediction, flag) for rate, flag in RATES.items()}
            flags["empty"] = not prediction.prediction
            if prediction.unknown_chars is not None:
                flags["unknown_characters"] = prediction.unknown_chars > 0
            if prediction.in_context is not None:
                flags["not_in_context"] = not prediction.in_context
            for name, flag in flags.items():
                if flag is not None:
                    self._num_known[name] += 1
                    self._num_set[name] += flag

            if prediction.references:
                scored = self._scorer.score([prediction.prediction], [prediction.references], details=[details])
                prediction = replace(prediction, scores=scored.each[0])
            yield prediction

    def compute_rates(self) -> dict[str, float]:
        rates = {name: self._num_set[name] / total for name, total in self._num_known.items()}
        # A label task: whether a few labels get all answers, which no share of flags shows.
        if self._answered and all("labels" in details for *_, details in self._answered):
            _, predictions, references, _ = zip(*self._answered, strict=True)
            rates |= compute_label_rates(predictions, references)
        return rates

    def compute_scores(self) -> Scores | None:
        """Compute the corpus scores; None unless every question has references.

        Questions are scored in their order, so that bootstrap intervals do not depend on the order of decoding.
        """
        # A score over some of the questions would be taken for a score of all.
        if not self._answered or not all(references for _, _, references, _ in self._answered):
            return None
        ordered = sorted(self._answered, key=itemgetter(0))
        _, predictions, references, details = zip(*ordered, strict=True)
        return self._scorer.score(list(predictions), list(references), details=list(details))
