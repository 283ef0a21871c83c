"""AdamW whose steps are scaled by each tensor's root mean square, as Adafactor's are (nanoT5, Nawrot 2023).

State: two fp32 tensors of the parameters' size. A learning rate is a share of a tensor's size: 1e-2 changes each by
about 1 % a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from fivetune.training.optimizers import AdamWOptions, Decay, Rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState


class AdamWRMS(AdamWOptions):
    """AdamW with RMS scaling: learning rates as for Adafactor's preset t5-paper."""

    state_bytes_per_parameter = 8.0
    lr_range = (1e-4, 2e-2)
    supports_shards = True

    lr: Rate = Field(1e-3, description="peak learning rate, before the scaling")
    weight_decay: Decay = Field(0.0, description="decoupled, not scaled; not applied to norms")
    min_rms: PositiveFloat = Field(1e-3, description="lower bound of the root mean square")

    def build(self, groups: list[TorchState]) -> Optimizer:
        from fivetune.training.optimizers._adamw_rms import ScaledAdamW

        for group in groups:
            if not group.get("scales_by_size", True):
                group["min_rms"] = 1.0  # more than the RMS of an adapter's matrices: steps of the plain rate
        return ScaledAdamW(groups, {**self.build_arguments(), "min_rms": self.min_rms})

    def effective_lr(self, optimizer: Optimizer) -> float | None:
        """Learning rate of the last step, averaged over all parameters; None before the first step."""
        return optimizer.compute_mean_rate()  # type: ignore[attr-defined]
