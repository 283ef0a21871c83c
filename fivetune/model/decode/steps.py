"""The decoder of the T5 family: one step for all slots of its cache, or one pass over a tree of tokens.

In: a model and flat inputs. Out: hidden states and logits. The bias of a step depends on how many columns of the cache
back a key is, which is the same for all slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.distributed.pipeline import find_bias_block, find_stage
from fivetune.distributed.sharding import call_gathered, get_local, is_gathered_by_call
from fivetune.model.decode.cache import KVCache, RootColumns, RowCompactor, StepCache
from fivetune.model.decode.encoder import EncodedInputs, encode_inputs
from fivetune.model.decode.weights import BlockWeights, Projection, apply_last, apply_projection, merge_projections
from fivetune.model.family import compute_output_scale, is_gated
from fivetune.model.layers import compute_activation, compute_gated, is_plain_linear, rms_norm
from fivetune.model.modules import T5Block, T5Model, T5Norm
from fivetune.model.precision import get_matmul_dtype, suppress_autocast

NUM_RECOMPUTED = 8  # least number of best tokens whose logits are computed in fp32

Rank = Callable[[Tensor], Tensor]
"""The scores by which search chooses, from logits [..., V], which may be overwritten."""


class Decoder:
    """The decoder of a model with its cache.

    Args:
        model: T5, mT5 or umT5 model of transformers, in eval mode.
        num_beams: K, running hypotheses per example.
        max_steps: longest decoder input, in tokens.
        max_tokens: tokens per pass of the encoder; None: one pass for all inputs.
    """

    can_refill = True

    def __init__(self, model: T5Model, *, num_beams: int, max_steps: int, max_tokens: int | None = None) -> None:
        self.config = model.config
        stage = self._stage = find_stage(model)
        self.device: torch.device = stage.device if stage else model.decoder.embed_tokens.weight.device
        self._model = model
        self._stack = model.decoder
        self._num_beams = num_beams
        self._max_tokens = max_tokens
        self._scale = compute_output_scale(model.config)
        numbers = stage.decoder if stage else range(len(model.decoder.block))
        self._blocks = [model.decoder.block[number] for number in numbers]
        # Weights are read once; None where a strategy gathers them for each computation.
        self._weights: list[BlockWeights | None] = []
        for block in self._blocks:
            self._weights.append(None if is_gathered_by_call(block) else BlockWeights.read(block))
        is_kept = not is_gathered_by_call(model) and (stage is None or stage.is_last)
        self._head: Projection | None = merge_projections(model.lm_head) if is_kept else None
        # T5 and mT5 have one table of biases for all layers, umT5 one per layer.
        self._owners = [find_bias_block(model.decoder, number) for number in numbers]
        self.tables: dict[int, Tensor] = {}
        for owner in set(self._owners):
            attention = model.decoder.block[owner].layer[0].SelfAttention
            table = attention.compute_bias(1, max_steps, device=self.device, past_seen_tokens=max_steps - 1)
            self.tables[owner] = table
        self._cache = KVCache(num_beams)
        # Ranks that gather weights together run every step: one of them may begin answers while others go on.
        self._keeps_root = num_beams == 1 and is_kept and stage is None and self.device.type == "cpu"
        # What the last pass over a tree says of the first step: its inputs, columns of the cache, hidden states.
        self._root: tuple[EncodedInputs, RootColumns, Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all products are plain ones, of weights that this process holds whole."""
        parts: list[object] = [self._head]
        for weights in self._weights:
            parts += [getattr(weights, field.name, None) for field in fields(BlockWeights)]
        return self._stage is None and all(isinstance(part, Tensor) for part in parts)

    @property
    def num_layers(self) -> int:
        return len(self._blocks)

    @property
    def head_shape(self) -> tuple[int, int]:
        """Number and size of the heads of plain blocks."""
        return self.config.num_heads, self.config.d_kv

    def encode(self, ids: Tensor, lengths: list[int]) -> EncodedInputs:
        """Encode flat inputs ([N]; B lengths)."""
        self._root = None  # whose inputs would stay in memory
        return encode_inputs(self._model, ids, lengths, max_tokens=self._max_tokens)

    def start(self, memory: EncodedInputs) -> None:
        """Let the slots be the rows of `memory`, all at their begin."""
        self._cache.start(memory)

    def fill_slots(self, slots: Sequence[int], memory: EncodedInputs) -> None:
        """Put the rows of `memory`, none longer than the first ones, into slots that have finished."""
        self._cache.fill_slots(slots, memory)

    def drop_finished(self, move: RowCompactor) -> None:
        """Remove finished slots."""
        self._cache.drop_finished(move)

    def step(self, ids: Tensor, ages: Sequence[int], places: Tensor | None = None) -> Tensor:
        """Run the decoder for one more token of every hypothesis.

        Args:
            ids: [B, K], the last tokens.
            ages: [B], steps since the begin of each slot.
            places: [B, K, t], cache place (0 to K - 1) of each hypothesis in every step so far, including this one;
                None with one beam.

        Returns: hidden states [B, K, d_model].
        """
        longest = max(ages)
        cache = self._cache
        cache.add_column(longest)
        if self._root and longest == 0 and self._root[0] is cache.inputs:
            _, root, hidden = self._root
            for layer, column in enumerate(root.columns):
                cache.append(layer, column)
            return hidden
        seen: Tensor | None = None  # which cached keys a query sees; None: all
        if places is not None:  # [B, 1, K, t * K]: a hypothesis sees the places that it has written
            beams = torch.arange(self._num_beams, device=self.device)
            seen = (places[..., None] == beams).flatten(2)[:, None]
        elif min(ages) < longest:  # [B, 1, 1, t]: a younger slot does not see the columns before its begin
            back = torch.arange(longest, -1, -1, device=self.device)
            seen = (back <= torch.tensor(ages, device=self.device)[:, None])[:, None, None]
        biases: dict[int, Tensor] = {}
        for owner, table in self.tables.items():
            bias = table[..., -1 - longest :]
            if places is not None:  # the K keys of a column are equally far back
                bias = bias.repeat_interleave(self._num_beams, -1)
            biases[owner] = bias if seen is None else torch.where(seen, bias, -torch.inf)
        return self.run_stack(ids, biases, cache.inputs.states, cache.mask, cache)

    def run_tree(self, memory: EncodedInputs, ids: Tensor, depth: Tensor, visible: Tensor) -> Tensor:
        """Compute the hidden states of tokens that form the same tree in every row.

        With one beam and whole weights on a CPU, the first step of answers to the same inputs needs no pass of its own.

        Args:
            memory: B encoded inputs.
            ids: [B, N].
            depth: [N], steps from the start token.
            visible: [N, N] bool, attention mask: a node attends to itself and its ancestors.

        Returns: [B, N, d_model].
        """
        back = (depth[:, None] - depth).clamp_min(0)  # what is further from the root is not visible
        biases: dict[int, Tensor] = {}
        for owner, table in self.tables.items():
            biases[owner] = table[:, :, 0, -1 - back].masked_fill(~visible, -torch.inf)
        root = RootColumns() if self._keeps_root else None
        hidden = self.run_stack(ids, biases, memory.states, memory.build_mask_bias(), root)
        if root:
            self._root = memory, root, hidden[:, :1]
        return hidden

    def compute_logits(self, hidden: Tensor, rank: Rank) -> Tensor:
        """Scores of all tokens, [..., V] fp32, before `rank`; every pipeline stage gets the scores of the last one.

        After products in 16 bits, the tokens that `rank` puts first are computed again in fp32.
        """
        head = self._model.lm_head
        if self._stage and not self._stage.is_last:
            logits = torch.empty(*hidden.shape[:-1], len(head.weight), device=self.device)
        else:
            logits = apply_projection(hidden, (head,) if self._head is None else self._head)
            if logits.dtype != torch.float32:
                logits = self._recompute_best(logits, hidden, rank)
        if self._stage:
            return self._stage.broadcast_last(logits)
        return logits

    def _recompute_best(self, logits: Tensor, hidden: Tensor, rank: Rank) -> Tensor:
        """The logits in fp32, the best ones computed again: products in bf16 have 8 bits, in which they tie.

        The best are all that search may choose: it takes two tokens per beam, and none that a rule forbids.
        """
        exact = logits.float()
        head = self._model.lm_head
        if is_plain_linear(head):
            number = min(max(NUM_RECOMPUTED, 2 * self._num_beams), logits.shape[-1])
            best = rank(exact.clone()).topk(number).indices
            with suppress_autocast(logits.device):
                found = torch.einsum("...kd,...d->...k", get_local(head.weight)[best].float(), hidden.float())
            exact.scatter_(-1, best, found)
        return exact

    def run_stack(
        self, ids: Tensor, biases: dict[int, Tensor], memory: Tensor, mask: Tensor | None, cache: StepCache | None
    ) -> Tensor:
        """Run the blocks for tokens.

        Args:
            ids: [B, n].
            biases: bias of self-attention by the block that owns its table, broadcast to [B, h, n, keys].
            memory, mask: states that cross-attention reads, [B, S, d], and what is added to its scores, [B, 1, S].
            cache: takes and gives keys and values; None: the tokens attend to each other.

        Returns: hidden states [B, n, d_model].
        """
        stage = self._stage
        shape = (*ids.shape, self.config.d_model)
        if stage and not self._blocks:  # the head of the last stage alone reads the result
            return torch.empty(shape, device=self.device)
        if stage and not stage.starts_decoder:
            (hidden,) = stage.receive(shape)
        else:
            hidden = self._stack.embed_tokens(ids).float()  # gathered weights may be in bf16
        kind = get_matmul_dtype(self.device)
        biases = {owner: bias.to(kind) for owner, bias in biases.items()}
        for i, block in enumerate(self._blocks):
            bias = biases[self._owners[i]]
            hidden = call_gathered(block, self._run_block, hidden, i, bias, memory, mask, cache)
        if stage and not stage.is_last:
            stage.send(hidden)
            return hidden
        with suppress_autocast(self.device):
            fused = kind != torch.float16  # whose runs use no kernel: they may be broken
            return _normalize(self._stack.final_layer_norm, hidden, fused=fused) * self._scale

    def _run_block(
        self,
        block: T5Block,
        hidden: Tensor,
        number: int,
        bias: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        cache: StepCache | None,
    ) -> Tensor:
        weights = self._weights[number] or BlockWeights.read(block)
        own, cross, feed_forward = block.layer
        heads = own.SelfAttention.n_heads
        size = own.SelfAttention.key_value_proj_dim
        # Self-attention.
        merged = apply_projection(_normalize(own.layer_norm, hidden), weights.qkv)
        # [B, n, 3 * h * d_kv] -> three times [B, h, n, d_kv]
        own_parts = merged.unflatten(-1, (3, heads, size)).permute(0, 2, 3, 1, 4)
        query, key, value = own_parts.unbind(1)
        if cache is not None:
            key, value = cache.append(number, own_parts[:, 1:])
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        hidden = hidden + apply_last(found.transpose(1, 2).flatten(2), weights.own_out)
        # Cross-attention.
        query = apply_projection(_normalize(cross.layer_norm, hidden), weights.queries)
        found = _attend_memory(query.unflatten(-1, (heads, size)), weights, memory, mask)
        hidden = hidden + apply_last(found, weights.cross_out)
        # Feed-forward; nothing else reads `inner`, which may change in place.
        inner = apply_projection(_normalize(feed_forward.layer_norm, hidden), weights.wide)
        act = self.config.dense_act_fn
        if is_gated(feed_forward.DenseReluDense):
            inner = compute_gated(inner, act)
        elif act == "relu":
            inner = inner.relu_()
        else:
            inner = compute_activation(inner, act)
        return hidden + apply_last(inner, weights.narrow)


