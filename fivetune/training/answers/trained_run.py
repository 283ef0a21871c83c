"""A run as Python and notebooks use it: its records, scores and report, and answers of its model.

In: a run directory. Out: a TrainedRun. The model is loaded at the first answer and stays loaded.
"""

# A caller without types gets FiveTune's error, not Python's.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from warnings import warn

import fivetune
from fivetune import rundir
from fivetune.config.aliases import find_setting
from fivetune.data.readers.tables import is_table, name_tables
from fivetune.data.shard import WHOLE, Shard
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import ConfigError, PromiseError, translate_oom_errors
from fivetune.model.decode import Decoding
from fivetune.rundir.abstention_file import read_abstention
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.export_file import EXPORT
from fivetune.rundir.figures import find_exported_eval
from fivetune.rundir.notebook import HtmlPage, is_notebook
from fivetune.rundir.progress import Progress, ProgressCallback, format_time_span, ignore_progress
from fivetune.rundir.records import (
    DataSummary,
    EvalRecord,
    MachineRecord,
    Prediction,
    Predictions,
    Run,
    RunStatus,
    StepRecord,
    TelemetryRecord,
)
from fivetune.scores.analysis.abstention import Silence, choose_silence, withhold
from fivetune.tasks.mixture import Mixture
from fivetune.training.answers.batch_size import AutoBatchSize
from fivetune.training.answers.inputs import describe_questions
from fivetune.training.answers.listening import OnWritten
from fivetune.training.answers.loading import RunModel, check_folder, load_run_model, resolve_config
from fivetune.training.answers.model_folder import find_exported_step, refuse_missing_model
from fivetune.training.answers.promise import describe_kept_promise, keep_promise, refuse_promise
from fivetune.training.answers.requests import answer_requests, list_inputs, name_texts, read_requests
from fivetune.training.mixture import build_part_configs, require_single_part
from fivetune.training.tables import write_tables
from fivetune.training.threads import watch_threads
from fivetune.types import OnNote, ignore_note
from fivetune.values import get_nested

if TYPE_CHECKING:
    from fivetune.rundir.plan import Plan
    from fivetune.training.answers.predicted_file import PredictedFile
    from fivetune.types import JsonTable

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


