"""Read raw records from any supported source: files, folders, hub names.

In: a source's name and the column mapping. Out: RawRecords with an `id` (text) and the columns under the task's names.
Memory holds one record, one SQuAD article or one small batch of rows, however large the source is.

Formats: SQuAD JSON (nested), {"data": [...]} or {"questions": [...]} with flat records, {id: record}, a JSON array,
JSONL, CSV, TSV, fastText's lines, Parquet, each also gzipped; a sheet of a workbook (`a.xlsx#Sheet`); files of lines
that belong together (`train.{de,en}`); a folder of files; a folder saved by `datasets`; `org/name:config:split`. The
format is detected from the content first, then from the suffix.
"""

from __future__ import annotations

import json
import os
import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import IO, cast

from fivetune.data.letters import LITERALS, MARKS, mark_template
from fivetune.data.readers.delimited import (
    TableRow,
    describe_missing_column,
    find_start,
    has_columns,
    read_csv_rows,
    read_first_cells,
    read_parallel_lines,
    read_text_lines,
)
from fivetune.data.readers.json_records import RECORD_LISTS, SPLIT_NAMES, RawLine, read_json_records, read_jsonl_lines
from fivetune.data.readers.json_text import decode_line, describe_value, find_json_error
from fivetune.data.readers.line_forms import (
    describe_first_words,
    is_fasttext,
    read_fasttext_lines,
    refuse_features_and_tokens,
    refuse_lines_above,
)
from fivetune.data.readers.source_files import (
    FORMATS,
    HEAD_BYTES,
    SUFFIXES,
    BadRecord,
    decode_head,
    describe_label_files,
    describe_paste,
    find_partner,
    get_data_suffix,
    is_saved_dataset,
    is_workbook,
    list_local_files,
    list_parallel,
    list_tables,
    make_utf8_error,
    open_bytes,
    quote_value,
    refuse_foreign_format,
    refuse_unequal,
    split_sheet,
)
from fivetune.data.readers.table_records import (
    ArrowRow,
    is_hub_form,
    load_hub_dataset,
    read_hub_records,
    read_parquet_rows,
    read_saved_records,
    read_sheet_records,
)
from fivetune.data.readers.workbooks import iter_sheet_rows
from fivetune.data.shard import WHOLE, Shard
from fivetune.errors import DataError, FiveTuneError, RecordError
from fivetune.types import ConversionResult, JsonTable, RawRecord, Task, TextExample

RUN_LENGTH = 20  # consecutive records that are drawn together, so that the records of one group are seen side by side

__all__ = [
    "BadRecord",
    "UniqueIds",
    "apply_task",
    "as_bad_record",
    "detect_format",
    "is_hub_name",
    "list_source_files",
    "read_records",
    "refuse_duplicate_ids",
]

UnparsedItem = RawLine | TableRow | ArrowRow
Item = RawRecord | BadRecord | UnparsedItem

CHAT_MEMBERS = (("role", "content"), ("role", "text"), ("from", "value"))  # of a message: who speaks, and the text
ASSISTANTS = ("assistant", "gpt")
MIN_ROWS = 10  # of the lists of a document in one line that also has other values: fewer belong to one record

NO_RENAMES: Mapping[str, str] = MappingProxyType({})


def is_hub_name(source: str) -> bool:
    """Return whether a source names a data set of the Hugging Face hub and no local path.

    >>> is_hub_name("rajpurkar/squad_v2::validation")
    True
    >>> is_hub_name("data/dev.json")
    False
    """
    if not is_hub_form(source) or os.path.exists(source):
        return False
    if ":" in source:
        return True
    return not get_data_suffix(Path(source)) and not Path(source).parent.is_dir()


def list_source_files(source: str) -> list[Path]:
    """Return the local files of a source, sorted; of a hub name the files in the cache of `datasets`.

    Raises DataError if a local source has none, FiveTuneEnvironmentError if a hub data set cannot be loaded.
    """
    if is_hub_name(source):
        return sorted(Path(file["filename"]) for file in load_hub_dataset(source).cache_files)
    return list_local_files(source)


