"""A run as Python and notebooks use it: its records, scores and report, and answers of its model.

In: a run directory. Out: a TrainedRun. The model is loaded at the first answer and stays loaded.
"""

# A caller without types gets FiveTune's error, not Python's.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import fivetune
from fivetune.data.readers.source_files import quote_value
from fivetune.data.readers.tables import is_table, name_tables
from fivetune.errors import ConfigError
from fivetune.rundir import read_run
from fivetune.rundir.figures import find_exported_eval
from fivetune.rundir.notebook import HtmlPage, is_notebook
from fivetune.rundir.progress import Progress, ProgressCallback, format_time_span, ignore_progress
from fivetune.rundir.records import EvalRecord, Prediction, Run
from fivetune.training.answers.batch_size import AutoBatchSize
from fivetune.training.answers.inference import LoadedRun, ignore_note, load_run, resolve_config
from fivetune.training.answers.model_folder import find_exported_step
from fivetune.training.answers.scoring import record_evaluation
from fivetune.training.tables import write_tables
from fivetune.values import get_nested

if TYPE_CHECKING:
    from fivetune.training.answers.predicted_file import PredictedFile

Inputs = Iterable[Mapping[str, object] | str]
"""Records, texts, or a table of records: a DataFrame, a data set of `datasets`."""


class Score(float):
    """A score, with the edges of its 95 % bootstrap interval.

    Args:
        low, high: edges of the interval; None where the evaluation has too few examples for one.

    >>> score = Score(71.25, (69.0, 73.5))
    >>> score, score > 70, score.high
    (71.25 (69.00-73.50), True, 73.5)
    """

    low: float | None
    high: float | None

    def __new__(cls, value: float, interval: tuple[float, float] | None = None) -> Score:
        score = super().__new__(cls, value)
        score.low, score.high = interval or (None, None)
        return score

    def __repr__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})"
        return f"{float(self):.2f}{interval}"


