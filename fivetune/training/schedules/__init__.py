"""Learning-rate schedules, one per file.

A schedule's file holds one options class with `factor(step, num_steps)`: the factor in [0, 1] that scales the
optimizer's `lr` at optimizer step `step` (0-based) of `num_steps`.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, NonNegativeInt, model_validator

from fivetune.plugins import Options

Share = Annotated[float, Field(ge=0, le=1)]


class Warmup(Options):
    """Base class of all schedules: linear warm-up from 1/n to 1 over the first n steps."""

    warmup_steps: NonNegativeInt | None = Field(None, description="steps of linear warm-up")
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="warm-up as a share of the run, rounded up to whole steps; excludes warmup_steps"
    )

    @model_validator(mode="after")
    def _check_one_length(self) -> Warmup:
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError("warmup_steps and warmup_fraction are both given. Keep one of them")
        return self

    def count_warmup_steps(self, num_steps: int) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((self.warmup_fraction or 0.0) * num_steps)  # as transformers rounds it

    def factor(self, step: int, num_steps: int) -> float:
        """Factor of the learning rate at a 0-based step: the warm-up, then `compute_decay`."""
        warmup = self.count_warmup_steps(num_steps)
        if step < warmup:
            return (step + 1) / warmup  # not from 0: the first step moves the weights too
        return self.compute_decay((step - warmup) / max(num_steps - warmup, 1))

    def compute_decay(self, progress: float) -> float:
        """Factor after the warm-up; `progress` runs from 0 to 1 (exclusive)."""
        raise NotImplementedError
