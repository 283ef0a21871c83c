"""Cross-entropy of a chunk of logits in Triton: one pass for the losses, one for their gradient.

In: logits [N, V] and labels [N]. Out: -log softmax(logits)[label] and log Z, [N]; the gradient by the logits. torch
takes about ten passes over fp32 copies of the logits. Sums are fp32, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivetune.model.cuda.tiles import TILES, divide_up, launch


def compute_nats(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every row and its log Z, [N] fp32 each.

    Args:
        logits: [N, V] fp32 or bf16, contiguous. labels: [N] int64.
    """
    assert logits.is_contiguous(), logits.stride()
    rows, width = logits.shape
    nats = torch.empty(rows, dtype=torch.float32, device=logits.device)
    norms = torch.empty_like(nats)
    tile = TILES["logits", ""]
    launch(_forward, (rows,), logits, labels, nats, norms, width, tile=tile, BLOCK=tile.cols)
    return nats, norms


def compute_nats_gradient(logits: Tensor, norms: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The gradient of sum(weights x losses) by the logits, (softmax(logits) - one-hot(label)) x weight: their dtype.

    Args:
        norms: what `compute_nats` returned. weights: [N] fp32.
    """
    rows, width = logits.shape
    found = torch.empty_like(logits)
    tile = TILES["logits", ""]
    grid = (rows, divide_up(width, tile.cols))
    args = (logits, norms, labels.contiguous(), weights.contiguous(), found, width)
    launch(_backward, grid, *args, tile=tile, BLOCK=tile.cols)
    return found


@triton.jit
def _forward(logits, labels, nats, norms, width, BLOCK: tl.constexpr):
    """One row per program; the sum of exponentials is scaled again where a later block has a larger logit."""
    row = tl.program_id(0).to(tl.int64)
    largest, total = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * width + cols, mask=cols < width, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
        largest = larger
    norm = largest + tl.log(total)
    own = tl.load(logits + row * width + tl.load(labels + row)).to(tl.float32)
    tl.store(norms + row + tl.arange(0, 1), norm)
    tl.store(nats + row + tl.arange(0, 1), norm - own)


@triton.jit
def _backward(logits, norms, labels, weights, found, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    share = tl.exp(values - tl.load(norms + row)) - (cols == tl.load(labels + row)).to(tl.float32)
    share *= tl.load(weights + row)
    tl.store(found + row * width + cols, share.to(found.dtype.element_ty), mask=cols < width)
