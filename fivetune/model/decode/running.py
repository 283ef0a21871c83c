"""The unfinished answers of a search, as far as the host knows their tokens.

In: the token of every slot, step by step. Out: the answers to an input, as soon as all of them have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from fivetune.model.decode.records import Decoding, Hypothesis, OnToken, ScoredRow
from fivetune.model.decode.texts import to_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Key = tuple[ScoredRow, int]
"""Row of a slot, and the number of its answer."""
Answered = tuple[ScoredRow, list[Hypothesis]]
"""A row, and all answers to its input."""


class RunningAnswers:
    """The answers of slots.

    Args:
        tokenizer: ends an answer as soon as it has a text of `decoding.stop`; None: answers do not end there.
        on_token: called for each token.

    Attributes:
        keys: the answer of each slot; None where the slot is free.
    """

    def __init__(
        self, decoding: Decoding, eos: int, tokenizer: PreTrainedTokenizerBase | None, on_token: OnToken | None
    ) -> None:
        self.keys: list[Key | None] = []
        self._decoding = decoding
        self._eos = eos
        self._tokenizer = tokenizer if decoding.stop else None
        self._on_token = on_token
        self._tokens: list[list[int]] = []
        self._logprobs: list[float] = []
        self._ended: dict[int, list[tuple[int, Hypothesis]]] = {}  # answers by row, until the last one ends

    @property
    def num_running(self) -> int:
        return sum(key is not None for key in self.keys)

    def start(self, num_slots: int) -> None:
        """Let all slots be free."""
        self.keys = [None] * num_slots
        self._tokens = [[] for _ in range(num_slots)]
        self._logprobs = [0.0] * num_slots

    def list_free(self) -> list[int]:
        return [slot for slot, key in enumerate(self.keys) if key is None]

    def list_ages(self) -> list[int]:
        """Number of tokens of each slot; 0 of a free one."""
        return [*map(len, self._tokens)]

    def list_keys(self, rows: Sequence[ScoredRow]) -> list[Key]:
        """The answers to the inputs of rows, those to one input one after another."""
        return [(row, number) for row in rows for number in range(self._decoding.num_candidates)]

    def begin(self, slot: int, key: Key) -> None:
        """Begin an answer in a free slot."""
        self.keys[slot] = key

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order."""
        self.keys = [self.keys[slot] for slot in slots]
        self._tokens = [self._tokens[slot] for slot in slots]
        self._logprobs = [self._logprobs[slot] for slot in slots]

    def add_tokens(self, tokens: Sequence[int], losses: Sequence[float], slots: Iterable[int]) -> list[Answered]:
        """Add the next token of slots. A slot whose answer ends with it becomes free; a free slot stays so.

        Args:
            tokens, losses: token of every slot, and its -log p.
            slots: those that count.

        Returns: row and answers of every input of which all answers have ended.
        """
        found: list[Answered] = []
        for slot in slots:
            if self.keys[slot] is not None and (answered := self._add_token(slot, tokens[slot], losses[slot])):
                found.append(answered)
        return found

    def _add_token(self, slot: int, token: int, loss: float) -> Answered | None:
        key = self.keys[slot]
        assert key is not None
        scored, number = key
        if self._on_token:
            self._on_token(scored[0], number, token, -loss)
        ids = self._tokens[slot]
        ids.append(token)
        self._logprobs[slot] -= loss
        hit_cap = len(ids) == self._decoding.max_new_tokens and token != self._eos
        if not (token == self._eos or hit_cap or self._has_stop(ids)):
            return None
        answer = ids[:-1] if token == self._eos else ids
        hypothesis = Hypothesis(answer, hit_cap, self._logprobs[slot], len(ids))
        self.keys[slot] = None
        self._tokens[slot] = []
        self._logprobs[slot] = 0.0
        ended = self._ended.setdefault(scored[0], [])
        ended.append((number, hypothesis))
        if len(ended) < self._decoding.num_candidates:
            return None
        drawn = sorted(self._ended.pop(scored[0]), key=itemgetter(0))
        return scored, [one for _, one in drawn]

    def _has_stop(self, ids: list[int]) -> bool:
        """Whether the text of an answer so far has a text that ends it."""
        if self._tokenizer is None:
            return False
        text = to_text(self._tokenizer, ids)
        return any(stop in text for stop in self._decoding.stop)
