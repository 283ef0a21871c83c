"""What autocast says about matrix products, asked in one place.

In: a device. Out: the type of products there, a context without autocast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def product_dtype(device: torch.device) -> torch.dtype:
    """The type in which matrix products of fp32 weights are computed here and now."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Types stay as they are inside."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
