"""Choice of the precision of a CPU: the requested one, else bf16 if it agrees with fp32 and is faster.

In: a model, a batch. Out: a ComputeConfig with the reason for the log and machine.json.
Processors with units for bf16 (AMX, AVX512-BF16, ARM's BF16) multiply matrices two to ten times as fast with them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fivetune.data.store.batch import split_batch
from fivetune.errors import ConfigError
from fivetune.machine.telemetry.devices import find_bf16_units
from fivetune.model.backend import Forward
from fivetune.model.modules import T5Model
from fivetune.training.autotune.probe import forward_backward, measure_best_seconds, restore_state
from fivetune.training.compute import ComputeConfig
from fivetune.types import Batch

MIN_WIDTH = 128  # d_model; the products of narrower models are too small to gain
MIN_GAIN = 1.15  # times as fast as fp32; below, the choice would change from start to start
MAX_LOSS_CHANGE, MAX_GRADIENT_CHANGE = 0.01, 0.1  # relative; bf16 rounds by up to 0.004, a few percent after all layers
NUM_TRIALS, MAX_TOKENS, NUM_COMPARED = 3, 1024, 4
REQUESTED, NO_UNITS = "requested", "this CPU has no units for it and computes it slower"


def choose_precision(
    requested: str,
    model: T5Model,
    compute: ComputeConfig,
    batch: Batch,
    forward: Forward,
) -> ComputeConfig:
    """Choose the precision of a CPU; on other devices the precision of `compute` stays.

    Args:
        requested: auto, fp32, tf32, bf16 or fp16.
        model: model with gradients, not yet placed by a strategy.
        forward: the run's forward.

    Raises ConfigError if bf16 is requested and does not agree with fp32.
    """
    if compute.kind != "cpu" or requested in ("fp32", "tf32", "fp16"):
        return compute
    units = find_bf16_units()
    if requested == "auto" and not units:
        return replace(compute, precision_why="the CPU has no units for bf16")
    width = model.get_input_embeddings().weight.shape[1]
    if requested == "auto" and width < MIN_WIDTH:
        return replace(compute, precision_why=f"d_model {width} is too small to gain from bf16")

    # Agreement before speed: a wrong gradient is not worth any time.
    candidates = {name: replace(compute, precision=name) for name in ("fp32", "bf16")}
    if reason := _explain_disagreement(model, batch, candidates, forward):
        if requested == "bf16":
            raise ConfigError(f"train.precision: bf16 does not agree with fp32 here: {reason}. Use fp32.")
        return replace(compute, precision_why=f"bf16 does not agree: {reason}")
    if requested == "bf16":
        why = REQUESTED if units else f"{REQUESTED}; {NO_UNITS}"
        return replace(candidates["bf16"], precision_why=why)
    exact = _measure_seconds(model, batch, candidates["fp32"], forward)
    rounded = _measure_seconds(model, batch, candidates["bf16"], forward)
    why = f"measured: bf16 takes {1000 * rounded:.0f} ms, fp32 {1000 * exact:.0f} ms, by {units}"
    chosen = "bf16" if exact / rounded >= MIN_GAIN else "fp32"
    return replace(candidates[chosen], precision_why=why)


def adopt_trained_precision(compute: ComputeConfig, requested: str, trained: str | None) -> ComputeConfig:
    """The precision of answers on a CPU: with auto, bf16 if the run was trained in it and the CPU has units for it."""
    if compute.kind == "cpu" and requested == "bf16" and not find_bf16_units():
        return replace(compute, precision_why=f"{REQUESTED}; {NO_UNITS}")
    if compute.kind != "cpu" or requested != "auto" or trained != "bf16":
        return compute
    if not find_bf16_units():
        return replace(compute, precision_why="the run was trained in bf16, for which this CPU has no units")
    return replace(compute, precision=trained, precision_why="as the run was trained")


def _explain_disagreement(model: T5Model, batch: Batch, candidates: dict[str, ComputeConfig], forward: Forward) -> str:
    """Describe how losses and gradients of some examples without dropout differ in bf16; empty if by rounding."""
    while len(batch.ids) > NUM_COMPARED:
        batch = split_batch(batch)[0]
    losses: dict[str, float] = {}
    gradients: dict[str, list[Tensor]] = {}
    for name, compute in candidates.items():
        with restore_state(model):
            forward.prepare(model)
            model.eval()
            loss = forward_backward(model, forward, batch, device="cpu", autocast=compute.make_autocast)
            losses[name] = loss.item()
            gradients[name] = [p.grad for p in model.parameters() if p.grad is not None]
    exact = losses["fp32"]
    rounded = losses["bf16"]
    # Of all gradients together: a weight whose gradient is almost nothing may differ by any factor.
    lengths = [gradient.norm().item() for gradient in gradients["fp32"]]
    differences: list[float] = []
    for gradient, other in zip(gradients["fp32"], gradients["bf16"], strict=True):
        differences.append((other - gradient).norm().item())
    change = math.hypot(*differences) / max(math.hypot(*lengths), 1e-30)
    if abs(rounded - exact) <= MAX_LOSS_CHANGE * abs(exact) and change <= MAX_GRADIENT_CHANGE:
        return ""
    return (
        f"the loss of {len(batch.ids)} examples is {exact:.4g} in fp32 and {rounded:.4g} in bf16 (allowed: "
        f"{MAX_LOSS_CHANGE:.0%}), their gradients differ by {change:.1%} (allowed: {MAX_GRADIENT_CHANGE:.0%})"
    )


def _measure_seconds(model: T5Model, batch: Batch, compute: ComputeConfig, forward: Forward) -> float:
    """Seconds of forward and backward of a batch, the least of some trials."""
    while len(batch.ids) > 1 and batch.num_input_tokens > MAX_TOKENS:
        batch = split_batch(batch)[0]
    with restore_state(model):
        forward.prepare(model)
        model.train()

        def run() -> None:
            forward_backward(model, forward, batch, device="cpu", autocast=compute.make_autocast)

        return measure_best_seconds(run, "cpu", num_trials=NUM_TRIALS, num_warm_up=1)
