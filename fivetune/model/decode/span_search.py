"""Extractive answers: the best span of the context, or none.

In: a model with a span head and the encoded inputs of a store. Out: one SpanAnswer per example, in length order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fivetune.data.store.batch import collate, pad
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.sharding import is_gathered_by_call
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.decode import Decoding, group_by_length
from fivetune.model.modules import T5Model
from fivetune.model.precision import suppress_half
from fivetune.model.span_head import compute_span_logits
from fivetune.types import Autocast

NUM_ENDS = 20  # most probable first and last tokens that are combined (transformers' n_best_size)
MAX_SPAN_TOKENS = 60


@dataclass(frozen=True, slots=True)
class SpanAnswer:
    """The spans that the model predicts for one example.

    Args:
        row: row of the store.
        spans: (first position, last position, log p), best first; log p of both positions together, in nats.
        null_logprob: log p of position 0 as first and as last one, which represents no answer.
        target_loss: -log p of the first and of the last position of the gold answer, summed.
    """

    row: int
    spans: tuple[tuple[int, int, float], ...]
    null_logprob: float
    target_loss: float


@torch.no_grad()
def extract_spans(
    model: T5Model,
    store: TokenStore,
    rows: Sequence[int],
    decoding: Decoding,
    *,
    context_of: Callable[[int], range],
    device: str,
    autocast: Autocast,
    world: World = SINGLE_PROCESS,
) -> Iterator[SpanAnswer]:
    """Yield the `decoding.num_candidates` best spans for `rows` of a store, longest inputs first.

    Args:
        context_of: function that returns the positions of a row's inputs that belong to the context.
        world: see `generate`.
    """
    together = world if is_gathered_by_call(model) else SINGLE_PROCESS
    lengths = store.inputs.lengths[np.asarray(rows, dtype=np.int64)]
    was_training = model.training
    model.eval()
    try:
        for positions in together.iter_together(group_by_length(lengths, decoding.batch_size)):
            chosen = [0]  # a rank without rows takes part with the store's first one, unused
            if positions is not None:
                chosen = [rows[position] for position in positions]
            batch = pad(collate(store, chosen), pad_id=model.config.pad_token_id).to(device)
            with autocast(), suppress_half(torch.device(device)):
                logits = compute_span_logits(model, batch.input_ids, batch.attention_mask)
            if positions is None:
                continue
            logp = logits.float().log_softmax(1)
            gold = logp.gather(1, batch.labels[:, None, :].clamp(min=0)).squeeze(1)
            for row, one, nat in zip(chosen, logp.cpu(), (-gold.sum(1)).tolist(), strict=True):
                spans = find_best_spans(one, context_of(row), decoding.num_candidates)
                yield SpanAnswer(row, spans, float(one[0].sum()), nat)
    finally:
        model.train(was_training)


def find_best_spans(logp: Tensor, context: range, num: int) -> tuple[tuple[int, int, float], ...]:
    """Find the best spans of one input, each with its log p.

    log p = log p_first[i] + log p_last[j], i <= j < i + 60, both in the context

    Args:
        logp: [S, 2] log p of each position as the first one and as the last one.

    >>> find_best_spans(torch.tensor([[-4.0, -4.0], [-0.5, -4.0], [-4.0, -0.25]]), range(1, 3), 1)
    ((1, 2, -0.75),)
    """
    starts = logp[:, 0].numpy()
    ends = logp[:, 1].numpy()
    inside = np.array(context, dtype=np.int64)
    # All pairs of positions would be too many: the best of each are combined, as in transformers.
    best_starts = inside[np.argsort(-starts[inside])[:NUM_ENDS]]
    best_ends = inside[np.argsort(-ends[inside])[:NUM_ENDS]]
    found: list[tuple[int, int, float]] = []
    for i in best_starts.tolist():
        for j in best_ends.tolist():
            if i <= j < i + MAX_SPAN_TOKENS:
                found.append((i, j, float(starts[i] + ends[j])))
    return tuple(sorted(found, key=lambda span: -span[2])[:num])
