"""The updates of AdamW and Adafactor as traceable functions of one weight, for devices whose steps are compiled whole.

In: a weight, its gradient, its state by the names of torch's optimizer, the options of its group, the numbers that
change from step to step. Out: weight and state after the step. Written with operators and the functions of `np`, which
is jax.numpy or any module with numpy's names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fivetune.errors import ConfigError
from fivetune.training.optimizers._batched_adafactor import BatchedAdafactor, compute_base_rate, create_adafactor_state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fivetune.types import TorchState

Array = Any
"""An array of jax or numpy; jax is an optional dependency."""


def compute_rates(optimizer: Optimizer, step: int) -> dict[str, float]:
    """Compute what changes from step to step, for the 1-based step, in double precision as torch does."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, BatchedAdafactor):
        return {"lr": compute_base_rate(group, step), "weight": math.pow(step, group["decay_rate"])}
    beta1, beta2 = group["betas"]
    return {"lr": group["lr"], "mean": 1 - beta1**step, "square": math.sqrt(1 - beta2**step)}


def create_state(optimizer: Optimizer, parameter: Tensor) -> TorchState:
    """Create the state of a weight before its first step. Raises ConfigError for an optimizer without traced update."""
    import torch

    if isinstance(optimizer, BatchedAdafactor):
        return create_adafactor_state(parameter, optimizer.param_groups[0]["beta1"])
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError(
            f"optimizer.name: {type(optimizer).__name__} has no update for device tpu. Use adamw or adafactor."
        )
    return {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def make_counter(optimizer: Optimizer, step: int) -> TorchState:
    """Make the entry of a state that counts the steps, of the type that the optimizer expects."""
    import torch

    return {"step": step if isinstance(optimizer, BatchedAdafactor) else torch.tensor(float(step))}


def apply_update(
    np: Any, optimizer: Optimizer, group: TorchState, weight: Array, state: TorchState, grad: Array, rates: TorchState
) -> tuple[Array, TorchState]:
    """Apply the optimizer's update to one weight; returns weight and state."""
    apply = _apply_adafactor if isinstance(optimizer, BatchedAdafactor) else _apply_adamw
    return apply(np, group, weight, state, grad, rates)


def _apply_adamw(
    np: Any, group: TorchState, weight: Array, state: TorchState, grad: Array, rates: TorchState
) -> tuple[Array, TorchState]:
    beta1, beta2 = group["betas"]
    mean = beta1 * state["exp_avg"] + (1 - beta1) * grad
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
    weight = weight * (1 - rates["lr"] * group["weight_decay"])
    weight = weight - rates["lr"] / rates["mean"] * mean / (np.sqrt(square) / rates["square"] + group["eps"])
    return weight, {"exp_avg": mean, "exp_avg_sq": square}


def _apply_adafactor(
    np: Any, group: TorchState, weight: Array, state: TorchState, grad: Array, rates: TorchState
) -> tuple[Array, TorchState]:
    """Apply the update of `BatchedAdafactor`, whose text has the reasons."""
    # The steps of BatchedAdafactor.update, without blocks: a compiler divides the work itself.
    lr = rates["lr"]
    after = dict(state)
    if group["scale_parameter"]:
        after["RMS"] = np.sqrt(np.mean(np.square(weight)))
        lr = lr * np.maximum(after["RMS"], group["eps"][1])
    squares = np.square(grad) + group["eps"][0]

    def average(name: str, value: Array) -> Array:
        after[name] = state[name] * (1 - rates["weight"]) + value * rates["weight"]
        return after[name]

    if "exp_avg_sq_row" in state:
        row = average("exp_avg_sq_row", squares.mean(-1))
        col = average("exp_avg_sq_col", squares.mean(-2))
        row = row / row.mean(-1, keepdims=True)
        update = grad / np.sqrt(row)[..., None] / np.sqrt(col)[..., None, :]
    else:
        update = grad / np.sqrt(average("exp_avg_sq", squares))
    rms = np.sqrt(np.mean(np.square(update)))
    update = update / np.maximum(1.0, rms / group["clip_threshold"]) * lr
    if group["beta1"] is not None:
        update = group["beta1"] * state["exp_avg"] + (1 - group["beta1"]) * update
        after["exp_avg"] = update
    return weight - update - group["weight_decay"] * lr * weight, after
