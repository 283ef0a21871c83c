"""Tensors of which each process holds a part (torch's DTensor), and back: the only two questions asked of them.

In: any tensor. Out: all of it, or the part that belongs here. A tensor that is not divided passes as it is.
"""

from __future__ import annotations

from typing import Any


def whole(tensor: Any) -> Any:
    """All of a tensor of which each process holds a part; any other as it is. All processes call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def placed_like(tensor: Any, other: Any) -> Any:
    """The part of a whole tensor that belongs here, if `other`, of the same shape, is divided; else as it is."""
    if not hasattr(other, "device_mesh") or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
