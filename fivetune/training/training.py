"""A run in progress: its parts, its outputs and its position, as the loop, the evaluation and the saving share them.

In: what `run.py` has set up and opened. Out: a Training, the one mutable object of a run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fivetune.machine.telemetry.meter import Meter, StepTimes
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.model.flops import Flops
from fivetune.model.module_flops import StepFlops
from fivetune.rundir import RunDir
from fivetune.rundir.plan import Plan
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import EvalRecord
from fivetune.training.machine import record_threads
from fivetune.training.setup import Setup
from fivetune.training.signals import StopRequest
from fivetune.training.state.bucket import Uploader
from fivetune.training.state.checkpoint import NO_OWNER, CheckpointOwner, TrainingState
from fivetune.training.state.saving import BackgroundWriter
from fivetune.training.step.learner import Update
from fivetune.training.threads import ThreadControl
from fivetune.types import Batch


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is queued on the device, with what is known of it before the device has finished it.

    Args:
        step: number of the step, from 1.
        batches: the step's micro-batches, for the error message of a non-finite step.
        lr: rate of the schedule; where the optimizer computes its own, the applied one.
        effective_lr: rate that the optimizer applied; None if this step is not logged.
        num_inputs, num_targets: tokens on all ranks, without padding.
        data_seconds: time in which the host waited for the batches.
        starved: whether the batches were not ready when the step began.
    """

    step: int
    batches: list[Batch]
    update: Update
    times: StepTimes
    flops: Flops
    lr: float
    effective_lr: float | None
    num_inputs: int
    num_targets: int
    data_seconds: float
    peak_bytes: int | None
    num_examples_seen: int
    starved: bool


@dataclass(slots=True)
class Training:
    """A run in progress.

    Args:
        plan: the setup's plan, with a smaller micro-batch after memory ran out.
        peak_flops: peak of one device, in operations per second; None if unknown.
        flops: counts the operations of steps with the weights that are trained now; None before the first step.
        nonfinite_flag: from `make_nonfinite_flag`.
        subset: the questions of eval.max_examples; None: all.
        threads: thread control of a CPU run; None on accelerators.
        pending_steps: steps without a record yet, oldest first.
        losses, grad_norms: finite values of this part of the run, by step.
        evals: evaluations of this part of the run, in order.
        writer: writes checkpoints.
        saving: the position of the checkpoint that is being written, or was resumed; None once it is finished.
        uploader: copies checkpoints to checkpoint.url.
    """

    setup: Setup
    plan: Plan
    run: RunDir
    progress: Progress
    state: TrainingState
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
    saving: TrainingState | None = None
    uploader: Uploader = field(default_factory=lambda: Uploader(None, Path()))

    def warn(self, message: str, kind: str = "") -> None:
        """Print and record a warning, once per run. Rules and pages select by its `kind`."""
        # A resumed run has the warnings of its earlier parts.
        if self.run.add_warning(message, kind):
            self.progress.warn(message)

    def report_threads(self, change: str) -> None:
        """Warn of another number of CPU threads from the next step on, and record it."""
        # Sums over another number of threads are added in another order.
        step = self.state.step + 1
        self.warn(f"from step {step:,} on {change}. Losses may differ in the last bits.")
        record_threads(self.run, step)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time of this block as `phase`, in the run's seconds and in its telemetry. Blocks do not nest."""
        self.sampler.phase = phase
        if phase != "train":  # a step after a pause is not a steady one
            self.meter.pause()
        seconds = self.state.seconds
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started
