"""Warm-up, stable, decay (Hu et al. 2024, MiniCPM): the peak learning rate for most of the run, then a short decay."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, Literal

from pydantic import Field

from fivetune.training.schedules import Share, Warmup


class WSD(Warmup):
    """A constant rate, then a decay over the last share of the steps after the warm-up.

    >>> [WSD(decay_fraction=0.5).factor(step, 8) for step in (0, 3, 4, 6, 7)]
    [1.0, 1.0, 1.0, 0.5, 0.25]
    """

    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="share of the steps that decay")
    final_fraction: Share = Field(0.0, description="share of lr at the end")
    shape: Literal["linear", "sqrt"] = Field(
        "linear", description="linear, or 1 - sqrt of the decayed share (Hägele et al. 2024)"
    )

    def compute_decay(self, progress: float) -> float:
        # The share of the decay that is over: 0 until it begins.
        decayed = max(0.0, (progress - (1.0 - self.decay_fraction)) / self.decay_fraction)
        fall = decayed if self.shape == "linear" else sqrt(decayed)
        return 1.0 - (1.0 - self.final_fraction) * fall
