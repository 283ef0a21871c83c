"""Inverse square root decay (Vaswani et al. 2017; T5's pre-training): 1 / sqrt(step), from the end of the warm-up."""

from __future__ import annotations

from math import sqrt

from pydantic import Field, PositiveInt

from fivetune.training.schedules import Warmup


class InverseSqrt(Warmup):
    """Decay sqrt(t / (t + steps since the warm-up)); without a length of the run in it, a run can be prolonged.

    >>> [round(InverseSqrt(timescale=3).factor(step, 10), 3) for step in (0, 1, 9)]
    [1.0, 0.866, 0.5]
    """

    timescale: PositiveInt | None = Field(
        None, description="t, in steps; default: the warm-up's length, 10,000 without one"
    )

    def factor(self, step: int, num_steps: int) -> float:
        warmup = self.count_warmup_steps(num_steps)
        if step < warmup:
            return (step + 1) / warmup
        scale = self.timescale or warmup or 10_000
        return sqrt(scale / (scale + step - warmup))
