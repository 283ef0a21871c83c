"""A `fivetune` command as a child process: start it, wait for it, stop it, and find the reason why it ended.

In: the words after `fivetune`, and a log file for its output. Out: its exit code and its error. Sweeps, studies and
the verification of verdicts train with this module.
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
PERMANENT_ERROR_CODES = (ConfigError.exit_code, DataError.exit_code, NumericError.exit_code)  # a retry fails too


class Job:
    """A running command; leaving its context stops it.

    It runs in its own session, so that Ctrl-C in a terminal reaches only the parent.
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
        """Wait until it ends; returns the exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """Stop it: SIGTERM lets it save, a second SIGTERM ends it at once, then SIGKILL. Ctrl-C meanwhile kills it."""
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
        """Find the reason why it ended in its exit code and its output."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return find_exit_reason(file.read().decode("utf-8", "replace"), self.code or 0)


def find_exit_reason(printed: str, code: int) -> str:
    """Find the reason why a process ended: its signal, its last error line, its last line, or its exit code.

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
    """A process id and its start time (seconds since 1970): the system reuses ids, but not the pair."""

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
    """Stop a process whose parent has ended, and wait at most SECONDS_TO_SAVE for its checkpoint."""
    if is_alive(process):
        with suppress(psutil.Error):
            orphan = psutil.Process(process.pid)
            orphan.terminate()
            orphan.wait(SECONDS_TO_SAVE)
