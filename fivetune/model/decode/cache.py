"""The cache of a decoder: keys and values of the answers so far, and the inputs that they attend to.

In: encoded inputs, keys and values of new tokens. Out: the keys and values that the slots see. Slots hold unfinished
answers, which may have begun at different steps: every step writes one column, and a slot sees the columns since its
begin.

    column   0 1 2 3     slot 0, begun in column 0, sees all columns
    slot 0   a b c d     slot 1 got a new answer in column 2: it sees two
    slot 1   x y p q

Finished slots are filled again, or removed: the last ones move into their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fivetune.model.decode.encoder import EncodedInputs

FIRST_STEPS = 16  # initial columns, which double when more than half are in use
MIN_EXCESS = 9 / 8  # ratio of the padded length to the longest input from which the padding is cut


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


class StepCache(Protocol):
    """What a step of the decoder writes keys and values to."""

    def append(self, layer: int, column: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of a layer, [B, 2, h, K, head size]. Returns: all keys and values to see."""
        ...


class RootColumns:
    """Keys and values of the root of a tree, with which an answer begins; the tree's tokens see each other alone."""

    def __init__(self) -> None:
        self.columns: list[Tensor] = []  # by layer, [B, 2, h, 1, head size]

    def append(self, layer: int, column: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the root of a layer's keys and values, [B, 2, h, nodes, head size]. Returns: all of them."""
        self.columns.append(column[..., :1, :].clone())
        keys, values = column.unbind(1)
        return keys, values


class KVCache:
    """Slots of B answers, with K hypotheses each.

    Args:
        num_beams: K.

    Attributes:
        inputs: encoded inputs of the slots.
        mask: `EncodedInputs.build_mask_bias` of the inputs.
    """

    inputs: EncodedInputs
    mask: Tensor | None

    def __init__(self, num_beams: int) -> None:
        self._num_beams = num_beams
        self._own: list[Tensor] = []  # keys and values per layer, [B, 2, h, columns * K, head size]
        self._num_columns = FIRST_STEPS  # columns that have memory
        self._first = self._end = 0  # range of columns that some slot sees

    def start(self, inputs: EncodedInputs) -> None:
        """Let the slots be the rows of `inputs`, all at their begin."""
        self.inputs = inputs
        self.mask = inputs.build_mask_bias()
        self._own = []
        self._num_columns = FIRST_STEPS
        self._end = 0

    def fill_slots(self, slots: Sequence[int], inputs: EncodedInputs) -> None:
        """Put the rows of `inputs`, none longer than the first ones, into slots that have finished."""
        states = self.inputs.states
        lengths = list(self.inputs.lengths)
        for slot, length in zip(slots, inputs.lengths, strict=True):
            lengths[slot] = length
        states[list(slots), : inputs.states.shape[1]] = inputs.states
        longest = max(lengths)
        if longest * MIN_EXCESS <= states.shape[1]:
            states = states[:, :longest].contiguous()  # products of a part copy it in every layer
        self.inputs = EncodedInputs(states, lengths)
        self.mask = self.inputs.build_mask_bias()

    def drop_finished(self, move: RowCompactor) -> None:
        """Remove finished slots."""
        states = self.inputs.states
        lengths = move(torch.tensor(self.inputs.lengths, device=states.device)).tolist()
        self.inputs = EncodedInputs(move(states), lengths)
        self._own = [move(own) for own in self._own]
        if self.mask is not None:
            self.mask = move(self.mask)

    def add_column(self, age: int) -> None:
        """Begin a step of slots of which the oldest has seen `age` columns."""
        if self._end == self._num_columns:
            # Columns that no slot sees any more are reused before memory grows.
            is_full = 2 * age >= self._num_columns
            if is_full:
                self._num_columns *= 2
            seen = slice((self._end - age) * self._num_beams, self._end * self._num_beams)
            front = slice(age * self._num_beams)
            for layer, old in enumerate(self._own):
                own = self._make_columns(old) if is_full else old
                # Within one tensor the two ranges do not overlap: fewer than half of the columns are seen.
                own[..., front, :] = old[..., seen, :]
                self._own[layer] = own
            self._end = age
        self._first = self._end - age
        self._end += 1

    def append(self, layer: int, column: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of a layer, [B, 2, h, K, head size].

        Returns: keys and values of the columns that some slot sees, [B, h, t * K, head size].
        """
        first = self._first * self._num_beams
        end = self._end * self._num_beams
        if layer == len(self._own):  # the first step
            self._own.append(self._make_columns(column))
        own = self._own[layer]
        own[..., end - self._num_beams : end, :] = column
        keys, values = own[..., first:end, :].unbind(1)
        return keys, values

    def _make_columns(self, like: Tensor) -> Tensor:
        rows, both, heads, _, width = like.shape
        return self.inputs.states.new_empty(rows, both, heads, self._num_columns * self._num_beams, width)
