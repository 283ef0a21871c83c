"""Output formats of predictions: JSON lines, a table joined to the input's columns, and submission formats.

In: the records of an input with their predictions, in the input's order, which are iterated as often as a format needs.
Out: an open file. A record without a prediction has a line with null, or a row with empty cells.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol

from fivetune.data.readers.delimited import NUMBER, TableForm
from fivetune.data.readers.records import is_hub_name
from fivetune.data.readers.source_files import list_local_files
from fivetune.data.readers.workbooks import import_openpyxl
from fivetune.errors import ConfigError, DataError
from fivetune.redaction import INVISIBLE
from fivetune.rundir.records import Prediction
from fivetune.scores.metrics.bioasq import NUM_RANKS
from fivetune.training.answers.inputs import InputRow
from fivetune.training.answers.predicted_file import PredictedRow, PredictionCounts

PREDICTED = (
    "id",
    "prediction",
    "confidence",
    "logprob",
    "no_answer_score",
    "candidates",
    "hit_cap",
    "skipped",
    "unsure",
    "reason",
    "withheld",
)
BIOASQ_TYPES = {"bioasq_factoid": "factoid", "bioasq_yesno": "yesno"}
ID_NAMES = ("id", "Id", "ID")
TARGET_NAMES = ("label", "answer", "answers", "target", "targets")
AS_JSON = (bool, int, float, list, dict)
EXACT_INTEGERS = 2**53  # that a double holds
ROWS_PER_GROUP = 1024  # of a Parquet file that is written
MAX_ROWS, MAX_CHARS = 2**20, 32_767  # of a sheet of Excel, and of a cell
FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")  # https://owasp.org/www-community/attacks/CSV_Injection


class TextFile(Protocol):
    """What takes the text of an output."""

    def write(self, text: str, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions of a source, as a format writes them.

    Args:
        rows: rows of all records in order; iterated once or more.
        counts: counts of these rows.
        parts: rows by the name of the task; for a mixture, an entry per part.
        columns: data.columns of the run.
        form: how a table of text is written.
    """

    rows: Iterable[PredictedRow]
    counts: PredictionCounts
    parts: Mapping[str, Iterable[PredictedRow]]
    columns: Mapping[str, str]
    form: TableForm = field(default_factory=TableForm)


def build_line(prediction: Prediction) -> dict[str, object]:
    """Build the output line of a prediction; `prediction` is null if the record was skipped or the answer withheld."""
    line = {key: value for key, value in prediction.as_dict().items() if key in PREDICTED}
    if prediction.skipped or prediction.unsure:
        line["prediction"] = None
    return line


def write_lines(file: TextFile, predicted: Predicted) -> None:
    """Write predictions as JSON lines."""
    for one in predicted.rows:
        file.write(json.dumps(build_line(one.prediction), ensure_ascii=False) + "\n")


def write_array(file: TextFile, predicted: Predicted) -> None:
    """Write predictions as one JSON array, an element per line."""
    file.write("[")
    # Written element by element: the predictions of a large file do not fit into memory.
    for number, one in enumerate(predicted.rows):
        file.write((",\n" if number else "\n") + json.dumps(build_line(one.prediction), ensure_ascii=False))
    file.write("\n]\n")


def write_table(file: TextFile, predicted: Predicted) -> None:
    """Write a table of the input's columns, prediction and confidence, one row per record of the input.

    If a record was skipped, the column `skipped` has the reasons. Where answers can be withheld, `unsure` is true for
    those that are, and `withheld` has them. Further answers to a record are in prediction_2, prediction_3 and so on.

    >>> import sys
    >>> from fivetune.training.answers.inputs import InputRow
    >>> row = InputRow("a.csv:2", "a-1", {"ticket": "17", "text": "no screen, help"})
    >>> rows = [PredictedRow(row, Prediction(id="a-1", prediction="hardware", confidence=0.5))]
    >>> write_table(sys.stdout, Predicted(rows, PredictionCounts.count(rows), {}, {}))
    ticket,text,prediction,confidence
    17,"no screen, help",hardware,0.5
    """
    form = predicted.form
    if form.has_mark:
        file.write("\ufeff")
    table = csv.writer(file, delimiter=form.separator, lineterminator=form.line_end)
    names = _list_table_columns(predicted.counts)
    for row in chain([names], _iter_table_rows(predicted, names)):
        cells = [_format_cell(value) for value in row]
        if form.is_safe:
            cells = [_make_harmless(cell) for cell in cells]
        table.writerow(cells)