def _attend_memory(query: Tensor, weights: BlockWeights, memory: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-attention with the encoder's output as keys and values: query [B, n, h, d_kv] -> [B, n, h * d_kv]."""
    rows, nodes, heads, size = query.shape
    # Into the encoder's space: [h, B * n, d_kv] -> [h, B * n, d] -> [B, n * h, d].
    by_head = query.permute(2, 0, 1, 3).reshape(heads, rows * nodes, size)
    wide = torch.bmm(by_head, weights.keys).view(heads, rows, nodes, -1)
    wide = wide.permute(1, 2, 0, 3).reshape(rows, nodes * heads, -1)
    transposed = memory.transpose(1, 2)
    scores = torch.bmm(wide, transposed) if mask is None else torch.baddbmm(mask, wide, transposed)
    shares = torch.softmax(scores, -1, dtype=memory.dtype)
    # Back to each head's values.
    found = torch.bmm(shares, memory).view(rows, nodes, heads, -1)
    found = found.permute(2, 0, 1, 3).reshape(heads, rows * nodes, -1)
    out = torch.bmm(found, weights.values.transpose(1, 2)).view(heads, rows, nodes, size)
    return out.permute(1, 2, 0, 3).reshape(rows, nodes, heads * size)


def _normalize(norm: T5Norm, hidden: Tensor, *, fused: bool = True) -> Tensor:
    return rms_norm(hidden, norm.weight, norm.variance_epsilon, fused=fused)
