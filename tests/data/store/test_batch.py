"""Batches: flattened and padded forms hold the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivetune.data.store.arrays import read_arrays, write_arrays
from fivetune.data.store.batch import IGNORE_INDEX, PaddedBatch, collate, pad
from fivetune.data.store.ragged import Ragged
from fivetune.types import Batch

SEQUENCES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 99), min_size=1, max_size=9), st.lists(st.integers(1, 99), min_size=1, max_size=5)
    ),
    min_size=1,
    max_size=6,
)


class Rows:
    """What `collate` needs of a store."""

    def __init__(self, folder: Path, inputs: list[list[int]], labels: list[list[int]]) -> None:
        self.inputs, self.labels = Ragged.from_rows(inputs, np.uint16), Ragged.from_rows(labels, np.uint16)

    def get_id(self, row: int) -> str:
        return f"q{row}"


def flat(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ends = np.cumsum([0, *map(len, sequences)])
    return torch.tensor([number for row in sequences for number in row]), torch.tensor(ends)


def test_collate_flattens_the_rows_in_the_given_order(tmp_path):
    batch = collate(Rows(tmp_path, [[7, 8, 1], [9, 1], [4, 1]], [[5, 1], [1], [6, 6, 1]]), [2, 0])  # type: ignore[arg-type]
    assert batch.input_ids.tolist() == [4, 1, 7, 8, 1]
    assert batch.labels.tolist() == [6, 6, 1, 5, 1]
    assert (batch.cu_seqlens_src.tolist(), batch.cu_seqlens_tgt.tolist()) == ([0, 2, 5], [0, 3, 5])
    assert (batch.ids, batch.num_input_tokens, batch.num_target_tokens) == (("q2", "q0"), 5, 5)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.cu_seqlens_src.dtype == torch.int64


@given(SEQUENCES)
def test_padding_keeps_every_token(pairs):
    inputs, labels = [list(a) for a, _ in pairs], [list(b) for _, b in pairs]
    batch = Batch(*_interleaved(flat(inputs), flat(labels)), tuple(map(str, range(len(pairs)))))
    padded = pad(batch, pad_id=0)
    assert [row[row != 0].tolist() for row in padded.input_ids] == inputs
    assert [row[row != IGNORE_INDEX].tolist() for row in padded.labels] == labels
    assert padded.attention_mask.sum(1).tolist() == [len(row) for row in inputs]
    assert torch.equal(padded.attention_mask.bool(), padded.input_ids != 0)
    assert padded.num_positions == len(pairs) * (max(map(len, inputs)) + max(map(len, labels)))


def test_a_padded_batch_goes_to_a_gpu_without_waiting_for_it():
    """From pageable memory a copy waits for all kernels before it."""
    asked: list[object] = []

    class Page:
        def pin_memory(self) -> Page:
            asked.append("pinned")
            return self

        def to(self, device: str, *, non_blocking: bool = False) -> Page:
            asked.append((device, non_blocking))
            return self

    PaddedBatch(Page(), Page(), Page()).to("cuda:1")  # type: ignore[arg-type]
    assert asked == ["pinned", ("cuda:1", True)] * 3


def _interleaved(inputs, labels):
    return inputs[0], labels[0], inputs[1], labels[1]


@pytest.mark.parametrize("rows", [[[7, 8], [9]], [[]], [[], [1], []], [[65535]]])
def test_ragged_rows_read_back(tmp_path, rows):
    write_arrays(
        tmp_path / "x", {"values": (made := Ragged.from_rows(rows, np.uint16)).values, "offsets": made.offsets}
    )
    arrays = read_arrays(tmp_path / "x")
    read = Ragged(arrays["values"], arrays["offsets"])
    assert [row.tolist() for row in map(read.__getitem__, range(len(read)))] == rows
    assert read.lengths.tolist() == [len(row) for row in rows]
