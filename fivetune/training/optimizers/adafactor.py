"""Adafactor (Shazeer and Stern 2018) with the update rule of transformers and two named presets.

"Adafactor with lr 1e-3" names two recipes with very different steps: `t5-paper` multiplies the rate by each tensor's
root mean square (t5x: multiply_by_parameter_scale=True), `hf` does not (the usual forum advice for transformers).
The effective learning rate is logged. The computation is in `_batched_adafactor.py`. State: one row and one column
per matrix, one value per element of a vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from fivetune.training.optimizers import Beta, Decay, OptimizerOptions, Rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState


EPS = (1e-30, 1e-3)  # added to squared gradients; lower bound of the RMS by which steps are scaled


class Adafactor(OptimizerOptions):
    """Adafactor. State per matrix: one fp32 row and one column, a negligible amount of memory."""

    state_bytes_per_parameter = 0.1
    lr_range = (1e-4, 1e-2)
    supports_shards = True
    supports_tpu = True
    gathers_state = True

    preset: Literal["t5-paper", "hf"] = Field(
        "t5-paper", description="t5-paper: steps scaled by each tensor's RMS; hf: plain steps"
    )
    lr: Rate | None = Field(None, description="peak learning rate; default 1e-3, none with relative_step")
    scale_parameter: bool | None = Field(
        None, description="the preset's value (t5-paper: true, hf: false); another value is refused"
    )
    relative_step: bool = Field(False, description="learning rate 1/sqrt(step), as in the paper; excludes lr")
    warmup_init: bool = Field(False, description="linear warm-up of relative_step: 1e-6 * step")
    clip_threshold: PositiveFloat = Field(1.0, description="RMS above which an update is scaled down")
    decay_rate: Annotated[float, Field(ge=-1, lt=0)] = Field(-0.8, description="exponent of the second moment's decay")
    beta1: Beta | None = Field(None, description="momentum; null: none")
    weight_decay: Decay = 0.0

    @model_validator(mode="after")
    def _check_options(self) -> Adafactor:
        if self.relative_step and self.lr is not None:
            raise ValueError(
                f"lr {self.lr} is given together with relative_step, which computes its own. Drop one of them"
            )
        if self.warmup_init and not self.relative_step:
            raise ValueError("warmup_init belongs to relative_step. Set relative_step: true or drop warmup_init")
        scaled = self.preset == "t5-paper"
        if self.scale_parameter is not None and self.scale_parameter != scaled:
            other = "hf" if scaled else "t5-paper"
            raise ValueError(
                f"scale_parameter {self.scale_parameter} contradicts preset {self.preset}. Set preset: {other}, "
                "which implies it"
            )
        return self

    @property
    def scales_by_size(self) -> bool:
        return self.preset == "t5-paper"

    @property
    def computes_rate(self) -> bool:
        return self.relative_step

    def get_state_bytes(self, kind: str) -> float:
        momentum = 0.0 if self.beta1 is None else 4.0
        return self.state_bytes_per_parameter + momentum

    def build(self, groups: list[TorchState]) -> Optimizer:
        from fivetune.training.optimizers._batched_adafactor import BatchedAdafactor

        # Matrices of an adapter begin at 0, where steps in proportion to their size hardly move them.
        for group in groups:
            group["scale_parameter"] = self.scales_by_size and group.get("scales_by_size", True)
        defaults = self.model_dump(exclude={"preset"})
        defaults["lr"] = None if self.relative_step else (self.lr or 1e-3)
        return BatchedAdafactor(groups, {**defaults, "scale_parameter": self.scales_by_size, "eps": EPS})

    def effective_lr(self, optimizer: Optimizer) -> float | None:
        """Learning rate of the last step, averaged over all parameters; None before the first step."""
        return optimizer.compute_mean_rate()  # type: ignore[attr-defined]
