"""Ctrl-C and SIGTERM: outside the loop they act at once; in it a flag is set, and it stops at the next boundary."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopNow(KeyboardInterrupt):
    """The first signal came where there is nothing to finish. Like Ctrl-C, it passes every `except Exception`."""


class StopRequest:
    """While entered, the first signal is kept in `signum`; a second one acts as usual.

    The first one raises StopNow, but in the block of `wait`, where `signum` is to be looked at.
    In a thread other than the main one nothing is caught, as Python allows no handlers there.

    Args:
        silent: another process tells the user.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self.signum: int | None = None
        self.waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        try:
            self._before = {number: signal.signal(number, self._keep) for number in CAUGHT}
        except ValueError:
            self._before = {}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name if self.signum else ""

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Here a signal only asks to stop soon."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def end(self) -> None:
        """The run ends for another reason, which is still to be told: signals are kept, and nothing comes of them."""
        self.waiting = self._silent = True

    def _keep(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for number in CAUGHT:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if not self.waiting:
            raise StopNow
        if self._silent:
            return
        with suppress(OSError):  # not print: a handler may interrupt another write of the same stream
            os.write(2, f"{self.name} received: stopping soon; once more stops at once.\n".encode())
