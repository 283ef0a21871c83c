"""Shared functions of all trials: a forward and backward pass, timing, comparing results, restoring the state.

In: a model, a Forward and batches. Out: seconds, or the first difference of two results. After a trial, weights and
random states are restored and gradients cleared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fivetune.model.backend import Forward
from fivetune.model.modules import T5Model
from fivetune.training.state.snapshot import get_random_states, set_random_states
from fivetune.training.step.learner import Learner
from fivetune.types import Autocast, Batch

SavedWeights = list[tuple[nn.Parameter, Tensor]]
"""Each parameter with a copy of its value, on the host."""


def forward_backward(
    model: T5Model, forward: Forward, batch: Batch, *, device: str, autocast: Autocast, loss_scale: float = 1.0
) -> Tensor:
    """Add the gradient of a batch's mean token loss, times `loss_scale`, to the parameters. Returns: that loss, []."""
    with autocast():
        loss = forward.compute_losses(model, batch, device=device)[0].sum() / batch.num_target_tokens
    (loss * loss_scale).backward()
    return loss.detach()


def synchronize(device: str) -> None:
    """Wait until a CUDA device has finished its queue; no-op on other devices."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def measure_seconds(run: Callable[[], object], device: str) -> float:
    """Wall-clock seconds of a call and of the work that it queues on the device."""
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def measure_best_seconds(run: Callable[[], object], device: str, *, num_trials: int, num_warm_up: int = 0) -> float:
    """Seconds of the fastest of `num_trials` calls, after `num_warm_up` calls that are not timed."""
    for _ in range(num_warm_up):
        run()
    # The least, not the mean: disturbances by others only add time.
    return min(measure_seconds(run, device) for _ in range(num_trials))


def find_disagreement(
    found: Mapping[str, float], reference: Mapping[str, float], *, tolerance: float, floor: float = 0.0
) -> str:
    """The first value that differs from the reference by more than `tolerance` of it plus `floor`; empty if none does.

    >>> find_disagreement({"the loss": 2.5}, {"the loss": 2.0}, tolerance=0.1)
    'the loss: 2.5 instead of 2'
    >>> find_disagreement({"the loss": 2.1}, {"the loss": 2.0}, tolerance=0.1)
    ''
    """
    for name, value in reference.items():
        if not abs(found[name] - value) <= tolerance * abs(value) + floor:  # true for NaN
            return f"{name}: {found[name]:.6g} instead of {value:.6g}"
    return ""


def clear_gradients(model: T5Model) -> None:
    """Clear all gradients, factored ones (`table_grad`) too."""
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        if parts := getattr(parameter, "table_grad", None):
            parts.clear()


def save_weights(model: T5Model) -> SavedWeights:
    """Copy all weights of this rank to the host."""
    # A stage of a pipeline has the weights of other stages as meta tensors.
    held = (parameter for parameter in model.parameters() if not parameter.is_meta)
    return [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in held]


@torch.no_grad()
def restore_weights(saved: SavedWeights, *, reallocate: bool = False) -> None:
    """Write saved weights back.

    Args:
        reallocate: allocate separate memory for each parameter, after a trial moved all into one buffer.
    """
    for parameter, value in saved:
        if reallocate:
            parameter.grad = None
            parameter.data = value.to(parameter.device, copy=True)
        else:
            parameter.copy_(value)


@contextmanager
def restore_state(model: T5Model, *, keep_gradients: bool = False) -> Iterator[None]:
    """Clear gradients and restore training mode and random states on exit, for trials that change no weight."""
    # Trials draw dropout masks: the run must draw the same numbers as without them.
    random = get_random_states()
    was_training = model.training
    try:
        yield
    finally:
        if not keep_gradients:
            clear_gradients(model)
        model.train(was_training)
        set_random_states(random)


@contextmanager
def restore_learner(learner: Learner, optimizer: torch.optim.Optimizer) -> Iterator[Learner]:
    """Yield the learner with another optimizer and a new scaler; on exit restore weights, mode and random states.

    The learner's own optimizer takes no step meanwhile, so its state needs no restoring.

    Args:
        optimizer: a new one over the learner's weights.
    """
    saved = save_weights(learner.model)
    with restore_state(learner.model):
        try:
            yield replace(learner, optimizer=optimizer, scaler=learner.compute.make_scaler())
        finally:
            restore_weights(saved)
