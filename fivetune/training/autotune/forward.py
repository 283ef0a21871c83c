"""Choice of the forward: the requested one, the resumed run's, or the fastest in a measurement.

In: a model on its device, sample batches. Out: a Forward, with the reason for the log and machine.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fivetune.data.store.batch import split_batch
from fivetune.distributed.pipeline import find_stage
from fivetune.errors import ConfigError, format_error, is_out_of_memory, refuse_broken_context
from fivetune.model.attention import explain_unsupported_device
from fivetune.model.backend import Forward
from fivetune.model.flat import explain_unsupported_model
from fivetune.model.modules import T5Model
from fivetune.model.precision import get_matmul_dtype
from fivetune.training.autotune.probe import (
    find_disagreement,
    forward_backward,
    measure_best_seconds,
    restore_state,
)
from fivetune.types import Autocast, Batch

STATIC_DEVICES = ("mps", "xla", "tpu")  # devices that compile every new shape
NUM_TRIALS = 3
NUM_COMPARED = 4  # examples
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.1}
"""Largest relative difference of gradient norms from transformers' forward: rounding stays far below it."""


def choose_forward(
    requested: str,
    model: T5Model,
    device: str,
    sample: Sequence[Batch],
    *,
    autocast: Autocast,
    recompute: bool = False,
    resumed_forward: Forward | None = None,
) -> Forward:
    """Choose the forward of a run: the resumed or the requested one, else the fastest one known or measured.

    Args:
        requested: auto, flat, padded or buckets.
        sample: batches for measurements, which are made on CUDA only.
        resumed_forward: the forward that a resumed run began with; another one would round differently.

    Raises ConfigError if the requested forward cannot run.
    """
    if device == "tpu":
        return Forward("buckets", "tpu compiles every new shape")
    obstacle = explain_unsupported_flat(model, device, autocast)
    if find_stage(model):
        if obstacle:
            raise ConfigError(
                f"strategy.name: pipeline computes flat tokens, which cannot run here: {obstacle}. Use fsdp or ddp."
            )
        return Forward("flat", "the only one that pipeline stages compute", recompute)
    wanted = resumed_forward.kind if resumed_forward else requested
    kind = device.partition(":")[0]

    # A run that began with flat tokens by itself goes on with padding where they cannot run, such as on another device.
    if wanted == "flat" and obstacle and requested == "flat":
        raise ConfigError(f"train.forward: flat cannot run this model: {obstacle}. Use auto or padded.")
    if wanted == "flat" and obstacle:
        return Forward("padded", f"the run began with flat tokens, which cannot run now: {obstacle}", recompute)
    with autocast():
        in_fp16 = get_matmul_dtype(torch.device(kind)) == torch.float16
    if kind == "cuda" and in_fp16 and not obstacle and wanted in ("auto", "flat"):
        return Forward("flat", "transformers' modules overflow in fp16", recompute)
    # On CUDA kernels are compiled for the device, so that only a trial shows whether they run, and how fast.
    if kind == "cuda" and not obstacle and wanted in ("auto", "flat"):
        parts = (resumed_forward.parts,) if resumed_forward else ("triton", "torch")
        candidates = [Forward("flat", "", recompute, part) for part in parts]
        reference = Forward("padded", "", recompute)
        found = choose_fastest(candidates, reference, model, device, sample, autocast, wanted=wanted)
        if requested == "flat" and found.kind != "flat":
            raise ConfigError(f"train.forward: flat does not run here: {found.why}. Use auto or padded.")
        return found
    if wanted != "auto":
        why = "as the run began" if resumed_forward else "requested"
        return Forward(wanted, why, recompute)  # type: ignore[arg-type]
    if kind in STATIC_DEVICES:
        return Forward("buckets", f"{kind} compiles every new shape", recompute)
    if obstacle:
        return Forward("padded", f"flat tokens cannot run: {obstacle}", recompute)
    return Forward("flat", "nothing is padded", recompute)


def explain_unsupported_flat(model: T5Model, device: str, autocast: Autocast) -> str:
    """Explain why the flat forward cannot run a model on a device; empty if it can."""
    return explain_unsupported_model(model, device) or explain_unsupported_device(model.config, device, autocast)


def choose_fastest(
    candidates: Sequence[Forward],
    reference: Forward,
    model: T5Model,
    device: str,
    sample: Sequence[Batch],
    autocast: Autocast,
    *,
    wanted: str,
) -> Forward:
    """Choose the fastest forward whose gradients agree with the reference; `why` lists every candidate's result.

    Args:
        candidates: forwards with FiveTune's kernels. reference: transformers' own.
        wanted: if "flat", the reference is chosen only if no candidate is usable.
    """
    results = {
        forward: _benchmark(forward, reference, model, device, sample, autocast) for forward in (*candidates, reference)
    }
    listed = "; ".join(f"{forward} {_format_result(result)}" for forward, result in results.items())
    usable = [forward for forward in candidates if isinstance(results[forward], float)]
    if wanted != "flat" and isinstance(results[reference], float):
        usable.append(reference)
    best = min(usable, key=lambda forward: float(results[forward]), default=reference)
    return replace(best, why=f"measured: {listed}")


def _format_result(result: float | str) -> str:
    if isinstance(result, str):
        return f"is not used: {result}"
    return "ran out of memory" if result == math.inf else f"{1000 * result:.1f} ms a batch"


def _benchmark(
    forward: Forward, reference: Forward, model: T5Model, device: str, sample: Sequence[Batch], autocast: Autocast
) -> float | str:
    """Seconds per batch, or the reason why the forward is not usable."""
    try:
        if forward != reference:
            # Few examples suffice: every kernel runs, and the padded reference is cheap.
            batch = sample[0]
            while len(batch.ids) > NUM_COMPARED:
                batch = split_batch(batch)[0]
            found = _measure_norms(forward, model, device, batch, autocast)
            expected = _measure_norms(reference, model, device, batch, autocast)
            with autocast():
                tolerance = TOLERANCES[get_matmul_dtype(torch.device(device))]
            floor = tolerance * 1e-3 * expected["all gradients"]  # for weights with a negligible gradient
            if reason := find_disagreement(found, expected, tolerance=tolerance, floor=floor):
                return reason
        return measure_batch_seconds(forward, model, device, sample, autocast)
    except Exception as error:  # a kernel that does not compile or does not run on this device
        refuse_broken_context(error, "--train.forward padded")
        return format_error(error)


def _measure_norms(forward: Forward, model: T5Model, device: str, batch: Batch, autocast: Autocast) -> dict[str, float]:
    """The loss, the norm of each gradient, and the norm of all gradients, without dropout."""
    with restore_state(model):
        forward.prepare(model)
        model.eval()
        loss = forward_backward(model, forward, batch, device=device, autocast=autocast)
        norms: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                norms[name] = parameter.grad.float().norm().item()
    return {"the loss": loss.item(), **norms, "all gradients": math.hypot(*norms.values())}


def measure_batch_seconds(
    forward: Forward, model: T5Model, device: str, sample: Sequence[Batch], autocast: Autocast
) -> float:
    """Seconds of forward and backward per batch, the least of NUM_TRIALS; infinity if memory runs out."""
    with restore_state(model):
        forward.prepare(model)
        model.train()

        def run() -> None:
            for batch in sample:
                forward_backward(model, forward, batch, device=device, autocast=autocast)

        try:
            return measure_best_seconds(run, device, num_trials=NUM_TRIALS) / len(sample)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return math.inf
