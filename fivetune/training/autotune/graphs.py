"""Decision whether a run replays its steps as CUDA graphs: only if these agree with launched kernels and are faster.

In: a Setup before its first step. Out: the Learner to train with, and a GraphDecision for the log and machine.json.
A graph is the forward and backward pass of a micro-batch; clipping and the optimizer are launched after them. All
graphs of a run are recorded here. After any failure, weights and random states are restored, and the run launches each
kernel.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fivetune.errors import ConfigError, format_error, refuse_broken_context
from fivetune.model.cuda.buckets import Bucket, Buckets, describe_batch, plan_buckets
from fivetune.model.cuda.dispatch import supports_graphs
from fivetune.model.cuda.static_step import GraphRecorder, make_graph_recorder, refuse_broken_generator
from fivetune.model.precision import get_matmul_dtype
from fivetune.model.weight_cache import list_factors
from fivetune.rundir import read_machine
from fivetune.training.autotune.capture_trial import try_capture
from fivetune.training.autotune.probe import (
    SavedWeights,
    clear_gradients,
    find_disagreement,
    forward_backward,
    measure_best_seconds,
    restore_state,
    restore_weights,
    save_weights,
    synchronize,
)
from fivetune.training.setup import Setup
from fivetune.training.step.groups import build_optimizer, get_peak_lr, set_lr
from fivetune.training.step.learner import Learner
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.training.step.update import train_step
from fivetune.types import Batch

TOLERANCES = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 2e-2}
"""Relative tolerance of loss and gradient norm against launched kernels: only the order of sums differs."""
WEIGHT_TOLERANCE = 0.3
"""Largest distance between both paths' weights, as a share of the distance that they moved.

AdamW's steps have full length even where the gradient is only rounding error."""
NUM_TRIALS, NUM_WARM_UP, NUM_BATCHES, NUM_COMPARED = 3, 3, 2, 3
MAX_GRAPHS = 32  # because each holds memory and is recorded at the start
FEWEST_REPLAYS = 8  # of a graph, on average: a recording takes about two steps
MAX_STEPS_READ = 20_000  # of the run's order, evenly spaced; more take seconds


