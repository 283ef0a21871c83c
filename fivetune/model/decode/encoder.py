"""The encoder's output of several inputs, computed on flat tokens by the training's forward.

ids 7 8 1 9 1, lengths [3, 2]  ->  states [2, 3, d], of which the last is padding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivetune.distributed.pipeline import find_stage
from fivetune.model.attention import SequenceBounds
from fivetune.model.flat import run_stack
from fivetune.model.modules import T5Model
from fivetune.model.ops import Ops
from fivetune.model.precision import get_matmul_dtype

CPU_TOKENS = 2_048  # tokens per pass, whose activations stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class EncodedInputs:
    """What the decoder attends to.

    Args:
        states: [B, S, d], the encoder's output, padded; padding is finite.
        lengths: number of real tokens of each of the B inputs.
    """

    states: Tensor
    lengths: list[int]

    def copy_rows(self, number: int) -> EncodedInputs:
        """Every input `number` times, one after another."""
        if number == 1:
            return self
        lengths = [length for length in self.lengths for _ in range(number)]
        return EncodedInputs(self.states.repeat_interleave(number, 0), lengths)

    def build_mask(self) -> Tensor:
        """The mask of real tokens, [B, S]."""
        lengths = torch.tensor(self.lengths, device=self.states.device)
        return torch.arange(self.states.shape[1], device=self.states.device) < lengths[:, None]

    def build_mask_bias(self) -> Tensor | None:
        """What is added to attention scores: -inf at padding, [B, 1, S]; None if nothing is padded."""
        if min(self.lengths) == self.states.shape[1]:
            return None
        zeros = torch.zeros(self.states.shape[:2], dtype=self.states.dtype, device=self.states.device)
        return zeros.masked_fill_(~self.build_mask(), -torch.inf)[:, None]


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
            first = row
            tokens = 0
        tokens += length
    if len(lengths):
        yield first, len(lengths)


def encode_inputs(model: T5Model, ids: Tensor, lengths: list[int], *, max_tokens: int | None = None) -> EncodedInputs:
    """Compute the encoder's output for flat inputs, in the dtype of matrix products.

    Args:
        model: T5, mT5 or umT5 model; the states of a pipeline stage are the output of its last block, or the received
            states if it has no block of the encoder.
        ids: [N], the concatenated inputs.
        lengths: number of tokens of each input; their sum is N.
        max_tokens: tokens per pass of the encoder; None: one pass for all.
    """
    longest = max(lengths)
    width = model.config.d_model
    states = torch.zeros(len(lengths), longest, width, dtype=get_matmul_dtype(ids.device), device=ids.device)
    begin = 0  # first token of a slice
    for first, end in iter_row_slices(lengths, max_tokens):
        rows = range(first, end)
        size = sum(lengths[first:end])
        hidden = _encode_flat(model, ids[begin : begin + size], lengths[first:end])
        # Where the tokens of these rows stand in the padded rectangle.
        places = torch.cat([torch.arange(lengths[row]) + row * longest for row in rows])
        states.view(-1, width)[places.to(ids.device)] = hidden.to(states.dtype)
        begin += size
    return EncodedInputs(states, lengths)


def _encode_flat(model: T5Model, ids: Tensor, lengths: list[int]) -> Tensor:
    """The encoder's output of flat tokens, [N] -> [N, d]; of a pipeline stage, the output of its last block."""
    stage = find_stage(model)
    stack = model.encoder
    if stage and not stage.is_first:
        (hidden,) = stage.receive((len(ids), model.config.d_model))
    else:
        hidden = stack.embed_tokens(ids).float()  # gathered weights may be in bf16
    if stage is None or stage.encoder:
        bounds = SequenceBounds.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), ids.device)
        numbers = stage.encoder if stage else None
        hidden = run_stack(stack, hidden, bounds, Ops(fused=True), numbers=numbers)
    if stage and not stage.is_last:
        stage.send(hidden)
    return hidden
