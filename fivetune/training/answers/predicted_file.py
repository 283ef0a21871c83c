"""The records of a file with their predictions, read one at a time from the file and from the answers in a folder."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fivetune.data.guard import SourceGuard
from fivetune.data.shard import WHOLE, Shard
from fivetune.errors import DataError
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.abstention import Silence, withhold
from fivetune.training.answers.answer_log import AnswerLog
from fivetune.training.answers.inputs import InputRow, iter_input_rows
from fivetune.types import Task

ANSWERED = "answered"  # what was done with a source, if it changes before its predictions are written
ROWS_AT_ONCE = 1_000  # are read before the file is looked at again


class PredictedRow(NamedTuple):
    """A record of the input and its prediction; `prediction.skipped` is the reason if there is none."""

    row: InputRow
    prediction: Prediction


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class PredictedFile:
    """Yields a PredictedRow for every record of a source, in its order, as often as it is iterated.

    The records are read again, and joined to the answers by their ids: iterating raises DataError, before it yields a
    record of other content, if the source is no longer what was answered.

    Args:
        folders: hold the answers (`AnswerLog`): one, or one for each shard of a file that was answered in shards.
        guard: guard of the source, made when it was answered.
        temporary: delete the folders with this object.
        silence: which answers are withheld; None: none.
        shard: the records that are yielded.
    """

    source: str
    task: Task
    columns: Mapping[str, str]
    folders: tuple[Path, ...]
    guard: SourceGuard
    temporary: bool = False
    header: tuple[str, ...] = ()
    silence: Silence | None = None
    shard: Shard = WHOLE

    def __repr__(self) -> str:
        return (
            f"PredictedFile({self.source!r}, task {self.task.plugin_name()}): iterate over its (row, prediction) pairs"
        )

    def __post_init__(self) -> None:
        # Who has the predictions may read them long after the call that made them.
        if self.temporary:
            for folder in self.folders:
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def iter_records(self) -> Iterator[InputRow]:
        """Yield every record without its prediction; the answers are not read."""
        rows = iter_input_rows(
            self.source,
            self.task,
            self.columns,
            self.header,
            shard=self.shard,
            num_answered_apart=len(self.folders),
        )
        while True:
            with self.guard.explain_errors(ANSWERED):
                block = list(islice(rows, ROWS_AT_ONCE))
            # Before they are yielded: rows of another content would get answers to other questions.
            self.guard.refuse_change(ANSWERED, whole=not block)
            if not block:
                return
            yield from block

    def __iter__(self) -> Iterator[PredictedRow]:
        with ExitStack() as stack:
            answers = [stack.enter_context(AnswerLog(folder)) for folder in self.folders]
            for number, row in enumerate(self.iter_records()):
                if row.skipped:
                    yield PredictedRow(row, Prediction(id=row.id, skipped=row.skipped))
                else:
                    found = withhold(answers[number % len(answers)].find(row.key), self.silence)
                    yield PredictedRow(row, replace(found, id=row.id))


@dataclass(frozen=True, slots=True)
class MergedParts:
    """The rows of a mixture's parts: for each record the part with a prediction, else the first part's reason."""

    parts: tuple[Iterable[PredictedRow], ...]

    def iter_records(self) -> Iterator[InputRow]:
        """Yield every record without its prediction."""
        for rows in zip(*map(iter_records, self.parts), strict=True):
            yield next((one for one in rows if not one.skipped), rows[0])

    def __iter__(self) -> Iterator[PredictedRow]:
        for rows in zip(*self.parts, strict=True):
            yield next((one for one in rows if not one.prediction.skipped), rows[0])


def iter_records(rows: Iterable[PredictedRow]) -> Iterator[InputRow]:
    """Yield the records of predicted rows, of a file without parsing its answers."""
    if isinstance(rows, (PredictedFile, MergedParts)):
        return rows.iter_records()
    return (one.row for one in rows)


@dataclass(slots=True)
class PredictionCounts:
    """How many records have a prediction, the first that has none, and the columns of the input.

    Args:
        num_foreign: valid records that are not for the task.
        first_faulty: the first skipped record that is not foreign.
        num_unsure: answers that are withheld; None where none can be.
        num_answers: most answers to a record that a table has.
    """

    num_records: int = 0
    num_skipped: int = 0
    num_foreign: int = 0
    first: InputRow | None = None
    first_faulty: InputRow | None = None
    num_unsure: int | None = None
    num_answers: int = 1
    columns: dict[str, None] = field(default_factory=dict[str, None])

    @classmethod
    def count(cls, rows: Iterable[PredictedRow], *, counts_unsure: bool = False) -> PredictionCounts:
        """Count the records of a source and collect their columns, in order of first appearance.

        Args:
            counts_unsure: whether answers may be withheld, so that each is read.
        """
        found = cls()
        # Columns of all records, not of the first: JSON lines may differ.
        for row in iter_records(rows):
            found.num_records += 1
            found.first = found.first or row
            found.columns.update(dict.fromkeys(row.fields))
            if row.skipped:
                found.num_skipped += 1
                found.num_foreign += row.is_foreign
                if not row.is_foreign:
                    found.first_faulty = found.first_faulty or row
        if counts_unsure:
            found.num_unsure = sum(bool(one.prediction.unsure) for one in rows)
        return found

    @property
    def num_answered(self) -> int:
        """Records with an answer, the withheld ones among them."""
        return self.num_records - self.num_skipped

    def refuse_none_answered(self) -> None:
        """Raise DataError if no record is answered: then the columns do not fit, and there is nothing to write."""
        if self.num_answered or self.first is None:
            return
        row = self.first
        found = f"{row.where}: {row.skipped.rstrip('.')}."
        if self.num_records > 1:
            found = (
                f"{row.where.rpartition(':')[0] or 'predict'}: none of {self.num_records:,} records can be answered. "
                f"The first: {found} Check task.name and data.columns."
            )
        raise DataError(found)

    def describe(self) -> str:
        """Describe how many records have a prediction, and why the others have none.

        >>> PredictionCounts.count([PredictedRow(InputRow("a:1"), Prediction(id="1", prediction="yes"))]).describe()
        '1 record: 1 answered'
        """
        parts = [f"{self.num_answered - (self.num_unsure or 0):,} answered"]
        if self.num_unsure is not None:
            parts.append(f"{self.num_unsure:,} unsure")
        if self.num_foreign:
            parts.append(f"{self.num_foreign:,} of other types")
        if row := self.first_faulty:
            parts.append(f"{self.num_skipped - self.num_foreign:,} skipped (first: {row.where}: {row.skipped})")
        return f"{self.num_records:,} record{'s' if self.num_records != 1 else ''}: {', '.join(parts)}"
