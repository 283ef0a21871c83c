"""The search of torch: rounds in which inputs are encoded and answers are written.

In: a model, rows of a store, a Decoding. Out: one GeneratedAnswer per row, as it ends; longest inputs begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fivetune.data.store.batch import collate, pad
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.sharding import call_gathered, is_gathered_by_call
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.attention import explain_unsupported_device
from fivetune.model.decode.beam import run_beam_search
from fivetune.model.decode.captured import CapturedSearch, can_capture
from fivetune.model.decode.encoder import CPU_TOKENS
from fivetune.model.decode.greedy import GreedySearch
from fivetune.model.decode.labels import score_given
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.padded import PaddedDecoder
from fivetune.model.decode.records import Decoding, GeneratedAnswer, Hypothesis, OnToken
from fivetune.model.decode.sampling import draw_uniforms
from fivetune.model.decode.steps import Decoder
from fivetune.model.decode.weights import keep_weights
from fivetune.model.family import ACTIVATIONS, get_family
from fivetune.model.precision import suppress_half
from fivetune.model.virtual_tokens import add_flat_prompt, find_prefix
from fivetune.types import OnNote, ignore_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Autocast


@torch.no_grad()
def search_answers(
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
    """Yield the answers as `fivetune.model.decode.generate` describes."""
    together = world if is_gathered_by_call(model) else SINGLE_PROCESS
    was_training = model.training
    if was_training:  # a walk over all modules, which a request to a server need not pay
        model.eval()
    try:
        chosen = np.asarray(rows, dtype=np.int64)
        order = np.argsort(-store.inputs.lengths[chosen], kind="stable")  # memory runs out at once or never
        queue = deque(chosen[order].tolist())
        if not together.all_reduce_max(len(queue)):
            return
        # The largest number of decoder inputs of a row, by which the table of position biases is built.
        max_steps = max(decoding.max_new_tokens, len(decoding.phrase_ids), *map(len, decoding.label_ids))
        if decoding.score_targets:
            scored = chosen if len(chosen) else [0]  # a rank without rows repeats the store's first one
            max_steps = max(max_steps, int(store.labels.lengths[scored].max()))
        is_flat = _has_flat_forward(model) and not explain_slow_decoding(model, device, autocast)
        where = torch.device(device)
        attach = keep_weights(model, device, autocast) if is_flat else partial(suppress_half, where)
        with autocast(), attach():
            if is_flat:
                # Ranks that gather weights together must run the same number of passes.
                max_tokens = CPU_TOKENS if device == "cpu" and together.size == 1 else None
                decoder = Decoder(model, num_beams=decoding.num_beams, max_steps=max_steps, max_tokens=max_tokens)
            else:
                decoder = PaddedDecoder(model, num_beams=decoding.num_beams)
        rules = LogitsProcessor(decoding, model.config.eos_token_id, device)
        search: GreedySearch | CapturedSearch
        if isinstance(decoder, Decoder) and can_capture(decoder, decoding):
            search = CapturedSearch(decoder, decoding, rules, tokenizer, on_token, on_note)
        else:
            search = GreedySearch(decoder, decoding, rules, tokenizer, on_token)
        # Each round encodes the next inputs; greedy search also goes on with answers of earlier rounds.
        while together.all_reduce_max(len(queue) + search.num_running):
            taken = [queue.popleft() for _ in range(min(search.num_wanted, len(queue)))]
            with autocast(), attach():
                found = call_gathered(model, _run_round, search, store, taken, together, bool(queue))
            yield from found  # outside of autocast, which would apply to the caller too
    finally:
        if was_training:
            model.train()


def explain_slow_decoding(model: T5Model, device: str, autocast: Autocast) -> str:
    """Explain why a device must decode by transformers' modules, not by the flat forward that the model has; "" if not.

    The first call on a GPU tests its kernels, which takes seconds.
    """
    return explain_unsupported_device(model.config, device, autocast) if _has_flat_forward(model) else ""


def _has_flat_forward(model: T5Model) -> bool:
    settings = model.config
    return bool(get_family(settings).t5_blocks) and not find_prefix(model) and settings.dense_act_fn in ACTIVATIONS


def _run_round(
    model: T5Model,
    search: GreedySearch | CapturedSearch,
    store: TokenStore,
    rows: list[int],
    together: World,
    has_more: bool,
) -> list[GeneratedAnswer]:
    """Encode rows of a store, and return the answers that have ended: with greedy search also to earlier rows.

    Args:
        rows: rows to begin with; a rank without any encodes the store's first row, unused.
        has_more: whether rows of this rank wait for a later round.
    """
    decoder = search.decoder
    decoding = search.decoding
    rules = search.rules
    batch = collate(store, rows or [0])
    ids = batch.input_ids.to(decoder.device)
    lengths = batch.cu_seqlens_src.diff().tolist()
    memory = decoder.encode(*add_flat_prompt(model, ids, lengths))
    targets = pad(batch, pad_id=decoder.config.pad_token_id).labels
    given = score_given(decoder, memory, targets, decoding, rules)
    scored = list(zip(rows, _split_by_row(given, len(rows)), strict=True))
    found: list[GeneratedAnswer] = []
    if not decoding.label_ids and decoding.num_beams == 1:
        uniforms = None
        if decoding.sampling:
            inputs = [store.inputs[row] for row in rows or [0]]
            table = draw_uniforms(decoding.sampling.seed, inputs, decoding.num_candidates, decoding.max_new_tokens)
            uniforms = torch.from_numpy(table)
        # The answers that end here may belong to rows of earlier rounds.
        search.fill_slots(memory, scored, uniforms)
        for (row, scores), hypotheses in search.write_answers(together, has_more=has_more):
            found.append(_build_answer(row, hypotheses, scores, decoding))
        return found
    if decoding.label_ids:
        answers = _choose_labels(given["label_logprobs"], decoding)
    else:
        answers = run_beam_search(decoder, memory, decoding, rules, together)
    # A rank without rows drops the answer to the row that it repeats.
    for (row, scores), hypotheses in zip(scored, answers, strict=bool(rows)):
        found.append(_build_answer(row, hypotheses, scores, decoding))
    return found


def _choose_labels(label_logprobs: Tensor, decoding: Decoding) -> list[list[Hypothesis]]:
    """Choose the most probable label of every row."""
    chosen: list[list[Hypothesis]] = []
    logprobs, best = label_logprobs.max(1)
    for number, logprob in zip(best.tolist(), logprobs.tolist(), strict=True):
        ids = decoding.label_ids[number]
        chosen.append([Hypothesis(list(ids[:-1]), False, logprob, len(ids))])
    return chosen


def _split_by_row(scores: dict[str, Tensor], num_rows: int) -> list[dict[str, Any]]:
    """Split scores of [B, ...] by row; a rank without rows has scores of the row that it repeats."""
    rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for name, column in scores.items():
        for row, value in zip(rows, column.tolist(), strict=False):
            row[name] = value
    return rows


def _build_answer(
    row: int, hypotheses: list[Hypothesis], scores: dict[str, Any], decoding: Decoding
) -> GeneratedAnswer:
    best = hypotheses[0]
    if "label_logprobs" in scores:
        scores["label_logprobs"] = tuple(scores["label_logprobs"])
    if max(decoding.num_beams, decoding.num_candidates) > 1:
        scores["candidates"] = tuple((one.token_ids, one.logprob) for one in hypotheses)
    return GeneratedAnswer(row, best.token_ids, best.hit_cap, best.logprob, best.num_scored_tokens, **scores)
