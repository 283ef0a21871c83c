"""Answers of a model: generated greedily or by beams, or chosen from a label set, with scores of fixed sequences.

In: a model and the encoded inputs of a store. Out: one Generated per example, in length order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fivetune.data.batch import collate, pad
from fivetune.data.store import TokenStore
from fivetune.decode.beam import beam_search
from fivetune.decode.greedy import greedy
from fivetune.decode.labels import Given, score_given
from fivetune.decode.records import Decoding, Generated, Written
from fivetune.decode.rules import Rules
from fivetune.decode.steps import Decoder
from fivetune.types import Batch

__all__ = ["Decoding", "Generated", "cap_from_lengths", "generate", "length_sorted", "to_text"]


def cap_from_lengths(target_p99: int) -> int:
    """Generation cap from the 99th percentile of the target lengths: a quarter and four tokens of margin.

    >>> cap_from_lengths(12)
    19
    """
    return target_p99 + -(-target_p99 // 4) + 4


def length_sorted(lengths: Sequence[int] | np.ndarray, batch_size: int) -> list[list[int]]:
    """Positions in batches of like lengths, the longest first, so that memory trouble shows at once.

    >>> length_sorted([3, 9, 5], 2)
    [[1, 2], [0]]
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


@torch.no_grad()
def generate(
    model: Any, store: TokenStore, rows: Sequence[int], decoding: Decoding, *, device: str, autocast: Any
) -> Iterator[Generated]:
    """Answers for `rows` of a store, streaming. The encoder runs once per example.

    Args:
        autocast: function that gives a fresh autocast context.
    """
    was_training = model.training
    model.eval()
    try:
        chosen = np.asarray(rows, dtype=np.int64)
        lengths = store.inputs.lengths[chosen]
        if not len(lengths):
            return
        rules = Rules(decoding, model.config.eos_token_id, device)
        decoder = Decoder(model, num_beams=decoding.num_beams, max_steps=_longest(store, chosen, decoding))
        for positions in length_sorted(lengths, decoding.batch_size):
            batch_rows = chosen[positions].tolist()
            with autocast():
                generated = _answer(decoder, collate(store, batch_rows), batch_rows, decoding, rules)
            yield from generated  # outside: autocast would hold for the caller too
    finally:
        model.train(was_training)


def _longest(store: TokenStore, rows: np.ndarray, decoding: Decoding) -> int:
    """Most decoder inputs of a row."""
    fixed = max(len(ids) for ids in (decoding.phrase_ids, *decoding.label_ids))
    targets = int(store.labels.lengths[rows].max()) if decoding.score_targets else 0
    return max(decoding.max_new_tokens, fixed, targets)


def _answer(decoder: Decoder, batch: Batch, rows: list[int], decoding: Decoding, rules: Rules) -> list[Generated]:
    decoder.start(batch.input_ids.to(decoder.device), batch.cu_seqlens_src.diff().tolist())
    targets = pad(batch, pad_id=decoder.config.pad_token_id).labels
    given = score_given(decoder, targets, decoding, rules)
    if decoding.label_ids:
        hypotheses = _choose_labels(given, decoding)
    elif decoding.num_beams > 1:
        hypotheses = beam_search(decoder, len(rows), decoding, rules)
    else:
        hypotheses = [[one] for one in greedy(decoder, len(rows), decoding, rules)]
    scores = _by_row(given, len(rows))
    return [_generated(*found, decoding) for found in zip(rows, hypotheses, scores, strict=True)]


def _choose_labels(given: Given, decoding: Decoding) -> list[list[Written]]:
    """The likeliest label of every row."""
    assert given.label_logprobs is not None
    logprobs, best = given.label_logprobs.max(1)
    chosen = [decoding.label_ids[i] for i in best.tolist()]
    return [[Written(list(ids[:-1]), False, p, len(ids))] for ids, p in zip(chosen, logprobs.tolist(), strict=True)]


def _by_row(given: Given, num_rows: int) -> list[dict[str, Any]]:
    """The fields of Generated that `given` knows, for each row."""
    columns = {name: value.tolist() for name in Given.__slots__ if (value := getattr(given, name)) is not None}
    return [{name: column[i] for name, column in columns.items()} for i in range(num_rows)]


def _generated(row: int, hypotheses: list[Written], scores: dict[str, Any], decoding: Decoding) -> Generated:
    best = hypotheses[0]
    if "label_logprobs" in scores:
        scores["label_logprobs"] = tuple(scores["label_logprobs"])
    return Generated(
        row=row,
        token_ids=best.token_ids,
        hit_cap=best.hit_cap,
        logprob=best.logprob,
        num_scored_tokens=best.num_scored_tokens,
        candidates=tuple((one.token_ids, one.logprob) for one in hypotheses) if decoding.num_beams > 1 else (),
        **scores,
    )


def to_text(tokenizer: Any, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Generated ids as text; sentinels are dropped unless `keep_special`."""
    return tokenizer.decode(list(ids), skip_special_tokens=not keep_special).strip()
