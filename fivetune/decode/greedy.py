"""Greedy search for one batch: the most probable token at every step; finished rows leave the batch.

In: a Decoder that has encoded the batch. Out: one Hypothesis per row.
"""

from __future__ import annotations

import torch

from fivetune.decode.logits import LogitsProcessor
from fivetune.decode.padded import PaddedDecoder
from fivetune.decode.records import Decoding, Hypothesis
from fivetune.decode.steps import Decoder, RowCompactor

MIN_FINISHED_SHARE = 1 / 8  # share of finished rows at which the batch is compacted


def run_greedy_search(
    decoder: Decoder | PaddedDecoder, num_rows: int, decoding: Decoding, rules: LogitsProcessor
) -> list[Hypothesis]:
    """Return the greedy answers of `num_rows` encoded rows, in order."""
    cap, eos = decoding.max_new_tokens, decoder.config.eos_token_id
    written = torch.full((num_rows, cap + 1), eos, device=decoder.device)
    written[:, 0] = decoder.config.decoder_start_token_id
    logprobs = torch.zeros(num_rows, device=decoder.device)
    rows = torch.arange(num_rows, device=decoder.device)  # row of `written` for each row of the decoder
    alive = torch.ones_like(rows, dtype=torch.bool)
    for step in range(cap):
        scores = decoder.compute_logits(decoder.step(written[rows, step, None])[:, 0])
        scores = rules.apply(scores, step, lambda step=step, rows=rows: written[rows, : step + 1])
        ids = torch.where(alive, scores.argmax(-1), eos)
        written[rows, step + 1] = ids
        logprobs[rows] += torch.where(alive, scores.log_softmax(-1).gather(-1, ids[:, None])[:, 0], 0.0)
        alive &= ids != eos
        num_alive = int(alive.sum())
        if decoder.is_finished(num_alive):
            break
        if num_alive <= len(rows) * (1 - MIN_FINISHED_SHARE):
            move = RowCompactor(alive)
            decoder.drop_finished(move)
            rows, alive = move(rows), move(alive)
    return [
        _truncate_at_end(ids, logprob, eos)
        for ids, logprob in zip(written[:, 1:].tolist(), logprobs.tolist(), strict=True)
    ]


def _truncate_at_end(ids: list[int], logprob: float, eos: int) -> Hypothesis:
    """Build the Hypothesis of a row, truncated before its end token.

    >>> _truncate_at_end([7, 8, 1, 1], -2.0, eos=1), _truncate_at_end([7, 8], -2.0, eos=1)
    (Hypothesis(token_ids=[7, 8], hit_cap=False, logprob=-2.0, num_scored_tokens=3), \
Hypothesis(token_ids=[7, 8], hit_cap=True, logprob=-2.0, num_scored_tokens=2))
    """
    if eos not in ids:
        return Hypothesis(ids, True, logprob, len(ids))
    end = ids.index(eos)
    return Hypothesis(ids[:end], False, logprob, end + 1)
