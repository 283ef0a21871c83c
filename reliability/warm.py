"""Processes that start in milliseconds: one server has imported torch and transformers.

In: the words after `fivetune`, or a function. Out: a process of its own that takes signals, its output and its exit
code. The server forks before any computation; what a process imports lazily beside PRELOADED, it imports itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil

PRELOADED = [
    "reliability.quiet",
    "fivetune.commands.train",
    "fivetune.training",
    "fivetune.reading.report.run.build",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
]
END_SECONDS = 30.0  # within which a killed process must be gone
# Each start of a process reads the exit codes of those that have ended, and another thread's read of one gets 255 then.
EXIT_CODES = threading.RLock()
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)


def prepare_peer() -> None:
    """Import the peer's trainer once too, in a server that is not yet started; FiveTune's tests need none."""
    SERVER.set_forkserver_preload([*PRELOADED, "transformers.trainer_seq2seq"])


class WarmProcess:
    """A running `work(*args)`, which may return an exit code; leaving its context kills it."""

    def __init__(self, work: Callable[..., int | None], *args: Any, environ: Mapping[str, str] = os.environ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        places = [str(file) for file in self._files]
        self._process = SERVER.Process(target=_run, args=(work, args, places, dict(environ), str(Path.cwd())))
        with EXIT_CODES:
            self._process.start()
        self.name = " ".join(map(str, args))
        self.pid = self._process.pid or 0

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        wait_for_any([self._process.sentinel])
        with EXIT_CODES:
            self._process.close()
        self._folder.cleanup()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs, -n if signal n ended it."""
        with EXIT_CODES:
            return self._process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Wait until the output matches; returns the first group. Raises TimeoutError, or if the process ends first."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            is_over = self.code is not None
            texts = [file.read_text(encoding="utf-8") for file in self._files if file.exists()]
            if found := re.search(pattern, "".join(texts)):
                return found[1]
            if is_over:
                break
            time.sleep(0.02)
        raise TimeoutError(f"{self.name}: no {pattern!r} within {seconds:g} s: {texts}")

    def kill_tree(self) -> None:
        """SIGKILL it and all processes that it started, as a machine that goes down does."""
        if self.code is None:
            started: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):  # it has ended since
                started = psutil.Process(self.pid).children(recursive=True)
            for one in (self._process, *started):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            until = time.monotonic() + END_SECONDS
            while alive := [one for one in started if is_alive(one)]:
                assert time.monotonic() < until, f"killed, and alive: {alive}"
                time.sleep(0.01)

    def wait(self, seconds: float = 300) -> CompletedProcess[str]:
        """Wait until it ends. Raises TimeoutError after `seconds`."""
        wait_for_any([self._process.sentinel], seconds)
        code = self.code
        if code is None:
            raise TimeoutError(f"{self.name} still runs after {seconds:g} s")
        stdout, stderr = (file.read_text(encoding="utf-8") if file.exists() else "" for file in self._files)
        return CompletedProcess(self.name, code, stdout, stderr)

    def finish(self) -> CompletedProcess[str]:
        """Wait until it ends, and leave its context."""
        with self:
            return self.wait()


def adopt_orphans() -> None:
    """Keep the processes that this one starts in its tree, also those whose parent ends."""
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; an ended one whose parent has not asked for its exit code does not."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def check_success(done: CompletedProcess[str]) -> None:
    """The command ended well, and printed no trace."""
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-600:]}"
    check_no_trace(done.stderr)


def check_no_trace(said: str) -> None:
    """Nothing of Python is shown to the user, and no error that FiveTune did not foresee."""
    assert "Traceback" not in said and "internal error" not in said, said[-900:]


def start_command(*words: str, environ: Mapping[str, str] = os.environ) -> WarmProcess:
    """Start `fivetune WORDS`."""
    return WarmProcess(_run_command, *words, environ=environ)


def run_command(*words: str) -> CompletedProcess[str]:
    """Run `fivetune WORDS` to its end."""
    return start_command(*words).finish()


def wait_until(
    is_done: Callable[[], bool], seconds: float, *, every: float = 0.1, explain: Callable[[], str] = str
) -> None:
    """Ask again and again until it is true. Raises AssertionError, with an explanation, after `seconds`."""
    until = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < until, f"not within {seconds:g} s: {explain()}"
        time.sleep(every)


def _run_command(*words: str) -> int:
    from fivetune.cli import main

    return main(list(words))


def _run(
    work: Callable[..., int | None],
    args: tuple[Any, ...],
    files: list[str],
    environ: Mapping[str, str],
    folder: str,
) -> None:
    os.setsid()  # a terminal's Ctrl-C is for the campaign, not for its trials
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has the campaign ignore it, and FiveTune respects that
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a shell's & does
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for file, standard in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    sys.exit(work(*args))
