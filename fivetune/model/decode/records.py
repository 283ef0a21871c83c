"""Settings and results of decoding. In: `Decoding`. Out: `GeneratedAnswer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fivetune.errors import ConfigError
from fivetune.types import JsonTable

ScoredRow = tuple[int, dict[str, Any]]
"""Row of a store, and its scores by fields of GeneratedAnswer."""
OnToken = Callable[[int, int, int, float], object]
"""Called as a token is written: row of the store, number of its answer, token id, log p (as in `logprob`)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: the scores are divided by the temperature, then top-k and top-p exclude tokens.

    Args:
        temperature: above 0.
        top_k: number of the most probable tokens that may be drawn; 0: all.
        top_p: share of the probability, of which the most probable tokens that have it may be drawn; 1: all.
        seed: seed of the draws, 0 to 2^63 - 1; equal inputs get equal answers. None: each answer has new draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        is_seed = self.seed is None or 0 <= self.seed < 2**63
        if not (self.temperature > 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and is_seed):
            raise ConfigError(
                f"decoding: {self}. Allowed: temperature above 0, top_k from 0, top_p above 0 up to 1, seed from 0 to "
                "2^63 - 1. Change it."
            )


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings of decoding.

    Args:
        max_new_tokens: largest number of tokens of an answer, including its end token.
        min_new_tokens: least number of tokens before the end token.
        suppressed_ids: tokens that are never generated.
        batch_size: examples per batch.
        phrase_ids: tokens of a phrase that is scored for every example (the no-answer text), with its end token.
        num_beams: 1 is greedy search or sampling.
        num_candidates: number of answers returned per example: of the best hypotheses, at most `num_beams`, or of
            sampled answers.
        sampling: how tokens are drawn; None: the most probable one is chosen.
        length_penalty: the score of a beam is its log p divided by its length to this power.
        repetition_penalty: lowers the scores of tokens that have occurred (Keskar et al. 2019); 1 disables it.
        no_repeat_ngram_size: length of the token sequences that occur at most once in an answer, the start token
            included (Paulus et al. 2017); 0 disables it.
        stop: texts before the first of which the text of an answer ends.
        early_stopping: True, False or "never", with the meaning of transformers.
        label_ids: the label set, each label with its end token. If given, labels are scored and nothing is generated.
        score_targets: whether the examples' own targets are scored.
        capture: replay steps as CUDA graphs where a device has them; the answers are the same.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()
    batch_size: int = 64
    phrase_ids: tuple[int, ...] = ()
    num_beams: int = 1
    num_candidates: int = 1
    length_penalty: float = 1.0
    sampling: Sampling | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: tuple[str, ...] = ()
    early_stopping: bool | str = False
    label_ids: tuple[tuple[int, ...], ...] = ()
    score_targets: bool = True
    capture: bool = True

    def __post_init__(self) -> None:
        if self.num_candidates < 1 or (self.sampling is None and self.num_candidates > self.num_beams):
            raise ConfigError(
                f"decoding: num_candidates is {self.num_candidates} with num_beams {self.num_beams}. "
                "Allowed: 1 to num_beams, with sampling any number. Lower it or search with more beams."
            )
        if self.sampling and self.num_beams > 1:
            raise ConfigError(
                f"decoding: sampling with num_beams {self.num_beams}. Allowed: one of them. Set num_beams 1."
            )
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(
                f'decoding: early_stopping is {self.early_stopping!r}. Allowed: true, false, "never". Choose one.'
            )
        if not all(self.label_ids):
            raise ConfigError("decoding: a label has no tokens. Every label needs at least its end token.")

    def as_generation_config(self) -> JsonTable:
        """Entries of generation_config.json with which transformers' `generate` returns the same answers.

        Of sampled answers, the distribution is the same; the texts of `stop` need a tokenizer, and are left out.

        >>> Decoding(19).as_generation_config()
        {'max_new_tokens': 19, 'do_sample': False, 'num_beams': 1}
        """
        entries: JsonTable = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.sampling is not None,
            "num_beams": self.num_beams,
        }
        if self.sampling:
            entries["temperature"] = self.sampling.temperature
            entries["top_k"] = self.sampling.top_k  # transformers' default is 50
            entries["top_p"] = self.sampling.top_p
        # Entries with transformers' default are left out.
        if self.min_new_tokens:
            entries["min_new_tokens"] = self.min_new_tokens
        if self.suppressed_ids:
            entries["suppress_tokens"] = list(self.suppressed_ids)
        if self.repetition_penalty != 1.0:
            entries["repetition_penalty"] = self.repetition_penalty
        if self.no_repeat_ngram_size:
            entries["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        if self.num_beams > 1:
            entries |= {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
        return entries


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """The answer of the model to one example, with log-probabilities (natural logarithms).

    Args:
        row: row of the store.
        token_ids: tokens without the end token; with a label set, of the best label.
        hit_cap: whether `max_new_tokens` was reached before the end token.
        logprob: log p of the generated tokens, including the end token, after penalties and suppression, as in
            transformers' transition scores (greedy) and sequences_scores (beams); of sampled answers before
            temperature, top-k and top-p.
        num_scored_tokens: number of tokens in the sum `logprob`.
        target_loss: -log p of the example's own target, summed over its tokens, teacher-forced; 0 if not scored.
        target_correct: whether each token of the target is the argmax (teacher-forced).
        phrase_loss: -log p of `phrase_ids`, or None.
        candidates: (token_ids, logprob) of the best hypotheses, best first, or of several sampled answers as drawn;
            empty if only one is asked for.
        label_logprobs: log p of every label in the order of `label_ids`, or None.
        left_label_set: whether greedy search would generate no label of the set.
    """

    row: int
    token_ids: list[int]
    hit_cap: bool
    logprob: float
    num_scored_tokens: int
    target_loss: float = 0.0
    target_correct: bool | None = None
    phrase_loss: float | None = None
    candidates: tuple[tuple[list[int], float], ...] = ()
    label_logprobs: tuple[float, ...] | None = None
    left_label_set: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One hypothesis, with the fields that `GeneratedAnswer` describes."""

    token_ids: list[int]
    hit_cap: bool
    logprob: float
    num_scored_tokens: int
