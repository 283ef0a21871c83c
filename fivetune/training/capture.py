"""Whether a run's steps are replayed as CUDA graphs: only where they were seen to agree and to be faster here.

In: a Setup before its first step. Out: a Capture, for the log and machine.json, and a Setup that steps accordingly.
Whatever goes wrong, weights, optimizer and random states are as before, and the run is launched kernel by kernel.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivetune.errors import ConfigError
from fivetune.model.cuda_step import Buckets, Record, cuda_graphs
from fivetune.rundir import MACHINE
from fivetune.training import checkpoint
from fivetune.training.setup import Setup, build_optimizer
from fivetune.training.update import halting, update_weights
from fivetune.types import Batch

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
"""How far loss and gradient norm may be from those of launched kernels, relatively: only the order of sums differs."""
NUM_TRIALS, NUM_WARM, NUM_BATCHES = 3, 3, 2
GRAINS = (512, 128)  # tokens that totals of inputs and targets are rounded up to

Clock = Callable[[Callable[[], Any]], float]
"""Seconds of a call."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Whether steps are replayed as CUDA graphs, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'replayed as CUDA graphs' if self.on else 'launched kernel by kernel'} ({self.why})"


def capture_begun(folder: Path) -> bool | None:
    """Whether the run in `folder` began with CUDA graphs; None where it did not say."""
    path = folder / MACHINE
    said = json.loads(path.read_text(encoding="utf-8")).get("capture") if path.is_file() else None
    return said["on"] if said else None


def has_graphs(device: str) -> bool:
    return device.startswith("cuda")


def obstacle(setup: Setup) -> str:
    """Why steps cannot be captured here; empty if they can be tried."""
    config, forward = setup.config, setup.forward
    facts = (
        (not has_graphs(setup.place.device), f"the device is {setup.place.device}, which has none"),
        (config.strategy.plugin_name() != "single", f"strategy.name is {config.strategy.plugin_name()}, not single"),
        (config.optimizer.plugin_name() != "adamw", f"optimizer.name is {config.optimizer.plugin_name()}, not adamw"),
        (setup.place.precision not in TOLERANCES, f"the precision is {setup.place.precision}, not bf16 or fp32"),
        (forward.kind != "flat", f"the forward is {forward.kind}, not flat"),
        (forward.recompute, "train.recompute keeps random states on the host"),
    )
    return next((reason for holds, reason in facts if holds), "")


def choose_capture(
    setup: Setup, *, begun: bool | None = None,
    graphs: Callable[[], Record] | None = None, clock: Clock | None = None,
) -> Capture | None:  # fmt: skip
    """Try graphs on real batches, and step by them from now on if they agree with launched kernels and are faster.

    Args:
        begun: what a resumed run began with, which it keeps to if it can.
        graphs: makes a `record` for CapturedStep; default: `cuda_graphs`.

    Returns: None where there is nothing to say: nobody asked, and the device has no graphs.
    Raises ConfigError where train.capture is on and that fails.
    """
    asked = setup.config.train.capture
    if asked == "auto" and not has_graphs(setup.place.device):
        return None
    if asked == "off" or (asked == "auto" and begun is False):
        return Capture(False, "asked for" if asked == "off" else "as the run began")
    update, why = None, obstacle(setup)
    if not why:
        clock = clock or _clock(setup.place.device)
        update, why = _tried(setup, graphs or cuda_graphs, clock, timed=asked == "auto" and not begun)
    if update is None and asked == "on":
        raise ConfigError(f"train.capture: on cannot run: {why}. Use auto or off.")
    setup.graphed = update
    if update is not None:
        setup.optimizer = update.optimizer
    return Capture(update is not None, why)


def _tried(
    setup: Setup, graphs: Callable[[], Record], clock: Clock, *, timed: bool
) -> tuple[Any, str]:  # fmt: skip
    """The GraphedUpdate to step by, or None, and why; weights, optimizer and random states are as before."""
    weights = [(parameter, parameter.detach().clone()) for parameter in setup.model.parameters()]
    random, was_training = checkpoint.random_states(), setup.model.training
    stream = torch.cuda.current_stream() if setup.place.device.startswith("cuda") else None
    update, record, why = None, None, ""
    try:
        record, why = _trial(setup, graphs, clock, timed=timed)
    except Exception as error:  # whatever a driver or a kernel has against it
        why = _words(error)
    _put_back(setup, weights)
    if record is not None:
        try:
            update = _graphed(setup, record)
        except Exception as error:
            why = _words(error)
            _put_back(setup, weights)
    if update is None and stream is not None:
        torch.cuda.set_stream(stream)
    setup.model.train(was_training)
    checkpoint.set_random_states(random)
    return update, why


