"""Beam search of one batch, with transformers' scores and stopping rules; finished examples leave the batch.

In: a decoder and the encoded batch. Out: the best hypotheses of every example. The caches are not
reordered: a hypothesis records its cache place at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fivetune.distributed.world import World
from fivetune.model.decode.cache import RowCompactor
from fivetune.model.decode.encoder import EncodedInputs
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.padded import PaddedDecoder
from fivetune.model.decode.records import Decoding, Hypothesis
from fivetune.model.decode.steps import Decoder, Rank

NEVER = -1e9  # transformers adds this to the score of a hypothesis that must not be chosen


@dataclass(slots=True)
class _BeamState:
    """B examples, each with K running hypotheses and its K best finished ones; T is the cap, without the start token.

    Args:
        rows: [B], number of the example in the batch.
        tokens: [B, K, T + 1], tokens of running hypotheses.
        slots: [B, K, T], cache place of a running hypothesis at every step.
        sums: [B, K], log p of running hypotheses.
        ended_tokens, ended_sums, ended_scores, ended_lengths, ended: [B, K, ...], finished hypotheses, best first.
        improvable: [B], False when no running hypothesis can exceed the finished ones.
    """

    rows: Tensor
    tokens: Tensor
    slots: Tensor
    sums: Tensor
    ended_tokens: Tensor
    ended_sums: Tensor
    ended_scores: Tensor
    ended_lengths: Tensor
    ended: Tensor
    improvable: Tensor

    @classmethod
    def create(cls, num_rows: int, num_beams: int, cap: int, start: int, device: torch.device) -> _BeamState:
        tokens = torch.full((num_rows, num_beams, cap + 1), start, device=device)
        sums = torch.full((num_rows, num_beams), NEVER, device=device)
        running = sums.clone()
        running[:, 0] = 0.0  # all hypotheses are equal at first: only one counts
        # Each hypothesis writes into its own place until it is copied.
        places = torch.arange(num_beams, device=device).expand(num_rows, cap, num_beams).transpose(1, 2)
        return cls(
            rows=torch.arange(num_rows, device=device),
            tokens=tokens,
            slots=places.contiguous(),
            sums=running,
            ended_tokens=tokens.clone(),
            ended_sums=sums.clone(),
            ended_scores=sums,
            ended_lengths=torch.zeros_like(sums, dtype=torch.int64),
            ended=torch.zeros_like(sums, dtype=torch.bool),
            improvable=torch.ones(num_rows, dtype=torch.bool, device=device),
        )

    def drop_finished(self, move: RowCompactor) -> None:
        for field in fields(self):
            setattr(self, field.name, move(getattr(self, field.name)))


def run_beam_search(
    decoder: Decoder | PaddedDecoder, memory: EncodedInputs, decoding: Decoding, rules: LogitsProcessor, together: World
) -> list[list[Hypothesis]]:
    """Return the `num_candidates` best hypotheses of every example, best first.

    Args:
        together: ranks that take the same number of steps; a rank without examples takes part in all of them.
    """
    cap = decoding.max_new_tokens
    config = decoder.config
    num_rows = len(memory.lengths)
    decoder.start(memory)
    state = _BeamState.create(num_rows, decoding.num_beams, cap, config.decoder_start_token_id, decoder.device)
    found: dict[int, list[Hypothesis]] = {}
    for step in range(cap):
        ages = [step] * max(1, len(state.rows))  # a rank without examples still takes part
        hidden = decoder.step(state.tokens[:, :, step], ages, state.slots[:, :, : step + 1])
        rank = _build_rank(rules, step, state.tokens[:, :, : step + 1])
        log_probs = rank(decoder.compute_logits(hidden, rank))
        _extend_hypotheses(state, log_probs, step, decoding, config.eos_token_id)
        # An example leaves when no better answer can come, or with early stopping as soon as K have ended.
        done = ~state.improvable
        if decoding.early_stopping is True:
            done |= state.ended.all(1)
        if step + 1 == cap:
            done |= True
        if done.any():
            found |= _build_hypotheses(state, done, decoding.num_candidates, config.eos_token_id)
            move = RowCompactor(~done)
            decoder.drop_finished(move)
            state.drop_finished(move)
        if not together.all_reduce_max(len(state.rows)):
            break
    return [found[row] for row in range(num_rows)]


def _build_rank(rules: LogitsProcessor, step: int, written: Tensor) -> Rank:
    """The log p by which search chooses; transformers applies the rules to log p here."""

    def rank(logits: Tensor) -> Tensor:
        return rules.apply(logits.log_softmax(-1), step, written)

    return rank


def _extend_hypotheses(state: _BeamState, log_probs: Tensor, step: int, decoding: Decoding, eos: int) -> None:
    """Extend the best running hypotheses by a token; move those that end with it to the finished ones."""
    beams = decoding.num_beams
    vocabulary = log_probs.shape[-1]
    # Twice as many as there are beams: at least K of them do not end, as in transformers.
    sums, index = (log_probs + state.sums[:, :, None]).flatten(1).topk(2 * beams)
    place = index // vocabulary
    token = index % vocabulary
    tokens = _gather_rows(state.tokens, place)
    tokens[:, :, step + 1] = token
    ends = (token == eos) | (step + 1 == decoding.max_new_tokens)
    _merge_ended(state, tokens, sums, ends, step + 1, decoding)
    # A finished hypothesis must not run on; a sum keeps the shapes static.
    running = sums + ends * NEVER
    best = running.topk(beams).indices
    slots = _gather_rows(state.slots, place.gather(1, best))
    # From the next step on, each hypothesis writes into its own place again.
    if step + 1 < slots.shape[-1]:
        slots[:, :, step + 1 :] = state.slots[:, :, step + 1 :]
    state.tokens = _gather_rows(tokens, best)
    state.slots = slots
    state.sums = running.gather(1, best)
    _update_improvable(state, step + 1, decoding)


def _merge_ended(
    state: _BeamState, tokens: Tensor, sums: Tensor, ends: Tensor, length: int, decoding: Decoding
) -> None:
    """Merge newly finished hypotheses, if they are among the K best, with those that finished before."""
    counts = ends.clone()
    counts[:, decoding.num_beams :] = False
    scores = sums / length**decoding.length_penalty
    merged = torch.cat([state.ended_scores, scores + ~counts * NEVER], 1)
    best = merged.topk(decoding.num_beams).indices
    lengths = torch.full_like(ends, length, dtype=torch.int64)
    state.ended_scores = merged.gather(1, best)
    state.ended_sums = torch.cat([state.ended_sums, sums], 1).gather(1, best)
    state.ended_lengths = torch.cat([state.ended_lengths, lengths], 1).gather(1, best)
    state.ended = torch.cat([state.ended, counts], 1).gather(1, best)
    state.ended_tokens = _gather_rows(torch.cat([state.ended_tokens, tokens], 1), best)


def _update_improvable(state: _BeamState, length: int, decoding: Decoding) -> None:
    """Compare the best score that a running hypothesis could reach with the worst of the K finished ones."""
    if decoding.early_stopping == "never" and decoding.length_penalty > 0:
        # log p is negative: divided by the largest length it is the best score that can still come.
        length = decoding.max_new_tokens
    reach = state.sums[:, :1] / length**decoding.length_penalty
    worst = torch.where(state.ended, state.ended_scores.amin(1, keepdim=True), NEVER)
    state.improvable = state.improvable & (reach > worst).any(1)


def _build_hypotheses(state: _BeamState, done: Tensor, num_candidates: int, eos: int) -> dict[int, list[Hypothesis]]:
    """The best hypotheses of the finished examples, by row."""
    tokens = state.ended_tokens[done, :num_candidates, 1:].tolist()
    lengths = state.ended_lengths[done, :num_candidates].tolist()
    sums = state.ended_sums[done, :num_candidates].tolist()
    ended = state.ended[done, :num_candidates].tolist()
    found: dict[int, list[Hypothesis]] = {}
    for i, row in enumerate(state.rows[done].tolist()):
        found[row] = []
        for ids, length, logprob, is_real in zip(tokens[i], lengths[i], sums[i], ended[i], strict=True):
            if is_real or not found[row]:  # an example has at least one answer, even if no hypothesis has ended
                hit_cap = ids[length - 1] != eos
                end = length if hit_cap else length - 1
                found[row].append(Hypothesis(ids[:end], hit_cap, logprob, length))
    return found


def _gather_rows(state: Tensor, places: Tensor) -> Tensor:
    """state[b, places[b, k]] of a [B, K, T] state."""
    return state.gather(1, places[..., None].expand(-1, -1, state.shape[-1]))
