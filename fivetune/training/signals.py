"""Signals that stop a run: outside the loop they act at once; inside it they set a flag that each step boundary reads.

Ctrl-C, SIGTERM, SIGHUP (terminal closed), SIGUSR1 and SIGUSR2 (a scheduler's warning before its time limit), SIGXCPU
(limit of CPU time) and SIGALRM all save a checkpoint first.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fivetune.distributed.processes.signals import ALL_SIGNALS, STOP_SIGNALS, defer_in_import, handle_signals

DUPLICATE_SECONDS = 5.0


class StopNowError(KeyboardInterrupt):
    """Raised by the first signal outside a `defer_signals` block; like Ctrl-C, `except Exception` does not catch it.

    Its argument is the number of the signal.
    """


class StopRequest:
    """Records the first signal in `signum` while entered; a second Ctrl-C or SIGTERM ends the process at once.

    The first signal raises StopNowError, except in a `defer_signals` block, whose code reads `signum`.
    All others count only as first signals: a scheduler may send them to every process of a job, and
    to some of them twice. SIGTERM too may reach a rank of torchrun twice, from the scheduler and from torchrun, which
    passes its own one on: repeated within DUPLICATE_SECONDS it counts once. Outside the main thread this class handles
    nothing, because Python allows no handlers there.

    Args:
        silent: print nothing, because another rank prints.
        can_resume: whether there is a run that can be resumed after a signal; a new run sets it when it has begun.
    """

    def __init__(self, *, silent: bool = False, can_resume: bool = False) -> None:
        self._silent = silent
        self.can_resume = can_resume
        self.signum: int | None = None
        self.is_deferring = False
        self._terminated: float | None = None  # time of the first SIGTERM
        self._handlers = handle_signals(ALL_SIGNALS, self._handle_signal, forget=self._forget_signal)

    def __enter__(self) -> StopRequest:
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.__exit__(None, None, None)

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name if self.signum else ""

    def get_signum(self) -> int:
        """The signal that was received; 0 if none."""
        return self.signum or 0

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Inside this block the first signal only sets `signum`."""
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def ignore_signals(self) -> None:
        """Ignore a first signal from now on: the run ends for another reason, which must still be recorded."""
        self.is_deferring = self._silent = True

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        # SIGXCPU comes at the soft limit, and each second after it: from now on the hard limit alone counts.
        if signum == signal.SIGXCPU:
            with suppress(OSError, ValueError):
                _, hard = resource.getrlimit(resource.RLIMIT_CPU)
                resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        if first and not self.is_deferring and defer_in_import(signum, frame):
            return
        if signum in STOP_SIGNALS:  # from now on these two act at once
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if signum == signal.SIGTERM and "LOCAL_RANK" in os.environ:
                if self._terminated is not None:
                    # The scheduler's and torchrun's SIGTERM count once; a later one ends the process.
                    if time.monotonic() - self._terminated > DUPLICATE_SECONDS:
                        signal.signal(signal.SIGTERM, signal.SIG_DFL)
                        os.kill(os.getpid(), signal.SIGTERM)
                    return
                self._terminated = time.monotonic()
            else:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        elif not first:
            return
        # A scheduler sends SIGUSR1 first and SIGTERM at its time limit: the save in progress continues.
        self.signum = signum
        if not self.is_deferring:
            if first:
                raise StopNowError(signum)
            return
        if self._silent:
            return
        # Not print: a handler may interrupt another write of the same stream.
        with suppress(OSError):
            os.write(2, f"{self.name} received: stopping soon; a second Ctrl-C stops at once.\n".encode())

    def _forget_signal(self) -> None:
        self.signum = self._terminated = None
