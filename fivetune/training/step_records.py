"""The records of steps: written in order when the device has finished a step, with the warnings that follow from them.

In: a Training with pending steps. Out: lines of steps.jsonl, the step line of the terminal, trackers.
"""

from __future__ import annotations

import math

from fivetune.rundir import STEPS
from fivetune.rundir.figures import list_eval_losses
from fivetune.rundir.records import StepRecord
from fivetune.training.checks.loss_warnings import iter_loss_warnings
from fivetune.training.step.nonfinite import refuse_nonfinite
from fivetune.training.training import PendingStep, Training


def write_steps(training: Training, *, wait: bool) -> None:
    """Write the records of the steps that the device has finished, in order; with `wait`, of all steps.

    Several ranks write only with `wait`, so that all of them find an error at the same step.
    Raises NumericError for a non-finite step.
    """
    # Oldest first: a device finishes its steps in order.
    pending = training.pending_steps
    single_process = training.setup.learner.world.size == 1
    while pending and (wait or (single_process and pending[0].times.is_done())):
        _write_step(training, pending.popleft())


def _write_step(training: Training, pending: PendingStep) -> None:
    learner = training.setup.learner
    times = pending.times.read()  # first: it waits for the device, before which the update has no values
    loss = pending.update.loss
    grad_norm = pending.update.grad_norm
    if training.nonfinite_flag is not None:  # the device has skipped the step, and nobody has told the host
        refuse_nonfinite(learner, pending.batches, pending.step, loss, grad_norm)
    record = build_step_record(pending, *times, world_size=learner.world.size, peak_flops=training.peak_flops)
    training.run.append(STEPS, record.as_dict())
    training.progress.show_step(record, training.plan.num_steps)
    for sink in training.sinks:
        sink.step(record)
    training.losses[pending.step] = loss
    if math.isfinite(grad_norm):
        training.grad_norms[pending.step] = grad_norm

    # A loss that diverges, explodes or does not move is told once.
    found = iter_loss_warnings(
        training.losses,
        training.grad_norms,
        list_eval_losses(training.evals),
        num_steps=training.plan.num_steps,
        vocab_size=learner.model.config.vocab_size,
        has_diverged=any(warning.kind == "diverged" for warning in training.run.warnings),
    )
    for message, kind in found:
        training.warn(message, kind)


def build_step_record(
    pending: PendingStep,
    seconds: float,
    phase_seconds: dict[str, float],
    *,
    world_size: int,
    peak_flops: float | None,
) -> StepRecord:
    """Build the record of a step that the device has finished.

    Args:
        seconds, phase_seconds: time of the step, whole and by phase.
        peak_flops: peak of one device, in operations per second; None if unknown.
    """
    update = pending.update
    flops = pending.flops
    num_tokens = pending.num_inputs + pending.num_targets
    mfu = None
    if peak_flops:  # operations of all ranks, over what all devices could do in the time
        mfu = flops.total / seconds / peak_flops / world_size
    return StepRecord(
        step=pending.step,
        loss=update.loss,
        lr=pending.lr,
        effective_lr=pending.effective_lr,
        grad_norm=update.grad_norm if math.isfinite(update.grad_norm) else None,
        num_input_tokens=pending.num_inputs,
        num_target_tokens=pending.num_targets,
        padding_fraction=1 - (num_tokens / update.num_positions),
        step_seconds=seconds,
        data_seconds=pending.data_seconds,
        peak_bytes=pending.peak_bytes,
        mfu=mfu,
        world_size=world_size,
        num_examples_seen=pending.num_examples_seen,
        phase_seconds=phase_seconds,
        warm_up=pending.times.warm_up,
        starved=pending.starved,
        encoder_flops=flops.encoder,
        decoder_flops=flops.decoder,
    )
