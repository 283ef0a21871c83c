"""Decision whether a run replays its steps as CUDA graphs: only if these agree with launched kernels and are faster.

In: a Setup before its first step. Out: the Learner to train with, and a GraphDecision for the log and machine.json.
After any failure, weights and random states are restored, and the run launches each kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fivetune.errors import ConfigError, refuse_broken_context
from fivetune.model.cuda.static_step import Buckets, GraphRecorder, make_graph_recorder
from fivetune.rundir import MACHINE
from fivetune.training.autotune.probe import (
    SavedWeights,
    find_disagreement,
    forward_backward,
    measure_best_seconds,
    restore_state,
    restore_weights,
    save_weights,
    synchronize,
)
from fivetune.training.learner import Learner, build_optimizer, get_peak_lr
from fivetune.training.setup import Setup
from fivetune.training.update import make_nonfinite_flag, train_step
from fivetune.types import Batch

if TYPE_CHECKING:
    from fivetune.model.cuda.graphed import GraphedUpdate

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative tolerance of loss and gradient norm against launched kernels: only the order of sums differs."""
WEIGHT_TOLERANCE = 0.3
"""Largest distance between both paths' weights, as a share of the distance that they moved.

AdamW's steps have full length even where the gradient is only rounding error."""
NUM_TRIALS, NUM_WARM_UP, NUM_BATCHES, NUM_COMPARED = 3, 3, 2, 3
BUCKET_SIZES = (512, 128)  # tokens that totals of inputs and targets are rounded up to

Clock = Callable[[Callable[[], object]], float]
"""Seconds of a call."""


