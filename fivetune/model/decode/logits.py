"""Logits processors: repetition penalty, minimum length, suppressed tokens, in the order of transformers.

In: scores of all tokens. Out: the scores by which search chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivetune.model.decode.records import Decoding


class LogitsProcessor:
    """Applies the processors of a Decoding on a device."""

    def __init__(self, decoding: Decoding, eos: int, device: torch.device | str) -> None:
        self._penalty = decoding.repetition_penalty
        self._min_new_tokens = decoding.min_new_tokens
        self._eos = eos
        self._suppressed = torch.tensor(decoding.suppressed_ids, dtype=torch.int64, device=device)

    def apply(self, scores: Tensor, step: int | Tensor, written: Tensor) -> Tensor:
        """Apply all processors; returns the scores.

        Args:
            scores: [..., V], changed in place.
            step: number of tokens generated before this one, the same for all rows or [B].
            written: [..., step + 1], the decoder's inputs so far, with the start token.
        """
        if self._penalty != 1.0:  # a score falls whether it is negative or not
            there = scores.gather(-1, written)
            scores.scatter_(-1, written, torch.where(there < 0, there * self._penalty, there / self._penalty))
        if self._min_new_tokens:
            is_early = torch.as_tensor(step, device=scores.device) < self._min_new_tokens
            scores[..., self._eos].masked_fill_(is_early, -torch.inf)
        return self.suppress(scores)

    def suppress(self, scores: Tensor) -> Tensor:
        """Set scores [..., V] of the suppressed tokens to -inf, in place."""
        if self._suppressed.numel():
            scores[..., self._suppressed] = -torch.inf
        return scores
