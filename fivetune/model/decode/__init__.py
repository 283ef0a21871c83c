"""Decoding: greedy search, beam search, or choice of the best label, with the scores of given sequences.

In: a model and the encoded inputs of a store. Out: one GeneratedAnswer per example, as it ends; longest inputs begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fivetune.data.store.batch import collate, pad
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.sharding import call_gathered, is_gathered_by_call
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.attention import explain_unsupported_device
from fivetune.model.decode.beam import run_beam_search
from fivetune.model.decode.greedy import GreedySearch
from fivetune.model.decode.labels import GivenScores, score_given
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.padded import PaddedDecoder
from fivetune.model.decode.records import Decoding, GeneratedAnswer, Hypothesis
from fivetune.model.decode.steps import Decoder
from fivetune.model.decode.weights import keep_weights
from fivetune.model.family import ACTIVATIONS, get_family
from fivetune.model.virtual_tokens import add_flat_prompt, find_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Autocast

__all__ = [
    "Decoding",
    "GenerateAnswers",
    "GeneratedAnswer",
    "estimate_max_new_tokens",
    "explain_slow_decoding",
    "generate",
    "group_by_length",
    "to_text",
]

_Scored = tuple[int, dict[str, Any]]
"""A row, and the scores of its given sequences."""


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


@torch.no_grad()
def generate(
    model: T5Model,
    store: TokenStore,
    rows: Sequence[int],
    decoding: Decoding,
    *,
    device: str,
    autocast: Autocast,
    world: World = SINGLE_PROCESS,
) -> Iterator[GeneratedAnswer]:
    """Yield the answers for `rows` of a store as they end. The encoder runs once per example.

    Args:
        autocast: returns a new autocast context.
        world: the ranks that generate at the same time. If the weights are gathered for each computation, all of them
            run the same number of rounds and steps; those without rows repeat the store's first row, unused.
    """
    together = world if is_gathered_by_call(model) else SINGLE_PROCESS
    was_training = model.training
    model.eval()
    try:
        chosen = np.asarray(rows, dtype=np.int64)
        order = np.argsort(-store.inputs.lengths[chosen], kind="stable")  # memory runs out at once or never
        queue = deque(chosen[order].tolist())
        if not together.all_reduce_max(len(queue)):
            return
        rules = LogitsProcessor(decoding, model.config.eos_token_id, device)
        max_steps = _find_max_steps(store, chosen if len(chosen) else np.zeros(1, np.int64), decoding)
        is_flat = _has_flat_forward(model) and not explain_slow_decoding(model, device, autocast)
        kind = Decoder if is_flat else PaddedDecoder
        attach = nullcontext if kind is PaddedDecoder else keep_weights(model, device, autocast)
        with autocast(), attach():
            decoder = kind(model, num_beams=decoding.num_beams, max_steps=max_steps, together=together)
        search: GreedySearch[_Scored] = GreedySearch(decoder, decoding.batch_size, decoding, rules)
        while together.all_reduce_max(len(queue) + search.num_running):
            taken = [queue.popleft() for _ in range(min(search.num_wanted, len(queue)))]
            with autocast(), attach():
                found = call_gathered(model, _run_round, decoder, search, store, taken, decoding, rules, bool(queue))
            yield from found  # outside of autocast, which would apply to the caller too
    finally:
        model.train(was_training)


def explain_slow_decoding(model: T5Model, device: str, autocast: Autocast) -> str:
    """Explain why a device must decode by transformers' modules, not by the flat forward that the model has; "" if not.

    The first call on a GPU tests its kernels, which takes seconds.
    """
    return explain_unsupported_device(model.config.d_kv, device, autocast) if _has_flat_forward(model) else ""


def _has_flat_forward(model: T5Model) -> bool:
    settings = model.config
    return bool(get_family(settings).t5_blocks) and not find_prefix(model) and settings.dense_act_fn in ACTIVATIONS


def _find_max_steps(store: TokenStore, rows: np.ndarray, decoding: Decoding) -> int:
    """The largest number of decoder inputs of a row."""
    fixed = max(len(ids) for ids in (decoding.phrase_ids, *decoding.label_ids))
    targets = int(store.labels.lengths[rows].max()) if decoding.score_targets else 0
    return max(decoding.max_new_tokens, fixed, targets)


def _run_round(
    model: T5Model,
    decoder: Decoder | PaddedDecoder,
    search: GreedySearch[_Scored],
    store: TokenStore,
    rows: list[int],
    decoding: Decoding,
    rules: LogitsProcessor,
    has_more: bool,
) -> list[GeneratedAnswer]:
    """Encode some rows, and return the answers that have ended since: with greedy search also those of other rows."""
    batch = collate(store, rows or [0])
    inputs = batch.input_ids.to(decoder.device), batch.cu_seqlens_src.diff().tolist()
    memory = decoder.encode(*add_flat_prompt(model, *inputs))
    targets = pad(batch, pad_id=decoder.config.pad_token_id).labels
    given = score_given(decoder, memory, targets, decoding, rules)
    scored = list(zip(rows, _split_by_row(given, len(rows)), strict=True))
    if decoding.label_ids:
        ended = zip(scored, _choose_labels(given, decoding), strict=bool(rows))
    elif decoding.num_beams > 1:
        ended = zip(scored, run_beam_search(decoder, memory, decoding, rules), strict=bool(rows))
    else:
        search.fill_slots(memory, scored)
        ended = ((key, [one]) for key, one in search.write_answers(has_more=has_more))
    return [_build_answer(row, hypotheses, scores, decoding) for (row, scores), hypotheses in ended]


def _choose_labels(given: GivenScores, decoding: Decoding) -> list[list[Hypothesis]]:
    """Choose the most probable label of every row."""
    assert given.label_logprobs is not None
    logprobs, best = given.label_logprobs.max(1)
    chosen = [decoding.label_ids[i] for i in best.tolist()]
    return [[Hypothesis(list(ids[:-1]), False, p, len(ids))] for ids, p in zip(chosen, logprobs.tolist(), strict=True)]


def _split_by_row(given: GivenScores, num_rows: int) -> list[dict[str, Any]]:
    """Split `given` into the fields of GeneratedAnswer, one table per row."""
    columns = {name: value.tolist() for name in GivenScores.__slots__ if (value := getattr(given, name)) is not None}
    return [{name: column[i] for name, column in columns.items()} for i in range(num_rows)]


def _build_answer(
    row: int, hypotheses: list[Hypothesis], scores: dict[str, Any], decoding: Decoding
) -> GeneratedAnswer:
    best = hypotheses[0]
    if "label_logprobs" in scores:
        scores["label_logprobs"] = tuple(scores["label_logprobs"])
    return GeneratedAnswer(
        row=row,
        token_ids=best.token_ids,
        hit_cap=best.hit_cap,
        logprob=best.logprob,
        num_scored_tokens=best.num_scored_tokens,
        candidates=tuple((one.token_ids, one.logprob) for one in hypotheses) if decoding.num_beams > 1 else (),
        **scores,
    )


def to_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Decode generated ids to text; special tokens, sentinels among them, are dropped unless `keep_special`."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=not keep_special)).strip()
