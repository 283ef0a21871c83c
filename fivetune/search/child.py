"""One training in a process of its own, watched from outside.

In: the words after `fivetune`. Out: whether it runs, how it ended, and the evaluations that it wrote so far.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fivetune import rundir

SECONDS_TO_SAVE = 120.0  # that a stopped training gets to write its state


class Child:
    """A started training; its output goes to `log`.

    It is the head of a session of its own, so that Ctrl-C reaches only who started it.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fivetune", *words],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._log = log

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs, -n if signal n ended it."""
        return self.process.poll()

    def stop(self) -> None:
        """End it: a signal lets it save, a second one ends it at once, then it is killed."""
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.code is None:
                self.process.send_signal(signum)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(SECONDS_TO_SAVE)

    def last_words(self) -> str:
        """The last line that it printed: the error, if it failed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("fivetune: ") if lines else f"exit code {self.code}"


def scores_so_far(folder: Path, metric: str) -> list[tuple[int, float]]:
    """(step, score) of a run's own evaluations after its start, in order."""
    evals = rundir.own_evals(rundir.read_jsonl(folder / rundir.EVALS))
    return [(one["step"], one["scores"][metric]) for one in evals if one["step"] > 0 and metric in one["scores"]]


def best_score(folder: Path, metric: str) -> float | None:
    """Score of the run's best evaluation, which is over all examples once the run has finished."""
    record = rundir.best_eval(rundir.read_jsonl(folder / rundir.EVALS), rundir.read_status(folder).get("best"))
    return record["scores"].get(metric) if record else None


def identity(pid: int) -> dict[str, Any]:
    """What tells a process from a later one of the same number."""
    return {"pid": pid, "born": psutil.Process(pid).create_time()}


def is_alive(process: dict[str, Any]) -> bool:
    try:
        return abs(psutil.Process(process["pid"]).create_time() - process["born"]) < 1
    except psutil.Error:
        return False


def end_orphan(process: dict[str, Any] | None) -> None:
    """Stop a training whose starter is gone; it saves first."""
    if process and is_alive(process):
        with suppress(psutil.Error):
            orphan = psutil.Process(process["pid"])
            orphan.terminate()
            orphan.wait(SECONDS_TO_SAVE)
