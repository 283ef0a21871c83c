"""The training loop: evaluate, save, stop, step.

In: a Setup, a run directory and the progress so far. Out: a trained model, records, checkpoints.
A run that is stopped at a step boundary and resumed gives the same result as an uninterrupted run.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fivetune.errors import ConfigError, InterruptedRunError, RunDirError
from fivetune.machine.telemetry.devices import reset_peak_memory, translate_oom_errors
from fivetune.machine.telemetry.meter import Meter, StepTimes
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.model.flops import Flops
from fivetune.model.module_flops import StepFlops
from fivetune.rundir import EVALS, STEPS, RunDir
from fivetune.rundir.figures import build_best_eval, list_eval_losses
from fivetune.rundir.layout import OWN_SPLITS, PLAN
from fivetune.rundir.plan import Plan
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.scores.metrics import is_maximized
from fivetune.training.checks.loss_warnings import iter_loss_warnings
from fivetune.training.machine import record_threads
from fivetune.training.setup import Setup
from fivetune.training.signals import StopRequest
from fivetune.training.state import checkpoint
from fivetune.training.state.bucket import Uploader
from fivetune.training.state.checkpoint import NO_OWNER, CheckpointOwner, TrainingProgress
from fivetune.training.state.past_evals import log_whole_evaluation
from fivetune.training.state.saving import BackgroundWriter
from fivetune.training.state.snapshot import ShardedSnapshot, take_shards, take_snapshot
from fivetune.training.step.update import Update, refuse_nonfinite, train_step
from fivetune.training.stopping import count_evaluation, is_exhausted, rank_evaluation
from fivetune.training.threads import ThreadControl, watch_threads
from fivetune.types import Batch


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step queued on the device; its record is written when the device has finished.

    Args:
        group: its batches, for the error message of a non-finite step.
        num_tokens: tokens of inputs and targets on all ranks, without padding.
        make_record: builds the StepRecord from the values that are known when the device has finished: loss,
            grad_norm, padding, times, mfu.
    """

    step: int
    group: list[Batch]
    update: Update
    times: StepTimes
    flops: Flops
    num_tokens: int
    make_record: Callable[..., StepRecord]


@dataclass(slots=True)
class Training:
    """A run in progress: its parts, its outputs and its position.

    Args:
        plan: that of the setup, with a smaller micro-batch after memory ran out.
        peak_flops: of one device; None if unknown.
        flops: counts the operations of steps with the weights that are trained now.
        nonfinite_flag: from `make_nonfinite_flag`.
        subset: the questions of eval.max_examples; None: all.
        threads: of a CPU run; None on other devices.
        pending_steps: steps without a record yet, oldest first.
        losses, grad_norms: finite values of this part of the run, by step.
        evals: evaluations of this part of the run, in order.
        writer: of checkpoints.
        saving: the position of the checkpoint that is being written, or was resumed; None once it is finished.
        uploader: of checkpoints to checkpoint.url.
    """

    setup: Setup
    plan: Plan
    run: RunDir
    progress: Progress
    state: TrainingProgress
    stop: StopRequest
    meter: Meter
    sampler: Sampler
    peak_flops: float | None = None
    flops: StepFlops | None = None
    nonfinite_flag: Tensor | None = None
    subset: Sequence[int] | None = None
    threads: ThreadControl | None = None
    pending_steps: deque[PendingStep] = field(default_factory=deque)
    sinks: list[Any] = field(default_factory=list)
    evaluated_steps: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    evals: list[EvalRecord] = field(default_factory=list)
    owner: CheckpointOwner = NO_OWNER
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    saving: TrainingProgress | None = None
    uploader: Uploader = field(default_factory=lambda: Uploader(None, Path()))


class EvaluationStoppedError(Exception):
    """Raised when a signal interrupts an evaluation; it is repeated on resume."""