def check_source(source: str, *, allows_lines: bool = False) -> None:
    """Raise DataError or FiveTuneEnvironmentError unless a source's files exist, are readable and begin like data.

    No record is read. A hub name passes unchecked, because its content is known only after the download.

    Args:
        allows_lines: lines of text without columns are data, too.
    """
    if is_hub_name(source):
        return
    if parts := list_parallel(source):
        refuse_unequal(parts)
        return
    files = list_tables(source)
    if is_saved_dataset(Path(source).expanduser()):
        return
    for file in files:
        with open_bytes(file) as content:
            head = content.read(HEAD_BYTES)
        kind = detect_format(head, file)
        if kind == "workbook":
            next(iter_sheet_rows(file), None)  # the package and the sheet are there
        elif kind == "lines" and not allows_lines:
            raise _make_lines_error(head, file)


def are_lines(source: str, name: str) -> bool:
    """Whether each file of a source is a text whose lines are records, and whose first line does not name a column."""
    if is_hub_name(source) or list_parallel(source) or is_saved_dataset(Path(source).expanduser()):
        return False
    for file in list_tables(source):
        with open_bytes(file) as content:
            head = content.read(HEAD_BYTES)
        kind = detect_format(head, file)
        # a text may divide its lines alike, as a table does
        is_table = kind == "csv" and (get_data_suffix(file) != "" or name in read_first_cells(head, file))
        if kind not in ("lines", "csv") or is_table:
            return False
    return True


def read_records(
    source: str,
    *,
    columns: Mapping[str, str] = NO_RENAMES,
    header: Sequence[str] = (),
    require_columns: bool = True,
    on_bad: Callable[[BadRecord], None] | None = None,
    shard: Shard = WHOLE,
) -> Iterator[RawRecord]:
    """Read the records of a source, in its order.

    Args:
        source: a file, a folder, or `org/name:config:split`.
        columns: the task's name -> the source's name, dotted for a nested value (`info.topic`, `answers.0.text`);
            other columns keep their names.
        header: names of the columns of a table without a header, and of JSON records that are lists.
        require_columns: whether the mapped columns must exist; a mapped `id` always must. False for prediction, where
            the task reports an absent column that it needs.
        on_bad: called with each bad record; None raises RecordError at the first. A damaged or unreadable file always
            raises DataError or FiveTuneEnvironmentError.
        shard: which records are read; bad ones count as well.

    A record without an `id` gets the value of its only column `Id` or `ID`, else the file's stem and its number from 1,
    bad records included.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "train.jsonl"
    >>> _ = path.write_text('{"Frage": "Wer?", "id": 7}\\n{"Frage": "Was?"}\\n')
    >>> for record in read_records(str(path), columns={"question": "Frage"}):
    ...     print(record.fields)
    {'id': '7', 'question': 'Wer?'}
    {'id': 'train-2', 'question': 'Was?'}
    """
    required = select_required_columns(columns, require_columns=require_columns)
    for stem, number, item in shard.select(iter_items(source, required, header=header)):
        record = parse_item(item, columns, required, f"{stem}-{number}")
        if isinstance(record, RawRecord):
            yield record
        elif on_bad is None:
            raise RecordError(record.where, record.reason, skippable=record.skippable)
        else:
            on_bad(record)


def select_required_columns(columns: Mapping[str, str], *, require_columns: bool) -> dict[str, str]:
    """Return the mapped columns that must exist (see `read_records`)."""
    return {wanted: name for wanted, name in columns.items() if require_columns or wanted == "id"}


def iter_items(
    source: str,
    required: Mapping[str, str],
    on_open: Callable[[IO[bytes]], None] = lambda file: None,
    *,
    header: Sequence[str] = (),
) -> Iterator[tuple[str, int, Item]]:
    """Yield (stem for ids, number from 1 in its file, item) of each record of a source, in its order.

    Lines of JSONL and rows of CSV and Parquet are not parsed yet, so that `parse_item` can do it in another process.

    Args:
        on_open: called with each file.
    """
    for name, stem, items in _iter_readers(source, required, header, on_open):
        number = 0
        for number, item in enumerate(items, 1):
            yield stem, number, item
        if number == 0:
            raise DataError(f"{name}: holds no records. Allowed is at least one. Check how the file was written.")


