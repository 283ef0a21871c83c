"""The dtype of matrix products under autocast.

In: a device. Out: the dtype of its matrix products; a context without autocast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def get_matmul_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products of fp32 weights in the current autocast context."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.float32


def suppress_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast inside the block."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
