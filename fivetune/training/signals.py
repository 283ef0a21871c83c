"""Ctrl-C and SIGTERM: the handler sets a flag, the loop stops at the next step boundary."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first signal is kept in `signum`; a second one acts as usual.

    In a thread other than the main one nothing is caught, as Python allows no handlers there.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
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

    def _keep(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for number in CAUGHT:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
