"""Choice of the precision where it must be measured: on a CPU bf16, on a GPU without bf16 fp16, if it agrees with fp32
and is faster.

In: a model, a batch. Out: a ComputeConfig with the reason for the log and machine.json.
Processors with units for bf16 (AMX, AVX512-BF16, ARM's BF16) multiply matrices two to ten times as fast with them, GPUs
before A100 (T4, V100, RTX 20) fp16 up to eight times as fast as fp32.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fivetune.data.store.batch import split_batch
from fivetune.errors import ConfigError, format_error, refuse_broken_context
from fivetune.machine.telemetry.devices import find_bf16_units
from fivetune.model.backend import Forward
from fivetune.model.flat import explain_unsupported_model
from fivetune.model.modules import T5Model
from fivetune.training.autotune.forward import measure_batch_seconds
from fivetune.training.autotune.probe import forward_backward, restore_state
from fivetune.training.compute_config import ComputeConfig
from fivetune.types import Batch

MIN_WIDTH = 128  # d_model; the products of narrower models are too small to gain
MIN_GAIN = 1.15  # times as fast as fp32; below, the choice would change from start to start
MAX_LOSS_CHANGE, MAX_GRADIENT_CHANGE = 0.01, 0.1  # relative; bf16 rounds by up to 0.004, a few percent after all layers
MAX_TOKENS, NUM_COMPARED = 1024, 4  # of a CPU's trial of speed; examples
REQUESTED, NO_UNITS = "requested", "this CPU has no units for it and computes it slower"


def choose_precision(
    requested: str,
    model: T5Model,
    compute: ComputeConfig,
    batch: Batch,
    forward: Forward,
) -> ComputeConfig:
    """Choose the precision of a CPU, unless it is requested: then the precision of `compute` stays.

    Args:
        requested: auto, fp32, tf32, bf16 or fp16.
        model: model with gradients, on its device, not yet placed by a strategy.
        forward: the run's forward in fp32.

    Raises ConfigError if bf16 is requested on a CPU and does not agree with fp32.
    """
    if requested not in ("auto", "bf16"):
        return compute
    units = find_bf16_units()
    if requested == "bf16":
        if reason := _explain_disagreement("bf16", model, compute, batch, (forward, forward)):
            raise ConfigError(f"train.precision: bf16 does not agree with fp32 here: {reason}. Use fp32.")
        why = REQUESTED if units else f"{REQUESTED}; {NO_UNITS}"
        return replace(compute, precision="bf16", precision_why=why)
    if not units:
        return replace(compute, precision_why="the CPU has no units for bf16")
    width = model.get_input_embeddings().weight.shape[1]
    if width < MIN_WIDTH:
        return replace(compute, precision_why=f"d_model {width} is too small to gain from bf16")
    return choose_faster("bf16", model, compute, batch, (forward, forward), units)


def choose_half(
    model: T5Model, compute: ComputeConfig, batch: Batch, wanted: str, *, recompute: bool = False
) -> ComputeConfig:
    """Choose fp16 on a GPU without bf16, if flat tokens in it agree with fp32 and are clearly faster.

    Whatever fails in the trial is the reason to stay with fp32.

    Args:
        model: as in `choose_precision`.
        wanted: train.forward.
    """
    reason = explain_unsupported_model(model, compute.device)
    if wanted not in ("auto", "flat"):
        reason = f"train.forward is {wanted}"
    if reason:
        return replace(compute, precision_why=f"fp16 needs flat tokens: {reason}")
    # In fp32 flat tokens need Triton's kernel, which has no such GPU.
    forwards = Forward("padded", "", recompute), Forward("flat", "", recompute)
    try:
        return choose_faster("fp16", model, compute, batch, forwards, "its units for fp16")
    except Exception as error:
        refuse_broken_context(error, "--train.precision fp32")
        return replace(compute, precision_why=f"the trial of fp16 failed: {format_error(error)}")


def choose_faster(
    name: str, model: T5Model, compute: ComputeConfig, batch: Batch, forwards: tuple[Forward, Forward], units: str
) -> ComputeConfig:
    """Choose a precision of 16 bits if it agrees with fp32 and is clearly faster.

    Args:
        name: bf16 or fp16.
        forwards: the forwards in fp32 and in 16 bits.
        units: what computes in 16 bits, for the reason.
    """
    # Agreement before speed: a wrong gradient is not worth any time.
    if reason := _explain_disagreement(name, model, compute, batch, forwards):
        return replace(compute, precision="fp32", precision_why=f"{name} does not agree: {reason}")
    exact = _measure_seconds(model, batch, replace(compute, precision="fp32"), forwards[0])
    rounded = _measure_seconds(model, batch, replace(compute, precision=name), forwards[1])
    why = f"measured: {name} takes {_describe_cost(rounded)}, fp32 {_describe_cost(exact)}, by {units}"
    chosen = name if rounded < math.inf and exact >= MIN_GAIN * rounded else "fp32"
    return replace(compute, precision=chosen, precision_why=why)


def adopt_trained_precision(compute: ComputeConfig, requested: str, trained: str | None) -> ComputeConfig:
    """The precision of answers with auto: 16 bits if the run was trained in them and the device has units for them."""
    if compute.kind == "cpu" and requested == "bf16" and not find_bf16_units():
        return replace(compute, precision_why=f"{REQUESTED}; {NO_UNITS}")
    if requested != "auto":
        return compute
    if compute.kind == "cuda" and compute.precision == "fp32" and trained == "fp16":
        return replace(compute, precision=trained, precision_why="as the run was trained")
    if compute.kind != "cpu" or trained != "bf16":
        return compute
    if not find_bf16_units():
        return replace(compute, precision_why="the run was trained in bf16, for which this CPU has no units")
    return replace(compute, precision=trained, precision_why="as the run was trained")


def _explain_disagreement(
    name: str, model: T5Model, compute: ComputeConfig, batch: Batch, forwards: tuple[Forward, Forward]
) -> str:
    """Describe how losses and gradients of some examples without dropout differ in 16 bits; empty if by rounding."""
    while len(batch.ids) > NUM_COMPARED:
        batch = split_batch(batch)[0]
    losses: list[float] = []
    gradients: list[list[Tensor]] = []
    for precision, forward in zip(("fp32", name), forwards, strict=True):
        loss, found = _compute_gradients(model, replace(compute, precision=precision), batch, forward)
        losses.append(loss)
        gradients.append(found)
    exact, rounded = losses
    # Of all gradients together: a weight whose gradient is almost nothing may differ by any factor.
    lengths = [gradient.norm().item() for gradient in gradients[0]]
    differences: list[float] = []
    for gradient, other in zip(*gradients, strict=True):
        differences.append((other - gradient).norm().item())
    change = math.hypot(*differences) / max(math.hypot(*lengths), 1e-30)
    if abs(rounded - exact) <= MAX_LOSS_CHANGE * abs(exact) and change <= MAX_GRADIENT_CHANGE:
        return ""
    return (
        f"the loss of {len(batch.ids)} examples is {exact:.4g} in fp32 and {rounded:.4g} in {name} (allowed: "
        f"{MAX_LOSS_CHANGE:.0%}), their gradients differ by {change:.1%} (allowed: {MAX_GRADIENT_CHANGE:.0%})"
    )


def _compute_gradients(
    model: T5Model, compute: ComputeConfig, batch: Batch, forward: Forward
) -> tuple[float, list[Tensor]]:
    """The loss without dropout and the gradients, on the host: a GPU may not hold those of two precisions."""
    # Small gradients vanish in fp16 and large ones overflow, unless the loss is scaled as in a run.
    scale = compute.make_scaler().get_scale()
    while True:
        with restore_state(model):
            forward.prepare(model)
            model.eval()
            loss = forward_backward(
                model, forward, batch, device=compute.device, autocast=compute.make_autocast, loss_scale=scale
            ).item()
            gradients = [p.grad.cpu() / scale for p in model.parameters() if p.grad is not None]
        if scale <= 1 or not math.isfinite(loss) or all(gradient.isfinite().all() for gradient in gradients):
            return loss, gradients
        scale /= 2


def _describe_cost(seconds: float) -> str:
    return "too much memory" if seconds == math.inf else f"{1000 * seconds:.0f} ms"


def _measure_seconds(model: T5Model, batch: Batch, compute: ComputeConfig, forward: Forward) -> float:
    """Seconds of forward and backward of a batch: on a GPU the whole one, as small ones do not fill it."""
    while compute.kind == "cpu" and len(batch.ids) > 1 and batch.num_input_tokens > MAX_TOKENS:
        batch = split_batch(batch)[0]
    return measure_batch_seconds(forward, model, compute.device, [batch], compute.make_autocast)
