"""Text generation: greedy, with the KV cache, on length-sorted batches, with scores of fixed answers.

In: a model and the encoded inputs of a store. Out: one Generated per example, in length order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivetune.data.batch import PaddedBatch, collate, pad
from fivetune.data.store import TokenStore
from fivetune.model.forward import label_nats


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model wrote for one example.

    Args:
        row: of the store.
        token_ids: up to and without the end token.
        hit_cap: the length limit came before the end token.
        target_nats: -log p of the example's own target, summed over its tokens, teacher-forced.
        phrase_nats: -log p of `phrase` (the no-answer text), or None.
    """

    row: int
    token_ids: list[int]
    hit_cap: bool
    target_nats: float
    phrase_nats: float | None


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to generate: cap in tokens (end token included), ids never to write, examples per batch."""

    max_new_tokens: int
    suppressed_ids: tuple[int, ...] = ()
    batch_size: int = 64
    phrase_ids: tuple[int, ...] = ()


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
    """Greedy generation for `rows` of a store, streaming. The encoder runs once per batch.

    Args:
        autocast: function that gives a fresh autocast context.
    """
    was_training = model.training
    model.eval()
    try:
        lengths = store.inputs.lengths[np.asarray(rows, dtype=np.int64)]
        for positions in length_sorted(lengths, decoding.batch_size):
            chosen = [rows[p] for p in positions]
            batch = pad(collate(store, chosen), pad_id=model.config.pad_token_id).to(device)
            with autocast():
                generated = _generate_batch(model, batch, chosen, decoding)
            yield from generated  # outside: autocast would hold for the caller too
    finally:
        model.train(was_training)


def _generate_batch(model: Any, batch: PaddedBatch, rows: list[int], decoding: Decoding) -> list[Generated]:
    encoded = model.get_encoder()(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    written = model.generate(
        encoder_outputs=encoded,
        attention_mask=batch.attention_mask,
        max_new_tokens=decoding.max_new_tokens,
        num_beams=1,
        do_sample=False,
        use_cache=True,
        suppress_tokens=list(decoding.suppressed_ids) or None,
    )[:, 1:]
    target = label_nats(model, batch, encoder_outputs=encoded).sum(1)
    phrase = _phrase_nats(model, batch, encoded, decoding.phrase_ids) if decoding.phrase_ids else None
    eos = model.config.eos_token_id
    generated = []
    for i, row in enumerate(rows):
        ids, ended = _until_end(written[i].tolist(), eos)
        nats = None if phrase is None else phrase[i].item()
        generated.append(Generated(row, ids, not ended, target[i].item(), nats))
    return generated


def _phrase_nats(model: Any, batch: PaddedBatch, encoded: Any, phrase_ids: Sequence[int]) -> Tensor:
    labels = torch.tensor(phrase_ids, device=batch.labels.device).expand(batch.labels.shape[0], -1)
    return label_nats(model, PaddedBatch(batch.input_ids, batch.attention_mask, labels), encoder_outputs=encoded).sum(1)


def _until_end(ids: list[int], eos: int) -> tuple[list[int], bool]:
    """Ids before the end token, and whether it came.

    >>> _until_end([7, 8, 1, 0], 1), _until_end([7, 8], 1)
    (([7, 8], True), ([7, 8], False))
    """
    return (ids[: ids.index(eos)], True) if eos in ids else (ids, False)


def to_text(tokenizer: Any, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Generated ids as text; sentinels are dropped unless `keep_special`."""
    return tokenizer.decode(list(ids), skip_special_tokens=not keep_special).strip()
