"""Signal handlers for the duration of a block.

In: signals and a handler. Out: a context manager that installs the handler and restores the previous ones on exit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # a closed terminal; a scheduler's warning
ALL_SIGNALS = (*STOP_SIGNALS, *SAVE_SIGNALS)

SignalHandler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: SignalHandler) -> Generator[None]:
    """Call `handler` for these signals inside the block. No-op outside the main thread, where Python allows none.

    An ignored signal, such as SIGHUP under nohup, stays ignored; SIGINT does not, because shells ignore it in
    background jobs.
    """
    wanted = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    try:
        before = {number: signal.signal(number, handler) for number in wanted}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def interrupt_on_stop_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt(signal number) inside the block for each of ALL_SIGNALS."""
    return handle_signals(ALL_SIGNALS, _raise_interrupt)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)