def run_training_loop(training: Training) -> None:
    """Train from the current step to the last one.

    Raises InterruptedRunError after a signal (the state is saved), NumericError for a loss that is not finite.
    """
    setup, plan, state, stop = training.setup, training.plan, training.state, training.stop
    reset_peak_memory(setup.learner.compute.device)
    groups = setup.data.stream.iter_micro_batches(state.step, plan.num_steps)
    saved = state.step
    training.saving = replace(state) if saved else None  # a killed process may have left it without what follows a save
    with stop.defer_signals():
        stopping = _is_stop_requested(training)
        while True:
            if is_evaluation_due(training) and not stopping:
                with measure_phase(training, "evaluate"), suppress(EvaluationStoppedError):
                    evaluate_model(training)
                saved = min(saved, state.step - 1)  # an earlier checkpoint of this step lacks its score
                stopping = _is_stop_requested(training)
            if state.step > max(saved, 0) and (is_checkpoint_due(training) or stopping):
                with measure_phase(training, "checkpoint"):
                    save_checkpoint(training)
                saved = state.step
                stopping = _is_stop_requested(training)
            is_done = state.step == plan.num_steps or is_stopped_early(training)
            if stopping or is_done:
                with measure_phase(training, "checkpoint"):
                    finish_save(training)
            if stopping and (state.step < plan.num_steps or is_evaluation_due(training)):
                raise _build_stop_error(training)
            if is_done:
                return
            with measure_phase(training, "train"):
                stopping = run_step(training, groups)


def _is_stop_requested(training: Training) -> bool:
    """Whether any rank received a signal; all ranks get the same answer."""
    signum = training.setup.learner.world.all_reduce_max(training.stop.signum or 0)
    training.stop.signum = signum or training.stop.signum
    return signum > 0


def run_step(training: Training, groups: Iterator[list[Batch]]) -> bool:
    """Run one optimizer step. Its record is written when the device has finished, on a CPU at once.

    Returns: whether any rank received a signal before its gradients were summed; all ranks get the same answer.
    """
    setup, learner, stream = training.setup, training.setup.learner, training.setup.data.stream
    state, meter = training.state, training.meter
    training.sampler.step = state.step + 1
    num_starved = stream.num_starved
    meter.begin()
    started = time.perf_counter()
    group = next(groups)
    data_seconds = time.perf_counter() - started
    meter.enter("host")
    lr = setup.start_step(state.step)
    lengths = stream.get_lengths(state.step)
    num_inputs, num_targets = (int(each.sum()) for each in lengths)
    if training.flops is None or state.step in setup.config.model.unfreeze.values():
        training.flops = StepFlops(learner.model, learner.forward)
    flops = training.flops.count(*lengths)
    with translate_oom_errors():
        update = train_step(
            learner,
            group,
            lr=lr,
            step=state.step + 1,
            batch_size=training.plan.batch_size,
            num_scored_tokens=num_targets,
            timer=meter.enter,
            nonfinite_flag=training.nonfinite_flag,
            get_signum=lambda: training.stop.signum or 0,
        )
    state.step += 1
    learner.update_averages(state.step, meter.enter)
    if update.batch_size < training.plan.batch_size:
        _reduce_micro_batch(training, update.batch_size)
    _warn_of_changes(training)
    logged = state.step % setup.config.train.log_every_steps == 0
    effective = setup.config.optimizer.effective_lr(learner.fetch_rates()) if logged or lr is None else None
    record = partial(
        StepRecord,
        step=state.step,
        lr=lr if lr is not None else (effective or 0.0),
        effective_lr=effective if logged else None,
        num_input_tokens=num_inputs,
        num_target_tokens=num_targets,
        data_seconds=data_seconds,
        peak_bytes=learner.get_peak_memory_bytes(),
        world_size=learner.world.size,
        num_examples_seen=stream.count_examples_before(state.step),
        starved=stream.num_starved > num_starved,
    )
    training.pending_steps.append(
        PendingStep(state.step, group, update, meter.end(), flops, num_inputs + num_targets, record)
    )
    write_steps(training, wait=logged or is_evaluation_due(training) or is_checkpoint_due(training))
    agreed = update.signum if learner.world.size > 1 else training.stop.signum
    training.stop.signum = agreed or training.stop.signum
    return bool(agreed)


