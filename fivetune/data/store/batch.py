"""Collate rows of a store into a flat Batch, and pad a Batch into rectangles.

inputs [7 8 1] [9 1]  ->  input_ids 7 8 1 9 1,  cu_seqlens_src 0 3 5
padded                    7 8 1 / 9 1 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.data.store.token_store import TokenStore
from fivetune.types import Batch

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch padded to rectangles.

    Args:
        input_ids: [B, S] int64, padded with the pad id.
        attention_mask: [B, S] int64, 1 at real tokens.
        labels: [B, T] int64, padded with -100.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def to(self, device: str) -> PaddedBatch:
        """Copy to a device; to a CUDA device without waiting for its queue."""
        tensors = (self.input_ids, self.attention_mask, self.labels)
        if device.startswith("cuda"):
            return PaddedBatch(*[tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors])
        return PaddedBatch(*[tensor.to(device) for tensor in tensors])

    @property
    def num_positions(self) -> int:
        """Number of positions that the model computes, padding included."""
        return self.input_ids.numel() + self.labels.numel()

    def extend(self, num_rows: int, *, pad_id: int) -> PaddedBatch:
        """Append rows without labels up to `num_rows`. They attend to one pad id: attention to nothing is undefined."""
        missing = (0, 0, 0, num_rows - len(self.labels))
        inputs = F.pad(self.input_ids, missing, value=pad_id)
        mask = F.pad(self.attention_mask, missing)
        mask[len(self.labels) :, 0] = 1
        labels = F.pad(self.labels, missing, value=IGNORE_INDEX)
        return PaddedBatch(inputs, mask, labels)


def collate(store: TokenStore, rows: Sequence[int]) -> Batch:
    """Concatenate the examples `rows` of a store into one flat batch."""
    input_ids, cu_seqlens_src = map(torch.from_numpy, store.inputs.gather(rows))
    labels, cu_seqlens_tgt = map(torch.from_numpy, store.labels.gather(rows))
    return Batch(input_ids, labels, cu_seqlens_src, cu_seqlens_tgt, tuple(map(store.get_id, rows)))


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch into halves by examples; of an odd number the first half has one more.

    >>> ids, ends = torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5])
    >>> first, second = split_batch(Batch(ids, ids, ends, ends, ("a", "b")))
    >>> first.input_ids.tolist(), second.input_ids.tolist(), second.cu_seqlens_src.tolist(), second.ids
    ([7, 8, 1], [9, 1], [0, 2], ('b',))
    """
    middle = -(-len(batch.ids) // 2)
    inputs = int(batch.cu_seqlens_src[middle])
    labels = int(batch.cu_seqlens_tgt[middle])
    first = Batch(
        batch.input_ids[:inputs],
        batch.labels[:labels],
        batch.cu_seqlens_src[: middle + 1],
        batch.cu_seqlens_tgt[: middle + 1],
        batch.ids[:middle],
    )
    second = Batch(
        batch.input_ids[inputs:],
        batch.labels[labels:],
        batch.cu_seqlens_src[middle:] - inputs,
        batch.cu_seqlens_tgt[middle:] - labels,
        batch.ids[middle:],
    )
    return first, second


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches, the reverse of `split_batch`.

    >>> ids, ends = torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5])
    >>> halves = split_batch(Batch(ids, ids, ends, ends, ("a", "b")))
    >>> joined = join_batches(halves)
    >>> joined.input_ids.tolist(), joined.cu_seqlens_tgt.tolist(), joined.ids
    ([7, 8, 1, 9, 1], [0, 3, 5], ('a', 'b'))
    """
    input_ids = torch.cat([batch.input_ids for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    # Every batch counts from 0: the lengths are joined, and summed again.
    input_lengths = torch.cat([batch.cu_seqlens_src.diff() for batch in batches])
    label_lengths = torch.cat([batch.cu_seqlens_tgt.diff() for batch in batches])
    ids: list[str] = []
    for batch in batches:
        ids += batch.ids
    input_ends = F.pad(input_lengths.cumsum(0), (1, 0))
    label_ends = F.pad(label_lengths.cumsum(0), (1, 0))
    return Batch(input_ids, labels, input_ends, label_ends, tuple(ids))


def pad(batch: Batch, *, pad_id: int, sizes: Sequence[int] | None = None) -> PaddedBatch:
    """Pad a batch: the inputs with `pad_id`, the labels with IGNORE_INDEX.

    Args:
        sizes: allowed lengths of a rectangle, ascending; above the largest, multiples of 1,024. None: the length of
            the longest sequence.

    >>> ids, ends = torch.tensor([7, 8, 1, 9, 1]), torch.tensor([0, 3, 5])
    >>> padded = pad(Batch(ids, ids, ends, ends, ("a", "b")), pad_id=0)
    >>> padded.input_ids.tolist(), padded.attention_mask.tolist(), padded.labels.tolist()
    ([[7, 8, 1], [9, 1, 0]], [[1, 1, 1], [1, 1, 0]], [[7, 8, 1], [9, 1, -100]])
    """
    input_ids, mask = _pad_rows(batch.input_ids, batch.cu_seqlens_src, pad_id, sizes)
    labels, _ = _pad_rows(batch.labels, batch.cu_seqlens_tgt, IGNORE_INDEX, sizes)
    return PaddedBatch(input_ids, mask.long(), labels)


def round_up_length(length: int, sizes: Sequence[int] | None) -> int:
    """Return the smallest of `sizes` >= `length`, above them the next multiple of 1,024; without sizes `length`.

    >>> round_up_length(65, [64, 128]), round_up_length(129, [64, 128]), round_up_length(65, None)
    (128, 1024, 65)
    """
    if sizes is None:
        return length
    for size in sizes:
        if size >= length:
            return size
    return -(-length // 1024) * 1024


def _pad_rows(flat: Tensor, cu_seqlens: Tensor, fill: int, sizes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens.diff()
    mask = torch.arange(round_up_length(int(lengths.max()), sizes)) < lengths[:, None]
    rectangle = torch.full(mask.shape, fill, dtype=torch.int64)
    rectangle[mask] = flat
    return rectangle, mask
