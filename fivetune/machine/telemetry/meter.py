"""The step clock: time of an optimizer step by phase, without synchronising with the device.

In: `begin`, `enter(phase)` and `end` around the parts of a step. Out: a StepTimes, to be read when the step is done.
A stamp ends one phase and begins the next, so the phases of a step sum to the step. On the CPU a stamp is a time. On
CUDA it is an event in the stream, so that each phase is measured on the device; time in which an idle device waits for
the host counts as the phase that the host is in.

    begin         enter("host")  enter("forward")  enter("backward")  enter("optimizer")     end
      |  data           |  host        |  forward       |  backward         |  optimizer      |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch

from fivetune.types import PHASES

WARM_UP_STEPS = 3
"""Steps after a start, a resume or a change of the batch size (that step included) whose times do not represent later
ones: kernels are compiled and chosen, memory is allocated, caches are cold."""


Stamp = TypeVar("Stamp")


class Clock(Protocol[Stamp]):
    """Stamps that are taken without waiting and read later."""

    def stamp(self) -> Stamp: ...

    def is_done(self, stamp: Stamp) -> bool: ...

    def wait(self, stamp: Stamp) -> None: ...

    def measure_seconds(self, first: Stamp, last: Stamp) -> float: ...

    def release(self, stamps: Iterable[Stamp]) -> None: ...


class HostClock:
    """Stamps are host times."""

    def stamp(self) -> float:
        return time.perf_counter()

    def is_done(self, stamp: float) -> bool:
        return True

    def wait(self, stamp: float) -> None:
        """No-op: a host time is known at once."""

    def measure_seconds(self, first: float, last: float) -> float:
        return last - first

    def release(self, stamps: Iterable[float]) -> None:
        """No-op: times are not reused."""


class EventClock:
    """Stamps are events in a device's stream, reused after they are read.

    Args:
        new: creates an event with `record`, `query`, `synchronize` and `elapsed_time` (in milliseconds).
    """

    def __init__(self, new: Callable[[], torch.cuda.Event]) -> None:
        self._new = new
        self._free: list[torch.cuda.Event] = []

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event

    def is_done(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    def measure_seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1000

    def release(self, stamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(stamps)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The stamps of one step. Read it once: reading releases the stamps.

    Args:
        phases: the phase that begins at each stamp but the last, which ends the step.
        has_phases: whether the clock measures on the device, so that phases are known.
        warm_up: whether the step is one of the first WARM_UP_STEPS.
    """

    clock: Clock[Any]
    phases: tuple[str, ...]
    stamps: tuple[object, ...]
    has_phases: bool
    warm_up: bool

    def is_done(self) -> bool:
        """Whether the device has finished the step; does not wait."""
        return self.clock.is_done(self.stamps[-1])

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds of the step, and by phase; waits if the step is not finished."""
        self.clock.wait(self.stamps[-1])
        by_phase: dict[str, float] = {}
        for phase, (first, last) in zip(self.phases, pairwise(self.stamps), strict=True):
            seconds = max(0.0, self.clock.measure_seconds(first, last))
            by_phase[phase] = by_phase.get(phase, 0.0) + seconds
        self.clock.release(self.stamps)
        whole = sum(by_phase.values())
        if not self.has_phases:
            return whole, {}
        return whole, {phase: by_phase[phase] for phase in PHASES if phase in by_phase}


class Meter:
    """Measures consecutive steps.

    Work of the host between two steps (records, trackers, the terminal) counts as "host" of the second one, unless
    `pause` excludes it.

    >>> ticks = iter([0.0, 2.0, 3.0, 3.5, 3.5, 4.0, 5.0, 5.0])
    >>> clock = HostClock()
    >>> clock.stamp = lambda: next(ticks)
    >>> meter = Meter(clock)
    >>> meter.begin(); meter.enter("forward"); meter.enter("backward"); meter.end().read()
    (3.5, {'data': 2.0, 'forward': 1.0, 'backward': 0.5})
    >>> meter.begin(); meter.end().read()
    (1.5, {'data': 1.0, 'host': 0.5})
    """

    def __init__(self, clock: Clock[Any], *, has_phases: bool = True) -> None:
        self._clock = clock
        self._divided = has_phases
        self._phases: list[str] = []
        self._stamps: list[object] = []
        self._num_warm = 0

    @classmethod
    def from_device(cls, device: str) -> Meter:
        """The meter of a device; phases are unknown on devices other than CPU and CUDA."""
        kind = device.partition(":")[0]
        clock = EventClock(partial(torch.cuda.Event, enable_timing=True)) if kind == "cuda" else HostClock()
        return cls(clock, has_phases=kind in ("cpu", "cuda"))

    def begin(self) -> None:
        """Begin a step with the phase "data"."""
        self.enter("data")

    def enter(self, phase: str) -> None:
        """Begin `phase`, one of PHASES; a phase can occur several times."""
        assert phase in PHASES, phase
        self._phases.append(phase)
        self._stamps.append(self._clock.stamp())

    def end(self) -> StepTimes:
        """End the step: it is finished when the device has finished the work queued so far."""
        times = StepTimes(
            clock=self._clock,
            phases=tuple(self._phases),
            stamps=(*self._stamps, self._clock.stamp()),
            has_phases=self._divided,
            warm_up=self._num_warm < WARM_UP_STEPS,
        )
        self._num_warm += 1
        self._phases, self._stamps = [], []
        self.enter("host")
        return times

    def pause(self) -> None:
        """Exclude the time from now until the next phase."""
        self._clock.release(self._stamps)
        self._phases, self._stamps = [], []

    def reset_warm_up(self) -> None:
        """Mark the current or next step as the first of a new warm-up."""
        self._num_warm = 0
