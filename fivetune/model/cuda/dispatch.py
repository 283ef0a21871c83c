"""Dispatch between Triton's kernels and plain torch.

In: tensors. Out: whether a kernel computes them. Attention on CUDA needs its kernel. Norms, dropout, activations and
the cross-entropy have both implementations: a run uses torch if the kernels fail, disagree or are slower.
`Forward.parts` holds the decision, and `Ops.fused` passes it to the layers, also to blocks that autograd's thread
recomputes.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DEVICES = ("cuda",)
KINDS = (torch.float32, torch.bfloat16)  # dtypes that the kernels support


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def needs_attention_kernel(x: Tensor) -> bool:
    """Whether Triton's kernels compute the attention of x."""
    return x.device.type in DEVICES


def supports_fused(*tensors: Tensor) -> bool:
    """Whether Triton's kernels support norms, dropout, activations and losses of these tensors."""
    return all(x.device.type in DEVICES and x.dtype in KINDS for x in tensors) and has_triton()
