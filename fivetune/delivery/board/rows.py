"""The list of runs as the board shows it, and what has changed in it since a page last asked.

In: folders of runs, read again by `reading/report/live.py` where their files have changed. Out: rows, as JSON: the
fields of a View, and those that `Board._build_row` adds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

from fivetune.reading.compare.variants import find_differing_settings, select_work_settings
from fivetune.reading.report.live import View, Watcher
from fivetune.reading.report.page.wording import escape_hidden, format_setting
from fivetune.rundir.records import Run
from fivetune.types import JsonTable
from fivetune.values import flatten_table, get_nested

MIN_SECONDS = 1.0  # between two looks at the files, however many pages ask
MAX_SECONDS = 1.0  # of a look, after which runs that are new to the board wait for the next one


@dataclass(slots=True)
class Entry:
    """A run of the list: its folder, what was read of it, its row, and the number of the change that made the row."""

    folder: Path
    view: View
    row: JsonTable
    changed: int


class Board:
    """The runs below some folders. Every change of a row has a number, so that a page asks for later ones only."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._watchers = [Watcher(folder) for folder in folders]
        self._started = f"{time.time():.6f}"  # tells the numbers of two servers apart
        self._lock = Lock()  # requests are answered in threads
        self._updated = float("-inf")
        self._number = 0
        self._num_waiting = 0
        self._entries: dict[str, Entry] = {}
        self._usual: dict[str, dict[str, str]] = {}

    def read_changes(self, server: str, since: int) -> JsonTable:
        """Return the names of all runs, and the rows that have changed after change number `since` of this server.

        `waiting` is the number of runs that are not read yet: the list of hundreds of runs comes in several answers.
        """
        with self._lock:
            self._update()
            if server != self._started:
                since = 0
            rows: list[JsonTable] = []
            for entry in self._entries.values():
                if entry.changed > since:
                    rows.append(entry.row)
            return {
                "server": self._started,
                "number": self._number,
                "names": list(self._entries),
                "waiting": self._num_waiting,
                "rows": rows,
            }

    def find_run(self, name: str) -> Entry | None:
        """Find a run by its name in the list; None if it is unknown."""
        with self._lock:
            if not self._entries:
                self._update()
            return self._entries.get(name)

    def _update(self) -> None:
        """Read what has changed, unless it was read just now, and number the rows that differ from before."""
        now = time.monotonic()
        if now - self._updated < MIN_SECONDS and not self._num_waiting:
            return
        self._updated = now
        self._num_waiting = 0
        found: dict[str, tuple[Path, View]] = {}
        for watcher in self._watchers:
            for path, view in watcher.read_folders(until=now + MAX_SECONDS).items():
                if view is None:
                    self._num_waiting += 1
                    continue
                # Runs of two folders may have the same name.
                name = view.name if len(self._watchers) == 1 else str(path)
                found[escape_hidden(name)] = (path, view)

        # The settings of one run may change what is unusual in all others.
        has_other_settings = found.keys() != self._entries.keys()
        for name, (_, view) in found.items():
            known = self._entries.get(name)
            if known and known.view is not view and _get_config(known.view) != _get_config(view):
                has_other_settings = True
        if has_other_settings:
            self._usual = find_usual_settings(view for _, view in found.values())

        entries: dict[str, Entry] = {}
        number = self._number + 1
        for name, (path, view) in found.items():
            known = self._entries.get(name)
            if known is None or known.view is not view or has_other_settings:
                row = self._build_row(name, path, view)
                is_same = known is not None and known.row == row
                changed = known.changed if known and is_same else number
                known = Entry(path, view, row, changed)
            if known.changed == number:
                self._number = number
            entries[name] = known
        self._entries = entries

    def _build_row(self, name: str, path: Path, view: View) -> JsonTable:
        run = view.run or Run(name=name)
        device = run.machine.device
        task = _get_task(run)
        row = asdict(replace(view, name=name, run=None))
        row["folder"] = str(path)  # as commands take it
        row["task"] = task
        row["model"] = str(get_nested(run.config, "model", "path") or "")
        row["device"] = device.name or device.kind or ""
        row["started"] = run.status.started
        row["num_evals"] = len(run.evals)
        row["settings"] = list_differing_settings(run, self._usual.get(task, {}))
        for key, value in row.items():
            if isinstance(value, str):
                row[key] = escape_hidden(value)
        return row


def find_usual_settings(views: Iterable[View]) -> dict[str, dict[str, str]]:
    """Find the settings that differ between the runs of a task, each with its most frequent value: by task."""
    by_task: dict[str, list[Run]] = {}
    for view in views:
        if view.run:
            by_task.setdefault(_get_task(view.run), []).append(view.run)
    usual: dict[str, dict[str, str]] = {}
    for task, runs in by_task.items():
        tables = [select_work_settings(run) for run in runs]
        usual[task] = {}
        for key in find_differing_settings(runs):
            counts = Counter(format_setting(key, table[key]) for table in tables if key in table)
            [(value, _)] = counts.most_common(1)
            usual[task][key] = value
    return usual


def list_differing_settings(run: Run, usual: Mapping[str, str]) -> list[tuple[str, str]]:
    """List a run's values of the settings that differ between runs, those first that are not the usual ones."""
    table = select_work_settings(run)
    first: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for key, most_frequent in usual.items():
        if key not in table:
            continue
        value = format_setting(key, table[key])
        shown = (key, escape_hidden(value))
        if value == most_frequent:
            others.append(shown)
        else:
            first.append(shown)
    return first + others


def list_all_settings(run: Run) -> list[tuple[str, str]]:
    """List all settings of a run, as texts."""
    settings: list[tuple[str, str]] = []
    for key, value in flatten_table(run.config).items():
        settings.append((key, escape_hidden(format_setting(key, value))))
    return settings


def _get_config(view: View) -> JsonTable:
    return view.run.config if view.run else {}


def _get_task(run: Run) -> str:
    return str(get_nested(run.config, "task", "name") or "")