@dataclass(frozen=True, slots=True)
class GraphDecision:
    """Whether steps are replayed as CUDA graphs, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'replayed as CUDA graphs' if self.on else 'launched kernel by kernel'} ({self.why})"


def read_graph_decision(folder: Path) -> bool | None:
    """Whether the run in `folder` began with CUDA graphs; None if machine.json records no decision."""
    decision = read_machine(folder).capture
    return decision["on"] if decision else None


def find_graph_obstacle(setup: Setup) -> str:
    """The reason why steps cannot be captured; empty if a trial is possible."""
    config = setup.config
    forward = setup.learner.forward
    compute = setup.learner.compute
    facts = (
        (not supports_graphs(compute.device), f"the device is {compute.device}, which has no CUDA graphs"),
        (config.strategy.supports_multiple, f"strategy.name is {config.strategy.plugin_name()}, not single"),
        (compute.precision not in TOLERANCES, f"the precision is {compute.precision}, not bf16, tf32 or fp32"),
        (bool(config.model.adapter), "model.adapter is set"),
        (bool(config.model.unfreeze), "model.unfreeze changes what is trained"),
        (forward.kind != "flat", f"the forward is {forward.kind}, not flat"),
        (bool(forward.objective.r_drop), "loss.r_drop computes every example twice"),
        (bool(forward.objective.class_weights), "loss.class_weights is set"),
        (forward.teacher is not None, "distill.kind logits computes a teacher"),
        (forward.recompute, "train.recompute keeps random states on the host"),
    )
    for holds, reason in facts:
        if holds:
            return reason
    return ""


def decide_graphs(
    setup: Setup,
    *,
    resumed_decision: bool | None = None,
) -> tuple[Learner, GraphDecision | None]:
    """Try CUDA graphs on real batches: use them if they agree with launched kernels and are faster.

    Args:
        resumed_decision: the decision that a resumed run began with; kept if possible.

    Returns: the learner to train with, and the decision; None if the device has no graphs and none were requested.
    Raises ConfigError if train.capture is on and graphs fail.
    """
    learner = setup.learner
    requested = setup.config.train.capture
    device = setup.learner.compute.device
    if requested == "auto" and not supports_graphs(device):
        return learner, None
    if requested == "off":
        return learner, GraphDecision(False, "requested")
    if requested == "auto" and resumed_decision is False:
        return learner, GraphDecision(False, "as the run began")
    found = None
    why = find_graph_obstacle(setup)
    if not why:
        found, why = _try_graphs(setup, timed=requested == "auto" and not resumed_decision)
    if found is None and requested == "on":
        raise ConfigError(f"train.capture: on cannot run: {why}. Use auto or off.")
    return found or learner, GraphDecision(found is not None, why)


def _try_graphs(setup: Setup, *, timed: bool) -> tuple[Learner | None, str]:
    """Build the learner with all graphs; weights and random states are restored. Returns it or None, and why."""
    learner = setup.learner
    compute = setup.learner.compute
    stream = None
    if compute.device.startswith("cuda"):
        if why := _try_elsewhere(setup):
            return None, why
        stream = torch.cuda.current_stream()
    # The trial: a few graphs, with steps that change the weights.
    saved = save_weights(learner.model)
    found = None
    recorder = None
    why = ""
    with restore_state(learner.model):
        try:
            recorder, why = _benchmark_graphs(setup, saved, timed=timed)
        except Exception as error:  # of any class: drivers and kernels raise many
            refuse_broken_context(error, "--train.capture off")
            why = format_error(error)
        restore_weights(saved, reallocate=True)
    gc.collect()  # captures do not, since torch 2.9: the trial's graphs and states would stay

    # All graphs of the run, with the run's own optimizer.
    with restore_state(learner.model, keep_gradients=True):  # graphs write to the gradients' addresses
        if recorder is not None:
            try:
                found, of_graphs = _record_run(setup, recorder)
                why = f"{why}; {of_graphs}"
            except Exception as error:
                refuse_broken_context(error, "--train.capture off")
                why = format_error(error)
                restore_weights(saved, reallocate=True)
        if found is None:
            clear_gradients(learner.model)
            # A capture that failed may leave its own stream as the current one.
            if stream is not None:
                torch.cuda.set_stream(stream)
                refuse_broken_generator(compute.device)
    return found, why


def _try_elsewhere(setup: Setup) -> str:
    """The reason why another process cannot capture a small bucket of this run; empty if it can."""
    learner = setup.learner
    return try_capture(
        learner.model.config.to_diff_dict(),
        _plan_few(setup.data.stream.build_micro_batches(0))[-1],
        device=learner.compute.device,
        precision=learner.compute.precision,
        fused=learner.forward.is_fused,
    )


def _record_run(setup: Setup, recorder: GraphRecorder) -> tuple[Learner, str]:
    """Record the graphs of a run. Returns: the learner, and how many graphs there are and what they fill up.

    Raises RuntimeError if none can be recorded.
    """
    facts = count_micro_batches(setup)
    planned = plan_buckets(facts, max_buckets=max(1, min(MAX_GRAPHS, len(facts) // FEWEST_REPLAYS)))
    found = _build_learner(setup, setup.learner.optimizer, planned, recorder)
    num_graphs = found.engine.num_graphs
    if not num_graphs:
        raise RuntimeError(f"a graph could not be recorded: {found.engine.failure}")
    computed = 0
    for row in facts.tolist():  # each micro-batch takes the smallest graph that holds it
        computed += min(bucket.num_positions for bucket in planned if bucket.can_hold(*row))
    filler = 1 - facts[:, :2].sum() / computed
    return found, f"{num_graphs} graphs, {filler:.1%} of the positions are filler"


def count_micro_batches(setup: Setup) -> NDArray[np.int64]:
    """What `describe_batch` returns, of every micro-batch of the run (of at most MAX_STEPS_READ steps): [n, 5]."""
    stream = setup.data.stream
    num_steps = setup.plan.num_steps
    inputs = stream.store.inputs.lengths
    labels = stream.store.labels.lengths
    found: list[tuple[int, ...]] = []
    for step in range(0, num_steps, -(-num_steps // MAX_STEPS_READ)):
        for rows in stream.select_rows(step):
            sources = inputs[rows]
            targets = labels[rows]
            totals = int(sources.sum()), int(targets.sum())
            found.append((*totals, int(sources.max()), int(targets.max()), len(rows)))
    return np.array(found, np.int64)


def _benchmark_graphs(setup: Setup, saved: SavedWeights, *, timed: bool) -> tuple[GraphRecorder | None, str]:
    """Compare graphs with launched kernels. Returns: the recorder if graphs are to be used, else None; the reason."""
    batches = setup.data.stream.build_micro_batches(0)[:NUM_BATCHES]
    launched = 0.0
    # Launched kernels first, with the weights where they are: graphs may move them into one buffer.
    if timed:
        learner = replace(setup.learner, optimizer=build_optimizer(setup.config, setup.learner.model))
        launched = _measure_batch_seconds(learner, batches)
        del learner  # its optimizer's state
    recorder = make_graph_recorder()
    if reason := _check_agreement(setup, recorder, batches[0], saved):
        return None, reason
    if not timed:
        return recorder, "requested" if setup.config.train.capture == "on" else "as the run began"
    optimizer = build_optimizer(setup.config, setup.learner.model)
    learner = _build_learner(setup, optimizer, _plan_few(batches), recorder)
    if failure := learner.engine.failure:
        return None, f"a graph could not be recorded: {failure}"
    replayed = _measure_batch_seconds(learner, batches)
    times = f"measured: {1000 * replayed:.1f} ms a batch with graphs, {1000 * launched:.1f} ms a batch without"
    if replayed >= launched:
        return None, times
    return recorder, times


def _measure_batch_seconds(learner: Learner, batches: Sequence[Batch]) -> float:
    """Seconds of one step per batch, at rate 0."""

    def run() -> None:
        flag = make_nonfinite_flag(learner)
        for batch in batches:
            train_step(learner, [batch], lr=0.0, step=0, nonfinite_flag=flag)

    device = learner.compute.device
    return measure_best_seconds(run, device, num_trials=NUM_TRIALS, num_warm_up=NUM_WARM_UP) / len(batches)


def _plan_few(batches: Sequence[Batch]) -> tuple[Bucket, ...]:
    facts = np.array([describe_batch(batch) for batch in batches])
    return plan_buckets(facts, max_buckets=len(facts))


def _check_agreement(setup: Setup, recorder: GraphRecorder, batch: Batch, saved: SavedWeights) -> str:
    """Describe how NUM_COMPARED steps without dropout differ between graphs and launched kernels; empty if equal."""
    learner = setup.learner
    # At the peak rate, where a wrong gradient moves the weights most.
    lr = get_peak_lr(learner.optimizer) or 0.0
    # Both ways begin at the same weights, each with an optimizer of its own.
    restore_weights(saved, reallocate=True)
    eager = replace(learner, optimizer=build_optimizer(setup.config, learner.model))
    launched = [_run_eager_step(eager, batch, lr) for _ in range(NUM_COMPARED)][-1]
    reached = [parameter.detach().to("cpu", copy=True) for parameter, _ in saved]
    restore_weights(saved, reallocate=True)
    del eager
    mine = _build_learner(
        setup, build_optimizer(setup.config, learner.model), _plan_few([batch]), recorder, training=False
    )
    replayed = [train_step(mine, [batch], lr=lr, step=0).values for _ in range(NUM_COMPARED)][-1]
    synchronize(learner.compute.device)
    if failure := mine.engine.failure:
        return f"a graph could not be recorded: {failure}"
    found = dict(zip(launched, replayed.tolist(), strict=False))
    if reason := find_disagreement(found, launched, tolerance=TOLERANCES[learner.compute.precision]):
        return f"with graphs, {reason}"
    # The distance between the two ends, and between the beginning and one end, over all weights.
    apart: list[float] = []
    moved: list[float] = []
    for (parameter, before), there in zip(saved, reached, strict=True):
        apart.append((parameter.detach().cpu() - there).norm().item())
        moved.append((before - there).norm().item())
    away = math.hypot(*apart)
    way = math.hypot(*moved)
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
    set_lr(learner.optimizer, lr)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return {"the loss": loss.item(), "the gradient norm": norm.item()}


def _build_learner(
    setup: Setup,
    optimizer: torch.optim.Optimizer,
    planned: tuple[Bucket, ...],
    recorder: GraphRecorder | None,
    *,
    training: bool = True,
) -> Learner:
    """Build a learner whose gradients come from graphs; without a recorder each kernel is launched.

    The optimizer is the given one, or for AdamW with one rate and decay GraphedAdamW, which moves the parameters into
    one buffer.
    """
    from fivetune.model.cuda.graphed import GraphedAdamW, GraphedUpdate, attach_flat_gradients
    from fivetune.training.step.graphs import GraphEngine

    learner = setup.learner
    stream = setup.data.stream
    config = setup.config
    copies = None
    longest_input = int(stream.store.inputs.lengths.max())
    longest_target = int(stream.store.labels.lengths.max())
    # One launch updates all weights, which therefore have one rate and one decay.
    if config.optimizer.supports_graphs and not (config.train.param_groups or config.train.layer_decay):
        with learner.compute.make_autocast():
            kind = get_matmul_dtype(torch.device(learner.compute.device))
        factors = list_factors(learner.model)
        max_norm = learner.max_grad_norm or math.inf
        optimizer = GraphedAdamW(optimizer, max_norm=max_norm, factors=factors, kind=kind)
        gradients = optimizer.flat.grads
        copies = optimizer.flat.copies
    else:
        gradients = attach_flat_gradients(learner.model)
    graphs = GraphedUpdate(
        learner.model,
        gradients,
        Buckets(stream.plan.batch_size, longest_input, longest_target, planned),
        device=learner.compute.device,
        autocast=learner.compute.make_autocast,
        training=training,
        fused=learner.forward.is_fused,
        objective=learner.forward.objective,
        copies=copies,
    )
    if recorder is not None:
        graphs.record(recorder)
    return replace(learner, optimizer=optimizer, engine=GraphEngine(graphs))
