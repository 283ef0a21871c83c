"""Conversion of sharded tensors (torch's DTensor) to full ones and back.

In: any tensor. Out: the full tensor, or the shard of this rank. A tensor that is not sharded is returned unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; other tensors are returned unchanged. Collective: all ranks call it."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a full tensor as `other` of the same shape is sharded; if `other` is not, return the tensor unchanged."""
    if not _is_sharded(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds a shard of the tensor. Checks an attribute, because importing DTensor takes time."""
    return hasattr(tensor, "full_tensor")