class TrainedRun:
    """A run, as `fivetune.train` and `fivetune.open_run` return it: what its directory holds, and its model.

    The records of the run directory are attributes: `run.status`, `run.evals`, `run.steps`, `run.data`, `run.config`.
    The model is loaded at the first call that needs it, and once.

    Args:
        folder: the run directory, or an export of a run.
        overrides: settings for predictions and evaluations that differ from the run's.
        records: what the directory holds; None: read when it is first asked for.
        loaded: the model; None: loaded when it is first asked for.

    >>> run = fivetune.open_run("runs/tickets")
    >>> run.status.state, len(run.steps), run.scores["accuracy"]
    ('finished', 40, 100.00 (91.24-100.00))
    >>> [one.prediction for one in run.predict(["where is my parcel", "i want my money back"])]
    ['delivery', 'refund']
    """

    def __init__(
        self,
        folder: Path,
        overrides: Mapping[str, object] | None = None,
        *,
        records: Run | None = None,
        loaded: RunModel | None = None,
    ) -> None:
        self.folder = folder
        self.overrides = dict(overrides or {})
        self._records = records
        self._loaded = loaded
        self._auto_batch_size = AutoBatchSize()

    # --- what the run directory holds ---

    @property
    def records(self) -> Run:
        """The content of the run directory, as `fivetune.read_run` returns it."""
        if self._records is None:
            self._records = rundir.read_run(self.folder)
        return self._records

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.records.name

    @property
    def config(self) -> JsonTable:
        """config.yaml: the settings that the run was trained with, nested."""
        return self.records.config

    @property
    def machine(self) -> MachineRecord:
        """machine.json: the device, the versions, the parts of the run."""
        return self.records.machine

    @property
    def status(self) -> RunStatus:
        """status.json: progress and end of the run, and its best evaluation."""
        return self.records.status

    @property
    def plan(self) -> Plan | None:
        """plan.json: the numbers that the run decided at its start; None if it ended before."""
        return self.records.plan

    @property
    def data(self) -> DataSummary:
        """data.json: counts, lengths and losses of the training and evaluation data."""
        return self.records.data

    @property
    def steps(self) -> list[StepRecord]:
        """steps.jsonl: a record for each optimizer step."""
        return self.records.steps

    @property
    def num_steps(self) -> int | None:
        """Planned steps of the whole run; None if it ended before its plan was written."""
        return self.records.num_steps

    @property
    def evals(self) -> list[EvalRecord]:
        """evals.jsonl: a record for each evaluation."""
        return self.records.evals

    @property
    def telemetry(self) -> list[TelemetryRecord]:
        """telemetry.jsonl: samples of the devices and the host, in the order of time."""
        return self.records.telemetry

    @property
    def predictions(self) -> Mapping[str, list[Prediction]]:
        """The predictions of each evaluation by the name of its file, such as eval-300; read when asked for."""
        return self.records.predictions

    def read_predictions(self, record: EvalRecord | None) -> list[Prediction]:
        """Return the predictions of an evaluation; [] without it or its file."""
        return self.records.read_predictions(record)

    @property
    def trace(self) -> JsonTable:
        """trace/summary.json, which `fivetune profile` writes; {} without a trace."""
        return self.records.trace

    @property
    def range_test(self) -> JsonTable:
        """The result of `fivetune find-lr` in the folder next to the run; {} without one."""
        return self.records.range_test

    @property
    def temperature(self) -> float:
        """The temperature of the model's confidences; 1 if they are its own."""
        return self.records.temperature

    @property
    def has_model(self) -> bool:
        """Whether model/ is there."""
        return self.records.has_model

    @property
    def damage(self) -> list[str]:
        """A sentence for each damaged file, and for what is left out of it."""
        return self.records.damage

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run, and its damage."""
        return self.records.warnings

    @property
    def step(self) -> int:
        """The optimizer step of the weights in model/, or of the checkpoint that answers; `status.step` is the last."""
        if self._loaded and self._loaded.checkpoint:
            return int(self._loaded.checkpoint.name)
        return find_exported_step(self.folder, rundir.read_status(self.folder, rundir.Damage()))

    @property
    def is_export(self) -> bool:
        """Whether the folder is an export, which `fivetune export` wrote."""
        return (self.folder / EXPORT).is_file()

    @property
    def scores(self) -> dict[str, Score]:
        """The scores of the weights in model/ on the run's evaluation data, by name; {} if it has not evaluated them.

        >>> fivetune.open_run("runs/tickets").scores["accuracy"]
        100.00 (91.24-100.00)
        """
        record = find_exported_eval(self.records)
        if record is None:
            return {}
        return {name: Score(value, record.intervals.get(name)) for name, value in record.scores.items()}

    # --- how it is shown ---

    def __repr__(self) -> str:
        shown = [repr(str(self.folder)), str(get_nested(self.config, "task", "name")), self._describe_state()]
        if best := self.status.best:
            score = self.scores.get(best.metric, Score(best.score))
            shown.append(f"{best.metric} {score!r}")
        return f"TrainedRun({', '.join(shown)})"

    def _describe_state(self) -> str:
        state = "" if self.status.state == "finished" else f"{self.status.state or 'unknown'}, "
        return f"{state}step {self.status.step:,} of {self.num_steps or self.status.step:,}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows of a run: a table of its scores."""
        facts = [str(get_nested(self.config, "task", "name")), self._describe_state()]
        if self.status.seconds:
            facts.append(format_time_span(self.status.seconds))
        head = f"<b>{escape(str(self.folder))}</b> &nbsp; {escape(', '.join(facts))}"
        # The main scores have intervals; where none has one, all are shown.
        scores = self.scores
        with_interval = {name: score for name, score in scores.items() if score.low is not None}
        rows: list[str] = []
        for name, score in (with_interval or scores).items():
            interval = "" if score.low is None else f"{score.low:.2f} to {score.high:.2f}"
            rows.append(f"<tr><td>{escape(name)}</td><td>{float(score):.2f}</td><td>{interval}</td></tr>")
        if not rows:
            return f"<div>{head}</div>"
        titles = "<tr><th>score</th><th>value</th><th>95 % interval</th></tr>"
        return f"<div>{head}<table>{titles}{''.join(rows)}</table></div>"

    def report(self) -> HtmlPage:
        """Write report.html of the run directory; a notebook shows it in the cell, in a frame of its own.

        Returns the page; `str(page)` is its path. Raises RunDirError if it cannot be written.

        >>> print(fivetune.open_run("runs/tickets").report())
        runs/tickets/report.html
        """
        return HtmlPage(fivetune.write_report(self.folder))

    # --- what its model answers ---

    @property
    def loaded(self) -> RunModel:
        """The model, loaded to answer; of a run that is not finished its newest whole checkpoint, with a warning.

        Raises RunDirError for a run without either, or with a damaged model.
        """
        if self._loaded is None:
            self._loaded = load_run_model(self.folder, self.overrides, uses_checkpoint=True)
        return self._loaded

    def list_parts(self) -> dict[str, TrainedRun]:
        """List the run by the name of its task; of a mixture a run for each part, with the same model."""
        config = self.loaded.config
        if not isinstance(config.task, Mixture):
            return {config.task.plugin_name(): self}
        # One model for all parts: they differ by task and data only.
        parts: dict[str, TrainedRun] = {}
        for part in build_part_configs(config).values():
            loaded = replace(self.loaded, config=part)
            parts[part.task.plugin_name()] = TrainedRun(self.folder, self.overrides, loaded=loaded)
        return parts

    def predict(
        self,
        inputs: Inputs,
        *,
        batch_size: int | Literal["auto"] = "auto",
        max_error: str | float | None = None,
        min_confidence: str | float | None = None,
        on_progress: ProgressCallback | None = None,
        on_note: OnNote = ignore_note,
    ) -> Predictions:
        """Answer records or texts with the run's model, which is loaded at the first call.

        Args:
            inputs: a list of records with the columns of the run's data (answers are not needed), a DataFrame of pandas
                or polars, a datasets.Dataset, or a list of texts. A text is the value of the only column that the task
                reads, which puts it into its template; for a task of several columns it is the whole input, exactly as
                the model reads it.
            batch_size: examples per generation batch. auto: what the free memory of the device holds, at most 256 on a
                GPU and 64 elsewhere; it is halved where memory runs out.
            max_error: promised share of wrong answers, "5%" or 0.05: an answer whose confidence is too low for it has
                `unsure`, `reason` and `withheld` instead of a prediction. Default: the promise that `evaluate` has kept
                in the model folder, if any.
            min_confidence: the least confidence of an answer instead, 0.9 or "90%"; 0 withholds nothing.
            on_progress: called with what is done, the number of answers so far and of all; default: a notebook shows
                the progress.
            on_note: called with a sentence when the number of CPU threads changes.

        Returns a list of one Prediction each, in order, with `to_pandas` and `to_polars`; a record that cannot be used
        has the reason in `skipped`, whatever data.on_bad_record is.

        Raises ConfigError for another `batch_size` and for a promise that the evaluation does not support, DataError
        for inputs that are neither records nor texts, and for records that all lack a column, RunDirError for a run
        without a model, FiveTuneEnvironmentError if memory runs out at one example.

        >>> run = fivetune.open_run("runs/tickets")
        >>> answer, = run.predict([{"text": "my parcel is late"}], batch_size=8)
        >>> answer.prediction, answer.confidence > 0.5
        ('delivery', True)
        """
        is_size = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1
        if batch_size != "auto" and not is_size:
            raise ConfigError(f"batch_size: {batch_size!r} is no size. Allowed are whole numbers from 1 and 'auto'.")
        config = self.loaded.config
        require_single_part(config)
        requests = [name_texts(list_inputs(inputs), config.task, config.data.columns)]
        size = self._auto_batch_size if batch_size == "auto" else batch_size
        silence = self.find_silence(max_error=max_error, min_confidence=min_confidence)
        with _show_progress(on_progress) as report:
            (found,) = self.predict_each(
                requests, batch_size=size, on_progress=report, on_note=on_note, refuses_incomplete=True
            )
        answers = Predictions(withhold(one, silence) for one in found)
        answers.row_index = None if isinstance(inputs, Sequence) else getattr(inputs, "index", None)
        return answers

    def find_silence(
        self, *, max_error: str | float | None = None, min_confidence: str | float | None = None
    ) -> Silence | None:
        """Find the confidence below which answers are withheld, as `predict` does; None if none is.

        >>> fivetune.open_run("runs/tickets").find_silence(min_confidence=0.8)
        Silence(min_confidence=0.8, promise='')
        """
        model = rundir.find_model_folder(self.folder)
        return choose_silence(
            str(self.folder),
            read_abstention(model),
            read_temperature(model),
            _name_settings(self.overrides),
            max_error=max_error,
            min_confidence=min_confidence,
        )

    def predict_each(
        self,
        requests: Sequence[Sequence[Mapping[str, object] | str]],
        *,
        batch_size: AutoBatchSize | int | None = None,
        max_input_tokens: int | None = None,
        decoding: Decoding | None = None,
        on_written: OnWritten | None = None,
        on_progress: ProgressCallback = ignore_progress,
        on_note: OnNote = ignore_note,
        refuses_incomplete: bool = False,
    ) -> list[list[Prediction]]:
        """Answer several lists of records or texts in common batches; each gets what `predict` returns for it, with
        no answer withheld.

        Args:
            requests: unlike for `predict`, a text is always the whole input, exactly as the model reads it.
            batch_size: examples per generation batch; default: eval.batch_size of the run.
            max_input_tokens: most tokens of an input before clipping; one with more has a reason in `skipped`.
            decoding: options of the search; default: the run's options.
            on_written: called for each token of an answer, where the search reports them.
            refuses_incomplete: raise DataError for a list whose records all lack a column.
        """
        loaded = self.loaded
        config = loaded.config
        require_single_part(config)
        report = watch_threads(loaded.threads, on_progress, on_note)
        with translate_oom_errors():
            read = read_requests(
                requests,
                loaded.tokenizer,
                task=config.task,
                columns=config.data.columns,
                describe=partial(describe_questions, config),
                refuses_incomplete=refuses_incomplete,
            )
            return answer_requests(
                read,
                loaded.model,
                build_evaluator=partial(loaded.make_predictor, decoding=decoding),
                batch_size=batch_size,
                max_input_tokens=max_input_tokens,
                on_progress=partial(report, "answering"),
                on_written=on_written,
            )

    def predict_file(
        self,
        source: str | Path,
        *,
        folder: Path | None = None,
        max_error: str | float | None = None,
        min_confidence: str | float | None = None,
        on_progress: ProgressCallback | None = None,
        on_note: OnNote = warn,
        world: World = SINGLE_PROCESS,
        shard: Shard = WHOLE,
        shard_folders: Sequence[Path] = (),
    ) -> PredictedFile:
        """Answer every record of a data file; iterating the result yields rows in order, read from the disk.

        Args:
            source: a file in any format of data.eval; gold answers are not needed.
            folder: holds the answers while they are computed and after that; a call that was killed goes on from
                there if weights, settings and data are the same. Default: a temporary one.
            max_error, min_confidence: as for `predict`.
            on_progress: as for `predict`.
            on_note: called with a sentence about answers that an earlier call has left in the folder, and when the
                number of CPU threads changes.
            world: the ranks that share the questions; each needs the same folder.
            shard, shard_folders: the records of this job, and the folders of all jobs that share the file.

        A record that cannot be used has the reason in `prediction.skipped`, also where none can be used. Raises
        DataError for an unreadable file.

        >>> rows = fivetune.open_run("runs/tickets").predict_file("tickets.csv")
        >>> len([row.prediction for row in rows])
        40
        """
        from fivetune.training.answers.answer_file import answer_file  # needs torch

        loaded = self.loaded
        require_single_part(loaded.config)
        silence = self.find_silence(max_error=max_error, min_confidence=min_confidence)
        place = folder or Path(tempfile.mkdtemp(prefix="fivetune-predict-"))
        try:
            with _show_progress(on_progress) as report:
                report = watch_threads(loaded.threads, report, on_note)
                found = answer_file(
                    self.folder,
                    loaded,
                    str(source),
                    place,
                    on_progress=report,
                    on_note=on_note,
                    world=world,
                    shard=shard,
                    shard_folders=shard_folders,
                )
        except BaseException:
            # A folder of the caller stays: the next call goes on with its answers.
            if folder is None:
                shutil.rmtree(place, ignore_errors=True)
            raise
        return replace(found, temporary=folder is None, silence=silence)

    def evaluate(
        self,
        data: object = None,
        *,
        split: str | None = None,
        max_error: str | float | None = None,
        error_below: float | None = None,
        on_progress: ProgressCallback | None = None,
        on_damage: OnNote = warn,
        on_note: OnNote = ignore_note,
    ) -> EvalRecord:
        """Score the run on other data, or again on its own, and record that in the run directory.

        Args:
            data: a file, a folder, a hub name, a pandas DataFrame, a datasets.Dataset or a list of records; None: the
                run's own evaluation data.
            split: name of the predictions file; default: the data file's name.
            max_error: share of wrong answers, "5%" or 0.05, that is promised from now on: the confidence that keeps it
                is chosen on this evaluation and kept in the model folder; `predict` and `serve` withhold answers below.
            error_below: score (0-100) below which an answer is wrong, for a main score that is graded, such as F1.
            on_progress: as for `predict`.
            on_damage: called with a sentence for each damaged file that the evaluation does not need.
            on_note: called with a sentence when the number of CPU threads changes.

        Returns the EvalRecord with `scores` and `intervals`, which `evals` has too. Raises DataError for bad data,
        ConfigError for a promise on examples that the run has learnt, PromiseError, which has the record, if no
        confidence keeps the promise.

        >>> run = fivetune.open_run("runs/tickets")
        >>> run.evaluate([{"text": "give me my money back", "label": "refund"}], split="one").scores["accuracy"]
        100.0
        """
        from fivetune.training.answers.scoring import record_evaluation  # needs torch

        if max_error is not None:
            refuse_promise(self.folder, max_error, error_below)
        if not self.is_export:
            # A checkpoint answers, but its scores are the training's.
            refuse_missing_model(self.folder, rundir.read_status(self.folder, rundir.Damage()))
        # The model first: a table is written next to the run only when the folder has proved usable.
        loaded = self.loaded
        given = self.overrides if data is None else {**self.overrides, "data.eval": data}
        changes, files = write_tables(given, self.folder)
        with name_tables(files), _show_progress(on_progress) as report:
            config = resolve_config(self.folder, changes)
            learnt = None
            if max_error is not None:
                require_single_part(config)
                part = {name: value for name, value in self.overrides.items() if find_setting(name) == "task.part"}
                learnt = resolve_config(self.folder, part)
            record = record_evaluation(
                self.folder,
                replace(loaded, config=config),
                step=self.step,
                split=split,
                has_own_settings=not changes,
                learnt=learnt,
                on_progress=report,
                on_damage=on_damage,
                on_note=on_note,
            )
        if self._records is not None:  # who reads them later finds the evaluation in the file
            self._records.evals.append(record)
        if max_error is not None:
            try:
                keep_promise(
                    self.folder,
                    record,
                    metric=config.eval.metric or config.task.main_metric,
                    max_error=max_error,
                    error_below=error_below,
                    overrides=_name_settings(self.overrides),
                )
            except ConfigError as error:
                message = f"{str(error).removesuffix('.')}.{describe_kept_promise(self.folder)}"
                raise PromiseError(message, record=record) from None
        return record


