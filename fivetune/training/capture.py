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
WAY_TOLERANCE = 0.3
"""How far apart weights may get, as a share of their way: AdamW steps as far along a gradient that is only rounding."""
NUM_TRIALS, NUM_WARM, NUM_BATCHES, NUM_COMPARED = 3, 3, 2, 3
GRAINS = (512, 128)  # tokens that totals of inputs and targets are rounded up to

Clock = Callable[[Callable[[], Any]], float]
"""Seconds of a call."""

Weights = list[tuple[Any, torch.Tensor]]
"""Each parameter with its value, on the host."""


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
        (not has_graphs(setup.place.device), f"the device is {setup.place.device}, which has no CUDA graphs"),
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
    weights = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in setup.model.parameters()]
    random, was_training = checkpoint.random_states(), setup.model.training
    stream = torch.cuda.current_stream() if setup.place.device.startswith("cuda") else None
    update, record, why = None, None, ""
    try:
        record, why = _trial(setup, weights, graphs, clock, timed=timed)
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


def _put_back(setup: Setup, weights: Weights) -> None:
    """Weights as they were, in memory of their own, no gradients, a new optimizer."""
    for parameter, saved in weights:
        parameter.grad = None
        parameter.data = saved.to(setup.place.device, copy=True)
    setup.optimizer = build_optimizer(setup.config, setup.model)


def _trial(
    setup: Setup, weights: Weights, graphs: Callable[[], Record], clock: Clock, *, timed: bool
) -> tuple[Record | None, str]:
    """What records graphs, or None, and why."""
    batches = setup.stream.group(0)[:NUM_BATCHES]
    halted = halting(setup)
    launched = 0.0
    if timed:
        launched = clock(lambda: [update_weights(setup, [b], lr=0.0, step=0, halted=halted) for b in batches])
    record = graphs()
    if reason := _disagreement(setup, record, batches[0], weights):
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


def _disagreement(setup: Setup, record: Record, batch: Batch, weights: Weights) -> str:
    """How a few steps without dropout differ, by graphs and by launched kernels from the same weights; empty if not."""
    lr, names = setup.optimizer.param_groups[0]["initial_lr"], ("the loss", "the gradient norm")
    _put_back(setup, weights)
    launched = [_launched(setup, batch, lr) for _ in range(NUM_COMPARED)][-1]
    reached = [parameter.detach().to("cpu", copy=True) for parameter, _ in weights]
    _put_back(setup, weights)
    update = _graphed(setup, record, warm_up=1, training=False)
    replayed = [update.update([batch], lr=lr) for _ in range(NUM_COMPARED)][-1]
    _wait(setup.place.device)
    if not update.steps.num_replayed:
        return f"a graph could not be recorded: {update.steps.failure}"
    tolerance = TOLERANCES[setup.place.precision]
    for name, value, found in zip(names, launched, replayed.tolist(), strict=False):
        if not abs(found - value) <= tolerance * abs(value):
            return f"{name} is {found:.6g} with graphs and {value:.6g} without"
    pairs = [
        (parameter.detach().cpu(), there, before) for (parameter, before), there in zip(weights, reached, strict=True)
    ]
    away, way = (math.hypot(*[(pair[i] - pair[1]).norm().item() for pair in pairs]) for i in (0, 2))
    if not away <= WAY_TOLERANCE * way:
        return f"after {NUM_COMPARED} steps the weights are {away / way:.0%} of their way off"
    return ""


def _launched(setup: Setup, batch: Batch, lr: float) -> tuple[float, float]:
    """A step without dropout, kernel by kernel. Returns: loss and gradient norm."""
    setup.model.eval()
    with setup.place.autocast():
        loss = setup.forward.nats(setup.model, batch, device=setup.place.device)[0].sum() / batch.num_target_tokens
    loss.backward()
    norm = setup.config.strategy.clip(setup.model, setup.config.train.max_grad_norm)
    for group in setup.optimizer.param_groups:
        group["lr"] = lr
    setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm.item()


def _graphed(setup: Setup, record: Record | None, *, warm_up: int = NUM_WARM, training: bool = True) -> Any:
    """A GraphedUpdate of the model as it is; its parameters move into one buffer."""
    from fivetune.training.graphed import GraphedAdamW, GraphedUpdate

    store = setup.stream.store
    longest = [int(lengths.max()) for lengths in (store.inputs.lengths, store.labels.lengths)]
    return GraphedUpdate(
        setup.model, GraphedAdamW(setup.optimizer, max_norm=setup.config.train.max_grad_norm or math.inf),
        Buckets(setup.stream.order.batch_size, longest[0], longest[1], GRAINS[0], GRAINS[1]),
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
