"""The input records of a prediction, read for the output; a skipped record has the reason.

In: a data file, or records and texts in memory. Out: one InputRow per record, in the source's order, also for records
that the task cannot use; a file from which a TokenStore is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from fivetune.config import RunConfig
from fivetune.data.examples import Source
from fivetune.data.readers.delimited import read_first_cells
from fivetune.data.readers.records import (
    BadRecord,
    UniqueIds,
    apply_task,
    detect_format,
    find_column,
    is_hub_name,
    read_records,
)
from fivetune.data.readers.source_files import HEAD_BYTES, get_data_suffix, open_bytes, split_sheet
from fivetune.data.readers.tables import NUMBERS, find_unwritable_column, format_json, replace_empty_cell
from fivetune.data.shard import WHOLE, Shard
from fivetune.errors import AbsentColumnError, DataError
from fivetune.tasks import find_needed_columns
from fivetune.training.sources import build_length_limits
from fivetune.types import RawRecord, Task


@dataclass(frozen=True, slots=True)
class InputRow:
    """One record of a source.

    Args:
        where: file and line, for messages.
        id: id of the record's question and prediction; "" for a record that cannot be read.
        fields: the record's columns, with the names of the source.
        skipped: the reason why the record has no prediction; "" if it has one.
        is_incomplete: whether the record lacks a column.
        is_foreign: whether the record is valid, but not for this task, such as another question type.
        key: id of the record's question among the examples; differs from `id` where an id is repeated.
    """

    where: str
    id: str = ""
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    skipped: str = ""
    is_incomplete: bool = False
    is_foreign: bool = False
    key: str = ""


def iter_input_rows(
    source: str,
    task: Task,
    columns: Mapping[str, str],
    header: Sequence[str] = (),
    *,
    shard: Shard = WHOLE,
    num_answered_apart: int = 1,
) -> Iterator[InputRow]:
    """Yield one row per record of `source`, in order. Raises DataError for an unreadable file.

    Args:
        shard: which records are read.
        num_answered_apart: number of shards in which the records were answered; repeated ids are numbered in each.
    """
    ids = [UniqueIds() for _ in range(num_answered_apart)]
    header = choose_header(source, task, columns, header)
    # Read twice at once: with the columns renamed for the task, and as the file has them, for the output.
    records = _iter_all(source, columns, header, shard)
    originals = _iter_all(source, {}, header, shard)
    for number, (record, original) in enumerate(zip(records, originals, strict=True)):
        fields: Mapping[str, object] = {}
        if isinstance(original, RawRecord):
            fields = {key: value for key, value in original.fields.items() if key != "id" or original.has_own_id}
        row = _build_row(record, fields, task)
        key = row.id
        if isinstance(record, RawRecord):
            # Examples with a repeated id get a number after it, and their answers are found by that.
            unique = ids[number % num_answered_apart].number(record)
            if unique is not record:
                key = _build_row(unique, fields, task).id
        yield replace(row, key=key)


def choose_header(source: str, task: Task, columns: Mapping[str, str], header: Sequence[str]) -> tuple[str, ...]:
    """Choose the names of an input's columns: none if its first line has the names that the task reads, else `header`
    if it fits, and for lines of text the only column that the task reads.

    Raises DataError for lines of text and a task of several columns.
    """
    path = Path(source).expanduser()
    if is_hub_name(source) or not Path(split_sheet(str(path))[0]).is_file():
        return tuple(header)
    # A file to predict often has no header although the training data have one, or the other way round.
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    if detect_format(head, path) not in ("csv", "lines", "workbook"):
        return tuple(header)
    needed = [columns.get(name, name) for name in find_needed_columns(task)]
    first = read_first_cells(head, path)
    if {*needed} <= {*first}:
        return ()
    if get_data_suffix(path) or (header and len(header) == len(first)):
        return tuple(header)
    if len(needed) == 1:
        return (needed[0],)
    raise DataError(
        f"{source}: lines of text, but the task reads {', '.join(needed)}. Allowed is a table with these names in its "
        "first line, or JSONL. Write the columns into one file."
    )


def _iter_all(
    source: str, columns: Mapping[str, str], header: Sequence[str], shard: Shard
) -> Iterator[RawRecord | BadRecord]:
    """Yield every record of a shard in order, bad ones included."""
    # Bad records come by a callback, before the next good one: in between they are in order.
    bad: list[BadRecord] = []
    records = read_records(
        source, columns=columns, header=header, require_columns=False, on_bad=bad.append, shard=shard
    )
    for record in records:
        yield from bad
        bad.clear()
        yield record
    yield from bad


def _build_row(record: RawRecord | BadRecord, fields: Mapping[str, object], task: Task) -> InputRow:
    if isinstance(record, BadRecord):
        return InputRow(record.where, "", fields, record.reason)
    own_id = str(record.fields["id"])
    try:
        converted = apply_task(task, record, labelled=False)
    except DataError as error:
        reason = str(error).removeprefix(f"{record.where}: ")
        return InputRow(record.where, own_id, fields, reason, isinstance(error, AbsentColumnError))
    if not converted:
        return InputRow(record.where, own_id, fields, f"left out by task {task.plugin_name()}", is_foreign=True)
    return InputRow(record.where, converted[0].group or converted[0].id, fields)


def write_records(
    path: Path, records: Sequence[Mapping[str, object]], columns: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Write records as a JSONL file for `read_records`; a column may have the source's name or the task's.

    A record without id, or with an empty one, gets its number, or a larger one if another record has that id. Numbers,
    texts and arrays of NumPy are written as Python's are; a NaN, as a DataFrame has for an empty cell, as null. Any
    other number that is not finite, and half a surrogate pair, are written as they are, so that reading refuses this
    record alone. Returns id and "" of each record; for one that JSON cannot represent the reason in place of "".
    """
    id_column = columns.get("id", "id")
    clean: list[dict[str, object]] = []
    given: set[str] = set()
    for one in records:
        clean.append({str(key): replace_empty_cell(value) for key, value in one.items()})
        given |= {_get_id(clean[-1], "id"), _get_id(clean[-1], id_column)}
    free = (str(number) for number in count(len(clean)) if str(number) not in given)
    written: list[tuple[str, str]] = []
    lines: list[str] = []
    for number, record in enumerate(clean):
        own_id = str(number)
        if own_id in given:
            own_id = next(free)
        named = {"id": own_id} | record
        # A column that has the task's name here gets the name that the run's source has for it.
        for wanted, name in columns.items():
            if wanted in named and find_column(named, name) is None:
                named[name] = named.pop(wanted)
        found = find_column(named, id_column)
        if found and (found[0] is None or (isinstance(found[0], str) and not found[0])):
            named[id_column] = own_id
        wrong = find_unwritable_column(record, f"inputs[{number}]")
        lines.append("null" if wrong else format_json(named))
        written.append((_get_id(named, id_column) or own_id, wrong))
    _write_lines(path, lines)
    return written


def _get_id(fields: Mapping[str, object], name: str) -> str:
    """The id in a column as text, "" without one; an object or list is none."""
    found = find_column(fields, name)
    return str(found[0]) if found and isinstance(found[0], (str, int, *NUMBERS)) else ""


def write_texts(path: Path, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Write texts as a JSONL file of the task `jsonl`, which refuses a blank one; returns what `write_records` does."""
    ids = [str(number) for number in range(len(texts))]
    lines = [json.dumps({"id": own, "inputs": text}) for own, text in zip(ids, texts, strict=True)]
    _write_lines(path, lines)
    return [(own, "") for own in ids]


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


OWN_SOURCE: Mapping[str, str] = dict.fromkeys(
    ("data.eval", "data.max_eval_examples", "data.cache_dir"), "predict answers all records of --input"
)
"""Settings of a run without effect on the answers to a file, each with the reason."""


def describe_questions(config: RunConfig, path: str, task: Task, columns: Mapping[str, str]) -> Source:
    """Describe a source of questions without gold answers."""
    return Source(
        paths=(path,),
        task=task,
        limits=build_length_limits(config),
        columns=dict(columns),
        header=choose_header(path, task, columns, config.data.header),
        on_bad_record="skip",
        labelled=False,
    )
