"""The decoder of the T5 family with its caches: one step for all rows, or one pass over a tree of tokens.

In: a model and flat inputs. Out: hidden states and logits. Cross-attention keys and values are computed once per
batch; the beams of an example share them. Finished rows are removed: the last rows move into their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.decode.encoder import CPU_TOKENS, encode_flat, iter_equal_runs, iter_row_slices
from fivetune.distributed.pipeline import find_bias_block, find_stage
from fivetune.distributed.sharding import call_gathered
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.family import compute_output_scale

if TYPE_CHECKING:
    from fivetune.model.modules import T5Attention, T5Block, T5Model, T5Stack

FIRST_STEPS = 16  # initial capacity of the self-attention cache, which doubles when it is full

KeysValues = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class RowCompactor:
    """Removes finished rows: the last remaining rows fill their places, which copies few rows.

    >>> move = RowCompactor(torch.tensor([False, True, True]))
    >>> move.count, move(torch.tensor([7, 8, 9])).tolist()
    (2, [9, 8])
    """

    def __init__(self, stays: Tensor) -> None:
        self.count = int(stays.sum())
        self._to = (~stays[: self.count]).nonzero().flatten()
        self._source = stays[self.count :].nonzero().flatten() + self.count

    def __call__(self, state: Tensor) -> Tensor:
        """The remaining rows of `state`, moved in place."""
        state[self._to] = state[self._source]
        return state[: self.count]


class Decoder:
    """The decoder of a model with its caches, which successive batches reuse.

    Args:
        model: T5, mT5 or umT5 model of transformers, in eval mode.
        num_beams: K, running hypotheses per example.
        max_steps: longest decoder input, in tokens.
        together: the ranks that must run the same number of passes and steps.
    """

    def __init__(self, model: T5Model, *, num_beams: int, max_steps: int, together: World = SINGLE_PROCESS) -> None:
        self.config = model.config
        stage = self._stage = find_stage(model)
        self.device: torch.device = stage.device if stage else model.decoder.embed_tokens.weight.device
        self.num_steps = 0
        self._model, self._stack = model, model.decoder
        self._num_beams = num_beams
        self._together = together
        self._scale = compute_output_scale(model.config)
        numbers = stage.decoder if stage else range(len(model.decoder.block))
        self._blocks = [model.decoder.block[number] for number in numbers]
        self._tables, self._table_of = _compute_bias_tables(model.decoder, numbers, max_steps, self.device)
        self._cross: list[tuple[Tensor, Tensor]] = []  # per layer [B, h, S, d_kv]
        self._own: list[tuple[Tensor, Tensor]] = []  # per layer [B, h, steps * K, d_kv]
        self._room: list[tuple[Tensor, Tensor]] = []  # flat memory of _cross: the first batch needs the most
        self._visible: Tensor | None = None  # [B, 1, 1, S]: mask of real source tokens

    # --- a batch ---

    def start_batch(self, ids: Tensor, lengths: Sequence[int]) -> None:
        """Encode flat inputs ([N]; B lengths, equal ones adjacent) and compute cross-attention's keys and values."""
        self.num_steps = 0
        self._allocate_caches(len(lengths), max(lengths))
        tokens = torch.tensor(lengths, device=self.device)
        positions = torch.arange(max(lengths), device=self.device)
        ragged = min(lengths) < max(lengths)
        self._visible = (positions < tokens[:, None])[:, None, None] if ragged else None
        begin = 0
        max_tokens = CPU_TOKENS if self.device.type == "cpu" and self._together.size == 1 else None
        for first, end in iter_row_slices(lengths, max_tokens):
            size = sum(lengths[first:end])
            encoded = encode_flat(self._model.encoder, ids[begin : begin + size], lengths[first:end], self._stage)
            for (keys, values), block in zip(self._cross, self._blocks, strict=True):
                rows = keys[first:end], values[first:end]
                call_gathered(block, _fill_cross_cache, encoded, *rows, lengths[first:end])
            begin += size

    def is_finished(self, num_rows: int) -> bool:
        """Whether no rank has unfinished rows; a rank without any takes part in the steps of the others."""
        return not self._together.all_reduce_max(num_rows)

    def drop_finished(self, move: RowCompactor) -> None:
        """Remove finished rows from the batch."""
        self._cross = [(move(keys), move(values)) for keys, values in self._cross]
        self._own = [(move(keys), move(values)) for keys, values in self._own]
        self._visible = None if self._visible is None else move(self._visible)

    # --- the decoder ---

    def step(self, ids: Tensor, slots: Tensor | None = None) -> Tensor:
        """Run the decoder for one more token of every hypothesis.

        Args:
            ids: [B, K], the last tokens.
            slots: [B, K, t], cache slot (0 to K - 1) of each hypothesis in every step so far, this one included;
                None with one beam.

        Returns: hidden states [B, K, d_model].
        """
        step, beams = self.num_steps, self._num_beams
        self._extend_caches()
        biases = [_build_history_bias(table[..., table.shape[-1] - 1 - step :], slots, beams) for table in self._tables]

        def append_and_read(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self._append(layer, key, value, step * beams)
            return keys[:, :, : (step + 1) * beams], values[:, :, : (step + 1) * beams]

        self.num_steps += 1
        return self._run_stack(ids, biases, append_and_read)

    def run_tree(self, ids: Tensor, depth: Tensor, visible: Tensor) -> Tensor:
        """Compute the hidden states of tokens that form the same tree in every row; nothing is cached.

        Args:
            ids: [B, N].
            depth: [N], steps from the start token.
            visible: [N, N] bool, attention mask: a node attends to itself and its ancestors.

        Returns: [B, N, d_model].
        """
        distance = (depth[:, None] - depth).clamp_min(0)
        biases = [
            table[:, :, 0, table.shape[-1] - 1 - distance].masked_fill(~visible, -torch.inf) for table in self._tables
        ]
        return self._run_stack(ids, biases, lambda layer, key, value: (key, value))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens, [..., V] fp32; those of the last pipeline stage on all of them."""
        head = self._model.lm_head
        if self._stage is None:
            return head(hidden).float()
        shape = (*hidden.shape[:-1], len(head.weight))
        last = self._stage.is_last
        return self._stage.broadcast_last(head(hidden).float() if last else torch.empty(shape, device=self.device))

    def _run_stack(self, ids: Tensor, biases: list[Tensor], keys_values: KeysValues) -> Tensor:
        stage, shape = self._stage, (*ids.shape, self._stack.embed_tokens.embedding_dim)
        if stage and not self._blocks:  # the head of the last stage alone reads the result
            return torch.empty(shape, device=self.device)
        if stage and not stage.starts_decoder:
            (hidden,) = stage.receive(shape)
        else:
            hidden = self._stack.embed_tokens(ids).float()  # gathered weights may be in bf16
        for i, block in enumerate(self._blocks):
            hidden = call_gathered(block, self._run_block, hidden, i, biases[self._table_of[i]], keys_values)
        if stage and not stage.is_last:
            stage.send(hidden)
            return hidden
        return self._stack.final_layer_norm(hidden) * self._scale

    def _run_block(self, block: T5Block, hidden: Tensor, number: int, bias: Tensor, keys_values: KeysValues) -> Tensor:
        own, across, feed_forward = block.layer
        normed, attention = own.layer_norm(hidden), own.SelfAttention
        key, value = (_split_heads(attention, project(normed)) for project in (attention.k, attention.v))
        hidden = hidden + _attend(attention, normed, *keys_values(number, key, value), bias)
        normed = across.layer_norm(hidden)
        hidden = hidden + _attend(across.EncDecAttention, normed, *self._cross[number], self._visible)
        return feed_forward(hidden)

    # --- memory ---

    def _allocate_caches(self, rows: int, length: int) -> None:
        """Allocate the keys and values of `rows` inputs of `length` tokens, reusing the previous batch's memory."""
        attention = self._stack.block[0].layer[1].EncDecAttention
        shape = (rows, attention.n_heads, length, attention.key_value_proj_dim)
        size = rows * attention.n_heads * length * attention.key_value_proj_dim
        if not self._room or self._room[0][0].numel() < size:
            weight = self._stack.embed_tokens.weight
            kind = self.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
            options = {"dtype": dtype, "device": self.device}
            self._room = [_allocate_pair(weight.new_empty, size, **options) for _ in self._blocks]
        self._cross = [(keys[:size].view(shape), values[:size].view(shape)) for keys, values in self._room]
        self._own = []

    def _extend_caches(self) -> None:
        """Grow the self-attention cache if it has no room for one more step."""
        needed = (self.num_steps + 1) * self._num_beams
        if self._own and self._own[0][0].shape[2] >= needed:
            return
        grown = []
        for layer, (cross, _) in enumerate(self._cross):
            rows, heads, _, width = cross.shape
            old = self._own[layer] if self._own else ()
            steps = old[0].shape[2] * 2 if old else FIRST_STEPS * self._num_beams
            pair = _allocate_pair(cross.new_empty, rows, heads, steps, width)
            for new, filled in zip(pair, old, strict=False):
                new[:, :, : filled.shape[2]] = filled
            grown.append(pair)
        self._own = grown

    def _append(self, layer: int, key: Tensor, value: Tensor, at: int) -> tuple[Tensor, Tensor]:
        keys, values = self._own[layer]
        keys[:, :, at : at + key.shape[2]] = key
        values[:, :, at : at + value.shape[2]] = value
        return keys, values


def _compute_bias_tables(
    stack: T5Stack, numbers: range, max_steps: int, device: torch.device
) -> tuple[list[Tensor], list[int]]:
    """Biases of the last of `max_steps` queries, [1, h, 1, max_steps]: entry -1-n belongs to a key n steps back.

    Also the index of the table of each of the blocks `numbers`: T5 and mT5 have one table for all layers, umT5 one per
    layer.
    """
    owners = [find_bias_block(stack, number) for number in numbers]
    different = sorted(set(owners))
    attentions = (stack.block[number].layer[0].SelfAttention for number in different)
    options = {"device": device, "past_seen_tokens": max_steps - 1}
    tables = [attention.compute_bias(1, max_steps, **options) for attention in attentions]
    return tables, [different.index(owner) for owner in owners]


def _build_history_bias(row: Tensor, slots: Tensor | None, num_beams: int) -> Tensor:
    """The bias of a step, [1, h, 1, t]; with beams [B, h, K, t * K], -inf at cached keys of other hypotheses."""
    if slots is None:
        return row
    mine = slots[..., None] == torch.arange(num_beams, device=slots.device)
    return torch.where(mine.flatten(2)[:, None], row.repeat_interleave(num_beams, -1), -torch.inf)


def _fill_cross_cache(block: T5Block, encoded: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> None:
    attention = block.layer[1].EncDecAttention
    _scatter_rows(attention.k(encoded), keys, lengths)
    _scatter_rows(attention.v(encoded), values, lengths)


def _attend(attention: T5Attention, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    query = _split_heads(attention, attention.q(hidden))
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
    return attention.o(mixed.transpose(1, 2).flatten(2))


def _split_heads(attention: T5Attention, projected: Tensor) -> Tensor:
    """[B, Q, h * d_kv] to [B, h, Q, d_kv]."""
    return projected.unflatten(-1, (attention.n_heads, attention.key_value_proj_dim)).transpose(1, 2)


def _scatter_rows(flat: Tensor, rows: Tensor, lengths: Sequence[int]) -> None:
    """Write projected flat tokens, [N, h * d_kv], into rows padded with 0, [B, h, S, d_kv]."""
    _, heads, _, width = rows.shape
    begin = 0
    for first, count, length in iter_equal_runs(lengths):
        end = begin + count * length
        part = flat[begin:end].view(count, length, heads, width)
        rows[first : first + count, :, :length] = part.transpose(1, 2)
        rows[first : first + count, :, length:] = 0.0
        begin = end


def _allocate_pair(
    make: Callable[..., Tensor], *size: int, **options: torch.device | torch.dtype
) -> tuple[Tensor, Tensor]:
    return make(*size, **options), make(*size, **options)