def _put_back(setup: Setup, weights: list[tuple[Any, torch.Tensor]]) -> None:
    """Weights in memory of their own again, no gradients, a new optimizer."""
    for parameter, saved in weights:
        parameter.grad = None
        parameter.data = saved.clone()
    setup.optimizer = build_optimizer(setup.config, setup.model)


def _trial(setup: Setup, graphs: Callable[[], Record], clock: Clock, *, timed: bool) -> tuple[Record | None, str]:
    """What records graphs, or None, and why."""
    batches = setup.stream.group(0)[:NUM_BATCHES]
    halted = halting(setup)
    launched = 0.0
    if timed:
        launched = clock(lambda: [update_weights(setup, [b], lr=0.0, step=0, halted=halted) for b in batches])
    record = graphs()
    if reason := _disagreement(setup, record, batches[0]):
        return None, reason
    if not timed:
        return record, "asked for" if setup.config.train.capture == "on" else "as the run began"
    update = _graphed(setup, record, warm_up=1)
    replayed = clock(lambda: [update.update([batch], lr=0.0) for batch in batches])
    said = f"measured: {_shown(replayed, batches)} with graphs, {_shown(launched, batches)} without"
    if update.steps.failure:
        return None, f"a graph could not be recorded: {update.steps.failure}"
    return (record, said) if replayed < launched else (None, said)


def _shown(seconds: float, batches: Sequence[Batch]) -> str:
    return f"{1000 * seconds / len(batches):.1f} ms a batch"


def _disagreement(setup: Setup, record: Record, batch: Batch) -> str:
    """How replayed steps differ from launched kernels with the same weights, without dropout; empty if they do not."""
    model, device = setup.model, setup.place.device
    model.eval()
    with setup.place.autocast():
        loss = setup.forward.nats(model, batch, device=device)[0].sum() / batch.num_target_tokens
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    wanted = {"the loss": loss.item(), "the gradient norm": torch.nn.utils.get_total_norm(grads).item()}
    model.zero_grad(set_to_none=True)
    update = _graphed(setup, record, warm_up=1, training=False)
    values = [update.update([batch], lr=0.0) for _ in range(NUM_WARM)][-1]
    _wait(device)
    if not update.steps.num_replayed:
        return f"a graph could not be recorded: {update.steps.failure}"
    tolerance = TOLERANCES[setup.place.precision]
    for (name, value), found in zip(wanted.items(), values.tolist(), strict=False):
        if not abs(found - value) <= tolerance * abs(value):
            return f"{name} is {found:.6g} with graphs and {value:.6g} without"
    return ""


def _graphed(setup: Setup, record: Record | None, *, warm_up: int = NUM_WARM, training: bool = True) -> Any:
    """A GraphedUpdate of the model as it is; its parameters move into one buffer."""
    from fivetune.training.graphed import GraphedAdamW, GraphedUpdate

    store = setup.stream.store
    longest = [int(lengths.max()) for lengths in (store.inputs.lengths, store.labels.lengths)]
    return GraphedUpdate(
        setup.model, GraphedAdamW(setup.optimizer, max_norm=setup.config.train.max_grad_norm or math.inf),
        Buckets(setup.stream.order.batch_size, *longest, *GRAINS),
        device=setup.place.device, autocast=setup.place.autocast, record=record, training=training, warm_up=warm_up,
    )  # fmt: skip


def _clock(device: str) -> Clock:
    def seconds(run: Callable[[], Any]) -> float:
        """The best of a few calls, after some that warm up."""
        best = math.inf
        for number in range(NUM_WARM + NUM_TRIALS):
            started = time.perf_counter()
            run()
            _wait(device)
            if number >= NUM_WARM:
                best = min(best, time.perf_counter() - started)
        return best

    return seconds


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
