"""Steps that are not finite: refused on the host, or skipped on the device, and explained.

In: the values of a step. Out: NumericError that names the examples and the module, or a flag on the device.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from fivetune.data.store.batch import pad
from fivetune.distributed.pipeline import find_stage
from fivetune.errors import NumericError
from fivetune.model.family import get_family
from fivetune.model.flat import compute_flat_losses, find_nonfinite_block
from fivetune.model.forward import compute_padded_losses, find_nonfinite_module
from fivetune.training.step.learner import Learner, StepInputs
from fivetune.types import Batch

MIN_LOSS_SCALE = 1.0  # at which fp16 gradients are the loss's own; torch begins with 65,536 and halves it
MAX_LISTED = 8  # examples that a message names


def make_nonfinite_flag(learner: Learner) -> Tensor | None:
    """[] fp32 on the device, set to 1 at the first non-finite step; from then on no update is applied.

    None if each step is checked on the host before it changes the weights: on a CPU, where reading a value is free;
    with loss scaling, where an overflow is not an error; with optimizers that do not support `found_inf`, the tensor
    by which torch's fused optimizers skip a step; and with sharded models, for which they do not support it either.
    """
    device = learner.compute.device  # cpu with TPU chips, whose steps check themselves
    if not device.startswith("cuda") or learner.scaler.is_enabled() or learner.strategy.sharded:
        return None
    if not getattr(learner.optimizer, "_step_supports_amp_scaling", False):
        return None
    return torch.zeros((), device=device)


def check_values(learner: Learner, inputs: StepInputs, values: Tensor) -> Tensor:
    """Raise NumericError for a non-finite step, or set the flag without waiting.

    Args:
        values: as in `Update`, on the device.

    Returns: the values, on the host.
    """
    flag = inputs.nonfinite_flag
    if flag is None:
        values = values.cpu()
        refuse_nonfinite(learner, inputs.batches, inputs.number, *values[:2].tolist())
        return values
    flag.logical_or_(~values.isfinite().all())
    return values.to("cpu", non_blocking=True)


def refuse_nonfinite(learner: Learner, batches: list[Batch], step: int, loss: float, norm: float) -> None:
    """Raise NumericError unless loss and norm are finite.

    With loss scaling an overflow of the norm is no error, as long as a smaller scale can help: one at MIN_LOSS_SCALE
    would be skipped for ever.
    """
    if math.isfinite(loss):
        if math.isfinite(norm):
            return
        if learner.scaler.is_enabled() and learner.scaler.get_scale() > MIN_LOSS_SCALE:
            return
    learner.fetch()  # the explanation runs the model of the host
    raise NumericError(_explain_nonfinite(learner, batches, step, loss, norm), step=step)


def _explain_nonfinite(learner: Learner, batches: list[Batch], step: int, loss: float, norm: float) -> str:
    """Name the micro-batch and the module of the first non-finite value."""
    what = f"gradient norm {norm}" if math.isfinite(loss) else f"loss {loss}"
    # All forward passes are finite: then a gradient is not.
    ids, place = _find_first_nonfinite(learner, batches) or (batches[0].ids, "the backward pass")
    listed = ", ".join(ids[:MAX_LISTED])
    if len(ids) > MAX_LISTED:
        listed += f" and {len(ids) - MAX_LISTED} more"
    change = "a lower optimizer.lr or with schedule.warmup_steps"
    if learner.compute.precision == "fp16":
        change = "train.precision bf16 or fp32"
    return (
        f"step {step}: {what}, first in {place}; examples {listed}. The weights were not changed. Look at "
        f"these examples, and start a new run (another run.dir) with {change}: --resume would repeat this step."
    )


def _find_first_nonfinite(learner: Learner, batches: list[Batch]) -> tuple[tuple[str, ...], str] | None:
    """The examples and the module of the first non-finite value of a forward pass; None if all are finite.

    Collective: all ranks run the same number of passes, because sharded weights are gathered in each.
    """
    model = learner.model.eval()
    for batch in batches:
        with torch.no_grad(), learner.compute.make_autocast():
            # In fp16 transformers' modules overflow where flat tokens do not.
            in_fp16 = learner.compute.precision == "fp16" and learner.forward.kind == "flat"
            if find_stage(model) or (in_fp16 and get_family(model.config).t5_blocks):
                place = find_nonfinite_block(model, partial(compute_flat_losses, model, batch))
            else:
                place = _find_in_model(learner, batch)
        found = (batch.ids, place) if place else None
        # Of several ranks or stages the first one that has a non-finite value names it.
        for one in learner.world.gather(found):
            if one is not None:
                return one
    return None


def _find_in_model(learner: Learner, batch: Batch) -> str | None:
    """The module with the first non-finite value; None if the losses of this rank are finite."""
    model = learner.model
    padded = pad(batch, pad_id=model.config.pad_token_id).to(learner.compute.device)
    is_broken = not compute_padded_losses(model, padded).isfinite().all()
    # The search gathers sharded weights again: every rank takes part as soon as one of them is broken.
    if not any(learner.world.gather(is_broken)):
        return None
    place = find_nonfinite_module(model, padded)
    return place if is_broken else None
