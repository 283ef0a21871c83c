"""Dropout masks without memory: whether an element is kept follows from the seed and its place alone.

In: a seed on the device and the place of 8 neighbours. Out: 8 booleans.
Philox 4x32-10 (Salmon et al. 2011) gives 128 bits per place; each element gets 16 of them. So the rate is a multiple of
2^-16, one generator call serves 8 elements, and forward, backward and every tile size draw the same mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STEPS = 65536  # values of 16 bits


def round_dropout_rate(probability: float) -> int:
    """The probability of dropping in units of 2^-16.

    >>> round_dropout_rate(0.1)
    6554
    """
    assert 0 <= probability < 1, probability
    return min(round(probability * STEPS), STEPS - 1)


def choose_seed(x: Tensor, rate: int, seed: Tensor | None) -> Tensor | None:
    """The seed of a call: none without dropout, the given one, or one drawn on x's device from torch's generator.

    A drawn one costs a small kernel and may be captured in a CUDA graph: each replay draws another one.
    """
    if rate == 0 or seed is not None:
        return None if rate == 0 else seed
    return torch.randint(2**62, (1,), device=x.device)


@triton.jit
def keep(seed, places, rate):
    """Which elements are kept: places [..., C] (int64, counted in groups of 8) to booleans [..., 8 C]."""
    a, b, c, d = tl.randint4x(tl.load(seed), places)
    bits = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    return tl.interleave(bits & 0xFFFF, bits >> 16) >= rate


@triton.jit
def gain(rate):
    """What a kept element is multiplied with, so that the mean stays: 1 / (1 - p)."""
    return 65536.0 / (65536 - rate)
