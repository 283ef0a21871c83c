"""Trials that share a warm process: small faults by the hundred, in the time of one start.

In: a check and its cases. Out: a Trial for each; the first that runs has all cases checked, one after the other.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reliability.campaign import Trial
from reliability.warm import WarmProcess

TIMEOUT = 600.0  # seconds that all cases of a process take at most
RESULTS = "results.jsonl"
Check = Callable[[Path, Any], None]  # gets an empty folder and a case; raises AssertionError where a promise broke


def share_process(check: Check, cases: Mapping[str, Any]) -> Iterator[Trial]:
    """Yield a trial for each case, by its name; `check` and cases are pickled."""
    batch = Batch(check, cases)
    for name in cases:
        yield Trial(name, partial(batch.raise_failure, name))


class Batch:
    """Cases of one process, which runs when the first result is asked for."""

    def __init__(self, check: Check, cases: Mapping[str, Any]) -> None:
        self._check, self._cases = check, cases
        self._failures: dict[str, str] | None = None
        self._lock = threading.Lock()

    def raise_failure(self, name: str, folder: Path) -> None:
        """Raise AssertionError if the case of that name failed."""
        with self._lock:
            if self._failures is None:
                self._failures = self._run()
        assert not self._failures[name], self._failures[name]

    def _run(self) -> dict[str, str]:
        place = Path(tempfile.mkdtemp(prefix="batch-"))
        with WarmProcess(check_all, self._check, self._cases, str(place)) as process:
            try:
                done = process.wait(TIMEOUT)
                end = f"the process ended, exit code {done.returncode}: {done.stderr[-600:]}"
            except TimeoutError as error:
                end = str(error)
        lines = (place / RESULTS).read_text().splitlines() if (place / RESULTS).exists() else []
        found = {one["name"]: one["failure"] for one in map(json.loads, lines)}
        rest = [name for name in self._cases if name not in found]
        found |= dict.fromkeys(rest, f"not checked, since {''.join(rest[:1])} ended the process: {end}")
        if not any(found.values()):
            shutil.rmtree(place)
        return found


def check_all(check: Check, cases: Mapping[str, Any], place: str) -> None:
    """Check all cases in folders of `place`; those that held are deleted, and each result becomes a line."""
    with Path(place, RESULTS).open("w") as results:
        for number, (name, case) in enumerate(cases.items()):
            folder, failure = Path(place, str(number)), ""
            folder.mkdir()
            try:
                check(folder, case)
            except Exception as error:  # a trial that cannot run has shown nothing
                last = traceback.extract_tb(error.__traceback__)[-1]
                failure = f"{type(error).__name__} in {last.name}:{last.lineno}: {error}; files: {folder}"
            else:
                shutil.rmtree(folder)
            results.write(json.dumps({"name": name, "failure": failure}) + "\n")
            results.flush()
