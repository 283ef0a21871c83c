"""AdamW with moments of 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"), bitsandbytes'.

State: two bytes per element of a matrix and a scale per 256 elements, a quarter of AdamW's. Tensors of less than 4,096
elements have moments of 32 bits, and so do embeddings and head, whose rows are updated unevenly (as in transformers'
Trainer); `table_bits: 8` saves memory where the vocabulary is most of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fivetune.installation import require_package
from fivetune.training.optimizers import AdamWOptions

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState

BLOCK = 256  # elements that share an fp32 scale


class AdamW8bit(AdamWOptions):
    """AdamW with a quarter of its memory for moments. Learning rates as for AdamW; needs bitsandbytes."""

    state_bytes_per_parameter = 2 * (1 + 4 / BLOCK)
    lr_range = (1e-5, 5e-3)

    table_bits: Literal[8, 32] = Field(32, description="bits of the moments of embeddings and head")

    def get_state_bytes(self, kind: str) -> float:
        is_exact = kind != "matrix" and self.table_bits == 32
        return 8.0 if is_exact else self.state_bytes_per_parameter

    def refuse_missing_packages(self) -> None:
        """Raise FiveTuneEnvironmentError without bitsandbytes."""
        advice = ". Without it: adafactor, whose state is smaller still"
        require_package("optimizer.name adamw_8bit", "bitsandbytes", "bitsandbytes", advice)

    def build(self, groups: list[TorchState]) -> Optimizer:
        self.refuse_missing_packages()
        from fivetune.training.optimizers._adamw_8bit import BlockwiseAdamW

        return BlockwiseAdamW(groups, table_bits=self.table_bits, **self.build_arguments())