def parse_item(
    item: Item, columns: Mapping[str, str], required: Mapping[str, str], fallback_id: str
) -> RawRecord | BadRecord:
    """Return the record of an item with checked values, renamed columns and an id, or a BadRecord with the error."""
    record = item.parse() if isinstance(item, UnparsedItem) else item
    return _normalize_record(record, columns, required, fallback_id) if isinstance(record, RawRecord) else record


def apply_task(task: Task, record: RawRecord, *, labelled: bool = True) -> tuple[TextExample, ...]:
    """Convert a record to its examples; () if the task leaves it out.

    An exception of the task, which may be the user's own, becomes a RecordError with its line. Raises DataError as
    `to_text` does, MemoryError: it is no fault of the record, which must not be skipped for it.
    """
    try:
        converted = _convert(task, record, labelled=labelled)
    except (FiveTuneError, MemoryError):
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})".replace("\n", " ")
        raise RecordError(
            record.where, f"task {task.plugin_name()} fails on this record: {what}. Correct the task."
        ) from error
    if isinstance(converted, tuple):
        return converted
    return (converted,) if converted else ()


def _convert(task: Task, record: RawRecord, *, labelled: bool) -> ConversionResult:
    """Convert a record, and note in `meta` where inputs hold a token of the template: a special one is meant there.

    The template is filled with another character for the "<" of its tokens, one that the record lacks: so a text that
    spells out the same token cannot take its place.
    """
    option = "template" if hasattr(task, "template") else "inputs"
    template = getattr(task, option, None)
    if not isinstance(template, str) or "<" not in template:
        return task.to_text(record, labelled=labelled)
    known = repr(record.fields)
    mark = next(mark for mark in MARKS if ascii(mark)[1:-1] not in known)
    marked = task.model_copy(update={option: mark_template(template, mark)})
    converted = marked.to_text(record, labelled=labelled)
    if isinstance(converted, tuple):
        return tuple(_replace_marks(example, mark) for example in converted)
    return converted and _replace_marks(converted, mark)


def _replace_marks(example: TextExample, mark: str) -> TextExample:
    places = [place for place, character in enumerate(example.inputs) if character == mark]
    if not places:
        return example
    return replace(example, inputs=example.inputs.replace(mark, "<"), meta={**example.meta, LITERALS: places})


def as_bad_record(error: DataError, record: RawRecord) -> BadRecord:
    """Convert a task's error into a BadRecord; a plugin may raise a plain DataError."""
    if isinstance(error, RecordError):
        return BadRecord(error.where, error.reason, error.skippable)
    return BadRecord(record.where, str(error).removeprefix(f"{record.where}: "))


def refuse_duplicate_ids(
    records: Iterable[RawRecord], *, on_bad: Callable[[BadRecord], None] | None = None
) -> Iterator[RawRecord]:
    """Yield the records with unique ids; a duplicate goes to `on_bad`, without which it raises RecordError.

    Memory holds an 8-byte hash and a position per record (about 150 bytes in Python), not the ids.

    >>> twice = [RawRecord({"id": "q1"}, "a.jsonl:1"), RawRecord({"id": "q1"}, "a.jsonl:2")]
    >>> list(refuse_duplicate_ids(twice))
    Traceback (most recent call last):
    fivetune.errors.RecordError: a.jsonl:2: the id 'q1' is already used by record 1. Ids must be unique. Rename one.
    """
    first: dict[int, int] = {}
    for number, record in enumerate(records, 1):
        earlier = first.setdefault(hash(str(record.fields["id"])), number)
        if earlier == number:
            yield record
            continue
        bad = describe_duplicate(record, earlier)
        if on_bad is None:
            raise RecordError(bad.where, bad.reason)
        on_bad(bad)


def describe_duplicate(record: RawRecord, earlier: int) -> BadRecord:
    """Describe that a record has the id of an earlier one.

    Args:
        earlier: number of the earlier record, from 1.
    """
    return BadRecord(
        record.where,
        f"the id {quote_value(record.fields['id'])} is already used by record {earlier}. Ids must be unique. "
        "Rename one.",
    )


def ignore_bad_record(bad: BadRecord) -> None:
    """An `on_bad` that passes over bad records, where another reading of the data reports them."""


