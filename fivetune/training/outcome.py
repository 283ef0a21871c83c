"""How a run ends: its state in status.json, and the error that its user gets.

In: the blocks that open, train and close a run. Out: the same, with its outcome recorded; a signal raises
InterruptedRunError.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivetune.distributed.world import ProcessGroupError, World
from fivetune.errors import FiveTuneError, InterruptedRunError, NumericError
from fivetune.rundir import RunDir
from fivetune.rundir.progress import Progress, format_time_span
from fivetune.training.loop import format_resume_command
from fivetune.training.signals import StopNowError, StopRequest


@contextmanager
def name_python_call(folder: str, command: str | None) -> Iterator[None]:
    """Add the call that resumes to the error of a stopped run that no command started."""
    try:
        yield
    except InterruptedRunError as error:
        if command is None and error.can_resume:
            call = f"In Python: fivetune.train({folder!r}, resume=True)"
            signum = error.exit_code - 128
            raise InterruptedRunError(f"{error}. {call}", signum=signum, can_resume=True, reason=error.reason) from None
        raise


@contextmanager
def record_outcome(run: RunDir, progress: Progress, stop: StopRequest, world: World) -> Iterator[None]:
    """Write how the run ended to status.json, then re-raise. A refused resume keeps the previous state."""
    started = time.monotonic()

    # A resume that is refused before it begins leaves the state of the run as it was, such as finished.
    def write_end(state: str, why: str, **facts: object) -> None:
        if run.status.state in ("", "preparing", "running"):
            run.update_status(state=state, why=why, **facts)

    try:
        with world.translate_disconnects():
            yield
    except InterruptedRunError as error:
        write_end("interrupted", error.reason)
        raise
    except StopNowError:
        # torchrun ends the other ranks by a signal when one has failed: the failure is why the run ended.
        if reason := world.find_peer_error():
            write_end("failed", reason)
        stopped = _build_stop_error(stop, run.path)
        write_end("interrupted", stopped.reason)
        raise stopped from None
    except KeyboardInterrupt:
        write_end("interrupted", "stopped by a second signal; the last checkpoint is whole")
        raise
    except BaseException as error:
        stop.ignore_signals()
        # repr: an error of Python says little without its class.
        why = str(error) if isinstance(error, FiveTuneError) else repr(error)
        if isinstance(error, ProcessGroupError):
            why = world.explain_disconnect(error)
        write_end("failed", why, nonfinite_step=error.step if isinstance(error, NumericError) else None)
        raise
    progress.log(f"finished in {format_time_span(time.monotonic() - started)}")


@contextmanager
def report_stop(stop: StopRequest, folder: Path) -> Iterator[None]:
    """Raise InterruptedRunError for a signal while a run is opened or closed, of which nothing is recorded."""
    try:
        yield
    except StopNowError:
        raise _build_stop_error(stop, folder) from None


def _build_stop_error(stop: StopRequest, folder: Path) -> InterruptedRunError:
    reason = f"stopped by {stop.name}"
    rest = "Nothing was trained, nothing is kept."
    if stop.can_resume:
        rest = f"Resume with: {format_resume_command(folder)}"
    return InterruptedRunError(f"{reason}. {rest}", signum=stop.get_signum(), can_resume=stop.can_resume, reason=reason)
