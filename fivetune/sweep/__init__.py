"""Sweeps: one file names a recipe, variants and seeds; every run is a process of its own, in one directory.

plan.read_sweep: file -> Sweep (checked to the last run) -> runs.run_sweep -> run directories and sweep.json
-> record.comparison_of -> Comparison. Without torch: training happens in the processes.
"""

from __future__ import annotations

from fivetune.sweep.plan import Planned, Sweep, read_sweep
from fivetune.sweep.record import comparison_of, is_sweep, variants_of
from fivetune.sweep.runs import estimates, run_sweep

__all__ = ["Planned", "Sweep", "comparison_of", "estimates", "is_sweep", "read_sweep", "run_sweep", "variants_of"]
