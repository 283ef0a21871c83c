"""Which tensors Triton's kernels compute, and which plain torch does.

In: tensors. Out: yes or no. Attention on CUDA needs its kernel; norms, dropout and activations have both, so that a
run can leave those kernels out where they fail, disagree or are slower (`model/backend.py`).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DEVICES = ("cuda",)
KINDS = (torch.float32, torch.bfloat16)  # what the kernels read and write


class _Switch:
    """What `use_fused` says; one for the process, because a block that is computed again asks from another thread."""

    on = False


def use_fused(on: bool) -> None:
    """Compute norms, dropout and activations of flat tokens by Triton's kernels from now on, or by torch."""
    _Switch.on = on


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def on_kernels(x: Tensor) -> bool:
    """Whether attention of x is computed by Triton's kernels."""
    return x.device.type in DEVICES


def fused(*tensors: Tensor) -> bool:
    """Whether Triton's kernels compute norms, dropout and activations of these tensors, all on one device."""
    able = all(x.device.type in DEVICES and x.dtype in KINDS for x in tensors)
    return able and _Switch.on and has_triton()