@dataclass(frozen=True, repr=False, eq=False)
class TrainedRun(Run):
    """A run, as `fivetune.train` and `fivetune.open_run` return it: everything of `Run`, and its model.

    The records of the run directory are fields: `run.status`, `run.evals`, `run.steps`, `run.data`, `run.config`. The
    model is loaded at the first call that needs it, and once.

    Args:
        folder: the run directory, or an export of a run.
        overrides: settings for predictions and evaluations that differ from the run's.

    >>> run = fivetune.open_run("runs/tickets")
    >>> run.status.state, len(run.steps), run.scores["accuracy"]
    ('finished', 40, 100.00 (91.24-100.00))
    >>> [one.prediction for one in run.predict(["where is my parcel", "i want my money back"])]
    ['delivery', 'refund']
    """

    folder: Path = Path()
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])

    def __repr__(self) -> str:
        shown = [repr(str(self.folder)), str(get_nested(self.config, "task", "name")), self._describe_state()]
        if best := self.status.best:
            shown.append(f"{best.metric} {self.scores.get(best.metric, Score(best.score))!r}")
        return f"TrainedRun({', '.join(shown)})"

    def _describe_state(self) -> str:
        state = "" if self.status.state == "finished" else f"{self.status.state or 'unknown'}, "
        return f"{state}step {self.status.step:,} of {self.num_steps or self.status.step:,}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows of a run: a table of its scores."""
        seconds = self.status.seconds
        facts = [self._describe_state(), *([format_time_span(seconds)] if seconds else [])]
        task = escape(str(get_nested(self.config, "task", "name")))
        head = f"<b>{escape(str(self.folder))}</b> &nbsp; {task}, {', '.join(facts)}"
        shown = {name: score for name, score in self.scores.items() if score.low is not None} or self.scores
        rows = "".join(f"<tr><td>{escape(name)}</td>{_build_cells(score)}</tr>" for name, score in shown.items())
        table = f"<table><tr><th>score</th><th>value</th><th>95 % interval</th></tr>{rows}</table>" if rows else ""
        return f"<div>{head}{table}</div>"

    @property
    def step(self) -> int:
        """The optimizer step of the weights in model/; `status.step` is the last step of the run."""
        return find_exported_step(self.folder, self.status)

    @property
    def scores(self) -> dict[str, Score]:
        """The scores of the weights in model/ on the run's evaluation data, by name; {} if it has not evaluated them.

        >>> fivetune.open_run("runs/tickets").scores["accuracy"]
        100.00 (91.24-100.00)
        """
        record = find_exported_eval(self)
        return {} if record is None else {k: Score(v, record.intervals.get(k)) for k, v in record.scores.items()}

    def report(self) -> HtmlPage:
        """Write report.html of the run directory; a notebook shows it in the cell, in a frame of its own.

        Returns the page; `str(page)` is its path. Raises RunDirError if it cannot be written.

        >>> print(fivetune.open_run("runs/tickets").report())
        runs/tickets/report.html
        """
        return HtmlPage(fivetune.write_report(self.folder))

    def predict(
        self, inputs: Inputs, *, batch_size: int | Literal["auto"] = "auto", on_progress: ProgressCallback | None = None
    ) -> list[Prediction]:
        """Answer records or texts with the run's model, which is loaded at the first call.

        Args:
            inputs: a list of records with the columns of the run's data (answers are not needed), a pandas DataFrame, a
                datasets.Dataset, or a list of texts. A text is the value of the only column that the task reads, which
                puts it into its template; for a task of several columns it is the whole input, exactly as the model
                reads it.
            batch_size: examples per generation batch. auto: what the free memory of the device holds, at most 256 on a
                GPU and 64 elsewhere; it is halved where memory runs out.
            on_progress: called with what is done, the number of answers so far and of all; default: a notebook shows
                the progress.

        Returns one Prediction each, in order; a record that cannot be used has the reason in `skipped`.

        Raises ConfigError for another `batch_size`, DataError for inputs that are neither records nor texts,
        RunDirError for a run without a model, FiveTuneEnvironmentError if memory runs out at one example.

        >>> run = fivetune.open_run("runs/tickets")
        >>> answer, = run.predict([{"text": "my parcel is late"}], batch_size=8)
        >>> answer.prediction, answer.confidence > 0.5
        ('delivery', True)
        """
        if batch_size != "auto" and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
            raise ConfigError(f"batch_size: {batch_size!r} is no size. Allowed are whole numbers from 1 and 'auto'.")
        loaded = self._loaded
        size = self._auto_batch_size if batch_size == "auto" else batch_size
        with _show_progress(on_progress) as report:
            return loaded.predict(inputs, batch_size=size, on_progress=report)

    def predict_file(self, source: str | Path, *, on_progress: ProgressCallback | None = None) -> PredictedFile:
        """Answer every record of a data file; iterating the result yields rows in order, read from the disk.

        Args:
            source: a file in any format of data.eval; gold answers are not needed.

        Raises DataError for an unreadable file.

        >>> rows = fivetune.open_run("runs/tickets").predict_file("tickets.csv")
        >>> len([row.prediction for row in rows])
        40
        """
        with _show_progress(on_progress) as report:
            return self._loaded.predict_file(source, on_progress=report)

    def evaluate(
        self, data: object = None, *, split: str | None = None, on_progress: ProgressCallback | None = None
    ) -> EvalRecord:
        """Score the run on other data, or again on its own, and record that in the run directory.

        Args:
            data: a file, a folder, a hub name, a pandas DataFrame, a datasets.Dataset or a list of records; None: the
                run's own evaluation data.
            split: name of the predictions file; default: the data file's name.

        Returns the EvalRecord with `scores` and `intervals`, which `evals` has too. Raises DataError for bad data.

        >>> run = fivetune.open_run("runs/tickets")
        >>> run.evaluate([{"text": "give me my money back", "label": "refund"}], split="one").scores["accuracy"]
        100.0
        """
        changes = self.overrides if data is None else {**self.overrides, "data.eval": data}
        loaded = self._loaded  # before a table is written beside the run: the folder is usable
        changes, files = write_tables(changes, self.folder)
        with name_tables(files), _show_progress(on_progress) as report:
            loaded = replace(loaded, config=resolve_config(self.folder, changes))
            record = record_evaluation(
                loaded,
                split=split,
                has_own_settings=not changes,
                on_progress=report,
                on_damage=warnings.warn,
                on_note=ignore_note,
            )
        self.evals.append(record)
        return record

    @cached_property
    def _loaded(self) -> LoadedRun:
        return load_run(self.folder, self.overrides)

    @cached_property
    def _auto_batch_size(self) -> AutoBatchSize:
        return AutoBatchSize()


