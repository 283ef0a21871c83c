"""Optimizers, one per file.

An optimizer's file holds one subclass of `OptimizerOptions`, whose fields are its options, with `lr` among them. torch
is imported inside the methods. What other code asks of an optimizer is a field or a method of the class.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fivetune.plugins import Options

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState

__all__ = ["AdamWOptions", "Beta", "Decay", "OptimizerOptions", "Rate"]

Rate = Annotated[float, Field(gt=0, le=10)]
Decay = NonNegativeFloat
Beta = Annotated[float, Field(ge=0, lt=1)]
"""Types of options that most optimizers have: learning rate, weight decay, share of an average that a step keeps."""


class OptimizerOptions(Options):
    """Base of all optimizers, which describes the contract `fivetune.types.Optimizer`.

    A subclass adds `lr` (peak learning rate), `weight_decay`, `build` and the two fields without a value.
    """

    state_bytes_per_parameter: ClassVar[float]  # of a matrix with fp32 weights
    lr_range: ClassVar[tuple[float, float]]  # rates at which T5 fine-tuning is known to work

    # Whether the torch optimizer updates tensors that are divided among ranks (DTensor).
    supports_shards: ClassVar[bool] = False
    # Whether it is AdamW's rule, which CUDA graphs apply to all weights in one buffer.
    supports_graphs: ClassVar[bool] = False
    # Whether a step can be traced for the chips of device tpu.
    supports_tpu: ClassVar[bool] = False
    # Whether a step needs whole weights, and each rank holds the whole state.
    gathers_state: ClassVar[bool] = False
    # Whether the optimizer averages the weights instead of lowering its rate. Its torch optimizer then has
    # `compute_averages(weights)`, which returns the weights to evaluate.
    replaces_decay: ClassVar[bool] = False

    @property
    def computes_rate(self) -> bool:
        """Whether the optimizer computes its own learning rate."""
        return False

    def get_state_bytes(self, kind: str) -> float:
        """Return the bytes of state for each weight of a kind: "matrix", "table" (embedding and head) or "norm".

        >>> from fivetune.training.optimizers.muon import Muon
        >>> Muon().get_state_bytes("matrix"), Muon().get_state_bytes("table")
        (4.0, 8.0)
        """
        return self.state_bytes_per_parameter

    def refuse_missing_packages(self) -> None:
        """Raise FiveTuneEnvironmentError, before a model is loaded, if a package is missing."""

    @abstractmethod
    def build(self, groups: list[TorchState]) -> Optimizer:
        """Build the torch optimizer over parameter groups."""

    def build_for_tables(self, groups: list[TorchState]) -> Optimizer:
        """Build the optimizer of one process on a CPU, where large tables may have factored gradients."""
        return self.build(groups)

    def effective_lr(self, optimizer: Optimizer) -> float | None:
        """The learning rate that the last step applied; None before the first step."""
        return float(optimizer.param_groups[0]["lr"])


class AdamWOptions(OptimizerOptions):
    """Base of AdamW and its variants: their common options."""

    lr: Rate = Field(3e-4, description="peak learning rate")
    weight_decay: Decay = Field(0.0, description="decoupled; not applied to norms")
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: PositiveFloat = 1e-8

    def build_arguments(self) -> TorchState:
        """Build the arguments of torch's AdamW, which the variants share."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay}
