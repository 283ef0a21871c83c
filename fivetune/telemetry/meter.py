"""The step clock: what the seconds of an optimizer step went into, without making the host wait for the device.

In: `begin`, `enter(phase)` and `end` around the parts of a step. Out: a StepTimes, to be read once it is done.
A mark ends one phase and begins the next, so the phases of a step add up to the step. On the CPU a mark is a time. On a
CUDA device it is an event in the stream, so that each phase is measured where its work is done; a device that has
nothing to do waits for the host, and that time counts as the phase which the host is in.

    begin         enter("host")  enter("forward")  enter("backward")  enter("optimizer")     end
      |  data           |  host        |  forward       |  backward         |  optimizer      |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from fivetune.types import PHASES

WARM_UP_STEPS = 3
"""Steps after a start, a resume or a change of the batch size whose times say nothing about later ones: kernels are
compiled and chosen, memory is taken from the system, caches are cold. The step of the change is one of them."""


class Clock(Protocol):
    """Stamps that can be taken at once and read later."""

    def stamp(self) -> Any: ...

    def is_done(self, stamp: Any) -> bool: ...

    def wait(self, stamp: Any) -> None: ...

    def seconds(self, first: Any, last: Any) -> float: ...

    def give_back(self, stamps: Iterable[Any]) -> None: ...


class HostClock:
    """Stamps are times of the host."""

    def stamp(self) -> float:
        return time.perf_counter()

    def is_done(self, stamp: float) -> bool:
        return True

    def wait(self, stamp: float) -> None:
        """Nothing is under way."""

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def give_back(self, stamps: Iterable[float]) -> None:
        """Times are not used again."""


class EventClock:
    """Stamps are events in a device's stream, used again once they were read.

    Args:
        new: makes an event with `record`, `query`, `synchronize` and `elapsed_time` (in milliseconds).
    """

    def __init__(self, new: Callable[[], Any]) -> None:
        self._new = new
        self._free: list[Any] = []

    def stamp(self) -> Any:
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event

    def is_done(self, stamp: Any) -> bool:
        return stamp.query()

    def wait(self, stamp: Any) -> None:
        stamp.synchronize()

    def seconds(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1000

    def give_back(self, stamps: Iterable[Any]) -> None:
        self._free.extend(stamps)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The marks of one step. They belong to the step: read it once.

    Args:
        phases: what begins with each of the stamps but the last, which is the end.
        divided: whether the clock sees where the work is done, so that the phases are known.
        warm_up: whether it is one of the first WARM_UP_STEPS.
    """

    clock: Clock
    phases: tuple[str, ...]
    stamps: tuple[Any, ...]
    divided: bool
    warm_up: bool

    def is_done(self) -> bool:
        """Whether the device has done the step; asks, and does not wait."""
        return self.clock.is_done(self.stamps[-1])

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds of the step, and by phase, those that came up; waits if the step is not done."""
        self.clock.wait(self.stamps[-1])
        pairs = zip(self.stamps, self.stamps[1:], strict=False)
        parts = [max(0.0, self.clock.seconds(first, last)) for first, last in pairs]
        by_phase: dict[str, float] = {}
        for phase, seconds in zip(self.phases, parts, strict=True):
            by_phase[phase] = by_phase.get(phase, 0.0) + seconds
        self.clock.give_back(self.stamps)
        whole = sum(by_phase.values())
        return whole, {phase: by_phase[phase] for phase in PHASES if phase in by_phase} if self.divided else {}


class Meter:
    """Measures one step after the other.

    What the host does between two steps (records, trackers, the terminal) is the beginning of the second one's "host",
    unless `rest` says that something else stood between.

    >>> ticks = iter([0.0, 2.0, 3.0, 3.5, 3.5, 4.0, 5.0, 5.0])
    >>> clock = HostClock()
    >>> clock.stamp = lambda: next(ticks)
    >>> meter = Meter(clock)
    >>> meter.begin(); meter.enter("forward"); meter.enter("backward"); meter.end().read()
    (3.5, {'data': 2.0, 'forward': 1.0, 'backward': 0.5})
    >>> meter.begin(); meter.end().read()
    (1.5, {'data': 1.0, 'host': 0.5})
    """

    def __init__(self, clock: Clock, *, divided: bool = True) -> None:
        self._clock = clock
        self._divided = divided
        self._phases: list[str] = []
        self._stamps: list[Any] = []
        self._num_warm = 0

    @classmethod
    def of(cls, device: str) -> Meter:
        """The meter of a device; of one that is neither a CPU nor CUDA, the phases stay unknown."""
        kind = device.partition(":")[0]
        clock = EventClock(partial(torch.cuda.Event, enable_timing=True)) if kind == "cuda" else HostClock()
        return cls(clock, divided=kind in ("cpu", "cuda"))

    def begin(self) -> None:
        """A step begins with waiting for its batch."""
        self.enter("data")

    def enter(self, phase: str) -> None:
        """From here on the time belongs to `phase`, one of PHASES, which may come several times."""
        assert phase in PHASES, phase
        self._phases.append(phase)
        self._stamps.append(self._clock.stamp())

    def end(self) -> StepTimes:
        """The step is over as soon as the device has done what it was given so far."""
        times = StepTimes(
            clock=self._clock, phases=tuple(self._phases), stamps=(*self._stamps, self._clock.stamp()),
            divided=self._divided, warm_up=self._num_warm < WARM_UP_STEPS,
        )  # fmt: skip
        self._num_warm += 1
        self._phases, self._stamps = [], []
        self.enter("host")
        return times

    def rest(self) -> None:
        """What comes now belongs to no step."""
        self._clock.give_back(self._stamps)
        self._phases, self._stamps = [], []

    def warm_up(self) -> None:
        """Something changed: the step that is under way, or comes next, is the first to warm up again."""
        self._num_warm = 0
