"""One process, one device."""

from __future__ import annotations

from fivetune.training.strategies import StrategyOptions
from fivetune.types import Layout


class Single(StrategyOptions):
    """The whole model on one device."""

    supports_multiple = False
    supports_tpu = True
    complexity = 0

    def get_layout(self, num_ranks: int) -> Layout:
        return Layout()
