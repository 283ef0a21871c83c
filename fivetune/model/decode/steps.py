"""The decoder of the T5 family with its caches: one step for all slots, or one pass over a tree of tokens.

In: a model and flat inputs. Out: hidden states and logits. Slots hold unfinished answers, which may have begun at
different steps: every step writes one column of the self-attention cache, and a slot sees the columns since its begin.

    column   0 1 2 3     slot 0, begun in column 0, sees all columns
    slot 0   a b c d     slot 1 got a new answer in column 2: it sees two
    slot 1   x y p q

The bias depends on how many columns back a key is, which is the same for all slots. Finished slots are filled again,
or removed: the last ones move into their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.distributed.pipeline import find_bias_block, find_stage
from fivetune.distributed.sharding import call_gathered, get_local, is_gathered_by_call
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.decode.encoder import CPU_TOKENS, EncodedInputs, encode_inputs
from fivetune.model.decode.weights import BlockWeights, Projection, apply_projection, merge_projections
from fivetune.model.family import compute_output_scale, is_gated
from fivetune.model.layers import compute_activation, compute_gated, is_plain_linear, rms_norm
from fivetune.model.precision import get_matmul_dtype, suppress_autocast

if TYPE_CHECKING:
    from fivetune.model.modules import T5Block, T5Model, T5Norm, T5Stack

FIRST_STEPS = 16  # initial capacity of the self-attention cache, which doubles when more than half is in use
MIN_EXCESS = 9 / 8  # length of the slots' memory, in that of the longest input, from which it is cut
NUM_RECOMPUTED = 8  # least number of best tokens whose logits are computed in fp32

KeysValues = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Rank = Callable[[Tensor], Tensor]
"""The scores by which search chooses, from logits [..., V], which may be overwritten."""


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
    """The decoder of a model with its caches.

    Args:
        model: T5, mT5 or umT5 model of transformers, in eval mode.
        num_beams: K, running hypotheses per example.
        max_steps: longest decoder input, in tokens.
        together: the ranks that must run the same number of passes and steps.
    """

    can_refill = True

    def __init__(self, model: T5Model, *, num_beams: int, max_steps: int, together: World = SINGLE_PROCESS) -> None:
        self.config = model.config
        stage = self._stage = find_stage(model)
        self.device: torch.device = stage.device if stage else model.decoder.embed_tokens.weight.device
        self._model, self._stack = model, model.decoder
        self._num_beams = num_beams
        self._together = together
        self._scale = compute_output_scale(model.config)
        numbers = stage.decoder if stage else range(len(model.decoder.block))
        self._blocks = [model.decoder.block[number] for number in numbers]
        self._weights = [None if is_gathered_by_call(block) else BlockWeights.read(block) for block in self._blocks]
        is_kept = not is_gathered_by_call(model) and (stage is None or stage.is_last)
        self._head: Projection | None = merge_projections(model.lm_head) if is_kept else None
        self._tables, self._table_of = _compute_bias_tables(model.decoder, numbers, max_steps, self.device)
        self._memory = torch.empty(0)  # [B, S, d]
        self._lengths: list[int] = []
        self._mask: Tensor | None = None
        self._own: list[tuple[Tensor, Tensor]] = []  # per layer [B, h, columns * K, d_kv]
        self._column = 0

    # --- slots ---

    def encode(self, ids: Tensor, lengths: list[int]) -> EncodedInputs:
        """Encode flat inputs ([N]; B lengths)."""
        max_tokens = CPU_TOKENS if self.device.type == "cpu" and self._together.size == 1 else None
        width = self.config.d_model
        return encode_inputs(self._model.encoder, ids, lengths, width, self._stage, max_tokens=max_tokens)

    def start(self, memory: EncodedInputs) -> None:
        """Let the slots be the rows of `memory`, all at their begin."""
        self._memory, self._lengths = memory.states, list(memory.lengths)
        self._own, self._column = [], 0
        self._mask = _build_bias(memory)

    def fill_slots(self, slots: Sequence[int], memory: EncodedInputs) -> None:
        """Put the rows of `memory`, none longer than the first ones, into slots that have finished."""
        for slot, length in zip(slots, memory.lengths, strict=True):
            self._lengths[slot] = length
        self._memory[list(slots), : memory.states.shape[1]] = memory.states
        longest = max(self._lengths)
        if longest * MIN_EXCESS <= self._memory.shape[1]:
            self._memory = self._memory[:, :longest].contiguous()  # products of a part copy it in every layer
        self._mask = _build_bias(EncodedInputs(self._memory, self._lengths))

    def drop_finished(self, move: RowCompactor) -> None:
        """Remove finished slots."""
        self._memory = move(self._memory)
        self._lengths = move(torch.tensor(self._lengths, device=self.device)).tolist()
        self._own = [(move(keys), move(values)) for keys, values in self._own]
        self._mask = None if self._mask is None else move(self._mask)

    def find_most_urgent(self, need: int) -> int:
        """The greatest need of a rank; a rank without rows takes part in the steps of the others."""
        return self._together.all_reduce_max(need)

    # --- the decoder ---

    def step(self, ids: Tensor, ages: Sequence[int], places: Tensor | None = None) -> Tensor:
        """Run the decoder for one more token of every hypothesis.

        Args:
            ids: [B, K], the last tokens.
            ages: [B], steps since the begin of each slot.
            places: [B, K, t], cache place (0 to K - 1) of each hypothesis in every step so far, this one included;
                None with one beam.

        Returns: hidden states [B, K, d_model].
        """
        longest, beams = max(ages), self._num_beams
        self._make_room(len(ids), longest)
        first, last = (self._column - longest) * beams, self._column * beams
        hidden = None
        if min(ages) < longest:
            back = torch.arange(longest, -1, -1, device=self.device)
            hidden = (back > torch.tensor(ages, device=self.device)[:, None])[:, None, None]
        biases = [_build_history_bias(table[..., -1 - longest :], hidden, places, beams) for table in self._tables]

        def append_and_read(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self._own[layer]
            keys[:, :, last : last + beams], values[:, :, last : last + beams] = key, value
            return keys[:, :, first : last + beams], values[:, :, first : last + beams]

        self._column += 1
        return self._run_stack(ids, biases, append_and_read, self._memory, self._mask)

    def run_tree(self, memory: EncodedInputs, ids: Tensor, depth: Tensor, visible: Tensor) -> Tensor:
        """Compute the hidden states of tokens that form the same tree in every row; nothing is cached.

        Args:
            memory: B encoded inputs.
            ids: [B, N].
            depth: [N], steps from the start token.
            visible: [N, N] bool, attention mask: a node attends to itself and its ancestors.

        Returns: [B, N, d_model].
        """
        back = (depth[:, None] - depth).clamp_min(0)
        biases = [table[:, :, 0, -1 - back].masked_fill(~visible, -torch.inf) for table in self._tables]
        return self._run_stack(ids, biases, lambda layer, key, value: (key, value), memory.states, _build_bias(memory))

    def compute_logits(self, hidden: Tensor, rank: Rank) -> Tensor:
        """Scores of all tokens, [..., V] fp32, before `rank`; those of the last pipeline stage on all of them.

        After products in 16 bits, the tokens that `rank` puts first are computed again in fp32.
        """
        head = self._model.lm_head
        if self._stage and not self._stage.is_last:
            logits = torch.empty(*hidden.shape[:-1], len(head.weight), device=self.device)
        else:
            logits = apply_projection(hidden, (head,) if self._head is None else self._head)
            if logits.dtype != torch.float32:
                logits = self._recompute_best(logits, hidden, rank)
        return self._stage.broadcast_last(logits) if self._stage else logits

    def _recompute_best(self, logits: Tensor, hidden: Tensor, rank: Rank) -> Tensor:
        """The logits in fp32, the best ones computed again: products in bf16 have 8 bits, in which they tie.

        The best are all that search may choose: it takes two tokens per beam, and none that a rule forbids.
        """
        exact, head = logits.float(), self._model.lm_head
        if is_plain_linear(head):
            number = min(max(NUM_RECOMPUTED, 2 * self._num_beams), logits.shape[-1])
            best = rank(exact.clone()).topk(number).indices
            with suppress_autocast(logits.device):
                found = torch.einsum("...kd,...d->...k", get_local(head.weight)[best].float(), hidden.float())
            exact.scatter_(-1, best, found)
        return exact

    def _run_stack(
        self, ids: Tensor, biases: list[Tensor], keys_values: KeysValues, memory: Tensor, mask: Tensor | None
    ) -> Tensor:
        stage, shape = self._stage, (*ids.shape, self.config.d_model)
        if stage and not self._blocks:  # the head of the last stage alone reads the result
            return torch.empty(shape, device=self.device)
        if stage and not stage.starts_decoder:
            (hidden,) = stage.receive(shape)
        else:
            hidden = self._stack.embed_tokens(ids).float()  # gathered weights may be in bf16
        kind = get_matmul_dtype(self.device)
        biases = [bias.to(kind) for bias in biases]
        for i, block in enumerate(self._blocks):
            bias = biases[self._table_of[i]]
            hidden = call_gathered(block, self._run_block, hidden, i, bias, keys_values, memory, mask)
        if stage and not stage.is_last:
            stage.send(hidden)
            return hidden
        with suppress_autocast(self.device):
            return _normalize(self._stack.final_layer_norm, hidden) * self._scale

    def _run_block(
        self,
        block: T5Block,
        hidden: Tensor,
        number: int,
        bias: Tensor,
        keys_values: KeysValues,
        memory: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        weights = self._weights[number] or BlockWeights.read(block)
        own, cross, feed_forward = block.layer
        heads, size = own.SelfAttention.n_heads, own.SelfAttention.key_value_proj_dim
        merged = apply_projection(_normalize(own.layer_norm, hidden), weights.qkv)
        query, key, value = merged.unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)  # [B, h, n, d_kv] each
        key, value = keys_values(number, key, value)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        hidden = hidden + apply_projection(found.transpose(1, 2).flatten(2), weights.own_out)
        query = apply_projection(_normalize(cross.layer_norm, hidden), weights.queries)
        found = _attend_memory(query.unflatten(-1, (heads, size)), weights, memory, mask)
        hidden = hidden + apply_projection(found, weights.cross_out)
        inner = apply_projection(_normalize(feed_forward.layer_norm, hidden), weights.wide)
        act = self.config.dense_act_fn
        if is_gated(feed_forward.DenseReluDense):
            inner = compute_gated(inner, act)
        else:
            inner = inner.relu_() if act == "relu" else compute_activation(inner, act)
        return hidden + apply_projection(inner, weights.narrow)

    # --- memory ---

    def _make_room(self, rows: int, longest: int) -> None:
        """Make room for one more column: move those that are seen to the front if they are few, else grow."""
        beams = self._num_beams
        columns = self._own[0][0].shape[2] // beams if self._own else 0
        if self._column < columns or not self._blocks:
            return
        seen = slice((self._column - longest) * beams, self._column * beams)
        size = columns if 2 * longest < columns else max(2 * columns, FIRST_STEPS)
        attention = self._stack.block[0].layer[0].SelfAttention
        shape = (rows, attention.n_heads, size * beams, attention.key_value_proj_dim)
        grown = []
        for layer in range(len(self._blocks)):
            pair = (
                self._own[layer] if size == columns else (self._memory.new_empty(shape), self._memory.new_empty(shape))
            )
            for new, old in zip(pair, self._own[layer] if self._own else (), strict=False):
                new[:, :, : longest * beams] = old[:, :, seen]
            grown.append(pair)
        self._own, self._column = grown, longest


def _build_bias(memory: EncodedInputs) -> Tensor | None:
    """What is added to the products with a padded memory: -inf at padding, [B, 1, S]; None if nothing is padded."""
    if min(memory.lengths) == memory.states.shape[1]:
        return None
    zeros = torch.zeros(memory.states.shape[:2], dtype=memory.states.dtype, device=memory.states.device)
    return zeros.masked_fill_(~memory.build_mask(), -torch.inf)[:, None]


def _attend_memory(query: Tensor, weights: BlockWeights, memory: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-attention with the encoder's output as keys and values: query [B, n, h, d_kv] -> [B, n, h * d_kv]."""
    rows, nodes, heads, size = query.shape
    by_head = query.permute(2, 0, 1, 3).reshape(heads, rows * nodes, size)
    wide = torch.bmm(by_head, weights.keys).view(heads, rows, nodes, -1)
    wide = wide.permute(1, 2, 0, 3).reshape(rows, nodes * heads, -1)
    transposed = memory.transpose(1, 2)
    scores = torch.bmm(wide, transposed) if mask is None else torch.baddbmm(mask, wide, transposed)
    found = torch.bmm(torch.softmax(scores, -1, dtype=memory.dtype), memory).view(rows, nodes, heads, -1)
    found = found.permute(2, 0, 1, 3).reshape(heads, rows * nodes, -1)
    out = torch.bmm(found, weights.values.transpose(1, 2)).view(heads, rows, nodes, size)
    return out.permute(1, 2, 0, 3).reshape(rows, nodes, heads * size)


def _normalize(norm: T5Norm, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, norm.weight, norm.variance_epsilon, fused=True)


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


def _build_history_bias(row: Tensor, hidden: Tensor | None, places: Tensor | None, num_beams: int) -> Tensor:
    """The bias of a step, [1 or B, h, 1, t], -inf where `hidden`; with beams [B, h, K, t * K], -inf at cached keys of
    other hypotheses."""
    if places is None:
        return row if hidden is None else row.masked_fill(hidden, -torch.inf)
    mine = places[..., None] == torch.arange(num_beams, device=places.device)
    return torch.where(mine.flatten(2)[:, None], row.repeat_interleave(num_beams, -1), -torch.inf)
