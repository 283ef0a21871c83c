"""The largest micro-batch that fits into memory: tried before training, on the longest examples.

In: the model with its forward, the training store, the global batch. Out: a Fit. Growing parts of the global batch go
forward and backward. On a GPU a trial that fails ends the search. The CPU has no such failure (the system would end
the process), so there a trial is made only if what the smaller ones took lets it fit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from fivetune.data.batch import collate
from fivetune.data.store import TokenStore
from fivetune.model.backend import Forward
from fivetune.model.memory import is_out_of_memory
from fivetune.telemetry.devices import enough_memory
from fivetune.telemetry.memory import free_bytes, peak_during, used_bytes

SHARE = 0.8  # of the CPU's free memory that training may take
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fit:
    """What the search found.

    Args:
        batch_size: examples per forward pass; a divisor of the global batch.
        measured_bytes: most memory in use while they went forward and backward, weights and gradients included.
        forecast_bytes: what the smaller trials had promised for it, linearly.
        state_bytes: what the optimizer will hold on top of it.
        why: what ended the search.
    """

    batch_size: int
    measured_bytes: int
    forecast_bytes: int
    state_bytes: int
    why: str

    def __str__(self) -> str:
        return (
            f"train.batch_size auto: {self.batch_size} examples, {self.measured_bytes / GIB:.2f} GiB measured on the "
            f"longest (forecast {self.forecast_bytes / GIB:.2f}), {self.state_bytes / GIB:.2f} more for the optimizer; "
            f"{self.why}"
        )


def largest_fit(
    model: Any, forward: Forward, store: TokenStore, *,
    total: int, state_bytes_per_parameter: float, device: str, autocast: Callable[[], AbstractContextManager[Any]],
    num_processes: int = 1,
) -> Fit:  # fmt: skip
    """The largest divisor of the global batch `total` that fits. Weights and random states stay as they are.

    Args:
        total: of the global batch, what this process computes.
        num_processes: that share the memory of a CPU.

    Raises EnvironmentProblem if not even one example fits.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    state_bytes = ceil(sum(p.numel() for p in trainable) * state_bytes_per_parameter)
    longest = (store.inputs.lengths + store.labels.lengths).argsort()[::-1].tolist()
    was_training = model.training
    model.train()

    def trial(size: int) -> int:
        batch = collate(store, longest[:size])

        def work() -> None:
            with autocast():
                loss = forward.nats(model, batch, device=device)[0].sum() / batch.num_target_tokens
            loss.backward()

        return peak_during(work, device)

    on_gpu = device.startswith("cuda")
    try:
        with torch.random.fork_rng(devices=[torch.device(device)] if on_gpu else []), enough_memory():
            for parameter in trainable:  # gradients are there in all micro-batches but a step's first
                parameter.grad = torch.zeros_like(parameter)
            state = torch.empty(state_bytes if on_gpu else 0, dtype=torch.uint8, device=device)
            room = None if on_gpu else used_bytes(device) + int(SHARE * free_bytes() / num_processes) - state_bytes
            fit = _grow(trial, total, state_bytes, base=used_bytes(device), room=room)
            del state
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return fit


def _grow(trial: Callable[[int], int], total: int, state_bytes: int, *, base: int, room: int | None) -> Fit:
    """Try divisors of `total` from 1 on; `base` bytes are in use before each trial, `room` may be (None: try it)."""
    size, measured = 1, trial(1)
    forecast, why, slope = measured, "that is the whole global batch", 0.0
    for larger in (n for n in range(2, total + 1) if total % n == 0):
        slope = max(slope, (measured - base) / size)
        promised = int(measured + slope * (larger - size))
        if room is not None and max(promised, measured) > room:
            why = f"{larger} would take {promised / GIB:.2f} GiB of {max(room, 0) / GIB:.2f}"
            break
        try:
            found = trial(larger)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{larger} would take {promised / GIB:.2f} GiB and ran out of memory"
            break
        if room is not None and found > room:
            why = f"{larger} took {found / GIB:.2f} GiB of {room / GIB:.2f}"
            break
        slope = (found - measured) / (larger - size)  # steeper than from `base` where early trials reused freed memory
        size, measured, forecast = larger, found, promised
    return Fit(size, measured, forecast, state_bytes, why)