def _name_settings(overrides: Mapping[str, object]) -> dict[str, object]:
    """Return overrides by the full names of the settings."""
    return {find_setting(name): value for name, value in overrides.items()}


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
    folder = check_folder(folder)
    records = rundir.read_run(folder)
    if overrides:
        resolve_config(folder, overrides)  # names a setting without effect now, not at the first answer
    return TrainedRun(folder, overrides, records=records)


def predict(folder: str | Path, inputs: Inputs, overrides: Mapping[str, object] | None = None) -> Predictions:
    """Answer once with a run: `open_run(folder, overrides).predict(inputs)`. For more calls, keep the open run.

    Args, returns and errors: as for `open_run` and `TrainedRun.predict`.

    >>> fivetune.predict("runs/tickets", ["the courier never came"])[0].prediction
    'delivery'
    """
    return open_run(folder, overrides).predict(inputs)


def evaluate(
    folder: str | Path,
    overrides: Mapping[str, object] | None = None,
    *,
    split: str | None = None,
    max_error: str | float | None = None,
    error_below: float | None = None,
    on_progress: ProgressCallback = ignore_progress,
    on_damage: OnNote = warn,
    on_note: OnNote = ignore_note,
) -> EvalRecord:
    """Evaluate a run on its own data, or on {"data.eval": FILE}, and record it in the run directory.

    Args:
        folder: the run directory.
        overrides: settings that differ from the run's; data.eval may be a table, as for `TrainedRun.evaluate`.
        split: name of the predictions file; default: the data file's name.
        max_error, error_below: as for `TrainedRun.evaluate`.
        on_progress: called with what is done, and the number of questions so far and of all.
        on_damage: called with a sentence for each damaged file that the evaluation does not need.
        on_note: called with the reasons of the precision and of the number of CPU threads, and when the latter changes.

    Returns the EvalRecord. Raises DataError for bad data, RunDirError for a run without a model.

    >>> record = fivetune.evaluate("runs/tickets", {"data.eval": "tickets.csv"})
    >>> record.split, record.num_examples, record.scores["accuracy"]
    ('tickets', 40, 100.0)
    """
    given = dict(overrides or {})
    if max_error is not None:
        refuse_promise(check_folder(folder), max_error, error_below)
    # A table becomes a file when the folder has proved usable: the model is loaded without it.
    plain = {name: value for name, value in given.items() if not is_table(value)}
    loaded = load_run_model(folder, plain, on_damage=on_damage, on_note=on_note)
    run = TrainedRun(Path(folder), given, loaded=loaded)
    return run.evaluate(
        split=split,
        max_error=max_error,
        error_below=error_below,
        on_progress=on_progress,
        on_damage=on_damage,
        on_note=on_note,
    )
