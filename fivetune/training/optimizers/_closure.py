"""The closure that torch's optimizers accept: it computes the loss and its gradients before the step."""

from __future__ import annotations

from collections.abc import Callable

import torch


def run_closure(closure: Callable[[], float] | None) -> float | None:
    """Run a closure with gradients, inside of a step without them; returns its loss, None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
