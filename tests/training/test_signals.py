"""What each signal does, in this process."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from fivetune.commands import train
from fivetune.distributed.processes.signals import SAVE_SIGNALS, STOP_SIGNALS, report_interrupts
from fivetune.errors import IncompleteError, InterruptedRunError
from fivetune.training.signals import StopNowError, StopRequest


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


class Dropped:
    """Acts in its finalizer, where Python drops errors."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


def send_in_finalizer(signum: int) -> None:
    Dropped(lambda: send(signum))


def send_in_callback(signum: int) -> None:
    reference = weakref.ref(dropped := Dropped(lambda: None), lambda _: send(signum))
    del dropped, reference


def raise_memory_error() -> None:
    raise MemoryError


@pytest.mark.parametrize("signum", [*STOP_SIGNALS, *SAVE_SIGNALS])
def test_every_signal_only_sets_a_flag_while_deferred(signum, capfd):
    before = signal.getsignal(signum)
    with StopRequest() as stop, stop.defer_signals():
        send(signum)
        assert (stop.signum, stop.name) == (signum, signal.Signals(signum).name)
    assert f"{stop.name} received: stopping soon" in capfd.readouterr().err
    assert signal.getsignal(signum) == before


def test_a_signal_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    """torch and transformers cannot be imported again after a broken import: the kernel of a notebook was lost."""
    (tmp_path / "slowly_imported.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.02)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InterruptedRunError, match="stopped"), report_interrupts(lambda name: f"stopped by {name}"):
        __import__("slowly_imported")
        time.sleep(5)  # the signal comes again
    assert sys.modules.pop("slowly_imported").whole


@pytest.mark.parametrize("signum", SAVE_SIGNALS)
def test_every_signal_acts_at_once_where_nothing_is_to_be_finished(signum):
    with pytest.raises(StopNowError), StopRequest() as stop:
        send(signum)
    assert stop.signum == signum


@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM])
def test_sigterm_after_a_scheduler_warning_lets_the_save_go_on(second, capfd):
    with StopRequest() as stop, stop.defer_signals():
        send(signal.SIGUSR1)
        send(second)
        assert stop.signum == (signal.SIGTERM if second == signal.SIGTERM else signal.SIGUSR1)


def test_a_second_ctrl_c_acts_at_once(capfd):
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop, stop.defer_signals():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_nohup_stays_in_force(monkeypatch):
    """The parent ignores SIGHUP: a closed terminal does not stop the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop, stop.defer_signals():
            send(signal.SIGHUP)
            assert stop.signum is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_timer_of_a_program_around_stays_its_own():
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda signum, frame: rung.append(signum))
    try:
        with StopRequest() as stop, stop.defer_signals():
            send(signal.SIGALRM)
        assert stop.signum is None and rung == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_limit_of_cpu_time_leaves_time_to_save_and_to_report(capfd):
    """The system sends SIGXCPU once a second from the soft limit on, unless that is raised to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (10**6, hard))
    try:
        with StopRequest() as stop, stop.defer_signals():
            for _ in range(3):
                send(signal.SIGXCPU)
            assert stop.name == "SIGXCPU" and resource.getrlimit(resource.RLIMIT_CPU) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_during_the_report_is_reported(signum):
    before = signal.getsignal(signum)
    words = rf"^stopped by {signal.Signals(signum).name} here$"
    with pytest.raises(InterruptedRunError, match=words) as caught, report_interrupts("stopped by {} here".format):
        try:
            send(signum)
        except Exception:  # what is interrupted cannot swallow it
            pytest.fail("swallowed")
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) == before


@pytest.mark.parametrize(
    ("ending", "error", "words"),
    [
        (lambda: send(signal.SIGTERM), InterruptedRunError, "stopped by SIGTERM while the report was written. "),
        (raise_memory_error, IncompleteError, "runs/x: the report failed: memory ran out. "),
    ],
)
def test_a_report_that_fails_after_training_says_that_the_model_is_there(monkeypatch, ending, error, words):
    monkeypatch.setattr("fivetune.reading.report.write_report", lambda folder: ending())
    with pytest.raises(error) as caught:
        train._write_report("runs/x")
    assert str(caught.value).startswith(f"{words}The model is saved in runs/x/model. Write the report with: fivetune")


@pytest.mark.parametrize("send_there", [send_in_finalizer, send_in_callback])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_in_a_finalizer_still_stops(signum, send_there, capfd):
    handlers, hook = signal.getsignal(signum), sys.unraisablehook
    with pytest.raises(StopNowError), StopRequest() as stop:
        send_there(signum)
        assert stop.signum is None
        time.sleep(5)
    assert stop.signum == signum
    with pytest.raises(InterruptedRunError, match=f"^{stop.name}$") as caught, report_interrupts(str):
        send_there(signum)
        time.sleep(5)
    assert caught.value.exit_code == 128 + signum
    assert capfd.readouterr().err == "" and (signal.getsignal(signum), sys.unraisablehook) == (handlers, hook)


def test_a_sigterm_in_a_finalizer_is_no_duplicate_of_itself(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(StopNowError), StopRequest():
        send_in_finalizer(signal.SIGTERM)
        time.sleep(5)


def test_a_second_ctrl_c_in_a_finalizer_acts_at_once(capfd):
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop, stop.defer_signals():
        send(signal.SIGINT)
        send_in_finalizer(signal.SIGINT)
        time.sleep(5)
    assert stop.signum == signal.SIGINT and "Traceback" not in capfd.readouterr().err


def test_another_error_of_a_finalizer_is_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: reported.append(dropped.exc_type))
    with StopRequest():
        Dropped(raise_memory_error)
    assert reported == [MemoryError]
