"""Greedy search and sampling: one token of every answer at every step. Finished answers make room for the next inputs.

In: a decoder, and inputs that it has encoded. Out: the answers to an input, as soon as all of them have ended.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivetune.distributed.world import World
from fivetune.model.decode.cache import RowCompactor
from fivetune.model.decode.encoder import EncodedInputs
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.padded import PaddedDecoder
from fivetune.model.decode.records import Decoding, Hypothesis, OnToken, ScoredRow
from fivetune.model.decode.sampling import draw_tokens
from fivetune.model.decode.steps import Decoder
from fivetune.model.decode.texts import to_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_FREE_SHARE = 1 / 8  # share of free slots at which they are filled again, or removed
_Key = tuple[ScoredRow, int]  # row of a slot and the number of its answer
DONE, RUNNING, HUNGRY = range(3)  # needs of a rank by urgency: nothing, more steps, more inputs


class GreedySearch:
    """At most `decoding.batch_size` slots with unfinished answers, each with the row of its input.

    The answers to one input begin together, in slots of their own; if they are more than a batch, alone.
    """

    def __init__(
        self,
        decoder: Decoder | PaddedDecoder,
        decoding: Decoding,
        rules: LogitsProcessor,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_token: OnToken | None = None,
    ) -> None:
        self.decoder = decoder
        self.decoding = decoding
        self.rules = rules
        self._tokenizer = tokenizer if decoding.stop else None
        self._on_token = on_token
        self._cap = decoding.max_new_tokens
        self._eos = decoder.config.eos_token_id
        self._num_answers = decoding.num_candidates  # of one input
        self._keys: list[_Key | None] = []  # row of each slot; None where the slot is free
        self._ages: list[int] = []
        self._written = self._logprobs = torch.empty(0)  # [slots, cap + 1] with the start token, [slots]
        self._uniforms = torch.empty(0)  # [slots, cap], by which tokens are drawn
        self._ended: dict[int, list[tuple[int, Hypothesis]]] = {}  # answers by row, until the last one ends

    @property
    def num_running(self) -> int:
        return sum(key is not None for key in self._keys)

    @property
    def num_wanted(self) -> int:
        """How many inputs the next call of `fill_slots` takes at most."""
        if not self.num_running:
            return max(1, self.decoding.batch_size // self._num_answers)
        return (len(self._keys) - self.num_running) // self._num_answers

    def fill_slots(self, memory: EncodedInputs, rows: list[ScoredRow], uniforms: Tensor | None) -> None:
        """Begin the answers to encoded inputs; without rows, these only occupy slots of a rank that has none.

        Args:
            uniforms: [inputs * num_candidates, max_new_tokens] in [0, 1), by which tokens are drawn; None: greedy.
        """
        start = self.decoder.config.decoder_start_token_id
        keys: list[_Key] = []
        for row in rows:
            keys += [(row, number) for number in range(self._num_answers)]
        memory = memory.copy_rows(self._num_answers)
        if not self.num_running and (keys or not self._keys):
            # All slots begin anew: `memory` has one row for each.
            self.decoder.start(memory)
            num_slots = len(memory.lengths)
            device = self.decoder.device
            self._keys = [*keys, *[None] * (num_slots - len(keys))]
            self._ages = [0] * num_slots
            self._written = torch.full((num_slots, self._cap + 1), start, device=device)
            self._logprobs = torch.zeros(num_slots, device=device)
            if uniforms is not None:
                self._uniforms = uniforms.to(device)
        elif keys:
            assert isinstance(self.decoder, Decoder), "only its slots can be filled while others run"
            free = [slot for slot, key in enumerate(self._keys) if key is None]
            slots = free[: len(keys)]
            self.decoder.fill_slots(slots, memory)
            for slot, key in zip(slots, keys, strict=True):
                self._keys[slot] = key
            self._written[slots] = start
            self._logprobs[slots] = 0.0
            if uniforms is not None:
                self._uniforms[slots] = uniforms.to(self._uniforms.device)

    def write_answers(self, together: World, *, has_more: bool) -> list[tuple[ScoredRow, list[Hypothesis]]]:
        """Write tokens until slots are free for inputs that wait, on any rank, or all answers have ended.

        Args:
            together: ranks that take the same number of steps; a rank without answers takes part in all of them.
            has_more: whether inputs of this rank wait.

        Returns: row and answers of every input of which all answers have ended.
        """
        # A pass over few slots costs nearly as much as over all: free ones are filled before they are many.
        refills = has_more and self.decoder.can_refill
        found: list[tuple[ScoredRow, list[Hypothesis]]] = []
        while True:
            found += self._write_token()
            num_free = len(self._keys) - self.num_running
            is_time = num_free >= len(self._keys) * MIN_FREE_SHARE
            if has_more and (not self.num_running or (refills and is_time and self.num_wanted)):
                need = HUNGRY
            elif self.num_running:
                need = RUNNING
            else:
                need = DONE
            # One hungry rank ends the round of all: they encode together.
            if together.all_reduce_max(need) != RUNNING:
                return found
            if is_time and not refills and self.num_running:
                self._remove_free_slots()

    def _write_token(self) -> list[tuple[ScoredRow, list[Hypothesis]]]:
        """Write one token of every answer; returns the answers of inputs that have ended, whose slots are free."""
        ages = torch.tensor(self._ages, device=self.decoder.device)
        written = self._written[:, : max(self._ages) + 1]  # unwritten places hold the start token, the first of all

        def rank(logits: Tensor) -> Tensor:
            return self.rules.apply(logits, ages, written)

        # Each slot at its own age: those filled later are behind the others.
        hidden = self.decoder.step(written.gather(1, ages[:, None]), self._ages)
        scores = rank(self.decoder.compute_logits(hidden[:, 0], rank))
        if self.decoding.sampling:
            uniforms = self._uniforms.gather(1, ages[:, None])[:, 0]
            ids, logprobs = draw_tokens(scores, self.decoding.sampling, uniforms)
            losses = -logprobs
        else:
            best, ids = scores.max(-1)
            # -log p of the best token is log of the sum of exp(score - best); the scores are not needed any more.
            losses = scores.sub_(best[:, None]).exp_().sum(-1).log_()
        self._logprobs -= losses
        self._written.scatter_(1, ages[:, None] + 1, ids[:, None])
        # One copy to the host a step, which waits for the device: the ids decide which slots have ended.
        ended: list[int] = []  # slots
        tokens = ids.tolist()
        if self._on_token:
            for key, token, loss in zip(self._keys, tokens, losses.tolist(), strict=True):
                if key is not None:
                    self._on_token(key[0][0], key[1], token, -loss)
        has_stops = self._tokenizer is not None
        for slot, token in enumerate(tokens):
            if self._keys[slot] is None:
                continue
            self._ages[slot] += 1
            if token == self._eos or self._ages[slot] == self._cap or (has_stops and self._has_stop(slot)):
                ended.append(slot)
        found: list[tuple[ScoredRow, list[Hypothesis]]] = []
        answers = zip(ended, self._written[ended].tolist(), self._logprobs[ended].tolist(), strict=True)
        for slot, tokens, logprob in answers:
            key = self._keys[slot]
            assert key is not None
            ids = tokens[1 : self._ages[slot] + 1]
            answer = ids[:-1] if ids[-1] == self._eos else ids
            hit_cap = len(answer) == self._cap
            self._keys[slot] = None
            self._ages[slot] = 0
            scored, number = key
            ended_before = self._ended.setdefault(scored[0], [])
            ended_before.append((number, Hypothesis(answer, hit_cap, logprob, len(ids))))
            if len(ended_before) == self._num_answers:
                drawn = sorted(self._ended.pop(scored[0]), key=itemgetter(0))
                found.append((scored, [one for _, one in drawn]))
        return found

    def _has_stop(self, slot: int) -> bool:
        """Whether the text of an answer so far has a text that ends it."""
        assert self._tokenizer is not None
        text = to_text(self._tokenizer, self._written[slot, 1 : self._ages[slot] + 1].tolist())
        return any(stop in text for stop in self.decoding.stop)

    def _remove_free_slots(self) -> None:
        device = self.decoder.device
        move = RowCompactor(torch.tensor([key is not None for key in self._keys], device=device))
        # The lists on the host follow the order that the rows on the device get.
        order = move(torch.arange(len(self._keys), device=device)).tolist()
        self.decoder.drop_finished(move)
        self._keys = [self._keys[slot] for slot in order]
        self._ages = [self._ages[slot] for slot in order]
        self._written = move(self._written)
        self._logprobs = move(self._logprobs)
        if self.decoding.sampling:
            self._uniforms = move(self._uniforms)
