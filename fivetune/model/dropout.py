"""Dropout by sampling the positions of the zeros, not one random number per value.

In: number of values, rate. Out: the positions to set to 0, saved for the backward pass.
The gaps between the zeros of a Bernoulli sequence are geometric, so rate 0.1 needs a tenth of the random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def draw_dropout(count: int, rate: float, device: torch.device) -> Tensor | None:
    """Sample which of `count` values to drop, each with probability `rate`, seeded by torch's global generator.

    Returns: on the CPU their positions, ascending ([about rate * count] int64); on other devices a mask [count] bool,
    without a host synchronisation; None if rate or count is 0.
    """
    if rate == 0 or count == 0:
        return None
    if device.type != "cpu":
        return torch.rand(count, device=device) < rate
    if rate >= 1:
        return torch.arange(count)
    random = np.random.Generator(np.random.SFC64(int(torch.randint(2**62, ()))))
    # Six standard deviations above the mean: further positions are drawn almost never.
    likely = int(rate * count + 6 * math.sqrt(rate * count) + 8)
    found = _sample_positions(random, -1, likely, rate)
    while found[-1] < count:
        found = np.concatenate([found, _sample_positions(random, int(found[-1]), likely // 8 + 8, rate)])
    return torch.from_numpy(found[: int(np.searchsorted(found, count))])


def compute_keep_scale(rate: float) -> float:
    """The factor of kept values, 1 / (1 - rate); 0 if all are dropped."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def _sample_positions(random: np.random.Generator, start: int, steps: int, rate: float) -> np.ndarray:
    """Sample `steps` positions after `start` with geometric gaps: exponential variates, truncated to integers."""
    gaps = random.standard_exponential(steps, dtype=np.float32)
    gaps *= -1 / math.log1p(-rate)
    positions = gaps.astype(np.int64)
    positions += 1  # the next position is one away at least
    positions[0] += start
    return np.cumsum(positions, out=positions)


def split_dropout(drawn: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Split the result of `draw_dropout` for sum(sizes) values into one result per size."""
    if drawn is None:
        return [None] * len(sizes)
    if drawn.dtype == torch.bool:
        return list(drawn.split(list(sizes)))
    # The positions of each part count from its own begin.
    starts = np.cumsum([0, *sizes])
    cuts = np.searchsorted(drawn.numpy(), starts)
    parts: list[Tensor | None] = []
    for i in range(len(sizes)):
        parts.append(drawn[cuts[i] : cuts[i + 1]] - int(starts[i]))
    return parts


def zero_dropped_(values: Tensor, drawn: Tensor | None) -> Tensor:
    """Set the dropped values of a contiguous tensor to 0, in place; the others are not scaled.

    >>> zero_dropped_(torch.ones(2, 3), torch.tensor([0, 4])).tolist()
    [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]
    """
    if drawn is None:
        return values
    flat = values.view(-1)
    if drawn.dtype == torch.bool:
        flat.masked_fill_(drawn, 0)
    else:
        flat.index_fill_(0, drawn, 0)
    return values
