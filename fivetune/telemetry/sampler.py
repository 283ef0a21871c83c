"""Telemetry beside a run: a thread that looks at the host and its devices and writes a TelemetryRecord each time.

In: the phase and the step, which the loop sets. Out: lines of telemetry.jsonl. Nothing that goes wrong here reaches
the training: a look or a write that fails is counted, told once, and tried again at the next.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from fivetune.telemetry.host import Host
from fivetune.telemetry.nvml import Nvml
from fivetune.types import TelemetryRecord

SECONDS_TO_STOP = 5.0  # a driver that hangs does not hold up the end of the training
LONGEST_LINE = 2**20


class Sampler:
    """A thread that looks every so many seconds, from `start` or `with` on until `stop` or the end of the `with`.

    `phase` and `step` are plain attributes that the loop sets; `num_failures` and `failure` (a sentence, the last) tell
    what went wrong.

    Args:
        to: a JSONL file that lines are appended to, or what takes each line as a dict.
        every_seconds: time between two looks; 0 starts nothing.
        rank: of this process, written into each line.
        devices: also look at the node's devices; one process of a node does.
        warn: told once, from the sampler's thread, when a look or a write fails.
        nvml: makes what looks at the devices.
    """

    def __init__(
        self,
        to: Path | Callable[[dict[str, Any]], None],
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
        if isinstance(to, Path):
            lines = Lines(to)
            self._write, self._close = lines.append, lines.close
        else:
            self._write, self._close = to, lambda: None
        self._every, self._rank, self._warn = every_seconds, rank, warn
        self._make_nvml = nvml if devices else lambda: None
        self._host: Host | None = None
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
        """End the thread; waits for a look that is under way, for a few seconds at most."""
        self._stopped.set()
        if self._thread:
            self._thread.join(SECONDS_TO_STOP)
        else:
            self._close()

    def look(self) -> None:
        """Write one record. Raises nothing: what fails is counted."""
        try:
            if self._host is None:
                self._host, self._nvml = Host(), self._make_nvml()
            record = TelemetryRecord(
                seconds=round(time.time(), 3),
                host=self._host_name,
                rank=self._rank,
                phase=self.phase,
                step=self.step,
                devices=self._nvml.sample(self._host.pids()) if self._nvml else (),
                **self._host.sample(),
            )
            self._write(record.as_dict())
        except Exception as error:
            self._count(error)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stopped.is_set():
                self.look()
                due = next_tick(due, self._every, time.monotonic())
                self._stopped.wait(due - time.monotonic())
        finally:
            self._close()
            if self._nvml:
                self._nvml.close()

    def _count(self, error: Exception) -> None:
        self.num_failures += 1
        self.failure = f"telemetry: a record is lost: {type(error).__name__}: {error}. The training goes on."
        if self.num_failures == 1 and self._warn:
            with suppress(Exception):
                self._warn(self.failure)


def next_tick(due: float, every: float, now: float) -> float:
    """When the next look is due, on the grid of the first; those that were missed are left out.

    >>> next_tick(10.0, 1.0, now=10.2), next_tick(10.0, 1.0, now=13.5)
    (11.0, 14.0)
    """
    return due + every * (int(max(0.0, now - due) / every) + 1)


class Lines:
    """A JSONL file that is appended to: a line is in it whole or not at all, also when the disk runs full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Raises OSError if the line cannot be written, ValueError if the record holds what JSON does not know."""
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        if self._file is None:
            self._file = self._path.open("a+b", buffering=0)
            cut_torn_line(self._file)
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_torn_line(file: FileIO) -> None:
    """Drop the last line if it has no end: what a killed process left."""
    start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
    file.seek(start)
    tail = file.read()
    file.truncate(start + tail.rfind(b"\n") + 1)
