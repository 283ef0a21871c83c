"""The encoder on flat tokens: no padding, no mask.

ids 7 8 1 9 1, lengths [3, 2]  ->  hidden states of those 5 tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.distributed.pipeline import Stage, find_bias_block
from fivetune.distributed.sharding import call_gathered

if TYPE_CHECKING:
    from fivetune.model.modules import T5Attention, T5Block, T5Stack

CPU_TOKENS = 2_048  # tokens per pass, whose activations stay in the CPU's cache


def iter_row_slices(lengths: Sequence[int], max_tokens: int | None) -> Iterator[tuple[int, int]]:
    """Yield slices (first, end) of consecutive rows with at most `max_tokens` in sum, but at least one row.

    With `max_tokens` None, one slice holds all rows.

    >>> list(iter_row_slices([5, 4, 3, 9], 9))
    [(0, 2), (2, 3), (3, 4)]
    """
    first = tokens = 0
    for row, length in enumerate(lengths):
        if max_tokens is not None and row > first and tokens + length > max_tokens:
            yield first, row
            first, tokens = row, 0
        tokens += length
    if len(lengths):
        yield first, len(lengths)


def iter_equal_runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of rows of equal length: (first row, number of rows, length).

    >>> list(iter_equal_runs([5, 5, 3]))
    [(0, 2, 5), (2, 1, 3)]
    """
    row = 0
    for length, group in groupby(lengths):
        count = len(list(group))
        yield row, count, length
        row += count


def encode_flat(stack: T5Stack, ids: Tensor, lengths: Sequence[int], stage: Stage | None = None) -> Tensor:
    """Compute the hidden states of flat inputs; attention batches neighbours of equal length.

    Args:
        stack: encoder of a T5, mT5 or umT5 model of transformers.
        ids: [N], the concatenated inputs.
        lengths: tokens of each input; they sum to N.
        stage: of a pipeline; the states are those of its last block, or those received if it has none.

    Returns: [N, d_model].
    """
    if stage and not stage.is_first:
        (hidden,) = stage.receive((len(ids), stack.embed_tokens.embedding_dim))
    else:
        hidden = stack.embed_tokens(ids).float()  # gathered weights may be in bf16
    numbers = stage.encoder if stage else range(len(stack.block))
    longest, bias, above = max(lengths), None, find_bias_block(stack, numbers.start) if numbers else 0
    for number in (above, *numbers) if above not in numbers else numbers:
        block = stack.block[number]
        attention = block.layer[0].SelfAttention
        if attention.has_relative_attention_bias:
            bias = attention.compute_bias(longest, longest, device=ids.device)
        if number in numbers:
            hidden = call_gathered(block, _run_block, hidden, bias, lengths)
    hidden = stack.final_layer_norm(hidden) if numbers and numbers.stop == len(stack.block) else hidden
    if stage and not stage.is_last:
        stage.send(hidden)
    return hidden


def _run_block(block: T5Block, hidden: Tensor, bias: Tensor, lengths: Sequence[int]) -> Tensor:
    layer = block.layer[0]
    hidden = hidden + _attend(layer.SelfAttention, layer.layer_norm(hidden), bias, lengths)
    return block.layer[-1](hidden)


def _attend(attention: T5Attention, hidden: Tensor, bias: Tensor, lengths: Sequence[int]) -> Tensor:
    query, key, value = attention.q(hidden), attention.k(hidden), attention.v(hidden)
    out = torch.empty_like(query)
    start = 0
    for _, count, length in iter_equal_runs(lengths):
        end = start + count * length
        shape = (count, length, attention.n_heads, attention.key_value_proj_dim)
        q, k, v = (part[start:end].view(shape).transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :, :length, :length], scale=1.0)
        out[start:end].view(shape).copy_(mixed.transpose(1, 2))
        start = end
    return attention.o(out)
