"""Decoding: greedy search, sampling, beam search, or choice of the best label, with the scores of given sequences.

In: a model and the encoded inputs of a store. Out: one GeneratedAnswer per example, as it ends; longest inputs begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.decode.records import Decoding, GeneratedAnswer, OnToken, Sampling
from fivetune.model.decode.texts import cut_at_stop, to_text
from fivetune.types import OnNote, ignore_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Autocast

__all__ = [
    "Decoding",
    "GenerateAnswers",
    "GeneratedAnswer",
    "OnToken",
    "Sampling",
    "cut_at_stop",
    "estimate_max_new_tokens",
    "generate",
    "group_by_length",
    "to_text",
]


class GenerateAnswers(Protocol):
    """The signature of `generate`, which a device with decoding of its own has too."""

    def __call__(
        self,
        model: T5Model,
        store: TokenStore,
        rows: Sequence[int],
        decoding: Decoding,
        *,
        device: str,
        autocast: Autocast,
        world: World = SINGLE_PROCESS,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_token: OnToken | None = None,
        on_note: OnNote = ignore_note,
    ) -> Iterator[GeneratedAnswer]: ...


def estimate_max_new_tokens(target_p99: int) -> int:
    """Estimate the generation cap: the 99th percentile of target lengths plus a margin of a quarter and four tokens.

    >>> estimate_max_new_tokens(12)
    19
    """
    return target_p99 + -(-target_p99 // 4) + 4


def group_by_length(lengths: Sequence[int] | np.ndarray, batch_size: int) -> list[list[int]]:
    """Group positions into batches of similar lengths, longest first, so that memory runs out at once or never.

    >>> group_by_length([3, 9, 5], 2)
    [[1, 2], [0]]
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def generate(
    model: T5Model,
    store: TokenStore,
    rows: Sequence[int],
    decoding: Decoding,
    *,
    device: str,
    autocast: Autocast,
    world: World = SINGLE_PROCESS,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_token: OnToken | None = None,
    on_note: OnNote = ignore_note,
) -> Iterator[GeneratedAnswer]:
    """Yield the answers for `rows` of a store as they end. The encoder runs once per example.

    Args:
        autocast: function that returns a new autocast context.
        world: ranks that generate at the same time. If the weights are gathered for each computation, all ranks run the
            same number of rounds and steps; a rank without rows repeats the store's first row, unused.
        tokenizer: ends an answer as soon as it has a text of `decoding.stop`, but not with beams; the answer keeps the
            text. None: answers do not end there.
        on_token: called for each token of greedy search and sampling.
        on_note: called with the reason if steps that graphs should replay are launched.
    """
    # An export with an engine of its own answers without torch, whose import takes seconds and 300 MB.
    from fivetune.model.decode.engine import search_answers

    return search_answers(
        model,
        store,
        rows,
        decoding,
        device=device,
        autocast=autocast,
        world=world,
        tokenizer=tokenizer,
        on_token=on_token,
        on_note=on_note,
    )
