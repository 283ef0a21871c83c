"""Clip, AdamW and the bf16 copy of the weights in one pass over flat buffers, without host synchronisation.

In: parameters, whose data and grad become views of two flat buffers. Out: after `step`, new weights in both
precisions.
A step with a non-finite gradient only counts as skipped. The device decides it, so a CUDA graph can capture the step.
Bytes per parameter and step, bf16: 2 to read the gradient for its norm, then gradient 4 (read, zeroed), master and two
moments 24, copy 2. Blocks that never had a gradient cost the reading of it only: an update would not change a bit of
rows of a vocabulary that the data do not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fivetune.model.cuda.tiles import TILES, launch

ALIGNMENT = 64  # elements; every view begins at 128 bytes in bf16
NORM, CLIP, STEPS, SKIPPED, POWER1, POWER2 = range(6)  # indices of FlatAdamW.state


class FlatAdamW:
    """AdamW (Loshchilov and Hutter 2019) on fp32 master weights of parameters in bf16 (or fp32).

    Args:
        decayed: parameters with weight decay, on one device. plain: the others. Tied parameters occur once.
        dtype: dtype of the parameters; with torch.float32 there is no copy: the parameters are the master weights.
        max_norm: largest gradient norm; infinity disables clipping.

    Attributes:
        lr: [1] fp32 on the device; write it before a step.
        grads: [P] in `dtype`; the parameters' grads are views of it; zero after a step.
        master, mean, square: [P] fp32, the weights and AdamW's two moments.
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
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.betas, self.eps, self.weight_decay, self.max_norm = betas, eps, weight_decay, max_norm
        parameters = [*decayed, *plain]
        starts = _compute_starts(parameters)
        size, device = starts[-1], parameters[0].device
        self.num_decayed = starts[len(decayed)]
        self.master, self.mean, self.square = torch.zeros((3, size), dtype=torch.float32, device=device)
        self.grads = torch.zeros(size, dtype=dtype, device=device)
        self.copy = None if dtype == torch.float32 else torch.zeros(size, dtype=dtype, device=device)
        self.lr = torch.full((1,), lr, dtype=torch.float32, device=device)
        self.state = torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.float64, device=device)
        self._block = TILES["optimizer", ""].cols
        self._seen = torch.zeros(triton.cdiv(size, self._block), dtype=torch.int8, device=device)
        self._parts = torch.zeros(TILES["optimizer", ""].rows, dtype=torch.float32, device=device)
        weights = self.master if self.copy is None else self.copy
        for parameter, start in zip(parameters, starts[:-1], strict=True):
            place, shape = slice(start, start + parameter.numel()), parameter.shape
            self.master[place] = parameter.detach().flatten()
            weights[place] = self.master[place]
            parameter.data = weights[place].view(shape)
            parameter.grad = self.grads[place].view(shape)

    def step(self) -> None:
        """Clip, update, write the copy, zero the gradients. Three kernels, no synchronisation."""
        tile = TILES["optimizer", ""]
        size, blocks = len(self.master), triton.cdiv(len(self.master), tile.cols)
        betas = {"BETA1": self.betas[0], "BETA2": self.betas[1]}
        programs = min(len(self._parts), blocks)
        launch(_square_sums, (programs,), self.grads, self._parts, size, tile=tile, BLOCK=tile.cols)
        launch(_decide, (1,), self._parts, self.state, self.max_norm, tile=tile, **betas, BLOCK=len(self._parts))
        buffers = (self.master, self.copy, self.grads, self.mean, self.square, self._seen, self.lr, self.state)
        numbers = (size, self.num_decayed, self.weight_decay)
        launch(_update, (blocks,), *buffers, *numbers, tile=tile, **betas, EPS=self.eps, BLOCK=tile.cols)

    def state_dict(self) -> dict[str, Tensor]:
        """The state that a resumed run needs, as tensors on the device."""
        return {"master": self.master, "mean": self.mean, "square": self.square, "state": self.state}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Load a `state_dict` in place; the parameters change with it."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])
        if self.copy is not None:
            self.copy.copy_(self.master)
        self.find_seen()

    def find_seen(self) -> None:
        """Find the blocks that had gradients, after the moments were loaded."""
        whole = len(self.mean) // self._block * self._block
        for moment in (self.mean, self.square):
            for part, seen in ((moment[:whole], self._seen[: whole // self._block]), (moment[whole:], self._seen[-1:])):
                if len(part):
                    seen |= torch.linalg.vector_norm(part.view(len(seen), -1), torch.inf, dim=1) > 0


def _compute_starts(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The aligned start of each parameter in the flat buffers, then their size.

    >>> _compute_starts([nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(70))])
    [0, 64, 192]
    """
    starts = [0]
    for parameter in parameters:
        starts.append(starts[-1] + triton.cdiv(parameter.numel(), ALIGNMENT) * ALIGNMENT)
    return starts


@triton.jit
def _square_sums(grads, parts, size, BLOCK: tl.constexpr):
    """parts[program] = sum of squares of every n-th block (n programs), which is deterministic."""
    sums = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        places = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(grads + places, mask=places < size, other=0.0).to(tl.float32)
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
    master,
    copy,
    grads,
    mean,
    square,
    seen,
    lr,
    state,
    size,
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
    grad = tl.load(grads + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(grads + places, tl.zeros([BLOCK], grads.dtype.element_ty), mask=inside)
    clip = tl.load(state + 1).to(tl.float32)
    if clip == 0:
        return
    num_moved = tl.sum((grad != 0).to(tl.int32)) + tl.load(seen + tl.program_id(0)).to(tl.int32)
    if (num_moved == 0) & ((weight_decay == 0) | (tl.program_id(0) * BLOCK >= num_decayed)):
        return
    tl.store(seen + tl.program_id(0), 1)
    grad *= clip
    rate = tl.load(lr)
    step = rate / (1.0 - tl.load(state + 4)).to(tl.float32)
    root = tl.sqrt((1.0 - tl.load(state + 5)).to(tl.float32))
    first = tl.load(mean + places, mask=inside, other=0.0)
    first += (grad - first) * (1.0 - BETA1)
    second = tl.load(square + places, mask=inside, other=0.0) * BETA2 + grad * grad * (1.0 - BETA2)
    weights = tl.load(master + places, mask=inside, other=0.0)
    weights *= 1.0 - rate * tl.where(places < num_decayed, weight_decay, 0.0)
    weights -= step * first / (tl.sqrt(second) / root + EPS)
    tl.store(mean + places, first, mask=inside)
    tl.store(square + places, second, mask=inside)
    tl.store(master + places, weights, mask=inside)
    if copy is not None:
        tl.store(copy + places, weights.to(copy.dtype.element_ty), mask=inside)
