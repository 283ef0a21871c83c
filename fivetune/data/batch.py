"""Rows of a store to a Batch, and a Batch to its padded form.

inputs [7 8 1] [9 1]  ->  input_ids 7 8 1 9 1,  cu_seqlens_src 0 3 5
padded                    7 8 1 / 9 1 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fivetune.data.ragged import Ragged
from fivetune.data.store import TokenStore
from fivetune.types import Batch

NOT_SCORED = -100


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch as rectangles.

    Args:
        input_ids: [B, S] int64, padded with the pad id.
        attention_mask: [B, S] int64, 1 at real tokens.
        labels: [B, T] int64, padded with -100.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def to(self, device: str) -> PaddedBatch:
        return PaddedBatch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device))

    @property
    def num_positions(self) -> int:
        """Positions that the model computes, padding included."""
        return self.input_ids.numel() + self.labels.numel()


def collate(store: TokenStore, rows: Sequence[int]) -> Batch:
    """The examples `rows` of a store as one flattened batch."""
    input_ids, cu_seqlens_src = _flatten(store.inputs, rows)
    labels, cu_seqlens_tgt = _flatten(store.labels, rows)
    return Batch(input_ids, labels, cu_seqlens_src, cu_seqlens_tgt, tuple(store.id(row) for row in rows))


def _flatten(ragged: Ragged, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    parts = [ragged[row] for row in rows]
    ends = np.cumsum([0, *(len(part) for part in parts)])
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)), torch.from_numpy(ends)


def pad(batch: Batch, *, pad_id: int) -> PaddedBatch:
    """The padded form of a batch.

    >>> ids, ends = torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5])
    >>> padded = pad(Batch(ids, ids, ends, ends, ("a", "b")), pad_id=0)
    >>> padded.input_ids.tolist(), padded.attention_mask.tolist(), padded.labels.tolist()
    ([[7, 8, 1], [9, 1, 0]], [[1, 1, 1], [1, 1, 0]], [[7, 8, 1], [9, 1, -100]])
    """
    input_ids, mask = _rectangle(batch.input_ids, batch.cu_seqlens_src, pad_id)
    labels, _ = _rectangle(batch.labels, batch.cu_seqlens_tgt, NOT_SCORED)
    return PaddedBatch(input_ids, mask.long(), labels)


def _rectangle(flat: Tensor, cu_seqlens: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens.diff()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rectangle = torch.full(mask.shape, fill, dtype=torch.int64)
    rectangle[mask] = flat
    return rectangle, mask