def draw_records(records: Iterable[RawRecord], most: int) -> tuple[list[RawRecord], int]:
    """Draw up to `most` records in runs of RUN_LENGTH, each with the same chance (reservoir sampling), and count all.

    Files are often sorted by label: their first records say nothing about the others. Blank ones are not among them.

    >>> draw_records((RawRecord({"id": str(i)}, "") for i in range(3)), 20)[1]
    3
    """
    draw = random.Random(0)
    runs: list[tuple[int, Sequence[RawRecord]]] = []
    num_read = 0
    following = (record for record in records if not _is_blank(record))
    while run := list(islice(following, RUN_LENGTH)):
        replaced = draw.randrange(num_read // RUN_LENGTH + 1)
        if len(runs) < most // RUN_LENGTH:
            runs.append((num_read, run))
        elif replaced < len(runs):
            runs[replaced] = (num_read, run)
        num_read += len(run)
    runs.sort(key=itemgetter(0))
    return list(chain.from_iterable(run for _, run in runs)), num_read


def _is_blank(record: RawRecord) -> bool:
    """Return whether a record has no value but an id that its source did not give, as the rows below a table."""
    for name, value in record.fields.items():
        is_empty = value is None or (isinstance(value, str) and not value.strip())
        if not is_empty and (name != "id" or record.has_own_id):
            return False
    return True


class UniqueIds:
    """Makes the ids of records unique: a repeated id gets a number. For prediction, which answers each record.

    >>> ids = UniqueIds()
    >>> [ids.number(RawRecord({"id": "q1"}, "a.jsonl")).fields["id"] for _ in range(3)]
    ['q1', 'q1 (2)', 'q1 (3)']
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def number(self, record: RawRecord) -> RawRecord:
        """Return the record with an id that no earlier one has."""
        given = own = str(record.fields["id"])
        count = self._counts.get(given, 0) + 1
        if count > 1:
            while (own := f"{given} ({count})") in self._counts:
                count += 1
        self._counts[given] = count
        self._counts.setdefault(own, 1)
        return record if own == given else replace(record, fields={**record.fields, "id": own})


def _iter_readers(
    source: str, columns: Mapping[str, str], header: Sequence[str], on_open: Callable[[IO[bytes]], None]
) -> Iterator[tuple[str, str, Iterator[Item]]]:
    """Yield (name for messages, stem for ids, items) of each file of a source."""
    if is_hub_name(source):
        yield source, re.sub(r"\W+", "-", source), read_hub_records(source, columns=columns)
        return
    if parts := list_parallel(source):
        yield source, parts[0].name.partition(".")[0], read_parallel_lines(parts, header)
        return
    files = list_tables(source)
    folder = Path(source).expanduser()
    if is_saved_dataset(folder):
        yield source, folder.name, read_saved_records(folder, columns=columns)
        return
    for file in files:
        name = split_sheet(file.name)[0].removesuffix(".gz")
        items = _read_file_items(file, columns, header, on_open)
        yield str(file), Path(name).stem if get_data_suffix(file) else name, items


def _read_file_items(
    path: Path, columns: Mapping[str, str], header: Sequence[str], on_open: Callable[[IO[bytes]], None]
) -> Iterator[Item]:
    with open_bytes(path, on_open) as file:
        head = file.read(HEAD_BYTES)
        kind = detect_format(head, path)
        file.seek(0)
        if kind in ("csv", "lines") and len(header) == 1 and not get_data_suffix(path):
            yield from read_text_lines(file, path, header)
        elif kind == "lines":
            raise _make_lines_error(head, path)
        elif kind == "csv":
            yield from read_csv_rows(file, path, columns=columns, header=header)
        elif kind == "fasttext":
            yield from read_fasttext_lines(file, path)
        elif kind == "workbook":
            yield from read_sheet_records(path, columns=columns, header=header)
        elif kind == "parquet":
            yield from read_parquet_rows(file, path, columns=columns)
        elif kind == "jsonl":
            yield from read_jsonl_lines(file, path, header)
        else:
            yield from read_json_records(file, path, header)


def _normalize_record(
    record: RawRecord, columns: Mapping[str, str], required: Mapping[str, str], fallback_id: str
) -> RawRecord | BadRecord:
    """Return the record with checked values, renamed columns and an id, or a BadRecord with the error."""
    fields, where = record.fields, record.where
    wrong = find_json_error(fields)
    if wrong:
        return BadRecord(where, wrong)
    wanted: JsonTable = {}
    for name, old in columns.items():
        found = find_column(fields, old)
        if found:
            wanted[name] = found[0]
    missing = [name for name in required if name not in wanted]
    if missing:
        reason = describe_missing_column(fields, {missing[0]: columns[missing[0]]})
        return BadRecord(where, reason or _describe_missing_part(fields, columns[missing[0]]), skippable=False)
    renamed = set(columns.values())
    fields = {name: value for name, value in fields.items() if name not in renamed} | wanted
    given = fields.pop("id", None) if "id" in fields else _find_id(fields)
    if given is None or given == "":
        return RawRecord({"id": fallback_id} | fields, where, has_own_id=False)
    if isinstance(given, bool) or not isinstance(given, str | int):
        return BadRecord(
            where,
            f"'id' is {describe_value(given)}. Allowed is text or a whole number. Correct it.",
        )
    return RawRecord({"id": str(given)} | fields, where)


def find_column(fields: Mapping[str, object], name: str) -> tuple[object] | None:
    """Return the value of a column in a 1-tuple, None if there is none.

    A dotted name descends into objects and lists. A `*` stands for all items of a list: their texts are joined by line
    ends. As the last part it stands for the whole list or object as one text: texts and numbers joined by " | ",
    anything else as JSON. Of the messages of a chat, `answer` is the last one if an assistant says it, else None, and
    `chat` is all before it, with the names of who speaks.

    >>> find_column({"info": {"topics": ["rain", "snow"]}}, "info.topics.1")
    ('snow',)
    >>> find_column({"docs": [{"text": "Rain."}, {"text": "Snow."}]}, "docs.*.text")
    ('Rain.\\nSnow.',)
    >>> find_column({"steps": ["Stir.", "Bake."], "sql": {"sel": 1}}, "steps.*")
    ('Stir. | Bake.',)
    >>> turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    >>> find_column({"turns": turns}, "turns.chat"), find_column({"turns": turns}, "turns.answer")
    (('user: Hi.',), ('Yes?',))
    """
    if name in fields:
        return (fields[name],)
    value: object = fields
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif part == "*" and name.endswith(".*"):
            return (_join_items(value),)
        elif isinstance(value, list) and part in ("chat", "answer"):
            return (_read_chat(cast("list[object]", value))[part],)
        elif isinstance(value, list) and part == "*":
            texts: list[str] = []
            for item in value:
                found = find_column(item, name.partition("*.")[2]) if isinstance(item, Mapping) else None
                if found and found[0] is not None:
                    texts.append(str(found[0]))
            return ("\n".join(texts),)
        else:
            return None
    return (value,)


def _read_chat(messages: Sequence[object]) -> dict[str, str | None]:
    """Return all before the last answer, a line for each message, and that answer; None for what is absent."""
    turns: list[tuple[str, str]] = []
    for message in messages:
        table = cast("JsonTable", message) if isinstance(message, Mapping) else {}
        for speaker, text in CHAT_MEMBERS:
            if speaker in table and isinstance(table.get(text), str):
                turns.append((str(table[speaker]), table[text]))
                break
    answer = turns.pop()[1] if turns and turns[-1][0] in ASSISTANTS else None
    return {"chat": "\n".join(f"{speaker}: {text}" for speaker, text in turns) or None, "answer": answer}


def _join_items(value: object) -> object:
    """Return a list or object as one text, any other value as it is."""
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in cast("list[object]", value)):
        return " | ".join(map(str, cast("list[object]", value)))
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


def _describe_missing_part(fields: Mapping[str, object], name: str) -> str:
    """Return the error for a missing dotted column whose first part exists."""
    first = name.partition(".")[0]
    return (
        f"{first!r} is {quote_value(fields[first])}, without {name!r}, which data.columns names. "
        "Allowed are keys of its objects and indices of its lists, from 0. Correct data.columns."
    )


def _find_id(fields: Mapping[str, object]) -> object:
    """Return the only column named `id` in another case if it is text or an integer, else None; it is not removed."""
    values = [value for name, value in fields.items() if name.lower() == "id"]
    if len(values) != 1 or isinstance(values[0], bool) or not isinstance(values[0], str | int):
        return None
    return values[0]


def detect_format(head: bytes, path: Path) -> str:
    """Detect a file's format from its first bytes, then from its suffix: "json", "jsonl", "csv", "parquet",
    "workbook", "fasttext" or "lines", which are text that nothing divides alike.

    Raises DataError for other content: an empty file, a Git-LFS pointer, an HTML page, an archive, UTF-16, NUL bytes,
    features or tokens in place of texts.

    >>> detect_format(b'[{"question": "Why?"}]', Path("a.txt"))
    'json'
    >>> detect_format(b'{"question": "Why?"}\\n{"question": "Who?"}\\n', Path("a.json"))
    'jsonl'
    >>> detect_format(b"question;answer\\nWhy?;Because\\n", Path("a"))
    'csv'
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    if is_workbook(head):
        return "workbook"
    refuse_foreign_format(head, path)
    text = decode_head(head)
    expected = SUFFIXES.get(get_data_suffix(path), "")
    if _is_first_line_list(text):
        return "jsonl"
    if re.match(r"\s*\[\s*[\[{\]]", text):
        return "json"
    if re.match(r'\s*\{\s*["}]', text):
        if _is_first_line_record(text):
            return "jsonl"
        is_spread = text.lstrip().partition("\n")[0].strip() == "{"  # over several lines
        return "jsonl" if expected == "jsonl" and not is_spread else "json"
    if expected in ("parquet", "workbook"):
        raise DataError(
            f"{path}: not {path.suffix} but text: begins with {quote_value(text, limit=20)}. {FORMATS} Rename or "
            "replace it."
        )
    if is_fasttext(text):
        return "fasttext"
    if expected in ("", "json") or (expected == "jsonl" and re.search(r"^\{\s*\n", text, re.MULTILINE)):
        refuse_lines_above(text, path)
    refuse_features_and_tokens(text, path)
    if expected and not has_columns(text, path):
        return "lines"
    return expected or ("csv" if find_start(text, path)[1] else "lines")


def _make_lines_error(head: bytes, path: Path) -> DataError:
    whole = head[: head.rfind(b"\n") + 1] or head
    try:
        whole.decode()
    except UnicodeDecodeError as error:
        return make_utf8_error(path, error, line=1)
    text = decode_head(head)
    what = (
        f"{path}: lines of text without labels, which nothing divides alike; the first begins with "
        f"{quote_value(text.partition(chr(10))[0], limit=30)}. To pre-train on them, take the task denoising."
    )
    if way := describe_first_words(text, path):
        return DataError(f"{what} {way}")
    if partner := find_partner(path):
        return DataError(f"{what} {describe_paste([str(path), str(partner)])}")
    return DataError(
        f"{what} {FORMATS} "
        f"{describe_label_files(['pos.txt', 'neg.txt'])} So do records of several lines, with a dash for each: paste - "
        "- - < A > A.tsv. Two files whose lines belong together are named so: 'A.{en,de}'."
    )


def _is_first_line_list(text: str) -> bool:
    """Return whether the first of several lines is a JSON list, which is a record."""
    line, _, rest = text.lstrip().partition("\n")
    return line.startswith("[") and rest.lstrip().startswith("[") and isinstance(decode_line(line)[0], list)


def _is_first_line_record(text: str) -> bool:
    """Return whether the first line is a complete JSON object that is a record, not a document of records."""
    line, _, rest = text.lstrip().partition("\n")
    value, _ = decode_line(line)
    if not isinstance(value, dict):
        return False
    members = cast("JsonTable", value)
    if any(isinstance(members.get(name), list | dict) for name in (*RECORD_LISTS, *SPLIT_NAMES)):
        return False
    if not members:
        return True
    # Lists of equal length are columns of a table, if they are long or the document holds nothing else.
    sizes = [len(cast("list[object]", member)) for member in members.values() if isinstance(member, list)]
    if sizes and not rest.strip():
        is_long = len(sizes) > 1 and len({*sizes}) == 1 and sizes[0] >= MIN_ROWS
        if is_long or len(sizes) == len(members):
            return False
    return not all(isinstance(member, dict) for member in members.values())