def _reduce_micro_batch(training: Training, batch_size: int) -> None:
    before = training.plan.batch_size
    training.plan = training.plan.with_batch_size(batch_size)
    training.run.write(PLAN, training.plan.as_dict())
    training.meter.reset_warm_up()
    warn_once(
        training,
        f"step {training.state.step}: memory ran out with {before} examples in a forward pass. The step was repeated "
        f"with {batch_size}, and later steps use {batch_size} too.",
    )


def _warn_of_changes(training: Training) -> None:
    """Warn of another number of threads, and of steps that could not be captured."""
    if training.threads and (change := training.threads.update()):
        _warn_of_threads(training, change)
    graphs = training.setup.learner.graphs
    if graphs is not None and (failure := graphs.steps.failure):
        warn_once(training, f"a CUDA graph could not be recorded; steps without one launch each kernel: {failure}")


def _warn_of_threads(training: Training, change: str) -> None:
    """Warn of another number of threads, and record it."""
    warn_once(training, f"from step {training.state.step + 1:,} on {change}. Losses may differ in the last bits.")
    record_threads(training.run, training.state.step + 1)


def write_steps(training: Training, *, wait: bool) -> None:
    """Write the records of the steps that the device has finished, in order; with `wait`, of all steps.

    Several ranks write only with `wait`, so that all of them find an error at the same step.
    Raises NumericError for a non-finite step.
    """
    pending = training.pending_steps
    single_process = training.setup.learner.world.size == 1
    while pending and (wait or (single_process and pending[0].times.is_done())):
        _write_step(training, pending.popleft())


def _write_step(training: Training, pending: PendingStep) -> None:
    learner = training.setup.learner
    seconds, phase_seconds = pending.times.read()
    loss, norm = pending.update.loss, pending.update.grad_norm
    if training.nonfinite_flag is not None:
        refuse_nonfinite(learner, pending.group, pending.step, loss, norm)
    record = pending.make_record(
        loss=loss,
        grad_norm=norm if math.isfinite(norm) else None,
        padding_fraction=1 - (pending.num_tokens / pending.update.num_positions),
        step_seconds=seconds,
        phase_seconds=phase_seconds,
        warm_up=pending.times.warm_up,
        encoder_flops=pending.flops.encoder,
        decoder_flops=pending.flops.decoder,
        mfu=pending.flops.total / seconds / training.peak_flops / learner.world.size if training.peak_flops else None,
    )
    training.run.append(STEPS, record.as_dict())
    training.progress.show_step(record, training.plan.num_steps)
    for sink in training.sinks:
        sink.step(record)
    training.losses[pending.step] = loss
    if math.isfinite(norm):
        training.grad_norms[pending.step] = norm
    found = iter_loss_warnings(
        training.losses,
        training.grad_norms,
        list_eval_losses(training.evals),
        num_steps=training.plan.num_steps,
        vocab_size=learner.model.config.vocab_size,
        has_diverged=any(warning.kind == "diverged" for warning in training.run.warnings),
    )
    for message, kind in found:
        warn_once(training, message, kind=kind)


