"""The training loop: evaluate, save, stop, step.

In: a Training. Out: a trained model, records, checkpoints. A step goes from `run_step` through the step engine to the
Learner's engine: in `step/plain.py` the strategy orders the passes (`accumulate_gradients`), then gradients are summed
over the ranks (`step/accumulate.py`), clipped and applied.
A run that is stopped at a step boundary and resumed gives the same result as an uninterrupted run.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fivetune.errors import InterruptedRunError, translate_oom_errors
from fivetune.machine.telemetry.devices import reset_peak_memory
from fivetune.model.module_flops import StepFlops
from fivetune.rundir.layout import PLAN
from fivetune.training.evaluate import EvaluationStoppedError, evaluate_model
from fivetune.training.save import finish_save, save_checkpoint
from fivetune.training.step.learner import StepInputs
from fivetune.training.step_records import write_steps
from fivetune.training.stopping import is_exhausted
from fivetune.training.training import PendingStep, Training
from fivetune.types import Batch


def run_training_loop(training: Training) -> None:
    """Train from the current step to the last one.

    Raises InterruptedRunError after a signal (the state is saved), NumericError for a loss that is not finite.
    """
    setup = training.setup
    plan = training.plan
    state = training.state
    stop = training.stop
    reset_peak_memory(setup.learner.compute.device)
    batches_of_steps = setup.data.stream.iter_micro_batches(state.step, plan.num_steps)
    saved = state.step
    training.saving = replace(state) if saved else None  # a killed process may have left it without what follows a save
    with stop.defer_signals():
        stopping = _is_stop_requested(training)
        while True:
            # Evaluate. First, because the score of a step is part of its checkpoint.
            if is_evaluation_due(training) and not stopping:
                with training.measure("evaluate"), suppress(EvaluationStoppedError):
                    evaluate_model(training)
                saved = min(saved, state.step - 1)  # an earlier checkpoint of this step lacks its score
                stopping = _is_stop_requested(training)

            # Save. A signal saves what has been trained since the last checkpoint.
            if state.step > max(saved, 0) and (is_checkpoint_due(training) or stopping):
                with training.measure("checkpoint"):
                    save_checkpoint(training)
                saved = state.step
                stopping = _is_stop_requested(training)

            # Stop: at the end, early, or after a signal, which the last step's evaluation may have outrun.
            is_done = state.step == plan.num_steps or is_stopped_early(training)
            if stopping or is_done:
                with training.measure("checkpoint"):
                    finish_save(training)
            if stopping and (state.step < plan.num_steps or is_evaluation_due(training)):
                raise _build_stop_error(training)
            if is_done:
                return

            with training.measure("train"):
                stopping = run_step(training, batches_of_steps)


def _is_stop_requested(training: Training) -> bool:
    """Whether any rank received a signal; all ranks get the same answer."""
    signum = training.setup.learner.world.all_reduce_max(training.stop.get_signum())
    training.stop.signum = signum or training.stop.signum
    return signum > 0


def run_step(training: Training, batches_of_steps: Iterator[list[Batch]]) -> bool:
    """Run one optimizer step. Its record is written when the device has finished, on a CPU at once.

    Returns: whether any rank received a signal before its gradients were summed; all ranks get the same answer.
    """
    setup = training.setup
    learner = setup.learner
    stream = setup.data.stream
    state = training.state
    meter = training.meter

    # Wait for the batches: the time is the phase "data".
    training.sampler.step = state.step + 1
    num_starved = stream.num_starved
    meter.begin()
    started = time.perf_counter()
    batches = next(batches_of_steps)
    data_seconds = time.perf_counter() - started

    # Count while the device still computes the step before.
    meter.enter("host")
    lr = setup.start_step(state.step)
    input_lengths, target_lengths = stream.get_lengths(state.step)
    num_inputs = int(input_lengths.sum())
    num_targets = int(target_lengths.sum())
    # Weights that are unfrozen have gradients from this step on, which are operations too.
    if training.flops is None or state.step in setup.config.model.unfreeze.values():
        training.flops = StepFlops(learner.model, learner.forward)
    flops = training.flops.count(input_lengths, target_lengths)

    # Compute. If memory runs out the step is repeated with smaller micro-batches, which later steps keep.
    with translate_oom_errors():
        inputs = StepInputs(
            batches=batches,
            number=state.step + 1,
            lr=lr,
            batch_size=training.plan.batch_size,
            num_scored_tokens=num_targets,
            timer=meter.enter,
            nonfinite_flag=training.nonfinite_flag,
            get_signum=training.stop.get_signum,
        )
        update = learner.engine.step(learner, inputs)
    state.step += 1
    learner.update_averages(state.step, meter.enter)
    if update.batch_size < training.plan.batch_size:
        _reduce_micro_batch(training, update.batch_size)

    # Warn of another number of threads, and of steps that could not be captured.
    if training.threads and (change := training.threads.update()):
        training.report_threads(change)
    if failure := learner.engine.failure:
        training.warn(f"a CUDA graph could not be recorded; steps without one launch each kernel: {failure}")

    # Record. An effective rate is read from the optimizer's state, for which the host must wait: only where a line is
    # due, and where no schedule gives a rate.
    logged = state.step % setup.config.train.log_every_steps == 0
    effective_lr = None
    if logged or lr is None:
        effective_lr = setup.config.optimizer.effective_lr(learner.fetch_rates())
    if lr is None:
        lr = effective_lr or 0.0
    pending = PendingStep(
        step=state.step,
        batches=batches,
        update=update,
        times=meter.end(),
        flops=flops,
        lr=lr,
        effective_lr=effective_lr if logged else None,
        num_inputs=num_inputs,
        num_targets=num_targets,
        data_seconds=data_seconds,
        peak_bytes=learner.get_peak_memory_bytes(),
        num_examples_seen=stream.count_examples_before(state.step),
        starved=stream.num_starved > num_starved,
    )
    training.pending_steps.append(pending)
    write_steps(training, wait=logged or is_evaluation_due(training) or is_checkpoint_due(training))

    # Several ranks have agreed on the signal in the step; one reads its own, which may have come after the gradients.
    signum = update.signum if learner.world.size > 1 else training.stop.signum
    training.stop.signum = signum or training.stop.signum
    return bool(signum)


def _reduce_micro_batch(training: Training, batch_size: int) -> None:
    before = training.plan.batch_size
    training.plan = training.plan.with_batch_size(batch_size)
    training.run.write(PLAN, training.plan.as_dict())
    training.meter.reset_warm_up()  # other shapes: the next steps are slower once more
    training.warn(
        f"step {training.state.step}: memory ran out with {before} examples in a forward pass. The step was repeated "
        f"with {batch_size}, and later steps use {batch_size} too.",
    )


def is_evaluation_due(training: Training) -> bool:
    """Whether to evaluate now: at step 0 if eval.at_start, every `eval_every_steps`, at the end; once per step."""
    setup = training.setup
    plan = training.plan
    step = training.state.step
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
    plan = training.plan
    state = training.state
    if is_stopped_early(training) or state.step in state.kept_steps:
        return True
    return state.step == plan.num_steps or state.step % plan.checkpoint_every_steps == 0


def _build_stop_error(training: Training) -> InterruptedRunError:
    stop = training.stop
    steps = f"step {training.state.step} of {training.plan.num_steps}"
    saved = "saved" if training.state.step else "nothing to save yet"
    return InterruptedRunError(
        f"stopped by {stop.name} after {steps}; {saved}. Resume with: {format_resume_command(training.run.path)}",
        signum=stop.get_signum(),
        can_resume=True,
        reason=f"stopped by {stop.name}; {saved}",
    )


def format_resume_command(folder: Path) -> str:
    return f"fivetune train {shlex.quote(str(folder))} --resume"
