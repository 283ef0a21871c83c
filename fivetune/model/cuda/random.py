"""Dropout masks from a counter-based generator: an element's mask depends only on the seed and its position.

In: a seed on the device and the index of a group of 8 neighbours. Out: 8 booleans.
Philox 4x32-10 (Salmon et al. 2011) returns 128 bits per index, 16 for each element. So the rate is a multiple of 2^-16,
one generator call serves 8 elements, and forward, backward and all tile sizes use the same mask.
"""

# pyright: reportGeneralTypeIssues=false
# Triton has no types for functions within kernels that return several values.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

STEPS = 65536  # values of 16 bits
NUM_SEEDS = 512  # that one kernel draws for the calls of a step

_seeds: list[Tensor] | None = None


def round_dropout_rate(probability: float) -> int:
    """Convert a dropout probability to units of 2^-16.

    >>> round_dropout_rate(0.1)
    6554
    """
    assert 0 <= probability < 1, probability
    return min(round(probability * STEPS), STEPS - 1)


def choose_seed(x: Tensor, rate: int, seed: Tensor | None) -> Tensor | None:
    """Choose the seed of a call: None without dropout, the given one, or one from torch's generator of the device.

    Drawing costs a small kernel, which a CUDA graph may capture: each replay draws a new seed.
    """
    if rate == 0:
        return None
    if seed is not None:
        return seed
    if _seeds is None:
        return torch.randint(2**62, (1,), device=x.device)
    if not _seeds:
        pairs = torch.randint(2**62, (NUM_SEEDS, 2), device=x.device)  # of which one is read: 16 bytes are aligned
        _seeds.extend(pairs.unbind())
    return _seeds.pop()


@contextmanager
def draw_seeds_together() -> Iterator[None]:
    """Draw the seeds of all calls inside the block by one kernel.

    For a forward pass that a graph captures. A pass that is recomputed draws each seed again, from the random state at
    the begin of its block.
    """
    global _seeds
    assert _seeds is None
    _seeds = []
    try:
        yield
    finally:
        _seeds = None


@triton.jit
def keep(seed, places, rate):
    """Mask of kept elements: group indices [..., C] (int64, groups of 8) to booleans [..., 8 C]."""
    a, b, c, d = tl.randint4x(tl.load(seed), places)
    bits = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    return tl.interleave(bits & 0xFFFF, bits >> 16) >= rate


@triton.jit
def gain(rate):
    """The factor of kept elements, which preserves the mean: 1 / (1 - p)."""
    return 65536.0 / (65536 - rate)