def evaluate_model(training: Training) -> None:
    """Evaluate at the current step, on the subset of eval.max_examples; before the first step as eval.final says.

    Raises EvaluationStoppedError after a signal.
    """
    setup, state = training.setup, training.state
    write_steps(training, wait=True)
    with setup.learner.swap_in_averages():
        limited = state.step > 0 or setup.config.eval.final == "subset"
        record = run_evaluation(training, step=state.step, questions=training.subset if limited else None)
    training.evaluated_steps.add(state.step)
    if state.step > 0:
        rank_evaluation(
            state,
            build_best_eval(record, setup.metric),
            num_kept=setup.config.checkpoint.average_best or 1,
            higher_is_better=is_maximized(setup.config.task.metrics, setup.metric),
        )
        rule, watched = setup.config.train.early_stopping, setup.watched_metric
        count_evaluation(
            state,
            record,
            metric=watched,
            min_delta=rule.min_delta if rule else 0.0,
            higher_is_better=watched != "loss" and is_maximized(setup.config.task.metrics, watched),
        )
    training.run.update_status(step=state.step, best=asdict(state.best) if state.best else None)
    last = training.evals[-1] if training.evals else None
    if last and record.loss is not None and record.loss == last.loss and record.split == last.split:
        warn_once(
            training,
            f"evaluation loss is exactly the same ({record.loss:.4g}) at steps {last.step} and {state.step}: "
            "the weights do not move. Check optimizer.lr and train.precision.",
            kind="frozen_loss",
        )
    training.evals.append(record)


def run_evaluation(
    training: Training, *, step: int, questions: Sequence[int] | None = None, split: str = "eval"
) -> EvalRecord:
    """Evaluate the model, recorded under `step` as `split`, or as "subset" if only some questions are asked."""
    setup, evaluator = training.setup, training.setup.data.evaluator
    assert evaluator is not None
    split = split if questions is None else "subset"
    if questions is None:
        world, usual, log = setup.learner.world, setup.config.eval.max_examples, training.progress.log
        log_whole_evaluation(evaluator.num_questions, training.run, world, usual_limit=usual, log=log)

    report = watch_threads(training.threads, training.progress.update, partial(_warn_of_threads, training))

    def count(done: int, total: int) -> None:
        report("evaluating", done, total)
        if training.stop.is_deferring and training.stop.signum:
            raise EvaluationStoppedError

    with translate_oom_errors():
        record = evaluator.run(
            setup.learner.model,
            step=step,
            split=split,
            questions=questions,
            write=lambda made: training.run.write_predictions(split, step, (one.as_dict() for one in made)),
            on_progress=count,
            world=setup.learner.world,
        )
    record = replace(record, run_step=training.state.step, basis=training.owner.eval_basis)
    if setup.metric not in record.scores:
        known = ", ".join(record.scores)
        raise ConfigError(f"eval.metric: the evaluation has no score {setup.metric!r}. It has: {known}.")

    def publish() -> None:
        training.run.append(EVALS, record.as_dict())
        training.progress.show_evaluation(record)
        for sink in training.sinks if split in OWN_SPLITS else ():
            sink.evaluation(record)

    setup.learner.world.run_on_all(publish)  # a full disk or a sink fails on rank 0 alone, and the others go on
    return record


def save_checkpoint(training: Training) -> None:
    """Write a checkpoint, point `best` at the best one, remove old ones.

    With checkpoint.background only the copy of the state is made now; `finish_save` does the rest.
    """
    finish_save(training)
    with training.setup.learner.swap_in_averages() as trained:
        _start_save(training, trained)
    if not training.writer.is_parallel:
        finish_save(training)


