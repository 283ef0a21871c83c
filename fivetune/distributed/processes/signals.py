"""Signal handlers for the duration of a block.

In: signals and a handler. Out: a context manager that installs the handler and restores the previous ones on exit.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from fivetune.errors import InterruptedRunError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A closed terminal; a scheduler's warning; the soft limit of CPU time, each second until the hard one; a timer.
SAVE_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM)
ALL_SIGNALS = (*STOP_SIGNALS, *SAVE_SIGNALS)
REPEAT_SECONDS = 0.005

SignalHandler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(
    numbers: Sequence[signal.Signals], handler: SignalHandler, *, forget: Callable[[], None] = lambda: None
) -> Generator[None]:
    """Call `handler` for these signals inside the block. No-op outside the main thread, where Python allows none.

    An ignored signal, such as SIGHUP under nohup, stays ignored; SIGINT does not, because shells ignore it in
    background jobs. SIGALRM stays with a program around that has set a handler: it is that one's timer. A handler
    that raises KeyboardInterrupt gives it the number of the signal: while Python runs a finalizer or a callback of the
    garbage collector it drops every error, and the signal is then sent again.

    Args:
        forget: takes back what `handler` noted of a signal that is sent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in filter(_is_free, numbers)}
    report_dropped = sys.unraisablehook

    def repeat_dropped(dropped: sys.UnraisableHookArgs) -> None:
        error = dropped.exc_value
        if not isinstance(error, KeyboardInterrupt):
            return report_dropped(dropped)
        if error.args:
            forget()
            for number in before:  # the handler may have replaced itself
                signal.signal(number, handler)
        signum = error.args[0] if error.args else signal.SIGINT
        # threading.Thread takes locks, which the code that the finalizer interrupted may hold.
        _thread.start_new_thread(_send_again, (signum, signal.getsignal(signum)))

    sys.unraisablehook = repeat_dropped
    try:
        yield
    finally:
        sys.unraisablehook = report_dropped
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _is_free(number: signal.Signals) -> bool:
    before = signal.getsignal(number)
    if number == signal.SIGALRM:
        return before == signal.SIG_DFL or getattr(before, "__module__", "").startswith("fivetune.")
    return number == signal.SIGINT or before != signal.SIG_IGN


def _send_again(signum: int, handler: object) -> None:
    """Send the signal to this process a little later, unless another one has come first and replaced the handler."""
    time.sleep(REPEAT_SECONDS)
    if signal.getsignal(signum) is handler:
        os.kill(os.getpid(), signum)


def interrupt_on_all_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt(signal number) inside the block for each of ALL_SIGNALS."""
    return handle_signals(ALL_SIGNALS, raise_interrupt)


@contextmanager
def report_interrupts(describe: Callable[[str], str]) -> Generator[None]:
    """Raise InterruptedRunError for each of ALL_SIGNALS inside the block.

    Args:
        describe: returns the text of the error for the signal's name.
    """
    try:
        with interrupt_on_all_signals():
            yield
    except KeyboardInterrupt as stop:
        signum = get_signum(stop)
        raise InterruptedRunError(describe(signal.Signals(signum).name), signum=signum) from None


def get_signum(stop: KeyboardInterrupt) -> int:
    """Return the number of the signal of a KeyboardInterrupt: that of Python's own handler is SIGINT.

    >>> get_signum(KeyboardInterrupt(signal.SIGTERM)), get_signum(KeyboardInterrupt())
    (15, 2)
    """
    return next((int(one) for one in stop.args if isinstance(one, int)), signal.SIGINT.value)


def raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt that knows its signal: a handler of signals. While a module is imported the signal is
    sent again a little later: torch and transformers cannot be imported a second time after a broken import.
    """
    if not defer_in_import(signum, frame):
        raise KeyboardInterrupt(signum)


def defer_in_import(signum: int, frame: FrameType | None) -> bool:
    """Send a signal again a little later if a module is being imported; returns whether it is."""
    is_importing = _is_importing(frame)
    if is_importing:
        _thread.start_new_thread(_send_again, (signum, signal.getsignal(signum)))
    return is_importing


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way that FiveTune's own functions began: a user's module may train when imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        if frame.f_globals.get("__name__", "").startswith("fivetune.") and frame.f_code.co_name != "<module>":
            return False
        frame = frame.f_back
    return False


@contextmanager
def defer_interrupts() -> Generator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C, or the interrupt of a notebook's kernel, when the block has ended."""
    came: list[int] = []
    with handle_signals((signal.SIGINT,), lambda signum, frame: came.append(signum)):
        yield
    if came:
        raise KeyboardInterrupt(came[0])
