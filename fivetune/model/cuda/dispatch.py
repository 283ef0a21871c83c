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

from fivetune.model.precision import get_matmul_dtype

DEVICES = ("cuda",)
KINDS = (torch.float32, torch.bfloat16)  # dtypes that the kernels support; products in fp16 are plain torch's
OLDEST = (8, 0)  # compute capability of the first GPUs that Triton compiles for: A100, not T4 or V100


@cache
def explain_missing_triton() -> str:
    """Explain why Triton's kernels cannot run in this process; empty if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < OLDEST:
        return "Triton does not compile for a GPU of compute capability {}.{}".format(*capability)
    return ""


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels are written for a device, and weights change there without torch's knowledge."""
    return device.type in DEVICES


def supports_graphs(device: str) -> bool:
    return device.startswith("cuda")


def needs_attention_kernel(x: Tensor) -> bool:
    """Whether Triton's kernels compute the attention of x: in a forward pass, whose autocast says the dtype."""
    return has_kernels(x.device) and get_matmul_dtype(x.device) in KINDS


def supports_fused(*tensors: Tensor) -> bool:
    """Whether Triton's kernels support norms, dropout, activations and losses of these tensors."""
    on_device = all(has_kernels(x.device) and x.dtype in KINDS for x in tensors)
    return on_device and get_matmul_dtype(tensors[0].device) in KINDS and not explain_missing_triton()
