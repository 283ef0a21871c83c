"""Dropout by drawing where the zeros fall, not by drawing one number per value.

In: how many values, at what rate. Out: what to blank, kept for the backward pass.
The gaps between the zeros of a Bernoulli sequence are geometric, so a tenth of the draws is enough at rate 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def draw(count: int, rate: float, device: torch.device) -> Tensor | None:
    """Which of `count` values to drop, each with probability `rate`, from torch's global generator.

    Returns: on the CPU their positions, ascending ([about rate * count] int64); elsewhere [count] bool, without a
    host synchronisation; None where nothing is dropped.
    """
    if rate == 0 or count == 0:
        return None
    if device.type != "cpu":
        return torch.rand(count, device=device) < rate
    if rate >= 1:
        return torch.arange(count)
    random = np.random.Generator(np.random.SFC64(int(torch.randint(2**62, ()))))
    likely = int(rate * count + 6 * math.sqrt(rate * count) + 8)
    found = _walk(random, -1, likely, rate)
    while found[-1] < count:
        found = np.concatenate([found, _walk(random, int(found[-1]), likely // 8 + 8, rate)])
    return torch.from_numpy(found[: int(np.searchsorted(found, count))])


def kept_scale(rate: float) -> float:
    """What the values that are kept are multiplied with."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def _walk(random: np.random.Generator, start: int, steps: int, rate: float) -> np.ndarray:
    """`steps` positions after `start` whose gaps are geometric: an exponential, cut to whole numbers."""
    gaps = random.standard_exponential(steps, dtype=np.float32)
    gaps *= -1 / math.log1p(-rate)
    positions = gaps.astype(np.int64)
    positions += 1
    positions[0] += start
    return np.cumsum(positions, out=positions)


def split(drawn: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """What `draw` gave for sum(sizes) values, cut into what it means for each stretch of `sizes`."""
    if drawn is None:
        return [None] * len(sizes)
    if drawn.dtype == torch.bool:
        return list(drawn.split(list(sizes)))
    ends = np.cumsum([0, *sizes])
    cuts = np.searchsorted(drawn.numpy(), ends)
    return [drawn[a:b] - int(end) for a, b, end in zip(cuts[:-1], cuts[1:], ends[:-1], strict=True)]


def blank_(values: Tensor, drawn: Tensor | None) -> Tensor:
    """Set the dropped values of a contiguous tensor to 0, in place; the others are not scaled.

    >>> blank_(torch.ones(2, 3), torch.tensor([0, 4])).tolist()
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
