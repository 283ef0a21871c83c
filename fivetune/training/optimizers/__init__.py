"""Optimizers, one per file.

An optimizer's file holds one options class with `lr` (the peak learning rate), `build(groups)` (a
torch.optim.Optimizer over parameter groups), `effective_lr(optimizer)` (the learning rate that the last step applied,
or None), `state_bytes_per_parameter` (for fp32 weights) and `lr_range` (the rates at which T5 fine-tuning is known to
work). torch is imported inside the methods. Optional are:

- `relative_step`: a field by which the optimizer computes its own rate.
- `replaces_decay`: whether the optimizer averages the weights instead of lowering its rate. Its torch optimizer then
  has `compute_averages(weights)`, which returns the weights to evaluate.
- `state_bytes_per_table_weight`: of an embedding or a head, where it differs from other weights.
- `supports_shards`: whether the torch optimizer updates tensors that are divided among ranks (DTensor).
- `build_for_tables(groups)`: builds the optimizer of one process on a CPU.
- `refuse_missing_packages()`: raises FiveTuneEnvironmentError, before a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivetune.types import Optimizer


def get_state_bytes(options: Optimizer, kind: str) -> float:
    """Return the bytes of state for each weight of a kind: "matrix", "table" (embedding and head) or "norm".

    >>> from fivetune.training.optimizers.muon import Muon
    >>> get_state_bytes(Muon(), "matrix"), get_state_bytes(Muon(), "table")
    (4.0, 8.0)
    """
    name = "state_bytes_per_parameter" if kind == "matrix" else "state_bytes_per_table_weight"
    return getattr(options, name, options.state_bytes_per_parameter)
