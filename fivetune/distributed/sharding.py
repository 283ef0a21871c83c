"""Sharded tensors (torch's DTensor) to full ones and back.

In: any tensor. Out: the full tensor, or the shard of this rank. A tensor that is not sharded is returned unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def gather_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; any other unchanged. All ranks call it."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This rank's shard of a full tensor, if `other`, of the same shape, is sharded; else the tensor unchanged."""
    if not _is_sharded(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each process holds a part of the tensor; known by an attribute, because importing DTensor takes time."""
    return hasattr(tensor, "full_tensor")
