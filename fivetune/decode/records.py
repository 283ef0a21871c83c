"""How to decode, and what comes out: the records that callers of `generate` read and write.

In: nothing. Out: Decoding and Generated.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivetune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Decoding:
    """How answers are found.

    Args:
        max_new_tokens: cap, end token included.
        min_new_tokens: the end token is not written before so many others.
        suppressed_ids: never written.
        batch_size: examples that are decoded together.
        phrase_ids: a text whose likelihood is wanted for every example (the no-answer text), end token included.
        num_beams: 1 is greedy.
        num_candidates: best hypotheses kept per example, at most `num_beams`.
        length_penalty: a beam's score is its log p divided by its length to this power.
        repetition_penalty: divides the scores of tokens that are there already; 1 changes nothing.
        early_stopping: True, False or "never", as transformers means it.
        label_ids: the label set, each label with its end token. If given, labels are scored and nothing is generated.
        score_targets: whether the examples' own targets are scored.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()
    batch_size: int = 64
    phrase_ids: tuple[int, ...] = ()
    num_beams: int = 1
    num_candidates: int = 1
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    early_stopping: bool | str = False
    label_ids: tuple[tuple[int, ...], ...] = ()
    score_targets: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_candidates <= self.num_beams:
            raise ConfigError(
                f"decoding: num_candidates is {self.num_candidates} with num_beams {self.num_beams}. "
                "Allowed: 1 to num_beams. Lower it or search with more beams."
            )
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(
                f'decoding: early_stopping is {self.early_stopping!r}. Allowed: true, false, "never". Choose one.'
            )
        if not all(self.label_ids):
            raise ConfigError("decoding: a label has no tokens. Every label needs its end token at least.")


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model wrote for one example, and how sure it was.

    All log-probabilities are natural.

    Args:
        row: of the store.
        token_ids: up to and without the end token; the best label's with a label set.
        hit_cap: the length limit came before the end token.
        logprob: log p of the written tokens, end token included, under the scores after penalties and suppression,
            as transformers' transition scores (greedy) and sequences_scores (beams) have them.
        num_scored_tokens: tokens that `logprob` sums over.
        target_nats: -log p of the example's own target, summed over its tokens, teacher-forced; 0 if not scored.
        target_correct: greedy decoding would have written the target, by the argmax at each of its tokens.
        phrase_nats: -log p of `phrase_ids`, or None.
        candidates: (token_ids, logprob) of the best hypotheses, the best first; empty without beams.
        label_logprobs: log p of every label in the order of `label_ids`, or None.
        left_label_set: greedy decoding would have written none of the labels.
    """

    row: int
    token_ids: list[int]
    hit_cap: bool
    logprob: float
    num_scored_tokens: int
    target_nats: float = 0.0
    target_correct: bool | None = None
    phrase_nats: float | None = None
    candidates: tuple[tuple[list[int], float], ...] = ()
    label_logprobs: tuple[float, ...] | None = None
    left_label_set: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """One hypothesis: ids up to and without the end token, and what Generated says of them."""

    token_ids: list[int]
    hit_cap: bool
    logprob: float
    num_scored_tokens: int
