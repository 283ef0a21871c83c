"""The list of runs as the board shows it, and what has changed in it since a page last asked.

In: folders of runs, read again by `reading/report/live.py` where their files have changed. Out: Rows, as JSON.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from fivetune.reading.compare.variants import find_differing_settings, select_work_settings
from fivetune.reading.report.live import View, Watcher
from fivetune.reading.report.page.wording import escape_hidden, format_setting
from fivetune.rundir.activity import Activity
from fivetune.rundir.records import Run
from fivetune.types import JsonTable
from fivetune.values import flatten_table, get_nested

MIN_SECONDS = 1.0  # between two looks at the files, however many pages ask


@dataclass(frozen=True, slots=True)
class Row:
    """One run as the list shows it; unknown values are None, unknown texts "".

    Args:
        folder: path of the run directory, as commands take it.
        low, high: 95 % interval of the score.
        losses: evenly spaced losses of the whole run, oldest first.
        activity: what an active run does instead of training, such as evaluating; done, total: how far it is.
        settings: name and value of each setting that differs between the runs of its task, the unusual values first.
    """

    name: str
    folder: str
    state: str
    why: str
    verdict: str
    is_bad: bool
    task: str
    model: str
    device: str
    started: str | None
    seconds: float | None
    seconds_left: float | None
    step: int | None
    num_steps: int | None
    num_evals: int
    metric: str
    score: float | None
    score_step: int | None
    low: float | None
    high: float | None
    loss: float | None
    losses: tuple[float, ...]
    tokens_per_second: float | None
    utilisation: float | None
    on_gpu: bool
    activity: str
    done: int
    total: int | None
    settings: tuple[tuple[str, str], ...]


class Board:
    """The runs below some folders. Every change of a row has a number, so that a page asks for later ones only."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._watchers = [Watcher(folder) for folder in folders]
        self._started = f"{time.time():.6f}"  # tells the numbers of two servers apart
        self._lock = Lock()  # requests are answered in threads
        self._looked = float("-inf")
        self._number = 0
        self._views: dict[str, View] = {}
        self._folders: dict[str, Path] = {}
        self._rows: dict[str, Row] = {}
        self._changed: dict[str, int] = {}
        self._varied: dict[str, tuple[str, ...]] = {}
        self._usual: dict[str, dict[str, str]] = {}

    def read_changes(self, server: str, since: int) -> JsonTable:
        """Return the names of all runs, and the rows that have changed after change number `since` of this server."""
        with self._lock:
            if time.monotonic() - self._looked >= MIN_SECONDS:
                self._update()
                self._looked = time.monotonic()
            if server != self._started:
                since = 0
            rows: list[JsonTable] = []
            for name, row in self._rows.items():
                if self._changed[name] > since:
                    rows.append(asdict(row))
            return {"server": self._started, "number": self._number, "names": list(self._rows), "rows": rows}

    def find_run(self, name: str) -> tuple[Path, Row, Run] | None:
        """Find a run by its name in the list: its folder, its row, and what was read of it; None if it is unknown."""
        with self._lock:
            if not self._rows:
                self._update()
            view = self._views.get(name)
            if view is None:
                return None
            return self._folders[name], self._rows[name], view.run or Run(name=name)

    def _update(self) -> None:
        """Read what has changed, and number the rows that differ from before."""
        views: dict[str, View] = {}
        for watcher in self._watchers:
            for path, view in watcher.read_folders().items():
                name = view.name if len(self._watchers) == 1 else str(path)
                name = escape_hidden(name)
                views[name] = view
                self._folders[name] = path
        before = self._views
        self._views = views
        if [_get_config(view) for view in views.values()] != [_get_config(view) for view in before.values()]:
            self._compare_settings()
            before = {}  # settings of one run may change what is unusual in all others
        rows: dict[str, Row] = {}
        for name, view in views.items():
            known = self._rows.get(name)
            rows[name] = known if known and before.get(name) is view else self._build_row(name, view)
            if rows[name] != known:
                self._changed[name] = self._number + 1
        if rows != self._rows:
            self._number += 1
        self._rows = rows

    def _compare_settings(self) -> None:
        """Find the settings that differ between the runs of a task, and the most frequent value of each."""
        by_task: dict[str, list[Run]] = {}
        for view in self._views.values():
            if view.run:
                by_task.setdefault(_get_task(view.run), []).append(view.run)
        for task, runs in by_task.items():
            self._varied[task] = find_differing_settings(runs)
            tables = [select_work_settings(run) for run in runs]
            self._usual[task] = {}
            for key in self._varied[task]:
                counts = Counter(format_setting(key, table[key]) for table in tables if key in table)
                self._usual[task][key] = counts.most_common(1)[0][0]

    def _list_settings(self, run: Run) -> tuple[tuple[str, str], ...]:
        task = _get_task(run)
        table = select_work_settings(run)
        unusual: list[tuple[str, str]] = []
        usual: list[tuple[str, str]] = []
        for key in self._varied.get(task, ()):
            if key not in table:
                continue
            value = format_setting(key, table[key])
            kept = usual if value == self._usual[task][key] else unusual
            kept.append((key, escape_hidden(value)))
        return (*unusual, *usual)

    def _build_row(self, name: str, view: View) -> Row:
        run = view.run or Run(name=name)
        low, high = view.interval or (None, None)
        device = run.machine.device
        activity = view.activity or Activity("")
        return Row(
            name=name,
            folder=escape_hidden(str(self._folders[name])),
            state=view.state,
            why=escape_hidden(view.why),
            verdict=escape_hidden(view.verdict),
            is_bad=view.is_bad,
            task=escape_hidden(_get_task(run)),
            model=escape_hidden(str(get_nested(run.config, "model", "path") or "")),
            device=escape_hidden(device.name or device.kind or ""),
            started=run.status.started,
            seconds=view.seconds,
            seconds_left=view.seconds_left,
            step=view.step,
            num_steps=view.num_steps,
            num_evals=len(run.evals),
            metric=view.metric,
            score=view.score,
            score_step=view.score_step,
            low=low,
            high=high,
            loss=view.loss,
            losses=view.losses,
            tokens_per_second=view.tokens_per_second,
            utilisation=view.utilisation,
            on_gpu=view.on_gpu,
            activity=activity.what,
            done=activity.done,
            total=activity.total,
            settings=self._list_settings(run),
        )


def _get_config(view: View) -> JsonTable:
    return view.run.config if view.run else {}


def _get_task(run: Run) -> str:
    return str(get_nested(run.config, "task", "name") or "")


def list_all_settings(run: Run) -> list[tuple[str, str]]:
    """List all settings of a run, as texts."""
    return [(key, escape_hidden(format_setting(key, value))) for key, value in flatten_table(run.config).items()]