@dataclass(frozen=True, slots=True)
class GraphDecision:
    """Whether steps are replayed as CUDA graphs, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'replayed as CUDA graphs' if self.on else 'launched kernel by kernel'} ({self.why})"


def read_graph_decision(folder: Path) -> bool | None:
    """Whether the run in `folder` began with CUDA graphs; None if machine.json records no decision."""
    path = folder / MACHINE
    decision = json.loads(path.read_text(encoding="utf-8")).get("capture") if path.is_file() else None
    return decision["on"] if decision else None


def supports_graphs(device: str) -> bool:
    return device.startswith("cuda")


def find_graph_obstacle(setup: Setup) -> str:
    """The reason why steps cannot be captured; empty if a trial is possible."""
    config, forward, compute = setup.config, setup.learner.forward, setup.learner.compute
    facts = (
        (not supports_graphs(compute.device), f"the device is {compute.device}, which has no CUDA graphs"),
        (config.strategy.plugin_name() != "single", f"strategy.name is {config.strategy.plugin_name()}, not single"),
        (config.optimizer.plugin_name() != "adamw", f"optimizer.name is {config.optimizer.plugin_name()}, not adamw"),
        (compute.precision not in TOLERANCES, f"the precision is {compute.precision}, not bf16 or fp32"),
        (bool(config.model.adapter), "model.adapter is set"),
        (bool(config.model.unfreeze), "model.unfreeze changes what is trained"),
        (bool(config.train.param_groups or config.train.layer_decay), "train.param_groups or layer_decay is set"),
        (bool(config.train.ema), "train.ema averages the weights after each step"),
        (forward.kind != "flat", f"the forward is {forward.kind}, not flat"),
        (bool(forward.objective.r_drop), "loss.r_drop computes every example twice"),
        (bool(forward.objective.class_weights), "loss.class_weights is set"),
        (forward.teacher is not None, "distill.kind logits computes a teacher"),
        (forward.recompute, "train.recompute keeps random states on the host"),
    )
    return next((reason for holds, reason in facts if holds), "")


def decide_graphs(
    setup: Setup,
    *,
    resumed_decision: bool | None = None,
    make_recorder: Callable[[], GraphRecorder] | None = None,
    clock: Clock | None = None,
) -> tuple[Learner, GraphDecision | None]:
    """Try CUDA graphs on real batches: use them if they agree with launched kernels and are faster.

    Args:
        resumed_decision: the decision that a resumed run began with; kept if possible.
        make_recorder: creates the graph recorder; default: `make_graph_recorder`.
        clock: measures the seconds of a call; default: the least of NUM_TRIALS calls.

    Returns: the learner to train with, and the decision; None if the device has no graphs and none were requested.
    Raises ConfigError if train.capture is on and graphs fail.
    """
    learner, requested, device = setup.learner, setup.config.train.capture, setup.learner.compute.device
    if requested == "auto" and not supports_graphs(device):
        return learner, None
    if requested == "off" or (requested == "auto" and resumed_decision is False):
        return learner, GraphDecision(False, "requested" if requested == "off" else "as the run began")
    graphs, why = None, find_graph_obstacle(setup)
    if not why:
        clock = clock or partial(measure_best_seconds, device=device, num_trials=NUM_TRIALS, num_warm_up=NUM_WARM_UP)
        timed = requested == "auto" and not resumed_decision
        graphs, why = _try_graphs(setup, make_recorder or make_graph_recorder, clock, timed=timed)
    if graphs is None and requested == "on":
        raise ConfigError(f"train.capture: on cannot run: {why}. Use auto or off.")
    if graphs is not None:
        learner = replace(learner, optimizer=graphs.optimizer, graphs=graphs)
    return learner, GraphDecision(graphs is not None, why)


def _try_graphs(
    setup: Setup, make_recorder: Callable[[], GraphRecorder], clock: Clock, *, timed: bool
) -> tuple[GraphedUpdate | None, str]:
    """Build the GraphedUpdate. Returns: it or None, and the reason. Weights and random states are restored."""
    learner = setup.learner
    stream = torch.cuda.current_stream() if learner.compute.device.startswith("cuda") else None
    saved, graphs, recorder, why = save_weights(learner.model), None, None, ""
    with restore_state(learner.model):
        try:
            recorder, why = _benchmark_graphs(setup, saved, make_recorder, clock, timed=timed)
        except Exception as error:  # of any class: drivers and kernels raise many
            refuse_broken_context(error, "--train.capture off")
            why = _format_error(error)
        restore_weights(saved, reallocate=True)
    with restore_state(learner.model, keep_gradients=True):  # graphs write to the gradients' addresses
        if recorder is not None:
            try:
                graphs = _build_graphs(setup, recorder)
            except Exception as error:
                why = _format_error(error)
                restore_weights(saved, reallocate=True)
        if graphs is None and stream is not None:
            torch.cuda.set_stream(stream)
    return graphs, why


def _benchmark_graphs(
    setup: Setup, saved: SavedWeights, make_recorder: Callable[[], GraphRecorder], clock: Clock, *, timed: bool
) -> tuple[GraphRecorder | None, str]:
    """Compare graphs with launched kernels. Returns: the recorder if graphs are to be used, else None; the reason."""
    batches = setup.data.stream.build_micro_batches(0)[:NUM_BATCHES]
    launched = 0.0
    if timed:
        learner = replace(setup.learner, optimizer=build_optimizer(setup.config, setup.learner.model))
        flag = make_nonfinite_flag(learner)
        launched = clock(lambda: [train_step(learner, [b], lr=0.0, step=0, nonfinite_flag=flag) for b in batches])
    recorder = make_recorder()
    if reason := _check_agreement(setup, recorder, batches[0], saved):
        return None, reason
    if not timed:
        return recorder, "requested" if setup.config.train.capture == "on" else "as the run began"
    graphs = _build_graphs(setup, recorder, warm_up=1)
    replayed = clock(lambda: [graphs.update([batch], lr=0.0) for batch in batches])
    times = (
        f"measured: {_format_batch_time(replayed, batches)} with graphs, "
        f"{_format_batch_time(launched, batches)} without"
    )
    if graphs.steps.failure:
        return None, f"a graph could not be recorded: {graphs.steps.failure}"
    return (recorder, times) if replayed < launched else (None, times)


def _format_batch_time(seconds: float, batches: Sequence[Batch]) -> str:
    return f"{1000 * seconds / len(batches):.1f} ms a batch"


def _check_agreement(setup: Setup, recorder: GraphRecorder, batch: Batch, saved: SavedWeights) -> str:
    """Describe how NUM_COMPARED steps without dropout differ between graphs and launched kernels; empty if equal."""
    learner = setup.learner
    lr = get_peak_lr(learner.optimizer) or 0.0
    restore_weights(saved, reallocate=True)
    eager = replace(learner, optimizer=build_optimizer(setup.config, learner.model))
    launched = [_run_eager_step(eager, batch, lr) for _ in range(NUM_COMPARED)][-1]
    reached = [parameter.detach().to("cpu", copy=True) for parameter, _ in saved]
    restore_weights(saved, reallocate=True)
    graphs = _build_graphs(setup, recorder, warm_up=1, training=False)
    replayed = [graphs.update([batch], lr=lr) for _ in range(NUM_COMPARED)][-1]
    synchronize(learner.compute.device)
    if not graphs.steps.num_replayed:
        return f"a graph could not be recorded: {graphs.steps.failure}"
    found = dict(zip(launched, replayed.tolist(), strict=False))
    if reason := find_disagreement(found, launched, tolerance=TOLERANCES[learner.compute.precision]):
        return f"with graphs, {reason}"
    pairs = [
        (parameter.detach().cpu(), there, before) for (parameter, before), there in zip(saved, reached, strict=True)
    ]
    away, way = (math.hypot(*[(pair[i] - pair[1]).norm().item() for pair in pairs]) for i in (0, 2))
    if not away <= WEIGHT_TOLERANCE * way:
        return f"after {NUM_COMPARED} steps the weights differ by {away / way:.0%} of the distance that they moved"
    return ""


def _run_eager_step(learner: Learner, batch: Batch, lr: float) -> dict[str, float]:
    """Run a step without dropout that launches each kernel. Returns: loss and gradient norm."""
    learner.model.eval()
    loss = forward_backward(
        learner.model, learner.forward, batch, device=learner.compute.device, autocast=learner.compute.make_autocast
    )
    norm = learner.strategy.clip(learner.model, learner.max_grad_norm)
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return {"the loss": loss.item(), "the gradient norm": norm.item()}


def _build_graphs(
    setup: Setup, recorder: GraphRecorder | None, *, warm_up: int = NUM_WARM_UP, training: bool = True
) -> GraphedUpdate:
    """Build a GraphedUpdate of the model; the parameters move into one buffer."""
    from fivetune.model.cuda.graphed import GraphedAdamW, GraphedUpdate

    learner, stream = setup.learner, setup.data.stream
    longest = [int(lengths.max()) for lengths in (stream.store.inputs.lengths, stream.store.labels.lengths)]
    return GraphedUpdate(
        learner.model,
        GraphedAdamW(build_optimizer(setup.config, learner.model), max_norm=learner.max_grad_norm or math.inf),
        Buckets(stream.plan.batch_size, longest[0], longest[1], BUCKET_SIZES[0], BUCKET_SIZES[1]),
        device=learner.compute.device,
        autocast=learner.compute.make_autocast,
        record=recorder,
        training=training,
        fused=learner.forward.is_fused,
        objective=learner.forward.objective,
        warm_up=warm_up,
    )


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
