"""Search for the largest micro-batch that fits into memory, by trials on the longest examples before training.

In: the model with its forward, the training store, the global batch. Out: a Fit. Growing divisors of the global batch
run forward and backward. On a GPU the first trial that runs out of memory ends the search. On a CPU the system would
kill the process, so a trial runs only if the forecast from smaller trials fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fivetune.data.store.batch import collate
from fivetune.data.store.token_store import TokenStore
from fivetune.errors import format_size, is_out_of_memory, translate_oom_errors
from fivetune.machine.telemetry.memory import get_free_bytes, get_used_bytes, measure_peak_bytes
from fivetune.model.backend import Forward
from fivetune.model.modules import T5Model
from fivetune.training.autotune.probe import forward_backward, restore_state
from fivetune.types import Autocast

CPU_MEMORY_SHARE = 0.8  # of the CPU's free memory that training may take


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest micro-batch that fits into memory.

    Args:
        batch_size: examples per forward pass; a divisor of the global batch.
        measured_bytes: peak memory of forward and backward with weights and gradients; on a GPU with state_bytes too.
        forecast_bytes: the linear forecast of measured_bytes from the smaller trials.
        state_bytes: size of the optimizer's state.
        why: the reason why the search ended.
    """

    batch_size: int
    measured_bytes: int
    forecast_bytes: int
    state_bytes: int
    why: str

    def __str__(self) -> str:
        return (
            f"train.batch_size auto: {self.batch_size} examples, {format_size(self.measured_bytes)} measured on the "
            f"longest (forecast {format_size(self.forecast_bytes)}), optimizer state {format_size(self.state_bytes)}; "
            f"{self.why}"
        )


def find_largest_fit(
    model: T5Model,
    forward: Forward,
    store: TokenStore,
    *,
    total: int,
    state_bytes: int,
    device: str,
    autocast: Autocast,
    num_processes: int = 1,
) -> Fit:
    """Find the largest divisor of `total` that fits into memory. Weights and random states are restored.

    Args:
        total: this process's share of the global batch.
        state_bytes: size of the optimizer's state.
        num_processes: number of processes that share the memory of a CPU.

    Raises FiveTuneEnvironmentError if not even one example fits.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    # The longest examples of the set: no batch of the run takes more.
    lengths = store.inputs.lengths + store.labels.lengths
    longest = lengths.argsort()[::-1].tolist()

    def trial(size: int) -> int:
        batch = collate(store, longest[:size])

        def run() -> None:
            forward_backward(model, forward, batch, device=device, autocast=autocast)

        return measure_peak_bytes(run, device)

    on_gpu = device.startswith("cuda")
    with restore_state(model), translate_oom_errors():
        model.train()
        for parameter in trainable:  # as in every micro-batch of a step but the first
            parameter.grad = torch.zeros_like(parameter)
        # The optimizer's state comes with the first step, and must fit together with the activations.
        state = torch.empty(state_bytes if on_gpu else 0, dtype=torch.uint8, device=device)
        room = None  # on a GPU the trials decide
        if not on_gpu:
            room = get_used_bytes(device) + int(CPU_MEMORY_SHARE * get_free_bytes() / num_processes) - state_bytes
        fit = _search_batch_size(trial, total, state_bytes, base=get_used_bytes(device), room=room)
        del state
    return fit


def _search_batch_size(
    trial: Callable[[int], int], total: int, state_bytes: int, *, base: int, room: int | None
) -> Fit:
    """Try the divisors of `total` in ascending order.

    Args:
        base: bytes in use before each trial. room: limit of the bytes in use; None: the trials decide.
    """
    size = 1
    measured = trial(1)
    forecast = measured
    why = "that is the whole global batch"
    slope = 0.0  # bytes per example
    divisors = [size for size in range(2, total + 1) if total % size == 0]
    for larger in divisors:
        slope = max(slope, (measured - base) / size)
        expected = int(measured + slope * (larger - size))
        if room is not None and max(expected, measured) > room:
            why = f"{larger} would take {format_size(expected)} of {format_size(max(room, 0))}"
            break
        try:
            found = trial(larger)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{larger} would take {format_size(expected)} and ran out of memory"
            break
        if room is not None and found > room:
            why = f"{larger} took {format_size(found)} of {format_size(room)}"
            break
        # Steeper than from `base` where early trials reused freed memory.
        slope = (found - measured) / (larger - size)
        size = larger
        measured = found
        forecast = expected
    return Fit(size, measured, forecast, state_bytes, why)
