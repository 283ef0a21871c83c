"""Greedy search and label scoring as one program of static shape, for devices whose computations are compiled whole.

In: a batch as rectangles of jax arrays and the parts of a model. Out: ids and scores per row, no logits. The decoder is
computed for all positions at every step of the search, because a cache would change its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fivetune.data.store.batch import IGNORE_INDEX
from fivetune.model.decode.records import Decoding, GeneratedAnswer

Array = Any
"""A jax array: jax is an optional dependency."""


@dataclass(frozen=True, slots=True)
class TracedDecoder:
    """A decoder with the settings of its search.

    Args:
        decode: hidden states [B, T, d] of decoder inputs [B, T].
        compute_logits: scores [B, T, V] of hidden states.
        start_id, pad_id, end_id: special tokens.
    """

    decoding: Decoding
    decode: Callable[[Array], Array]
    compute_logits: Callable[[Array], Array]
    start_id: int
    pad_id: int
    end_id: int

    def answer(self, targets: Array) -> dict[str, Array]:
        """Compute the fields of GeneratedAnswer for targets [B, T], negative after their ends: [B] or [B, n] each."""
        found: dict[str, Array] = {}
        if self.decoding.score_targets:
            found["target_loss"], found["target_correct"] = self.score(targets)
        sequences = list(self.decoding.label_ids)
        if self.decoding.phrase_ids:
            sequences.insert(0, self.decoding.phrase_ids)
        if sequences:
            table = np.full((len(sequences), max(map(len, sequences))), IGNORE_INDEX, np.int32)
            for row, ids in zip(table, sequences, strict=True):
                row[: len(ids)] = ids
            shape = (len(targets), table.shape[1])
            # One sequence at a time: the logits of all of them at once would take the memory of as many batches.
            losses, correct = jax.lax.map(lambda ids: self.score(jnp.broadcast_to(ids, shape)), jnp.asarray(table))
            if self.decoding.phrase_ids:
                found["phrase_loss"] = losses[0]
                losses = losses[1:]
                correct = correct[1:]
        if self.decoding.label_ids:
            return {**found, "label_logprobs": -losses.T, "best": losses.argmin(0), "left_label_set": ~correct.any(0)}
        return {**found, **self.search(len(targets))}

    def score(self, labels: Array) -> tuple[Array, Array]:
        """Compute -log p of labels [B, T], and whether greedy search would choose every one of them: [B], [B]."""
        is_padding = labels < 0
        start = jnp.full_like(labels[:, :1], self.start_id)
        inputs = jnp.concatenate([start, jnp.where(is_padding, self.pad_id, labels)[:, :-1]], 1)
        logits = self.compute_logits(self.decode(inputs))
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], 2)[..., 0]
        is_best = self._suppress(logits).argmax(-1) == labels
        return -jnp.where(is_padding, 0, logprobs).sum(1), (is_padding | is_best).all(1)

    def search(self, num_rows: int) -> dict[str, Array]:
        """Write the most probable token at every step until all rows have ended."""
        cap = self.decoding.max_new_tokens
        end = self.end_id

        def is_unfinished(state: tuple[Array, ...]) -> Array:
            step, _, _, alive = state
            return (step < cap) & alive.any()

        def write_token(state: tuple[Array, ...]) -> tuple[Array, ...]:
            step, written, logprob, alive = state
            # All positions are decoded; the causal mask hides those that are not written yet.
            hidden = jax.lax.dynamic_slice_in_dim(self.decode(written[:, :-1]), step, 1, 1)
            scores = self.compute_logits(hidden)[:, 0]
            early = step < self.decoding.min_new_tokens
            scores = self._suppress(jnp.where(early, scores.at[:, end].set(-jnp.inf), scores))
            # A row that has ended writes end tokens, which add nothing to its log p.
            ids = jnp.where(alive, scores.argmax(-1), end).astype(written.dtype)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), ids[:, None], 1)[:, 0]
            written = jax.lax.dynamic_update_slice_in_dim(written, ids[:, None], step + 1, 1)
            return step + 1, written, logprob + jnp.where(alive, chosen, 0), alive & (ids != end)

        written = jnp.full((num_rows, cap + 1), end, jnp.int32).at[:, 0].set(self.start_id)
        state = (0, written, jnp.zeros(num_rows), jnp.ones(num_rows, bool))
        _, written, logprob, alive = jax.lax.while_loop(is_unfinished, write_token, state)
        return {"ids": written[:, 1:], "logprob": logprob, "hit_cap": alive}

    def _suppress(self, scores: Array) -> Array:
        if not self.decoding.suppressed_ids:
            return scores
        ids = np.array(self.decoding.suppressed_ids, np.int32)
        return scores.at[..., ids].set(-jnp.inf)


def build_traced_answer(row: int, found: dict[str, Any], decoding: Decoding, end_id: int) -> GeneratedAnswer:
    """Build the answer of one row from its values of `TracedDecoder.answer`."""
    scores = {name: found[name] for name in ("target_loss", "target_correct", "phrase_loss") if name in found}
    if "best" in found:
        ids = decoding.label_ids[found["best"]]
        logprobs = tuple(found["label_logprobs"])
        scores |= {"label_logprobs": logprobs, "left_label_set": found["left_label_set"]}
        return GeneratedAnswer(row, list(ids[:-1]), False, logprobs[found["best"]], len(ids), **scores)
    ids = found["ids"]
    end = ids.index(end_id) if end_id in ids else len(ids)
    return GeneratedAnswer(row, ids[:end], found["hit_cap"], found["logprob"], min(end + 1, len(ids)), **scores)
