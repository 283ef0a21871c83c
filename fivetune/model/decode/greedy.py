"""Greedy search and sampling: one token of every answer at every step. Finished answers make room for the next inputs.

In: a decoder, and inputs that it has encoded. Out: the answers to an input, as soon as all of them have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivetune.distributed.world import World
from fivetune.model.decode.cache import RowCompactor
from fivetune.model.decode.encoder import EncodedInputs
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.padded import PaddedDecoder
from fivetune.model.decode.records import Decoding, OnToken, ScoredRow
from fivetune.model.decode.running import Answered, RunningAnswers
from fivetune.model.decode.sampling import choose_tokens
from fivetune.model.decode.steps import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_FREE_SHARE = 1 / 8  # share of free slots at which they are filled again, or removed
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
        self._answers = RunningAnswers(decoding, decoder.config.eos_token_id, tokenizer, on_token)
        self._cap = decoding.max_new_tokens
        self._written = torch.empty(0)  # [slots, cap + 1] with the start token
        self._uniforms = torch.empty(0)  # [slots, cap], by which tokens are drawn

    @property
    def num_running(self) -> int:
        return self._answers.num_running

    @property
    def num_wanted(self) -> int:
        """How many inputs the next call of `fill_slots` takes at most."""
        num_answers = self.decoding.num_candidates
        if not self.num_running:
            return max(1, self.decoding.batch_size // num_answers)
        return len(self._answers.list_free()) // num_answers

    def fill_slots(self, memory: EncodedInputs, rows: list[ScoredRow], uniforms: Tensor | None) -> None:
        """Begin the answers to encoded inputs; without rows, these only occupy slots of a rank that has none.

        Args:
            uniforms: [inputs * num_candidates, max_new_tokens] in [0, 1), by which tokens are drawn; None: greedy.
        """
        start = self.decoder.config.decoder_start_token_id
        keys = self._answers.list_keys(rows)
        memory = memory.copy_rows(self.decoding.num_candidates)
        if not self.num_running and (keys or not self._answers.keys):
            # All slots begin anew: `memory` has one row for each.
            self.decoder.start(memory)
            num_slots = len(memory.lengths)
            device = self.decoder.device
            self._answers.start(num_slots)
            self._written = torch.full((num_slots, self._cap + 1), start, device=device)
            if uniforms is not None:
                self._uniforms = uniforms.to(device)
            slots = range(num_slots)
        else:
            slots = self._answers.list_free()[: len(keys)]
            if keys:
                assert isinstance(self.decoder, Decoder), "only its slots can be filled while others run"
                self.decoder.fill_slots(slots, memory)
                self._written[slots] = start
                if uniforms is not None:
                    self._uniforms[slots] = uniforms.to(self._uniforms.device)
        for slot, key in zip(slots, keys, strict=False):  # a rank without answers has slots only
            self._answers.begin(slot, key)

    def write_answers(self, together: World, *, has_more: bool) -> list[Answered]:
        """Write tokens until slots are free for inputs that wait, on any rank, or all answers have ended.

        Args:
            together: ranks that take the same number of steps; a rank without answers takes part in all of them.
            has_more: whether inputs of this rank wait.

        Returns: row and answers of every input of which all answers have ended.
        """
        # A pass over few slots costs nearly as much as over all: free ones are filled before they are many.
        refills = has_more and self.decoder.can_refill
        found: list[Answered] = []
        while True:
            found += self._write_token()
            num_slots = len(self._answers.keys)
            is_time = num_slots - self.num_running >= num_slots * MIN_FREE_SHARE
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

    def _write_token(self) -> list[Answered]:
        """Write one token of every answer; returns the answers of inputs that have ended, whose slots are free."""
        on_host = self._answers.list_ages()
        ages = torch.tensor(on_host, device=self.decoder.device)
        written = self._written[:, : max(on_host) + 1]  # unwritten places hold the start token, the first of all

        def rank(logits: Tensor) -> Tensor:
            return self.rules.apply(logits, ages, written)

        # Each slot at its own age: those filled later are behind the others.
        hidden = self.decoder.step(written.gather(1, ages[:, None]), on_host)
        scores = rank(self.decoder.compute_logits(hidden[:, 0], rank))
        uniforms = None
        if self.decoding.sampling:
            uniforms = self._uniforms.gather(1, ages[:, None])[:, 0]
        ids, losses = choose_tokens(scores, self.decoding.sampling, uniforms)
        self._written.scatter_(1, ages[:, None] + 1, ids[:, None])
        # The host waits for the device at every step: the ids decide which slots have ended.
        return self._answers.add_tokens(ids.tolist(), losses.tolist(), range(len(on_host)))

    def _remove_free_slots(self) -> None:
        device = self.decoder.device
        move = RowCompactor(torch.tensor([key is not None for key in self._answers.keys], device=device))
        # The lists on the host follow the order that the rows on the device get.
        self._answers.keep_slots(move(torch.arange(len(self._answers.keys), device=device)).tolist())
        self.decoder.drop_finished(move)
        self._written = move(self._written)
        if self.decoding.sampling:
            self._uniforms = move(self._uniforms)
