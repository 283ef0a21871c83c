"""Data parallel: every rank holds the whole model and computes its share of every global batch.

The gradients are all-reduced in place, in buckets, while the backward pass of the step's last micro-batch goes on; any
forward can be used. What remains after the backward pass is the phase "exchange" of the step's times.
"""

from __future__ import annotations

from fivetune.training.strategies import StrategyOptions


class DDP(StrategyOptions):
    """The whole model on each rank; gradients are summed."""

    supports_tpu = True
    complexity = 1
