"""Muon (Jordan et al. 2024): the momentum of a matrix is orthogonalised; torch's. AdamW updates everything else.

State: one fp32 tensor of a matrix's size; two for embeddings, head and norms. The update of a matrix is scaled to the
size of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so that one learning rate serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from fivetune.training.optimizers import Beta, Decay, OptimizerOptions, Rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState


class Muon(OptimizerOptions):
    """Muon for the matrices of the blocks, AdamW for the rest. Learning rates as for AdamW."""

    state_bytes_per_parameter = 4.0
    lr_range = (1e-5, 2e-2)
    supports_shards = True

    lr: Rate = Field(3e-4, description="peak learning rate")
    weight_decay: Decay = Field(0.0, description="decoupled; not applied to norms")
    momentum: Beta = Field(0.95, description="of Muon")
    beta1: Beta = Field(0.9, description="of AdamW")
    beta2: Beta = Field(0.999, description="of AdamW")
    eps: PositiveFloat = Field(1e-8, description="of AdamW")

    def get_state_bytes(self, kind: str) -> float:
        return self.state_bytes_per_parameter if kind == "matrix" else 8.0

    def build(self, groups: list[TorchState]) -> Optimizer:
        from fivetune.training.optimizers._muon import MuonWithAdamW

        return MuonWithAdamW(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
        )
