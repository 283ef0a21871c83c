"""Logits processors: repetition penalty, repeated n-grams, minimum length, suppressed tokens, as in transformers.

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
        self._ngram_size = decoding.no_repeat_ngram_size
        self._min_new_tokens = decoding.min_new_tokens
        self._eos = eos
        self._suppressed = torch.tensor(decoding.suppressed_ids, dtype=torch.int64, device=device)

    def apply(self, scores: Tensor, step: int | Tensor, written: Tensor) -> Tensor:
        """Apply all processors; returns the scores.

        Args:
            scores: [..., V], changed in place.
            step: number of tokens generated before this one, the same for all rows or [B].
            written: [..., step + 1], the decoder's inputs so far, with the start token; filler follows the inputs of a
                row at an earlier step.
        """
        if self._penalty != 1.0:  # a score falls whether it is negative or not
            there = scores.gather(-1, written)
            scores.scatter_(-1, written, torch.where(there < 0, there * self._penalty, there / self._penalty))
        if self._ngram_size:
            self._suppress_repeated(scores, step, written)
        if self._min_new_tokens:
            is_early = torch.as_tensor(step, device=scores.device) < self._min_new_tokens
            scores[..., self._eos].masked_fill_(is_early, -torch.inf)
        return self.suppress(scores)

    def _suppress_repeated(self, scores: Tensor, step: int | Tensor, written: Tensor) -> None:
        """Set the scores of tokens that would complete a sequence of n tokens once more to -inf, in place."""
        size = self._ngram_size
        if written.shape[-1] < size:
            return
        steps = torch.as_tensor(step, device=scores.device).view(-1, *[1] * (written.dim() - 1))  # [B or 1, ..., 1]
        sequences = written.unfold(-1, size, 1)  # [..., step + 2 - n, n]
        # The last n - 1 tokens of each row, and where they stand once more.
        last = steps + torch.arange(2 - size, 1, device=scores.device)
        ending = written.gather(-1, last.clamp_min(0).expand(*written.shape[:-1], -1))
        is_same = (sequences[..., :-1] == ending[..., None, :]).all(-1)
        is_written = torch.arange(size - 1, written.shape[-1], device=scores.device) <= steps
        banned = torch.where(is_same & is_written, -torch.inf, torch.inf)
        scores.scatter_reduce_(-1, sequences[..., -1], banned, "amin")

    def suppress(self, scores: Tensor) -> Tensor:
        """Set scores [..., V] of the suppressed tokens to -inf, in place."""
        if self._suppressed.numel():
            scores.index_fill_(-1, self._suppressed, -torch.inf)
        return scores
