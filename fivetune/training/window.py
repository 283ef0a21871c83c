"""A window of real training steps under torch.profiler: what `fivetune profile` records.

In: a config, how many steps. Out: a trace file (Chrome's JSON format, gzip) and what the same steps took without the
profiler. Nothing is evaluated or saved; the steps are those of a run: its data, order, forward, optimizer and seeds,
but launched kernel by kernel where the run would replay CUDA graphs.
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
from fivetune.errors import ConfigError, RunDirError
from fivetune.progress import Count, uncounted
from fivetune.telemetry.chrome import PREFIX
from fivetune.telemetry.devices import enough_memory
from fivetune.training.setup import Setup, set_up
from fivetune.training.update import halting, update_weights
from fivetune.types import Mark, unmarked


@dataclass(frozen=True, slots=True)
class Window:
    """What is known beside the trace.

    Args:
        plain_step_seconds: mean of the steps of the window, taken before it without the profiler.
        parts: bytes of the weights and of the optimizer's state.
        about: model, device and precision in a sentence.
    """

    plain_step_seconds: float
    parts: dict[str, int]
    about: str


class Ranges:
    """A Mark that makes each phase a named range of the trace; a new phase ends the one before."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[object] | None = None

    def __call__(self, phase: str) -> None:
        self.close()
        self._open = record_function(PREFIX + phase)
        self._open.__enter__()

    def close(self) -> None:
        if self._open:
            self._open.__exit__(None, None, None)
            self._open = None


def record_window(
    config: RunConfig, path: Path, *, num_steps: int, num_warm_up: int, count: Count = uncounted
) -> Window:
    """Warm up, take the steps without the profiler, take them again with it, write the trace to `path` (.json.gz).

    Args:
        num_steps, num_warm_up: at least 1.

    Raises ConfigError for a strategy of several processes, RunDirError where the trace cannot be written.
    """
    if config.strategy.plugin_name() != "single":
        raise ConfigError(f"strategy: {config.strategy.plugin_name()} takes several processes, a profile looks at one. "
                          "Add --strategy.name single --launch.nproc 1.")  # fmt: skip
    setup = set_up(config.model_copy(update={"data": config.data.model_copy(update={"eval": ()})}), count=count)
    halted = halting(setup)
    _take(setup, range(num_warm_up), halted)
    steps = range(num_warm_up - 1, num_warm_up + num_steps)  # the first one is not measured
    stamps: list[float] = []

    def stamp() -> None:
        _wait(setup)
        stamps.append(time.perf_counter())

    _take(setup, steps, halted, after=lambda step: stamp() if step in (steps[0], steps[-1]) else None)
    recorded = _record(setup, steps, halted)
    _export(recorded, path)
    return Window((stamps[-1] - stamps[0]) / num_steps, _parts(setup), _about(setup))


def _take(
    setup: Setup, steps: range, halted: Tensor | None, *,
    mark: Mark = unmarked, after: Callable[[int], None] = lambda step: None,
) -> None:  # fmt: skip
    """Training steps of the given numbers, as the loop takes them; past the run's end its data and rate go on."""
    groups = setup.stream.groups(steps.start, steps.stop)
    for step in steps:
        mark("data")
        group = next(groups)
        mark("host")
        with enough_memory():
            update_weights(
                setup, group, lr=setup.lr(min(step, setup.num_steps - 1)), step=step + 1, mark=mark, halted=halted
            )
        after(step)


def _record(setup: Setup, steps: range, halted: Tensor | None) -> profile:
    """The steps under the profiler; the first one warms it up and is not kept."""
    activities = [ProfilerActivity.CPU]
    if setup.place.device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    ranges, order = Ranges(), schedule(wait=0, warmup=1, active=len(steps) - 1, repeat=1)
    with profile(activities=activities, schedule=order, profile_memory=True, acc_events=True) as recorded:

        def after(step: int) -> None:
            ranges.close()
            recorded.step()

        _take(setup, steps, halted, mark=ranges, after=after)
    return recorded


def _export(recorded: profile, path: Path) -> None:
    """The trace is there whole or not at all."""
    staging = path.with_name(f".{path.name}")  # its ending says that it is to be packed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(staging))
        staging.replace(path)
    except OSError as error:
        raise RunDirError(
            f"{path}: cannot be written: {error.strerror}. Free space or choose another run.dir."
        ) from None


def _wait(setup: Setup) -> None:
    if setup.place.device.startswith("cuda"):
        torch.cuda.synchronize(setup.place.device)


def _parts(setup: Setup) -> dict[str, int]:
    state = (value for values in setup.optimizer.state.values() for value in values.values())
    return {
        "weights": _num_bytes(chain(setup.model.parameters(), setup.model.buffers())),
        "optimizer state": _num_bytes(value for value in state if isinstance(value, Tensor)),
    }


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(one): one for one in tensors}.values())


def _about(setup: Setup) -> str:
    where = setup.place.device
    if where.startswith("cuda"):
        where = f"{torch.cuda.get_device_name(where)} ({where})"
    examples = setup.config.train.examples_per_step
    return f"{setup.place.precision} on {where}, {setup.forward.kind} forward, {examples} examples a step"
