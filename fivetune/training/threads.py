"""The number of CPU threads: one per core, or fewer where other programs use the cores.

In: the most threads. Out: the number that torch uses from then on, and a text for the log.
Threads that share a core wait for each other at the end of every operation. How many are fastest is measured with
operations of a training step, because neither the load nor the number of cores shows what a neighbour takes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from fivetune.machine.telemetry.cores import count_cores
from fivetune.rundir.progress import ProgressCallback
from fivetune.types import OnNote

SECONDS_BETWEEN = 60.0  # between two measurements during a run
MIN_GAIN = 1.2  # times as fast as the present number; with less, the number would follow every disturbance
BUSY_SHARE = 0.8  # of the threads' time; with less, others had the cores, or the step waited for something else
NUM_ROUNDS, NUM_REPEATS, PROBE_SHAPE = 6, 4, (512, 512, 512)  # rows, inputs, outputs of a product


@dataclass(slots=True)
class ThreadControl:
    """Chooses the number of threads at the start of a run, and again when its threads do not get their cores.

    Args:
        most: number of threads without a disturbance.
        is_fixed: whether the user gave that number, by train.num_threads or OMP_NUM_THREADS.
    """

    most: int
    is_fixed: bool = False
    _wall: float = field(default_factory=time.perf_counter)
    _busy: float = field(default_factory=time.process_time)

    @classmethod
    def from_setting(cls, num_threads: int | None) -> ThreadControl:
        """Build the control of a run from train.num_threads."""
        is_fixed = num_threads is not None or "OMP_NUM_THREADS" in os.environ
        return cls(num_threads or count_cores(), is_fixed)

    def start(self, *, measure: bool) -> str:
        """Set the number of threads; `measure`: choose it. Returns: why it is not `most`, "" if it is."""
        import torch

        torch.set_num_threads(self.most)
        return self._choose(self.most) if measure else ""

    def update(self) -> str:
        """Choose again, at most once in SECONDS_BETWEEN. Returns: what changed, "" if nothing did."""
        wall = time.perf_counter()
        seconds = wall - self._wall
        if seconds < SECONDS_BETWEEN:
            return ""
        import torch

        busy = time.process_time()
        now = torch.get_num_threads()
        # Threads that had their cores all the time need no measurement, which would cost steps.
        is_disturbed = busy - self._busy < BUSY_SHARE * now * seconds
        self._wall = wall
        self._busy = busy
        return self._choose(now) if is_disturbed or now < self.most else ""

    def _choose(self, now: int) -> str:
        if self.most == 1 or self.is_fixed:
            return ""
        import torch

        seconds = measure_threads(self.most, now)
        best = min(seconds, key=lambda number: seconds[number])
        if seconds[now] < MIN_GAIN * seconds[best]:
            best = now
        # The measurement has left the last number that it tried.
        torch.set_num_threads(best)
        if best == now:
            return ""
        why = "other programs use the cores" if best < now else "the cores are free again"
        gain = seconds[now] / seconds[best]
        return f"{best} of {self.most} CPU threads, measured {gain:.1f} times as fast as {now}: {why}"


def watch_threads(control: ThreadControl | None, on_progress: ProgressCallback, on_change: OnNote) -> ProgressCallback:
    """Make a ProgressCallback that chooses the number of threads again where it is due; `on_change` gets what changed.

    Args:
        control: None on devices other than CPUs.
    """
    if control is None:
        return on_progress

    def report(what: str, done: int, total: int | None = None) -> None:
        if change := control.update():
            on_change(change)
        on_progress(what, done, total)

    return report


def measure_threads(most: int, now: int) -> dict[int, float]:
    """Measure seconds of the same operations with `now` threads, and with `most`, its half, its quarter, ... 1.

    The rounds are interleaved, so that a disturbance strikes all numbers.
    """
    import torch

    numbers = {now} | {most >> halves for halves in range(most.bit_length())}
    seconds = dict.fromkeys(sorted(numbers), 0.0)
    rows, inputs, outputs = PROBE_SHAPE
    # Ones: a measurement draws no random number of the run.
    x = torch.ones(rows, inputs)
    weight = torch.ones(inputs, outputs)
    for turn in range(NUM_ROUNDS + 1):
        for number in seconds:
            torch.set_num_threads(number)
            started = time.perf_counter()
            for _ in range(NUM_REPEATS):
                (x @ weight).relu_().softmax(-1)
            if turn:  # the first round starts the threads
                seconds[number] += time.perf_counter() - started
    return seconds
