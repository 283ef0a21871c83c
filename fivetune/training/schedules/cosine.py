"""Cosine decay from the peak learning rate to a final share of it (Loshchilov and Hutter 2017)."""

from __future__ import annotations

from math import cos, pi

from pydantic import Field

from fivetune.training.schedules import Share, Warmup


class Cosine(Warmup):
    """Cosine decay: final + (1 - final) * (1 + cos(pi * progress)) / 2.

    >>> [round(Cosine().factor(step, 4), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """

    final_fraction: Share = Field(0.0, description="share of lr at the end")

    def compute_decay(self, progress: float) -> float:
        return self.final_fraction + (1.0 - self.final_fraction) * (1.0 + cos(pi * progress)) / 2.0
