"""The main loop: step, evaluate, save, in plain sight.

In: a Setup, a run directory and where the run stands. Out: a trained model, records, checkpoints.
A run stopped at any step boundary and resumed does exactly what the uninterrupted run does.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivetune.data.batch import halves, pad
from fivetune.errors import ConfigError, Interrupted, NumericError, RunDirError
from fivetune.evaluate import subset
from fivetune.metrics import higher_is_better
from fivetune.model.forward import first_bad_module, label_nats
from fivetune.model.memory import is_out_of_memory
from fivetune.progress import Progress
from fivetune.rundir import EVALS, STEPS, RunDir
from fivetune.telemetry.devices import enough_memory, peak_bytes, reset_peak
from fivetune.training import checkpoint
from fivetune.training.checkpoint import Progression
from fivetune.training.setup import Setup
from fivetune.training.signals import StopRequest
from fivetune.types import Batch, EvalRecord, StepRecord

FROZEN_STEPS = 10  # as many identical losses in a row are reported


@dataclass(slots=True)
class Training:
    """A run in progress: what is built, where it is written, how far it is."""

    setup: Setup
    run: RunDir
    progress: Progress
    state: Progression
    stop: StopRequest
    sinks: list[Any] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)
    recent_losses: list[float] = field(default_factory=list)
    last_eval: EvalRecord | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did: mean nats per token, gradient norm before clipping, positions computed."""

    loss: float
    grad_norm: float
    num_positions: int


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
            if evaluation_due(training) and not stop.signum:
                with timed(state, "evaluate"), suppress(EvaluationStopped):
                    evaluate(training)
                saved = min(saved, state.step - 1)  # a checkpoint of this step does not know its score yet
            if state.step > max(saved, 0) and (checkpoint_due(training) or stop.signum):
                with timed(state, "checkpoint"):
                    save(training)
                saved = state.step
            if stop.signum and (state.step < setup.num_steps or evaluation_due(training)):
                raise Interrupted(_goodbye(training), signum=stop.signum)
            if state.step == setup.num_steps:
                return
            with timed(state, "train"):
                train_step(training, groups)


def train_step(training: Training, groups: Iterator[list[Batch]]) -> None:
    """One optimizer step and its record."""
    setup, state = training.setup, training.state
    started = time.perf_counter()
    group = next(groups)
    fetched = time.perf_counter()
    lr, batch_size = setup.lr(state.step), setup.batch_size
    with enough_memory():
        update = update_weights(setup, group, lr=lr, step=state.step + 1)
    state.step += 1
    if setup.batch_size < batch_size:
        training.run.status(batch_size=setup.batch_size)
        warn(training, f"step {state.step}: memory ran out with {batch_size} examples in a forward pass. The step was "
                       f"repeated with {setup.batch_size}, and so are all later ones made.")  # fmt: skip
    num_inputs = sum(batch.num_input_tokens for batch in group)
    num_targets = sum(batch.num_target_tokens for batch in group)
    logged = state.step % setup.config.train.log_every_steps == 0
    effective = setup.config.optimizer.effective_lr(setup.optimizer) if logged else None
    record = StepRecord(
        step=state.step,
        loss=update.loss,
        lr=lr if lr is not None else (setup.config.optimizer.effective_lr(setup.optimizer) or 0.0),
        effective_lr=effective,
        grad_norm=update.grad_norm if math.isfinite(update.grad_norm) else None,
        num_input_tokens=num_inputs,
        num_target_tokens=num_targets,
        padding_fraction=1 - (num_inputs + num_targets) / update.num_positions,
        step_seconds=time.perf_counter() - started,
        data_seconds=fetched - started,
        peak_bytes=peak_bytes(setup.place.device),
        mfu=None,
        world_size=1,
        num_examples_seen=setup.stream.num_examples_before(state.step),
    )
    training.run.append(STEPS, record.as_dict())
    training.progress.step(record, setup.num_steps)
    for sink in training.sinks:
        sink.step(record)
    _watch_frozen_loss(training, update.loss)


def update_weights(setup: Setup, group: list[Batch], *, lr: float | None, step: int) -> Update:
    """One optimizer step over the micro-batches of a group.

    loss = sum of nats of all scored tokens / number of scored tokens of the whole group, so that any way of
    cutting the group into micro-batches gives the same gradient (the mean of means does not).
    Where memory runs out on the way to the gradient, `setup.batch_size` is halved and the step begins again.
    Raises NumericError before the weights are touched.
    """
    nats, num_positions = _fitting_gradients(setup, group)
    setup.scaler.unscale_(setup.optimizer)
    norm = float(setup.config.strategy.clip(setup.model, setup.config.train.max_grad_norm))
    fp16_overflow = setup.scaler.is_enabled() and math.isfinite(float(nats)) and not math.isfinite(norm)
    if not (math.isfinite(float(nats)) and (math.isfinite(norm) or fp16_overflow)):
        raise NumericError(_explain_not_finite(setup, group, step, float(nats), norm))
    if lr is not None:
        for param_group in setup.optimizer.param_groups:
            param_group["lr"] = lr
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    setup.optimizer.zero_grad(set_to_none=True)
    return Update(float(nats), norm, num_positions)


