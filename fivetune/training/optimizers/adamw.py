"""AdamW (Loshchilov and Hutter 2019), torch's fused kernel.

State: two fp32 tensors of the parameters' size. On a CPU, large tables have factored gradients (`_table_adamw.py`):
the same steps with less memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivetune.training.optimizers import AdamWOptions

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fivetune.types import TorchState

LARGE_TABLE = 2**26  # elements (256 MiB of fp32): the tables of mT5 and umT5


class AdamW(AdamWOptions):
    """AdamW. T5 fine-tunes well at 1e-4 to 1e-3; 5e-5, a common default elsewhere, is too small for it."""

    state_bytes_per_parameter = 8.0
    lr_range = (1e-5, 5e-3)
    supports_shards = True
    supports_graphs = True
    supports_tpu = True

    def build(self, groups: list[TorchState]) -> Optimizer:
        import torch

        return torch.optim.AdamW(groups, fused=True, **self.build_arguments())

    def build_for_tables(self, groups: list[TorchState]) -> Optimizer:
        """Build the same optimizer for one process on a CPU, with factored gradients of large tables."""
        from fivetune.training.optimizers._table_adamw import TableAdamW

        return TableAdamW(groups, smallest=LARGE_TABLE, **self.build_arguments())