def _start_save(training: Training, trained: Mapping[str, Tensor]) -> None:
    """Write a checkpoint, or begin to write a copy of the state.

    Args:
        trained: the trained weights by name, if the model holds their averages.
    """
    setup, learner, state = training.setup, training.setup.learner, training.state
    folder = training.run.path / "checkpoints"
    write_steps(training, wait=True)
    learner.fetch()
    owner = replace(training.owner, batch_size=training.plan.batch_size)
    sharded = setup.config.strategy.sharded and learner.world.size > 1
    take = take_shards if sharded else take_snapshot
    taken = take(learner.model, learner.optimizer, learner.scaler, learner.world, trained)
    is_copied = not sharded and learner.compute.device != "cpu"
    if training.writer.is_parallel and not is_copied:
        taken = taken.copy()
    learner.world.run_on_all(training.run.refuse_moved)
    progress = replace(state, seconds=dict(state.seconds))

    def write() -> None:
        if isinstance(taken, ShardedSnapshot):
            checkpoint.write_shards(folder, taken, progress, owner, training.writer.world)
        elif learner.world.is_first:
            checkpoint.write_checkpoint(folder, taken, progress, owner)

    def write_or_retry() -> None:
        try:
            write()
        except RunDirError as error:
            time.sleep(1)
            training.progress.warn(f"{error} Retrying once.")
            write()
        training.uploader.submit(progress)

    training.saving = progress
    training.writer.start(write_or_retry)


def finish_save(training: Training) -> None:
    """Wait for the checkpoint that is being written, if there is one; then update `best`, and remove old ones.

    Raises RunDirError if it could not be written.
    """
    saved, training.saving = training.saving, None
    training.writer.finish()
    for message in training.uploader.take_notes():
        warn_once(training, message)
    if saved is None or not training.setup.learner.world.is_first:
        return
    setup, folder = training.setup, training.run.path / "checkpoints"
    warn = partial(warn_once, training)
    best_step = saved.best.step if saved.best else None
    if best_step is not None and (folder / str(best_step)).is_dir():
        try:
            checkpoint.update_best_link(training.run.path, best_step)
        except RunDirError as error:  # the link is for people; a resume does not need it
            warn(str(error))
    held = {*saved.kept_steps, *training.uploader.get_held_steps()}
    checkpoint.remove_old_checkpoints(folder, keep=setup.config.checkpoint.keep, held=held, on_failure=warn)
    training.run.update_status(
        step=saved.step, seconds_by_phase=saved.seconds, num_starved_steps=setup.data.stream.num_starved
    )


def is_evaluation_due(training: Training) -> bool:
    """Whether to evaluate now: at step 0 if eval.at_start, every `eval_every_steps`, at the end; once per step."""
    setup, plan, step = training.setup, training.plan, training.state.step
    if setup.data.evaluator is None or step in training.evaluated_steps:
        return False
    if step == 0:
        return setup.config.eval.at_start
    return step == plan.num_steps or step % plan.eval_every_steps == 0


def is_stopped_early(training: Training) -> bool:
    """Whether train.early_stopping ends the run now."""
    return is_exhausted(training.state, training.setup.config.train.early_stopping)


def is_checkpoint_due(training: Training) -> bool:
    """Whether to save now: every `checkpoint_every_steps`, at the end, and after one of the best evaluations so far."""
    plan, state = training.plan, training.state
    if is_stopped_early(training) or state.step in state.kept_steps:
        return True
    return state.step == plan.num_steps or state.step % plan.checkpoint_every_steps == 0


def warn_once(training: Training, message: str, kind: str = "") -> None:
    if training.run.add_warning(message, kind):
        training.progress.warn(message)


@contextmanager
def measure_phase(training: Training, phase: str) -> Iterator[None]:
    """Count the time of this block as `phase`, in the run's seconds and in its telemetry. Blocks do not nest."""
    training.sampler.phase = phase
    if phase != "train":
        training.meter.pause()
    seconds, started = training.state.seconds, time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def _build_stop_error(training: Training) -> InterruptedRunError:
    stop, steps = training.stop, f"step {training.state.step} of {training.plan.num_steps}"
    saved = "saved" if training.state.step else "nothing to save yet"
    return InterruptedRunError(
        f"stopped by {stop.name} after {steps}; {saved}. Resume with: {format_resume_command(training.run.path)}",
        signum=stop.signum or 0,
        can_resume=True,
        reason=f"stopped by {stop.name}; {saved}",
    )


def format_resume_command(folder: Path) -> str:
    return f"fivetune train {shlex.quote(str(folder))} --resume"
