"""Constant learning rate (the T5 recipe), after an optional warm-up."""

from __future__ import annotations

from fivetune.training.schedules import Warmup


class Constant(Warmup):
    """Constant learning rate.

    >>> [Constant(warmup_steps=2).factor(step, 4) for step in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """

    def compute_decay(self, progress: float) -> float:
        return 1.0
