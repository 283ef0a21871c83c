"""Linear decay from the peak learning rate to a final share of it."""

from __future__ import annotations

from pydantic import Field

from fivetune.training.schedules import Share, Warmup


class Linear(Warmup):
    """Linear decay.

    >>> [Linear().factor(step, 4) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    final_fraction: Share = Field(0.0, description="share of lr at the end")

    def compute_decay(self, progress: float) -> float:
        return 1.0 + (self.final_fraction - 1.0) * progress
