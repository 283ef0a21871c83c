"""bitsandbytes' AdamW8bit with the bits of its moments by kind of weight, and a state of tensors by name.

In: parameter groups; a group's key `kind` is "table" for embeddings and head. Out: changed weights, and the state step,
state1, state2, and for 8 bits qmap1, qmap2, absmax1, absmax2.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from fivetune.types import TorchState

_logger = logging.getLogger("bitsandbytes")
_level = _logger.level
_logger.setLevel(logging.ERROR)  # importing it warns about a kernel for 4-bit products on CPUs
from bitsandbytes.optim.adamw import AdamW8bit  # noqa: E402

_logger.setLevel(_level)


class BlockwiseAdamW(AdamW8bit):
    """AdamW with 8-bit moments; the moments of tables have `table_bits`."""

    def __init__(self, groups: list[TorchState], *, table_bits: int, **arguments: Any) -> None:
        super().__init__(groups, **arguments)
        self._table_bits = table_bits

    def get_config(self, gindex: int, pindex: int, group: TorchState) -> dict[str, Any]:
        """Settings of a weight; bitsandbytes' own exceptions go by the id of a tensor, which another may get later."""
        config = super().get_config(gindex, pindex, group)
        if group.get("kind") == "table":
            config = {**config, "optim_bits": self._table_bits}
        return config

    def state_dict(self) -> TorchState:
        """As torch's: bitsandbytes nests the quantised tensors, which sharded checkpoints store by name."""
        return Optimizer.state_dict(self)