def _make_harmless(cell: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would read as a formula; numbers stay as they are.

    >>> _make_harmless("=HYPERLINK(A1)"), _make_harmless("-3.5"), _make_harmless("- no")
    ("'=HYPERLINK(A1)", '-3.5', "'- no")
    """
    return f"'{cell}" if cell.startswith(FORMULA_STARTS) and not NUMBER.fullmatch(cell) else cell


def _list_table_columns(counts: PredictionCounts) -> list[str]:
    added = ["prediction", "confidence"]
    if counts.num_unsure is not None:
        added += ["unsure", "withheld"]
    if counts.num_skipped:
        added.append("skipped")
    added += [f"prediction_{number}" for number in range(2, counts.num_answers + 1)]
    return [*counts.columns, *(_choose_free_name(name, counts.columns) for name in added)]


def _iter_table_rows(predicted: Predicted, names: Sequence[str]) -> Iterator[list[object]]:
    """Yield the values of each record in the order of the columns; None where there is none."""
    for row, one in predicted.rows:
        values = [row.fields.get(name) for name in predicted.counts.columns]
        has_none = one.skipped or one.unsure
        values += [None if has_none else one.prediction, one.confidence]
        if predicted.counts.num_unsure is not None:
            values += [one.unsure, one.withheld]
        if predicted.counts.num_skipped:
            values.append(one.skipped)
        further = [] if has_none else [candidate.text for candidate in one.candidates[1 : predicted.counts.num_answers]]
        values += further
        yield values + [None] * (len(names) - len(values))


def _choose_free_name(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name = f"{name}_2"
    return name


def _format_cell(value: object) -> str:
    """Format a value of the input as text: JSON for numbers, lists and objects, else as Python does (a date).

    >>> import datetime
    >>> _format_cell(None), _format_cell(1.5), _format_cell(datetime.date(2026, 1, 2)), _format_cell([True])
    ('', '1.5', '2026-01-02', '[true]')
    """
    if value is None:
        return ""
    if isinstance(value, AS_JSON):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def write_parquet(file: IO[bytes], predicted: Predicted) -> None:
    """Write the table of `write_table` as Parquet; a column whose values have no common type is text."""
    pyarrow = import_module("pyarrow")
    parquet = import_module("pyarrow.parquet")
    names = _list_table_columns(predicted.counts)
    # Two passes over the rows: types are needed before the first row is written, and the rows may not fit into memory.
    kinds = _infer_types(predicted, names)
    schema = pyarrow.schema([(name, kind or pyarrow.string()) for name, kind in zip(names, kinds, strict=True)])
    with parquet.ParquetWriter(file, schema) as writer:
        for columns in _iter_column_groups(predicted, names):
            arrays: list[Any] = []
            for values, kind in zip(columns, kinds, strict=True):
                if kind is None:
                    values = [None if value is None else _format_cell(value) for value in values]
                arrays.append(pyarrow.array(values, type=kind or pyarrow.string()))
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def write_workbook(file: IO[bytes], predicted: Predicted) -> None:
    """Write the table of `write_table` as an Excel workbook. A text stays text, also where it begins with = or is a
    number; numbers, dates and true or false keep their types.

    Raises DataError for more rows or a longer text than a sheet holds, FiveTuneEnvironmentError without openpyxl.
    """
    if predicted.counts.num_records >= MAX_ROWS:
        raise DataError(
            f"--output: {predicted.counts.num_records:,} records. Allowed in a sheet: {MAX_ROWS - 1:,}. Write .csv."
        )
    book = import_openpyxl("--output").Workbook(write_only=True)
    cell_module = import_module("openpyxl.cell.cell")
    sheet = book.create_sheet("predictions")
    names = _list_table_columns(predicted.counts)
    try:
        for row in chain([names], _iter_table_rows(predicted, names)):
            cells: list[object] = []
            for value in row:
                if not _has_cell_type(value):
                    text = cell_module.ILLEGAL_CHARACTERS_RE.sub("\ufffd", _format_cell(value))
                    if len(text) > MAX_CHARS:
                        raise DataError(
                            f"--output: a text has {len(text):,} characters: {text[:30]!r}... Allowed in a cell: "
                            f"{MAX_CHARS:,}. Write .csv."
                        )
                    value = cell_module.WriteOnlyCell(sheet, text)
                    value.data_type = "s"  # else a text that begins with = is a formula
                cells.append(value)
            sheet.append(cells)
    finally:
        sheet.close()  # it has a temporary file
    book.save(file)


def _has_cell_type(value: object) -> bool:
    """Return whether a sheet has a type for a value, which shows all of it: no text, as its cells are made apart.

    >>> [_has_cell_type(value) for value in (True, 2.5, date(2026, 1, 2), "a", 2**60, float("inf"), date(1066, 1, 2))]
    [True, True, True, False, False, False, False]
    """
    if isinstance(value, int | float):
        return abs(value) <= EXACT_INTEGERS
    if isinstance(value, date | time):
        return getattr(value, "year", 1900) >= 1900 and getattr(value, "tzinfo", None) is None
    return value is None


def write_answers(file: TextFile, predicted: Predicted) -> None:
    """Write a line per record: its prediction with spaces for line ends, blank for a skipped record."""
    for _, one in predicted.rows:
        file.write(" ".join(one.prediction.splitlines()) + "\n")


def _iter_column_groups(predicted: Predicted, names: Sequence[str]) -> Iterator[list[tuple[object, ...]]]:
    """Yield the values of each column, ROWS_PER_GROUP records at a time."""
    rows = _iter_table_rows(predicted, names)
    while group := list(islice(rows, ROWS_PER_GROUP)):
        yield list(zip(*group, strict=True))


def _infer_types(predicted: Predicted, names: Sequence[str]) -> list[Any]:
    """Infer the type of each column over all rows; None for one that is written as text.

    Whole numbers and others are doubles together, if these hold them exactly; other types do not mix.
    """
    pyarrow = import_module("pyarrow")
    mixed = {pyarrow.int64(), pyarrow.float64()}
    found: list[set[Any]] = [set() for _ in names]
    largest = [0] * len(names)
    for columns in _iter_column_groups(predicted, names):
        for place, values in enumerate(columns):
            try:
                kind = pyarrow.array(values).type
            except (pyarrow.ArrowException, OverflowError):  # values without a common type
                kind = None
            if kind == pyarrow.int64():
                sizes = [abs(value) for value in values if isinstance(value, int)]
                largest[place] = max([largest[place], *sizes])
            if "struct<>" in str(kind):  # Parquet has no objects without fields
                kind = None
            if kind is None or not pyarrow.types.is_null(kind):
                found[place].add(kind)
    chosen: list[Any] = []
    for kinds, most in zip(found, largest, strict=True):
        # A larger whole number would change its last digits.
        if kinds == mixed and most <= EXACT_INTEGERS:
            kinds = {pyarrow.float64()}
        chosen.append(kinds.pop() if len(kinds) == 1 else None)
    return chosen


def write_squad(file: TextFile, predicted: Predicted) -> None:
    """Write SQuAD's prediction file, {id: answer}; "" for no answer."""
    answered = (one for _, one in predicted.rows if not one.skipped)
    file.write("{")
    for number, one in enumerate(answered):
        file.write((",\n" if number else "\n") + f"{json.dumps(one.id)}: {json.dumps(one.prediction)}")
    file.write("\n}\n")


def write_kaggle(file: TextFile, predicted: Predicted) -> None:
    """Write a submission of two columns, id and answer, named as in the run's data; empty for a skipped record."""
    # The names that the run's data have: for the id also as the input spells it.
    spelt = next((name for name in ID_NAMES if name in predicted.counts.columns), "id")
    of_id = predicted.columns.get("id") or spelt
    target = next((predicted.columns[name] for name in TARGET_NAMES if name in predicted.columns), "prediction")
    table = csv.writer(file, lineterminator="\n")
    table.writerow([of_id, target])
    for _, one in predicted.rows:
        table.writerow([one.id, one.prediction])


def write_bioasq(file: TextFile, predicted: Predicted) -> None:
    """Write BioASQ's submission: {"questions": [{"id", "type", "exact_answer"}]}.

    A factoid answer is a list of at most five lists of one synonym; a yes/no answer is a text.
    """
    questions: dict[str, dict[str, object]] = {}
    for task, rows in predicted.parts.items():
        for _, prediction in rows:
            if prediction.skipped:  # such as a question of the other part's type
                continue
            texts = [candidate.text for candidate in prediction.candidates] or [prediction.prediction]
            ranked = [[text] for text in texts[:NUM_RANKS] if text]
            answer = ranked if BIOASQ_TYPES[task] == "factoid" else prediction.prediction
            questions[prediction.id] = {"id": prediction.id, "type": BIOASQ_TYPES[task], "exact_answer": answer}
    json.dump({"questions": list(questions.values())}, file, ensure_ascii=False, indent=1)
    file.write("\n")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A format of predictions: the suffixes of its files, the first of which chooses it, and what writes it."""

    suffixes: tuple[str, ...]
    write: Callable[[Any, Predicted], None]
    is_text: bool = True
    is_chosen_by_suffix: bool = True


FORMATS = {
    "csv": OutputFormat((".csv",), write_table),
    "tsv": OutputFormat((".tsv",), write_table),
    "txt": OutputFormat((".txt",), write_answers),
    "xlsx": OutputFormat((".xlsx",), write_workbook, is_text=False),
    "json": OutputFormat((".json",), write_array),
    "jsonl": OutputFormat((".jsonl", ".ndjson"), write_lines),
    "parquet": OutputFormat((".parquet",), write_parquet, is_text=False),
    "bioasq": OutputFormat((".json",), write_bioasq, is_chosen_by_suffix=False),
    "squad": OutputFormat((".json",), write_squad, is_chosen_by_suffix=False),
    "kaggle": OutputFormat((".csv",), write_kaggle, is_chosen_by_suffix=False),
}
ONE_ANSWER = ("txt", "squad", "kaggle")  # formats with one answer to a record
SUFFIXES = {suffix: name for name, one in FORMATS.items() if one.is_chosen_by_suffix for suffix in one.suffixes}


def refuse_format(name: str | None, tasks: Iterable[str], rows: Iterable[InputRow]) -> None:
    """Raise ConfigError for a run whose tasks a format cannot express, DataError for records that it cannot.

    Args:
        rows: rows of the input, read before any is answered.
    """
    for task in tasks:
        if name == "bioasq" and task not in BIOASQ_TYPES:
            raise ConfigError(
                f"--format bioasq: the run's task is {task}. Allowed: {', '.join(BIOASQ_TYPES)}. Leave --format out."
            )
    if name in ("squad", "bioasq"):
        for row in rows:
            if row.key != row.id:
                raise DataError(f"{row.where}: the id {row.id!r} is used twice; --format {name} has one answer per id.")


def refuse_output(path: Path, source: str | None, format: str | None, *, overwrite: bool) -> None:
    """Raise ConfigError, before any record is answered, for an --output that cannot or should not be written."""
    where = f"--output {path}"
    allowed = FORMATS[format].suffixes if format else tuple(SUFFIXES)
    if path.suffix and path.suffix.lower() not in allowed:
        what = f" with --format {format}" if format else ""
        raise ConfigError(f"{where}: {path.suffix} is not written{what}. Allowed: {', '.join(allowed)}, or no suffix.")
    if os.path.isdir(path):  # unlike Path.is_dir, false for an impossible name
        raise ConfigError(f"{where}: is a folder. Give a file in it.")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"{where}: there is no folder {path.parent}. Create it, or give another file.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{where}: the folder {path.parent} is not writable. Give another file.")
    if path.suffix.lower() == ".xlsx":
        import_openpyxl(where)
    if not os.path.exists(path):
        return
    files = list_local_files(source) if source and not is_hub_name(source) else ()
    if any(file.samefile(path) for file in files):
        raise ConfigError(f"{where}: is the file of --input, which would be overwritten. Give another file.")
    if not overwrite:
        raise ConfigError(f"{where}: exists. Add --overwrite to replace it, or give another file.")


def refuse_form(output: str, format: str | None, delimiter: str | None, *, safe_csv: bool) -> None:
    """Raise ConfigError for a form of a table where none is written."""
    suffix = "" if format else Path(output).suffix.lower()
    if delimiter and suffix != ".csv":
        raise ConfigError("--delimiter: has an effect on .csv alone. Give --output FILE.csv, or leave it out.")
    if safe_csv and suffix not in (".csv", ".tsv"):
        raise ConfigError("--safe-csv: has an effect on .csv and .tsv alone. Give --output FILE.csv, or leave it out.")


def choose_format(path: Path | None) -> str:
    """The name of the format by the suffix of the file; JSON lines without one and on standard output.

    >>> choose_format(Path("a.CSV")), choose_format(Path("a")), choose_format(None)
    ('csv', 'jsonl', 'jsonl')
    """
    return SUFFIXES.get(path.suffix.lower(), "jsonl") if path else "jsonl"


def write_predictions(file: IO[bytes], name: str, predicted: Predicted) -> None:
    """Write predictions in a format to a binary file, which stays open."""
    chosen = FORMATS[name]
    if not chosen.is_text:
        chosen.write(file, predicted)
        return
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        chosen.write(text, predicted)
    finally:
        text.detach()  # else the wrapper closes the caller's file when it is deleted


class EscapedOutput:
    """A text file whose writes are escaped by `escape_invisible`."""

    def __init__(self, file: TextFile) -> None:
        self._file = file

    def write(self, text: str, /) -> object:
        return self._file.write(escape_invisible(text))


def escape_invisible(text: str) -> str:
    """Replace characters that a terminal does not show as such (`redaction.INVISIBLE`) by \\u escapes of JSON.

    >>> escape_invisible('"a\\u202eb"')
    '"a\\\\u202eb"'
    """
    return INVISIBLE.sub(lambda match: json.dumps(match.group())[1:-1], text)
