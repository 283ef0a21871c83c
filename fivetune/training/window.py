"""A window of training steps under torch.profiler, for `fivetune profile`.

In: a config, a number of steps. Out: a trace file (Chrome's JSON format, gzip) and the time of the same steps without
the profiler. The steps have the data, order, forward, optimizer and seeds of a run, but launch each kernel where the
run would replay CUDA graphs. Nothing is evaluated or saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fivetune.config import RunConfig
from fivetune.config.data import NO_SPLIT
from fivetune.errors import ConfigError, RunDirError, translate_oom_errors
from fivetune.machine.profiling.chrome import RANGE_PREFIX
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.training.autotune.probe import synchronize
from fivetune.training.setup import Setup, set_up
from fivetune.training.step.learner import StepInputs
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.types import PhaseTimer, ignore_phase


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Facts about the profiled steps that the trace lacks.

    Args:
        plain_step_seconds: mean time of the same steps without the profiler.
        bytes_by_part: bytes of the weights and of the optimizer's state.
        description: precision, device, forward and examples per step.
    """

    plain_step_seconds: float
    bytes_by_part: dict[str, int]
    description: str


class TraceRanges:
    """A PhaseTimer that records each phase as a named range of the trace; a new phase ends the previous one."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[object] | None = None

    def __call__(self, phase: str) -> None:
        self.close()
        self._open = record_function(RANGE_PREFIX + phase)
        self._open.__enter__()

    def close(self) -> None:
        if self._open:
            self._open.__exit__(None, None, None)
            self._open = None


def profile_steps(
    config: RunConfig, path: Path, *, num_steps: int, num_warm_up: int, on_progress: ProgressCallback = ignore_progress
) -> ProfiledSteps:
    """Warm up, run the steps without the profiler, repeat them with it, and write the trace to `path` (.json.gz).

    Args:
        num_steps, num_warm_up: at least 1.

    Raises ConfigError for a strategy of several processes, RunDirError if the trace cannot be written.
    """
    if config.strategy.supports_multiple:
        raise ConfigError(
            f"strategy: {config.strategy.plugin_name()} uses several processes; a profile records one. "
            "Add --strategy.name single --launch.nproc 1."
        )
    if config.device == "tpu":
        raise ConfigError("device: tpu runs a step as one program, of which torch's profiler sees nothing. Use cpu.")
    setup = set_up(config.replace("data", eval=(), **NO_SPLIT), on_progress=on_progress)
    flag = make_nonfinite_flag(setup.learner)
    _run_steps(setup, range(num_warm_up), flag)
    steps = range(num_warm_up - 1, num_warm_up + num_steps)  # the first one is not measured
    stamps: list[float] = []

    # Between the first and the last step the host does not wait for the device, as in a run.
    def stamp(step: int) -> None:
        if step in (steps[0], steps[-1]):
            synchronize(setup.learner.compute.device)
            stamps.append(time.perf_counter())

    _run_steps(setup, steps, flag, on_step_end=stamp)

    # The same steps once more: the profiler slows them down, so that their times are shares only.
    recorded = _record_profile(setup, steps, flag)
    _write_trace(recorded, path)
    state = chain.from_iterable(values.values() for values in setup.learner.optimizer.state.values())
    bytes_by_part = {
        "weights": _count_bytes(chain(setup.learner.model.parameters(), setup.learner.model.buffers())),
        "optimizer state": _count_bytes(value for value in state if isinstance(value, Tensor)),
    }
    return ProfiledSteps((stamps[-1] - stamps[0]) / num_steps, bytes_by_part, _describe_setup(setup))


def _run_steps(
    setup: Setup,
    steps: range,
    nonfinite_flag: Tensor | None,
    *,
    timer: PhaseTimer = ignore_phase,
    on_step_end: Callable[[int], None] = lambda step: None,
) -> None:
    """Run the training steps with these numbers as the loop does; after the run's last step its learning rate stays."""
    batches_of_steps = setup.data.stream.iter_micro_batches(steps.start, steps.stop)
    batch_size = setup.plan.batch_size
    for step in steps:
        timer("data")
        batches = next(batches_of_steps)
        timer("host")
        _, target_lengths = setup.data.stream.get_lengths(step)
        inputs = StepInputs(
            batches=batches,
            number=step + 1,
            lr=setup.compute_lr(min(step, setup.plan.num_steps - 1)),
            batch_size=batch_size,
            num_scored_tokens=int(target_lengths.sum()),
            timer=timer,
            nonfinite_flag=nonfinite_flag,
        )
        with translate_oom_errors():
            batch_size = setup.learner.engine.step(setup.learner, inputs).batch_size
        on_step_end(step)


def _record_profile(setup: Setup, steps: range, nonfinite_flag: Tensor | None) -> profile:
    """Run the steps under the profiler; the first one warms it up and is not recorded."""
    activities = [ProfilerActivity.CPU]
    if setup.learner.compute.device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    ranges = TraceRanges()
    order = schedule(wait=0, warmup=1, active=len(steps) - 1, repeat=1)
    with profile(activities=activities, schedule=order, profile_memory=True, acc_events=True) as recorded:

        def after(step: int) -> None:
            ranges.close()
            recorded.step()

        _run_steps(setup, steps, nonfinite_flag, timer=ranges, on_step_end=after)
    return recorded


def _write_trace(recorded: profile, path: Path) -> None:
    """Write the trace, whole or not at all."""
    # A trace that is cut by a full disk would be read as a whole one.
    staging = path.with_name(f".{path.name}")  # the suffix makes torch compress it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(staging))
        staging.replace(path)
    except OSError as error:
        raise RunDirError(
            f"{path}: cannot be written: {error.strerror}. Free space or choose another run.dir."
        ) from None


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    # Tied weights count once.
    held = {id(one): one for one in tensors if not one.is_meta}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def _describe_setup(setup: Setup) -> str:
    compute = setup.learner.compute
    where = setup.learner.compute.device
    if where.startswith("cuda"):
        where = f"{torch.cuda.get_device_name(where)} ({where})"
    examples = setup.config.train.examples_per_step
    return f"{compute.precision} on {where}, {setup.learner.forward.kind} forward, {examples} examples a step"
