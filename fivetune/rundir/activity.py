"""What a run does between its steps, in activity.json: preparing data, answering the evaluation's questions.

In: the counts that the progress display is given. Out: an Activity for whoever looks at the run from outside.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fivetune.rundir.damage import Damage
from fivetune.rundir.layout import ACTIVITY
from fivetune.rundir.parse import parse_record
from fivetune.rundir.reader import read_json

MIN_SECONDS = 1.0  # between two writes: an evaluation counts thousands of answers


@dataclass(frozen=True, slots=True)
class Activity:
    """A long operation: what it is, such as "evaluating"; how many of its parts are done, of how many if known."""

    what: str
    done: int = 0
    total: int | None = None


@dataclass(slots=True)
class ActivityFile:
    """Writes the activity of a run: a new one at once, its progress at most once in MIN_SECONDS.

    A write that fails is not repeated and no error.
    """

    folder: Path
    _what: str = ""
    _written: float = 0.0

    def update(self, activity: Activity) -> None:
        now = time.monotonic()
        if activity.what == self._what and now - self._written < MIN_SECONDS:
            return
        self._what = activity.what
        self._written = now
        # Not synced to the disk: after a power cut nobody asks how far an evaluation was.
        staging = self.folder / f".{ACTIVITY}.{os.getpid()}.tmp"
        with suppress(OSError):
            staging.write_text(json.dumps(asdict(activity)), encoding="utf-8")
            staging.replace(self.folder / ACTIVITY)

    def remove(self) -> None:
        with suppress(OSError):
            (self.folder / ACTIVITY).unlink()


def read_activity(folder: Path, *, after: float) -> Activity | None:
    """Read what a run does now; None if it has gone on since, because records were written `after` (a file's time)."""
    path = folder / ACTIVITY
    try:
        if path.stat().st_mtime <= after:
            return None
    except OSError:
        return None
    return parse_record(Activity, read_json(path, Damage()))