def _fitting_gradients(setup: Setup, group: list[Batch]) -> tuple[Tensor, int]:
    """`_gradients` of a group, cut to `setup.batch_size`, which is halved until memory is enough for it."""
    before = checkpoint.random_states()
    while True:
        while any(len(batch.ids) > setup.batch_size for batch in group):
            group = [half for batch in group for half in _cut(batch, setup.batch_size)]
        try:
            return _gradients(setup, group)
        except (RuntimeError, MemoryError) as error:
            largest = max(len(batch.ids) for batch in group)
            if largest == 1 or not is_out_of_memory(error):
                raise
        setup.batch_size = -(-largest // 2)
        setup.optimizer.zero_grad(set_to_none=True)
        checkpoint.set_random_states(before)


def _cut(batch: Batch, size: int) -> tuple[Batch, ...]:
    return halves(batch) if len(batch.ids) > size else (batch,)


def _gradients(setup: Setup, group: list[Batch]) -> tuple[Tensor, int]:
    """Leave the gradient of the loss in the parameters; the loss and the positions computed."""
    scored = sum(batch.num_target_tokens for batch in group)
    setup.model.train()
    nats = torch.zeros((), device=setup.place.device)
    num_positions = 0
    for index, batch in enumerate(group):
        with setup.config.strategy.accumulate(setup.model, is_last=index == len(group) - 1):
            with setup.place.autocast():
                each, positions = setup.forward.nats(setup.model, batch, device=setup.place.device)
                loss = each.sum() / scored
            num_positions += positions
            setup.scaler.scale(loss).backward()
        nats += loss.detach()
    return nats, num_positions


def evaluate(training: Training) -> None:
    """Evaluate where the run stands, on the subset if one is asked for; the baseline at step 0 takes all examples.

    Raises EvaluationStopped after a signal.
    """
    setup, state = training.setup, training.state
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

    with enough_memory():
        record = setup.evaluator.run(
            setup.plain,
            step=step,
            split=split,
            questions=questions,
            write=lambda lines: training.run.new_predictions(split, step, lines),
            progress=count,
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
    try:
        checkpoint.save(folder, setup.plain, setup.optimizer, setup.scaler, state)
    except RunDirError as error:
        time.sleep(1)
        training.progress.warn(f"{error} Trying once more.")
        checkpoint.save(folder, setup.plain, setup.optimizer, setup.scaler, state)
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
def timed(state: Progression, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        state.seconds[phase] = state.seconds.get(phase, 0.0) + time.perf_counter() - started


def _watch_frozen_loss(training: Training, loss: float) -> None:
    training.recent_losses = [*training.recent_losses[1 - FROZEN_STEPS :], loss]
    if len(training.recent_losses) == FROZEN_STEPS and len(set(training.recent_losses)) == 1:
        warn(training, f"the training loss is exactly {loss} in {FROZEN_STEPS} steps in a row: "
                       "the weights do not move. Check optimizer.lr and train.precision.")  # fmt: skip


def _explain_not_finite(setup: Setup, group: list[Batch], step: int, loss: float, norm: float) -> str:
    """Find the micro-batch and the module where the first value that is not finite comes from."""
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    ids, place = group[0].ids, "the backward pass"
    setup.model.eval()
    for batch in group:
        padded = pad(batch, pad_id=setup.plain.config.pad_token_id).to(setup.place.device)
        with torch.no_grad(), setup.place.autocast():
            if not label_nats(setup.plain, padded).isfinite().all():
                ids, place = batch.ids, first_bad_module(setup.plain, padded)
                break
    shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    advice = "T5 overflows in fp16: use train.precision bf16 or fp32." if setup.place.precision == "fp16" else (
        "Lower optimizer.lr or add schedule.warmup_steps; look at these examples.")  # fmt: skip
    return f"step {step}: {what}, first in {place}; examples {shown}. The weights were not touched. {advice}"


def _is_better(setup: Setup, score: float, best: float) -> bool:
    return score > best if higher_is_better(setup.config.task.metrics, setup.metric) else score < best


def _goodbye(training: Training) -> str:
    steps = f"step {training.state.step} of {training.setup.num_steps}"
    saved = "saved" if training.state.step else "nothing to save yet"
    return f"stopped by {training.stop.name} after {steps}; {saved}. Go on with: {resume_command(training.run.path)}"


def resume_command(folder: Path) -> str:
    return f"fivetune train {shlex.quote(str(folder))} --resume"
