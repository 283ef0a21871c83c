"""The main loop: step, evaluate, save, in plain sight.

In: a Setup, a run directory and where the run stands. Out: a trained model, records, checkpoints.
A run stopped at any step boundary and resumed does exactly what the uninterrupted run does.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fivetune.errors import ConfigError, Interrupted, RunDirError
from fivetune.evaluate import subset
from fivetune.metrics import higher_is_better
from fivetune.model.flops import Flops, flops_of
from fivetune.progress import Progress
from fivetune.rundir import EVALS, STEPS, RunDir
from fivetune.telemetry.devices import enough_memory, peak_bytes, reset_peak
from fivetune.telemetry.meter import Meter, StepTimes
from fivetune.telemetry.sampler import Sampler
from fivetune.training import checkpoint
from fivetune.training.checkpoint import Progression
from fivetune.training.setup import Setup
from fivetune.training.signals import StopRequest
from fivetune.training.update import Update, refuse_not_finite, update_weights
from fivetune.types import Batch, EvalRecord, StepRecord

FROZEN_STEPS = 10  # as many identical losses in a row are reported


@dataclass(frozen=True, slots=True)
class Held:
    """A step that was given to the device, and is written down once that has done it.

    Args:
        group: its batches, for the message if it was not finite.
        num_tokens: of inputs and targets, without padding, in all processes.
        record: makes the StepRecord of what is known only later: loss, grad_norm, padding, times, mfu.
    """

    step: int
    group: list[Batch]
    update: Update
    times: StepTimes
    flops: Flops
    num_tokens: int
    record: Callable[..., StepRecord]


@dataclass(slots=True)
class Training:
    """A run in progress: what is built, where it is written, how far it is.

    Args:
        halted: [] fp32 on the device, 1 from the first step on that was not finite, whose weights and all later ones
            stay as they are; None where each step is looked at before it changes the weights.
        peak_flops: of one device; None where it is not known.
        held: steps that are not written yet, the oldest first.
    """

    setup: Setup
    run: RunDir
    progress: Progress
    state: Progression
    stop: StopRequest
    meter: Meter
    sampler: Sampler
    peak_flops: float | None = None
    halted: Tensor | None = None
    held: deque[Held] = field(default_factory=deque)
    sinks: list[Any] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)
    recent_losses: list[float] = field(default_factory=list)
    last_eval: EvalRecord | None = None


class EvaluationStopped(Exception):
    """A signal came during an evaluation; it is not recorded, and made again when the run goes on."""


def fit(training: Training) -> None:
    """Train from where the state stands to the last step.

    Raises Interrupted after a signal (the state is saved), NumericError for a loss that is not finite.
    """
    setup, state, stop = training.setup, training.state, training.stop
    reset_peak(setup.place.device)
    groups = setup.stream.groups(state.step, setup.num_steps)
    saved = state.step
    with stop.wait():
        while True:
            stopping = _is_to_stop(training)
            if evaluation_due(training) and not stopping:
                with timed(training, "evaluate"), suppress(EvaluationStopped):
                    evaluate(training)
                saved = min(saved, state.step - 1)  # a checkpoint of this step does not know its score yet
                stopping = _is_to_stop(training)
            if state.step > max(saved, 0) and (checkpoint_due(training) or stopping):
                with timed(training, "checkpoint"):
                    save(training)
                saved = state.step
                stopping = _is_to_stop(training)
            if stopping and (state.step < setup.num_steps or evaluation_due(training)):
                raise Interrupted(_goodbye(training), signum=stop.signum or 0)
            if state.step == setup.num_steps:
                return
            with timed(training, "train"):
                train_step(training, groups)


def _is_to_stop(training: Training) -> bool:
    """Whether a signal came to any of the processes; all of them hear the same."""
    signum = training.setup.world.largest(training.stop.signum or 0)
    training.stop.signum = signum or training.stop.signum
    return signum > 0


def train_step(training: Training, groups: Iterator[list[Batch]]) -> None:
    """One optimizer step. Its record is written when the device has done it: on a CPU, at once."""
    setup, state, meter = training.setup, training.state, training.meter
    training.sampler.step = state.step + 1
    num_starved, batch_size = setup.stream.num_starved, setup.batch_size
    meter.begin()
    started = time.perf_counter()
    group = next(groups)
    data_seconds = time.perf_counter() - started
    meter.enter("host")
    lr = setup.lr(state.step)
    lengths = setup.stream.lengths(state.step)
    num_inputs, num_targets = (int(each.sum()) for each in lengths)
    with enough_memory():
        update = update_weights(
            setup, group, lr=lr, step=state.step + 1, scored=num_targets, mark=meter.enter, halted=training.halted
        )  # fmt: skip
    state.step += 1
    if setup.batch_size < batch_size:
        meter.warm_up()
        training.run.status(batch_size=setup.batch_size)
        warn(training, f"step {state.step}: memory ran out with {batch_size} examples in a forward pass. The step was "
                       f"repeated with {setup.batch_size}, and so are all later ones made.")  # fmt: skip
    if setup.graphed is not None and setup.graphed.steps.failure:
        warn(training, "a CUDA graph could not be recorded; steps that have none are launched kernel by kernel: "
                       f"{setup.graphed.steps.failure}")  # fmt: skip
    logged = state.step % setup.config.train.log_every_steps == 0
    effective = setup.config.optimizer.effective_lr(setup.optimizer) if logged or lr is None else None
    record = partial(
        StepRecord,
        step=state.step,
        lr=lr if lr is not None else (effective or 0.0),
        effective_lr=effective if logged else None,
        num_input_tokens=num_inputs,
        num_target_tokens=num_targets,
        data_seconds=data_seconds,
        peak_bytes=peak_bytes(setup.place.device),
        world_size=setup.world.size,
        num_examples_seen=setup.stream.num_examples_before(state.step),
        starved=setup.stream.num_starved > num_starved,
    )
    flops = flops_of(setup.plain, *lengths)
    training.held.append(Held(state.step, group, update, meter.end(), flops, num_inputs + num_targets, record))
    write_steps(training, wait=logged or evaluation_due(training) or checkpoint_due(training))


def write_steps(training: Training, *, wait: bool) -> None:
    """Write down the steps that the device has done, in their order; with `wait`, all that it was given.

    Several processes only write when they wait, so that all of them find the same errors at the same step.
    Raises NumericError for a step that was not finite.
    """
    held = training.held
    alone = training.setup.world.size == 1
    while held and (wait or (alone and held[0].times.is_done())):
        _write_step(training, held.popleft())


def _write_step(training: Training, held: Held) -> None:
    setup = training.setup
    seconds, phase_seconds = held.times.read()
    loss, norm = held.update.loss, held.update.grad_norm
    if training.halted is not None:
        refuse_not_finite(setup, held.group, held.step, loss, norm)
    record = held.record(
        loss=loss,
        grad_norm=norm if math.isfinite(norm) else None,
        padding_fraction=1 - (held.num_tokens / held.update.num_positions),
        step_seconds=seconds,
        phase_seconds=phase_seconds,
        warm_up=held.times.warm_up,
        encoder_flops=held.flops.encoder,
        decoder_flops=held.flops.decoder,
        mfu=held.flops.total / seconds / training.peak_flops / setup.world.size if training.peak_flops else None,
    )
    training.run.append(STEPS, record.as_dict())
    training.progress.step(record, setup.num_steps)
    for sink in training.sinks:
        sink.step(record)
    _watch_frozen_loss(training, loss)


def evaluate(training: Training) -> None:
    """Evaluate where the run stands, on the subset if one is asked for; the baseline at step 0 takes all examples.

    Raises EvaluationStopped after a signal.
    """
    setup, state = training.setup, training.state
    write_steps(training, wait=True)
    record = score(training, step=state.step, limit=setup.config.eval.max_examples if state.step else None)
    training.evaluated.add(state.step)
    value = record.scores[setup.metric]
    if state.step > 0 and (state.best is None or _is_better(setup, value, state.best["score"])):
        state.best = {"step": state.step, "metric": setup.metric, "score": value}
    training.run.status(step=state.step, best=state.best)
    last = training.last_eval
    if last and record.loss is not None and record.loss == last.loss and record.split == last.split:
        warn(training, f"evaluation loss is exactly the same ({record.loss}) at steps {last.step} and {state.step}: "
                       "the weights do not move. Check optimizer.lr and train.precision.")  # fmt: skip
    training.last_eval = record


def score(training: Training, *, step: int, limit: int | None = None) -> EvalRecord:
    """One evaluation of the weights as they are, recorded as of `step`: split "eval", or "subset" if limited."""
    setup = training.setup
    assert setup.evaluator is not None
    questions = subset(setup.evaluator.num_questions, limit)
    split = "eval" if questions is None else "subset"

    def count(done: int, total: int) -> None:
        training.progress.count("evaluating", done, total)
        if training.stop.waiting and training.stop.signum:
            raise EvaluationStopped

    with enough_memory(), setup.whole() as plain:
        record = setup.evaluator.run(
            plain,
            step=step,
            split=split,
            questions=questions,
            write=lambda lines: training.run.new_predictions(split, step, lines),
            progress=count,
            world=setup.world,
        )
    if setup.metric not in record.scores:
        known = ", ".join(record.scores)
        raise ConfigError(f"eval.metric: the evaluation gives no {setup.metric!r}. It gives: {known}.")
    training.run.append(EVALS, record.as_dict())
    training.progress.evaluation(record)
    for sink in training.sinks:
        sink.evaluation(record)
    return record


def save(training: Training) -> None:
    """Write a checkpoint, point `best` at the best one, remove old ones."""
    setup, state, folder = training.setup, training.state, training.run.path / "checkpoints"
    write_steps(training, wait=True)
    taken = checkpoint.snapshot(setup.model, setup.optimizer, setup.scaler, setup.world)
    if not setup.world.is_first:
        return
    try:
        checkpoint.write(folder, taken, state)
    except RunDirError as error:
        time.sleep(1)
        training.progress.warn(f"{error} Trying once more.")
        checkpoint.write(folder, taken, state)
    best_step = state.best["step"] if state.best else None
    if best_step is not None and (folder / str(best_step)).is_dir():
        checkpoint.link_best(training.run.path, best_step)
    checkpoint.rotate(folder, keep=setup.config.checkpoint.keep, best_step=best_step)
    training.run.status(step=state.step, seconds_by_phase=state.seconds, num_starved_steps=setup.stream.num_starved)


def evaluation_due(training: Training) -> bool:
    """At the start if asked for, every so many steps, and at the end; once per step."""
    setup, step = training.setup, training.state.step
    if setup.evaluator is None or step in training.evaluated:
        return False
    if step == 0:
        return setup.config.eval.at_start
    return step == setup.num_steps or step % setup.eval_every_steps == 0


def checkpoint_due(training: Training) -> bool:
    """Every so many steps, at the end, and where the best evaluation just was."""
    setup, state = training.setup, training.state
    is_best = state.best is not None and state.best["step"] == state.step
    return is_best or state.step == setup.num_steps or state.step % setup.checkpoint_every_steps == 0


def warn(training: Training, message: str) -> None:
    if training.run.warn(message):
        training.progress.warn(message)


@contextmanager
def timed(training: Training, phase: str) -> Iterator[None]:
    """Count what happens here as `phase`, in the run's seconds and in its telemetry."""
    training.sampler.phase = phase
    if phase != "train":
        training.meter.rest()
    seconds, started = training.state.seconds, time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def _watch_frozen_loss(training: Training, loss: float) -> None:
    training.recent_losses = [*training.recent_losses[1 - FROZEN_STEPS :], loss]
    if len(training.recent_losses) == FROZEN_STEPS and len(set(training.recent_losses)) == 1:
        warn(training, f"the training loss is exactly {loss} in {FROZEN_STEPS} steps in a row: "
                       "the weights do not move. Check optimizer.lr and train.precision.")  # fmt: skip


def _is_better(setup: Setup, score: float, best: float) -> bool:
    return score > best if higher_is_better(setup.config.task.metrics, setup.metric) else score < best


def _goodbye(training: Training) -> str:
    steps = f"step {training.state.step} of {training.setup.num_steps}"
    saved = "saved" if training.state.step else "nothing to save yet"
    return f"stopped by {training.stop.name} after {steps}; {saved}. Go on with: {resume_command(training.run.path)}"


def resume_command(folder: Path) -> str:
    return f"fivetune train {shlex.quote(str(folder))} --resume"
