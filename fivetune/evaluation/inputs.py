"""The input records of a prediction, read for the output; a skipped record has the reason.

In: a data file, or records and texts in memory. Out: one InputRow per record, in the source's order, also for records
that the task cannot use; a file from which a TokenStore is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import isnan
from pathlib import Path

from fivetune.data.records import BadRecord, find_column, number_duplicate_ids, read_records
from fivetune.errors import DataError
from fivetune.types import RawRecord, Task


@dataclass(frozen=True, slots=True)
class InputRow:
    """One record of a source.

    Args:
        where: file and line, for messages.
        id: id of its question and of its prediction; "" for a record that cannot be read.
        fields: its columns, with the names of the source.
        skipped: the reason why it has no prediction; "" if it has one.
        is_foreign: whether the record is valid, but not for this task, such as another question type.
        key: id of its question among the examples; differs from `id` for a repeated one.
    """

    where: str
    id: str = ""
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    skipped: str = ""
    is_foreign: bool = False
    key: str = ""


def read_input_rows(source: str, task: Task, columns: Mapping[str, str]) -> list[InputRow]:
    """Read one row per record of `source`. Raises DataError for an unreadable file."""
    records = _read_all(source, columns)
    originals = _read_all(source, {})
    numbered = number_duplicate_ids(record for record in records if isinstance(record, RawRecord))
    rows: list[InputRow] = []
    for record, original in zip(records, originals, strict=True):
        fields: Mapping[str, object] = {}
        if isinstance(original, RawRecord):
            fields = {key: value for key, value in original.fields.items() if key != "id" or original.has_own_id}
        row = _build_row(record, fields, task)
        unique = next(numbered) if isinstance(record, RawRecord) else record
        rows.append(replace(row, key=row.id if unique is record else _build_row(unique, fields, task).id))
    return rows


def _read_all(source: str, columns: Mapping[str, str]) -> list[RawRecord | BadRecord]:
    """Read every record of a source in order, bad ones included."""
    found: list[RawRecord | BadRecord] = []
    for record in read_records(source, columns=columns, require_columns=False, on_bad=found.append):
        found.append(record)  # not list.extend: bad records are appended in between
    return found


def _build_row(record: RawRecord | BadRecord, fields: Mapping[str, object], task: Task) -> InputRow:
    if isinstance(record, BadRecord):
        return InputRow(record.where, "", fields, record.reason)
    own_id = str(record.fields["id"])
    try:
        converted = task.to_text(record, labelled=False)
    except DataError as error:
        return InputRow(record.where, own_id, fields, str(error).removeprefix(f"{record.where}: "))
    if not converted:
        return InputRow(record.where, own_id, fields, f"left out by task {task.plugin_name()}", is_foreign=True)
    example = converted[0] if isinstance(converted, tuple) else converted
    return InputRow(record.where, example.group or example.id, fields)


def write_records(path: Path, records: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> list[str]:
    """Write records as a JSONL file for `read_records`; a column may have the source's name or the task's.

    A record without id, or with an empty one, gets its number, or a larger one if another record has that id. A NaN, as
    a DataFrame has for an empty cell, is written as null. Any other number that is not finite, and half a surrogate
    pair, are written as they are, so that reading refuses this record alone. Returns the ids. Raises DataError for a
    record that JSON cannot represent.
    """
    id_column = columns.get("id", "id")
    records = [{str(key): _replace_nan(value) for key, value in one.items()} for one in records]
    given = {str(found[0]) for one in records for name in ("id", id_column) if (found := find_column(one, name))}
    free = (str(number) for number in count(len(records)) if str(number) not in given)
    ids: list[str] = []
    lines: list[str] = []
    for number, record in enumerate(records):
        own_id = str(number) if str(number) not in given else next(free)
        named = {"id": own_id} | record
        for wanted, name in columns.items():
            if wanted in named and find_column(named, name) is None:
                named[name] = named.pop(wanted)
        if find_column(named, id_column) in ((None,), ("",)):
            named[id_column] = own_id
        try:
            lines.append(json.dumps(named))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"inputs[{number}]: {error}. Allowed are texts, numbers, lists and objects of them."
            ) from None
        found = find_column(named, id_column)
        ids.append(str(found[0]) if found else own_id)
    _write_lines(path, lines)
    return ids


def _replace_nan(value: object) -> object:
    return None if isinstance(value, float) and isnan(value) else value


def write_texts(path: Path, texts: Iterable[str]) -> None:
    """Write texts as a JSONL file of the task `jsonl`. Raises DataError for an empty text."""
    texts = list(texts)
    empty = [str(number) for number, text in enumerate(texts, start=1) if not text.strip()]
    if empty:
        raise DataError(f"--inputs: text {', '.join(empty)} is empty. Give each text as the model reads it.")
    rows = [{"id": str(number), "inputs": text} for number, text in enumerate(texts)]
    _write_lines(path, [json.dumps(row) for row in rows])


@contextmanager
def name_inputs(path: Path) -> Generator[None]:
    """Name the inputs from which `path` was written, not that temporary file, in a DataError: inputs[0], not path:1."""
    try:
        yield
    except DataError as error:
        text = re.sub(rf"{re.escape(str(path))}:(\d+)", lambda line: f"inputs[{int(line[1]) - 1}]", str(error))
        raise DataError(text.replace(str(path), "inputs")) from None


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