def _build_cells(score: Score) -> str:
    interval = "" if score.low is None else f"{score.low:.2f} to {score.high:.2f}"
    return f"<td>{float(score):.2f}</td><td>{interval}</td>"


@contextmanager
def _show_progress(given: ProgressCallback | None) -> Generator[ProgressCallback]:
    """Show progress in a notebook; elsewhere, or if the caller has a callback, nothing."""
    if given is not None or not is_notebook():
        yield given or ignore_progress
        return
    progress = Progress()
    try:
        yield progress.update
    finally:
        progress.close()


def open_run(folder: str | Path, overrides: Mapping[str, object] | None = None) -> TrainedRun:
    """Open a run directory, or an export of a run; the model is loaded when it first answers.

    Args:
        folder: the run directory, such as runs/tickets; of a run that is not finished the records can be read.
        overrides: settings for predictions and evaluations that differ from the run's, by dotted name:
            {"eval.num_beams": 4, "device": "cpu"}.

    Returns the TrainedRun. Raises RunDirError for a folder that is no run, ConfigError for an override without effect.

    >>> fivetune.open_run("runs/tickets")
    TrainedRun('runs/tickets', classification, step 40 of 40, accuracy 100.00 (91.24-100.00))
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"the run directory is {quote_value(str(folder))}. Allowed is a path. Name the run's folder.")
    run, given = read_run(folder), dict(overrides or {})
    if given:
        resolve_config(Path(folder), given)
    records: dict[str, Any] = {each.name: getattr(run, each.name) for each in fields(run)}
    return TrainedRun(**records, folder=Path(folder), overrides=given)


def predict(folder: str | Path, inputs: Inputs, overrides: Mapping[str, object] | None = None) -> list[Prediction]:
    """Answer once with a run: `open_run(folder, overrides).predict(inputs)`. For more calls, keep the open run.

    Args, returns and errors: those of `open_run` and `TrainedRun.predict`.

    >>> fivetune.predict("runs/tickets", ["the courier never came"])[0].prediction
    'delivery'
    """
    return open_run(folder, overrides).predict(inputs)


def evaluate(
    folder: str | Path,
    overrides: Mapping[str, object] | None = None,
    *,
    split: str | None = None,
    on_progress: ProgressCallback = ignore_progress,
    on_damage: Callable[[str], object] = warnings.warn,
    on_note: Callable[[str], object] = ignore_note,
) -> EvalRecord:
    """Evaluate a run on its own data, or on {"data.eval": FILE}, and record it in the run directory.

    Args:
        folder: the run directory.
        overrides: settings that differ from the run's; data.eval may be a table, as for `TrainedRun.evaluate`.
        split: name of the predictions file; default: the data file's name.
        on_progress: called with what is done, and the number of questions so far and of all.
        on_damage: called with a sentence for each damaged file that the evaluation does not need.
        on_note: called with the reasons of the precision and of the number of CPU threads, and when the latter changes.

    Returns the EvalRecord. Raises DataError for bad data, RunDirError for a run without a model.

    >>> record = fivetune.evaluate("runs/tickets", {"data.eval": "tickets.csv"})
    >>> record.split, record.num_examples, record.scores["accuracy"]
    ('tickets', 40, 100.0)
    """
    given = dict(overrides or {})
    plain = {name: value for name, value in given.items() if not is_table(value)}
    loaded = load_run(folder, plain, on_damage=on_damage, on_note=on_note)
    changes, files = write_tables(given, folder)
    with name_tables(files):
        if files:
            loaded = replace(loaded, config=resolve_config(Path(folder), changes))
        return record_evaluation(
            loaded,
            split=split,
            has_own_settings=not changes,
            on_progress=on_progress,
            on_damage=on_damage,
            on_note=on_note,
        )
