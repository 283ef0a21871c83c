"""Clip and AdamW in one pass over flat buffers, without host synchronisation.

In: parameters, whose data and grad become views of two flat buffers. Out: after `step`, new weights.
A step with a non-finite gradient only counts as skipped. The device decides it, so a CUDA graph can capture the step.
Bytes per parameter and step: 4 to read the gradient for its norm, then gradient 8 (read, zeroed), weight and two
moments 24; 2 to write the copy for products in 16 bits. Blocks that never had a gradient cost the reading of it only:
an update would not change a bit of rows of a vocabulary that the data do not use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import nn

from fivetune.model.cuda.tiles import TILES, divide_up, launch
from fivetune.model.weight_cache import allocate_views, count_places

NORM, CLIP, STEPS, SKIPPED, POWER1, POWER2 = range(6)  # indices of FlatAdamW.state


class FlatAdamW:
    """AdamW (Loshchilov and Hutter 2019) on parameters in fp32.

    Args:
        decayed: parameters with weight decay, on one device. plain: the others. Tied parameters occur once.
        max_norm: largest gradient norm; infinity disables clipping.
        num_copied: how many of the first `decayed` get copies for matrix products. kind: dtype of these.

    Attributes:
        lr: [1] fp32 on the device; write it before a step.
        grads: [P] fp32; the parameters' grads are views of it; zero after a step.
        weights, mean, square: [P] fp32, of which the parameters are views, and AdamW's two moments.
        copies: [C] of the first C weights, which each step writes with the weights; None without any.
        state: [6] fp64: gradient norm before clipping, factor of clipping, steps taken, steps skipped, beta1^steps,
            beta2^steps.
    """

    def __init__(
        self,
        decayed: Sequence[nn.Parameter],
        plain: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float = float("inf"),
        num_copied: int = 0,
        kind: torch.dtype = torch.bfloat16,
    ) -> None:
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.max_norm = max_norm
        parameters = [*decayed, *plain]
        self.weights, places = allocate_views(parameters)
        self.grads, gradients = allocate_views(parameters)
        self.mean, self.square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        for parameter, place, gradient in zip(parameters, places, gradients, strict=True):
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.grad = gradient
        size = len(self.weights)
        device = self.weights.device
        self.num_decayed = count_places(decayed)
        num_places = count_places(decayed[:num_copied])
        self.copies = torch.zeros(num_places, dtype=kind, device=device) if num_copied else None
        self.lr = torch.full((1,), lr, dtype=torch.float32, device=device)
        self.state = torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.float64, device=device)
        self._block = TILES["optimizer", ""].cols
        self._seen = torch.zeros(divide_up(size, self._block), dtype=torch.int8, device=device)
        self._parts = torch.zeros(TILES["optimizer", ""].rows, dtype=torch.float32, device=device)

    def step(self) -> None:
        """Clip, update, zero the gradients. Three kernels, no synchronisation."""
        tile = TILES["optimizer", ""]
        size = len(self.weights)
        blocks = divide_up(len(self.weights), tile.cols)
        betas = {"BETA1": self.betas[0], "BETA2": self.betas[1]}
        programs = min(len(self._parts), blocks)
        launch(_square_sums, (programs,), self.grads, self._parts, size, tile=tile, BLOCK=tile.cols)
        launch(_decide, (1,), self._parts, self.state, self.max_norm, tile=tile, **betas, BLOCK=len(self._parts))
        buffers = (self.weights, self.copies, self.grads, self.mean, self.square, self._seen, self.lr, self.state)
        numbers = (size, 0 if self.copies is None else len(self.copies), self.num_decayed, self.weight_decay)
        launch(_update, (blocks,), *buffers, *numbers, tile=tile, **betas, EPS=self.eps, BLOCK=tile.cols)

    def find_seen(self) -> None:
        """Find the blocks that had gradients, after the moments were loaded."""
        num_full = len(self.mean) // self._block
        for moment in (self.mean, self.square):
            full = moment[: num_full * self._block].view(num_full, self._block)
            rest = moment[num_full * self._block :]
            self._seen[:num_full] |= full.any(1)
            self._seen[num_full:] |= rest.any()  # the last block, unless it is full


@triton.jit
def _square_sums(grads, parts, size, BLOCK: tl.constexpr):
    """parts[program] = sum of squares of every n-th block (n programs), which is deterministic."""
    sums = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(grads + places, mask=places < size, other=0.0)
        sums += values * values
    tl.store(parts + tl.program_id(0), tl.sum(sums))


@triton.jit
def _decide(parts, state, max_norm, BETA1: tl.constexpr, BETA2: tl.constexpr, BLOCK: tl.constexpr):
    """Compute norm, clip factor (0: skip this step) and counts. Grid: one program."""
    norm = tl.sqrt(tl.sum(tl.load(parts + tl.arange(0, BLOCK)).to(tl.float64)))
    finite = norm < float("inf")
    clip = tl.where(finite, tl.minimum(max_norm / (tl.where(finite, norm, 1.0) + 1e-6), 1.0), 0.0)
    tl.store(state, norm)
    tl.store(state + 1, clip)
    tl.store(state + 2, tl.load(state + 2) + tl.where(finite, 1.0, 0.0))
    tl.store(state + 3, tl.load(state + 3) + tl.where(finite, 0.0, 1.0))
    tl.store(state + 4, tl.load(state + 4) * tl.where(finite, BETA1, 1.0))
    tl.store(state + 5, tl.load(state + 5) * tl.where(finite, BETA2, 1.0))


@triton.jit
def _update(
    weights,
    copies,
    grads,
    mean,
    square,
    seen,
    lr,
    state,
    size,
    num_copied,
    num_decayed,
    weight_decay,
    EPS: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of parameters, unless it has neither a gradient nor moments nor weight decay."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    grad = tl.load(grads + places, mask=inside, other=0.0)
    tl.store(grads + places, tl.zeros([BLOCK], tl.float32), mask=inside)
    clip = tl.load(state + 1).to(tl.float32)
    if clip == 0:  # a gradient was not finite: the gradients are zeroed, nothing else changes
        return
    num_moved = tl.sum((grad != 0).to(tl.int32)) + tl.load(seen + tl.program_id(0)).to(tl.int32)
    if (num_moved == 0) & ((weight_decay == 0) | (tl.program_id(0) * BLOCK >= num_decayed)):
        return
    tl.store(seen + tl.program_id(0), 1)
    grad *= clip
    rate = tl.load(lr)
    # Both moments divided by their sums of weights, 1 - beta^t.
    step = rate / (1.0 - tl.load(state + 4)).to(tl.float32)
    root = tl.sqrt((1.0 - tl.load(state + 5)).to(tl.float32))
    first = tl.load(mean + places, mask=inside, other=0.0)
    first += (grad - first) * (1.0 - BETA1)
    second = tl.load(square + places, mask=inside, other=0.0) * BETA2 + grad * grad * (1.0 - BETA2)
    # Weight decay is no part of the gradient, so the moments do not hold it.
    weight = tl.load(weights + places, mask=inside, other=0.0)
    weight *= 1.0 - rate * tl.where(places < num_decayed, weight_decay, 0.0)
    weight -= step * first / (tl.sqrt(second) / root + EPS)
    tl.store(mean + places, first, mask=inside)
    tl.store(square + places, second, mask=inside)
    tl.store(weights + places, weight, mask=inside)
    if copies is not None:
        tl.store(copies + places, weight.to(copies.dtype.element_ty), mask=places < num_copied)
