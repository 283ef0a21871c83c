"""Telemetry of a run: a thread that samples the host and its devices and writes TelemetryRecords.

In: the phase and the step, which the loop sets. Out: lines of telemetry.jsonl. Failures never reach the training: a
sample or a write that fails is counted, reported once, and retried at the next sample.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

from fivetune.machine.telemetry.host import HostCounters
from fivetune.machine.telemetry.nvml import Nvml
from fivetune.rundir.lines import JsonlFile
from fivetune.rundir.records import TelemetryRecord
from fivetune.types import JsonTable

SECONDS_TO_STOP = 5.0  # a hanging driver must not block the end of the training


class Sampler:
    """A thread that takes samples at a fixed interval, from `start` to `stop`, or within a `with` block.

    The loop sets the attributes `phase` and `step`; `num_failures` counts failures and `failure` describes the last.

    Args:
        destination: a JSONL file to append to, or a function that receives each record as a dict.
        every_seconds: interval between samples; 0 disables the thread.
        rank: rank of this process, written into each record.
        devices: sample the node's devices too; one process per node does.
        warn: called once, from the sampler's thread, at the first failure.
        nvml: creates the reader of the devices.
    """

    def __init__(
        self,
        destination: Path | Callable[[JsonTable], None],
        *,
        every_seconds: float = 1.0,
        rank: int = 0,
        devices: bool = True,
        warn: Callable[[str], None] | None = None,
        nvml: Callable[[], Nvml] = Nvml,
    ) -> None:
        self.phase: str | None = None
        self.step: int | None = None
        self.num_failures = 0
        self.failure: str | None = None
        if isinstance(destination, Path):
            lines = JsonlFile(destination)
            self._write, self._close = lines.append, lines.close
        else:
            self._write, self._close = destination, lambda: None
        self._every = every_seconds
        self._rank = rank
        self._warn = warn
        self._make_nvml = nvml if devices else lambda: None
        self._host: HostCounters | None = None
        self._nvml: Nvml | None = None
        self._host_name = socket.gethostname()
        self._stopped = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        if self._every and self._thread is None:
            self._thread = Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread; wait up to SECONDS_TO_STOP for a sample in progress."""
        self._stopped.set()
        if self._thread:
            self._thread.join(SECONDS_TO_STOP)
        else:
            self._close()

    def take_sample(self) -> None:
        """Write one record. Never raises: failures are counted."""
        try:
            if self._host is None:
                self._host, self._nvml = HostCounters(), self._make_nvml()
            record = TelemetryRecord(
                seconds=round(time.time(), 3),
                host=self._host_name,
                rank=self._rank,
                phase=self.phase,
                step=self.step,
                devices=self._nvml.sample(self._host.list_pids()) if self._nvml else (),
                **self._host.sample(),
            )
            self._write(record.as_dict())
        except Exception as error:
            self._record_failure(error)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stopped.is_set():
                self.take_sample()
                due = compute_next_tick(due, self._every, time.monotonic())
                self._stopped.wait(due - time.monotonic())
        finally:
            self._close()
            if self._nvml:
                self._nvml.close()

    def _record_failure(self, error: Exception) -> None:
        self.num_failures += 1
        self.failure = f"telemetry: a record is lost: {type(error).__name__}: {error}. Training continues."
        if self.num_failures == 1 and self._warn:
            with suppress(Exception):
                self._warn(self.failure)


def compute_next_tick(due: float, every: float, now: float) -> float:
    """Time of the next sample, on the grid of the first one; missed samples are skipped.

    >>> compute_next_tick(10.0, 1.0, now=10.2), compute_next_tick(10.0, 1.0, now=13.5)
    (11.0, 14.0)
    """
    return due + every * (int(max(0.0, now - due) / every) + 1)
