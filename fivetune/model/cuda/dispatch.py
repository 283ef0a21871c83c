"""Which tensors Triton's kernels compute, and which plain torch computes.

In: tensors. Out: yes or no. Attention on CUDA needs its kernel. Norms, dropout and activations have both
implementations: a run uses torch where the kernels fail, disagree or are slower (`Forward.parts` decides, and
`SequenceBounds.fused` carries the decision to the layers, also into blocks that autograd's thread recomputes).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DEVICES = ("cuda",)
KINDS = (torch.float32, torch.bfloat16)  # types that the kernels read and write


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def needs_attention_kernel(x: Tensor) -> bool:
    """Whether attention of x is computed by Triton's kernels."""
    return x.device.type in DEVICES


def supports_fused(*tensors: Tensor) -> bool:
    """Whether Triton's kernels can compute norms, dropout and activations of these tensors, all on one device."""
    return all(x.device.type in DEVICES and x.dtype in KINDS for x in tensors) and has_triton()
