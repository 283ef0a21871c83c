"""A `fivetune` command in a process of its own: start it, wait for it, stop it, and why it ended.

In: the words after `fivetune`, and a file for what it prints. Out: its exit code and its error. Sweeps, searches and
the verification of a verdict train through this module.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from fivetune.errors import ConfigError, DataError, NumericError

PROGRAM = (sys.executable, "-m", "fivetune")
SECONDS_TO_SAVE = 300.0  # for a stopped training to write its checkpoint
PERMANENT_ERROR_CODES = (ConfigError.exit_code, DataError.exit_code, NumericError.exit_code)  # a retry fails likewise


class Job:
    """A running command; as a context it is stopped on exit unless it has ended.

    It heads a session of its own, so that Ctrl-C in a terminal reaches only the process that started it.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        """Start `fivetune WORDS`; stdout and stderr are appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._log, self._log_start = log, file.tell()
            self._process = subprocess.Popen(
                [*PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs, -n if signal n ended it."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait until it ends; the exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """End it: SIGTERM lets it save, a second one ends it at once, then SIGKILL. A second Ctrl-C kills it."""
        try:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if self.code is None:
                    self._process.send_signal(number)
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(SECONDS_TO_SAVE)
        except KeyboardInterrupt:
            self._process.kill()
            self._process.wait()
            raise

    def read_error(self) -> str:
        """Why it ended, from its exit code and the last error that it printed."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return find_exit_reason(file.read().decode("utf-8", "replace"), self.code or 0)


def find_exit_reason(printed: str, code: int) -> str:
    """Why a process ended, from what it printed last.

    >>> find_exit_reason("step 1\\nfivetune: a.yaml:3: wrong value 1. Give 2.\\n", 2)
    'a.yaml:3: wrong value 1. Give 2'
    >>> find_exit_reason("step 1\\n", -9)
    'killed by SIGKILL; the system may have been out of memory'
    """
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + ("; the system may have been out of memory" if name == "SIGKILL" else "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("fivetune: ") for line in lines if line.startswith("fivetune: ")]
    last = (errors or lines or [f"ended with exit code {code}"])[-1]
    return last.rstrip(".")


class ProcessIdentity(NamedTuple):
    """A process number and when that process started (seconds since 1970): numbers are reused, both together not."""

    pid: int
    started: float


def identify_process(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, psutil.Process(pid).create_time())


def is_alive(process: ProcessIdentity) -> bool:
    try:
        return abs(psutil.Process(process.pid).create_time() - process.started) < 1
    except psutil.Error:
        return False


def stop_orphan(process: ProcessIdentity) -> None:
    """Stop a training whose parent is gone, and wait until it has saved."""
    if is_alive(process):
        with suppress(psutil.Error):
            orphan = psutil.Process(process.pid)
            orphan.terminate()
            orphan.wait(SECONDS_TO_SAVE)
