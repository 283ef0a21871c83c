"""Read records from JSON: SQuAD documents, flat documents, arrays, objects by id, JSON lines; one record at a time.

In: a binary stream. Out: RawRecord or BadRecord, in the order of the file. Memory holds one article at most.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from fivetune.data.readers.delimited import describe_missing_header
from fivetune.data.readers.json_text import (
    DuplicateKeyObject,
    JsonTooLongError,
    JsonWindow,
    decode_line,
    describe_kind,
    describe_value,
    find_json_error,
)
from fivetune.data.readers.nested_records import RECORD_LISTS, Step, describe_nested, format_join, measure_running_texts
from fivetune.data.readers.source_files import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    SPLIT,
    BadRecord,
    format_too_long_message,
    make_utf8_error,
    read_lines,
)
from fivetune.errors import DataError
from fivetune.types import JsonTable, RawRecord

SPLIT_NAMES = ("train", "validation", "val", "valid", "dev", "test")
NUM_DIALOGUES = 50  # first lists whose lengths show whether they are records or dialogues
MIN_PAIRS = 10  # texts from which on an object of texts holds pairs, with the columns text and value
MAX_COMMANDS = 3  # that write one of several lists to a file
MIN_ROWS = 20  # of columns whose rows have names, not numbers: fewer are records with so many fields
_Form = Literal["listed", "by id", "columns of rows", "columns of values"]
_TO_RECORDS = "df.to_json(FILE, orient='records', lines=True)"
_DOCUMENT_FORM = (
    "Allowed: {'data': [...]} (SQuAD or flat), {'questions': [...]}, {id: object}, columns of equal length, an array "
    "of objects, JSONL. "
    "Name the list 'data'."
)
_QUESTION_FORM = (
    "A question has 'question' (text), 'answers' (a list of objects with 'text' and 'answer_start') and in SQuAD 2.0 "
    "'is_impossible' (true or false); its paragraph has 'context' (text) and 'qas' (a list)."
)


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line of a JSONL file that is not parsed yet; `number` counts from 1."""

    path: Path
    number: int
    content: bytes
    header: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    def parse(self) -> RawRecord | BadRecord:
        line = self.content
        where = f"{self.path}:{self.number}"
        if len(line) > MAX_RECORD_BYTES:
            return BadRecord(where, format_too_long_message("the line"))
        torn = not line.endswith(b"\n")
        value, wrong = None, ""
        try:
            value, wrong = decode_line(line.decode("utf-8-sig" if self.number == 1 else "utf-8").strip())
        except UnicodeDecodeError as error:
            if not (torn and error.reason == "unexpected end of data"):
                raise make_utf8_error(self.path, error, line=self.number) from error
            wrong = "the last character is incomplete"
        if wrong and b"\0" in line:
            wrong = f"NUL byte at column {line.index(0) + 1}"
        elif wrong and torn:
            wrong = f"the last line is cut off: it has no line end, and {wrong}"
        if wrong:
            return BadRecord(where, f"{wrong}. Allowed is one JSON object per line. Repair or remove the line.")
        return _make_record(value, where, self.header)


def read_jsonl_lines(file: IO[bytes], path: Path, header: Sequence[str] = ()) -> Iterator[RawLine]:
    """Yield one line per record; blank lines are skipped.

    Args:
        header: names of the values of records that are lists; a single name is the name of the lists.
    """
    lines = ((number, line) for number, line in read_lines(file) if line.strip())
    first = [*islice(lines, 1)]
    # Lists may be dialogues; for them alone more lines are read, which may be long.
    if not header and first and first[0][1].lstrip(b"\xef\xbb\xbf \t")[:1] == b"[":
        first += islice(lines, NUM_DIALOGUES)
        values: list[object] = []
        for _, line in first:
            value, _ = decode_line(line.decode("utf-8-sig", "replace").strip())
            values.append(value)
        header = _name_lists(values)
    for number, line in chain(first, lines):
        yield RawLine(path, number, line, header)


def _make_record(value: object, where: str, header: Sequence[str]) -> RawRecord | BadRecord:
    if isinstance(value, dict):
        return RawRecord(cast("JsonTable", value), where)
    if len(header) == 1 and isinstance(value, list):
        return RawRecord({header[0]: value}, where)
    values = cast("list[object]", value) if isinstance(value, list) else []
    if len(values) < 2:
        return BadRecord(where, f"{describe_value(value)}. A record is an object {{name: value}}. Repair or remove it.")
    if len(values) == len(header):
        return RawRecord(dict(zip(header, values, strict=True)), where)
    if header:
        return BadRecord(
            where, f"a list of {len(values)} values, but data.header names {len(header)}. Repair or remove it."
        )
    reason = f"the record is {describe_value(values)}, without names for its values"
    return BadRecord(where, f"{describe_missing_header(reason, len(values))}.", num_unnamed=len(values))


def read_json_records(file: IO[bytes], path: Path, header: Sequence[str] = ()) -> Iterator[RawRecord | BadRecord]:
    """Yield the records of a JSON document: an array of objects, an object with such an array under one of
    RECORD_LISTS, an object {id: record}, as in PubMedQA, or {text: text}, or columns, as in MS MARCO and of
    `DataFrame.to_json`; or of objects over several lines, one after the other.

    An element with "paragraphs" is a SQuAD article and gives one record per question.
    """
    window = JsonWindow(file, path)
    form: _Form = "listed"
    if window.peek() == "[":
        with suppress(DataError):  # told below
            items = (window.read_item() for _ in islice(window.iter_indices(), NUM_DIALOGUES))
            header = header or _name_lists(items)
        file.seek(0)
        window = JsonWindow(file, path)
        yield from _read_list_items(window, f"{path}: ", header)
    elif window.peek() == "{" and _has_several_objects(file):
        number = 0
        while window.peek():
            number += 1
            yield _make_record(window.read_value(), f"{path}: object {number}", header)
    elif window.peek() == "{":
        form = yield from _read_listed_records(window, path, header)
    else:
        value = window.read_value()
        raise DataError(f"{path}: {describe_value(value)}. {_DOCUMENT_FORM}")
    if window.peek():
        raise window.make_error("data after the end of the document")
    if form != "listed":
        file.seek(0)
        read = _read_records_by_id if form == "by id" else _read_columns
        yield from read(JsonWindow(file, path), path)


def _has_several_objects(file: IO[bytes]) -> bool:
    """Whether objects over several lines follow each other in the first bytes of a file."""
    place = file.tell()
    file.seek(0)
    head = file.read(HEAD_BYTES)
    file.seek(place)
    return re.search(rb"\}\s*\n\s*\{", head) is not None  # within one, a comma stands between objects


def _read_listed_records(
    window: JsonWindow, path: Path, header: Sequence[str]
) -> Generator[RawRecord | BadRecord, None, _Form]:
    """Yield the records of an object's lists under RECORD_LISTS; return what the object holds without one."""
    seen: dict[str, _Member] = {}
    has_list = False
    for key in window.iter_keys():
        if key in seen:
            raise window.make_error(f"the key {key!r} occurs more than once")
        if key in RECORD_LISTS and window.peek() == "[":
            seen[key] = _Member("a list")
            has_list = True
            yield from _read_list_items(window, f"{path}: {key}", header)
            continue
        try:
            value = window.read_value()
        except JsonTooLongError as error:
            raise DataError(f"{error} Columns of df.to_json() are written as records by {_TO_RECORDS}.") from None
        if key == "columns" and isinstance(value, list) and not header:  # df.to_json(orient="split")
            header = [str(name) for name in cast("list[object]", value)]
        seen[key] = _describe_member(value)
    if has_list:
        return "listed"
    form = _find_form(list(seen.values())) if not seen.keys() & {*RECORD_LISTS} else None
    if form is None:
        raise DataError(_describe_missing_list(path, seen))
    return form


class _Member(NamedTuple):
    """What is known of the value of a key: its kind, and of a list or object its number and kind of parts.

    Args:
        parts: "records", "lists" or "values" of a list, "rows" of an object with whole numbers as keys, else "".
        keys: hash of an object's keys.
        num_chars: of the longest texts of several words in the first parts of a list, on average.
    """

    kind: str
    parts: str = ""
    num: int = 0
    keys: int = 0
    num_chars: float = 0


def _describe_member(value: object) -> _Member:
    kind = describe_kind(value)
    if isinstance(value, dict):
        table = cast("JsonTable", value)
        is_rows = bool(table) and all(key.isdecimal() for key in table)
        return _Member(kind, "rows" if is_rows else "", len(table), hash(tuple(table)))
    if isinstance(value, list) and value:
        items = cast("list[object]", value)
        kinds = {type(item) for item in items}
        parts = "values"
        if kinds == {dict}:
            parts = "records"
        elif kinds == {list}:
            parts = "lists"
        return _Member(kind, parts, len(items), num_chars=measure_running_texts(items))
    return _Member(kind)


def _find_form(members: Sequence[_Member]) -> _Form | None:
    """Find how an object without a list of records holds records: by id, or column by column; None if it does not."""
    if not members:
        return None
    kinds = {member.kind for member in members}
    if len(members) >= MIN_PAIRS and kinds == {describe_kind("a")}:
        return "by id"  # {text: text}
    lists = [member for member in members if member.kind == describe_kind([])]
    has_values = any(member.parts == "values" for member in lists)
    # Columns, and values of every record.
    if 1 < len(lists) < len(members) and lists[0].num > 1 and has_values:
        is_even = len({member.num for member in lists}) == 1
        return "columns of values" if is_even else None
    # Columns are alike: as many rows, by the same names.
    are_objects = kinds == {describe_kind({})}
    if len({(member.num, member.keys) for member in members}) > 1:
        return "by id" if are_objects else None
    if are_objects:
        first = members[0]
        is_columns = first.parts == "rows" or first.num >= max(MIN_ROWS, len(members) + 1)
        return "columns of rows" if is_columns else "by id"
    return "columns of values" if has_values else None


def _read_records_by_id(window: JsonWindow, path: Path) -> Iterator[RawRecord]:
    for key in window.iter_keys():
        value = window.read_value()
        if isinstance(value, str):
            value = {"text": key, "value": value}
        else:
            value.setdefault("id", key)
        yield RawRecord(value, f"{path}: {key!r}")


def _read_columns(window: JsonWindow, path: Path) -> Iterator[RawRecord]:
    """Yield the records of {column: {row: value}} or {column: [value, ...]}, as data frames write them.

    All is in memory. A row without a number has its name as id. A value among lists belongs to every record; if it is
    an id, it gets the record's number.
    """
    members = {name: window.read_value() for name in window.iter_keys()}
    has_lists = any(isinstance(value, list) for value in members.values())
    same: JsonTable = {}
    columns: dict[str, JsonTable] = {}
    for name, value in members.items():
        if isinstance(value, list):
            columns[name] = {str(row): one for row, one in enumerate(cast("list[object]", value))}
        elif has_lists:
            same[name] = value
        else:
            columns[name] = value
    for row in next(iter(columns.values())):
        fields: JsonTable = {} if row.isdecimal() else {"id": row}
        for name in members:  # in the order of the document
            fields[name] = same[name] if name in same else columns[name][row]
        if "id" in same:
            fields["id"] = f"{same['id']}-{row}"
        yield RawRecord(fields, f"{path}: row {row}")


def _describe_missing_list(path: Path, seen: Mapping[str, _Member]) -> str:
    if nested := describe_nested(path, is_read=False):
        return nested
    for name in RECORD_LISTS:
        if name in seen:
            return f"{path}: {name!r} is {seen[name].kind}. It must be a list of records. Correct the file."
    sets = {name: one for name, one in seen.items() if one.parts in ("records", "lists")}
    if not sets:
        keys = ", ".join(map(repr, [*seen][:8])) or "none"
        return f"{path}: no list of records: the keys are {keys}. {_DOCUMENT_FORM}"
    keeps = any(one.kind == describe_kind("a") for one in seen.values())
    told = _describe_sets(path, sets, keeps=keeps)
    objects = [repr(name) for name, one in seen.items() if one.kind == describe_kind({})]
    if objects:
        told += f" Lists within {', '.join(objects[:8])} are not among them."
    return told


def _describe_sets(path: Path, sets: Mapping[str, _Member], *, keeps: bool) -> str:
    """Return the error for an object with several lists of records, with the commands that write lists to files.

    The commands are for lists with texts, the longest texts first; of sets only for the training set.

    Args:
        keeps: whether the records get the object's own texts too.
    """
    longest = sorted(sets, key=lambda name: -sets[name].num)
    told = ", ".join(f"{name!r} ({sets[name].num:,})" for name in longest[:8])
    texts = sorted((name for name in longest if sets[name].num_chars), key=lambda name: -sets[name].num_chars)
    chosen = texts[:MAX_COMMANDS] or longest[:1]
    if "train" in sets:
        chosen = ["train"]
    elif any(map(SPLIT.fullmatch, texts)):
        chosen = texts[:1]
    ways: list[str] = []
    for name in chosen:
        own = keeps and sets[name].parts == "records"
        command = format_join(path, [Step("member", (name,), keeps=own), Step("each")])
        names = ", and name the values of its lists: --header text,label" if sets[name].parts == "lists" else ""
        ways.append(f"{command} > {shlex.quote(f'{name}.jsonl')}{names}")
    several = "the one that is meant" if len(ways) > 1 else "it"
    return (
        f"{path}: no list of records by the name data; there are {told}. Allowed in a file is one list. Write "
        f"{several} to a file of its own: {'; or '.join(ways)}."
    )


def _name_lists(items: Iterable[object]) -> Sequence[str]:
    """Return the name of the first records' lists if they are dialogues; () for other records.

    Turns of dialogues are objects, or texts: then the dialogues differ in length and in their second turns.
    """
    dialogues: list[Sequence[object]] = []
    kinds: set[type] = set()
    for item in items:
        if not isinstance(item, list):
            return ()
        dialogues.append(cast("list[object]", item))
        kinds.update(map(type, dialogues[-1]))
    seconds = [str(turns[1]) for turns in dialogues if len(turns) > 1]
    if not seconds:
        return ()
    are_texts = kinds == {str} and len({*map(len, dialogues)}) > 1 and 2 * len({*seconds}) > len(seconds)
    return ("turns",) if are_texts or kinds == {dict} else ()


def _read_list_items(window: JsonWindow, place: str, header: Sequence[str]) -> Iterator[RawRecord | BadRecord]:
    for index in window.iter_indices():
        where = f"{place}[{index}]"
        try:
            value = window.read_item()
        except JsonTooLongError as error:
            yield from _read_long_article(window, where, error)
            continue
        if isinstance(value, dict) and "paragraphs" in value:
            yield from _split_article(value, where)
        else:
            yield _make_record(value, where, header)


def _read_long_article(window: JsonWindow, where: str, error: JsonTooLongError) -> Iterator[RawRecord | BadRecord]:
    """Yield the records of an article over the size limit, by paragraph; its title is known only if it comes first."""
    if window.peek() != "{":
        raise error
    title = ""
    found = False
    for key in window.iter_keys():
        if key == "paragraphs" and window.peek() == "[":
            found = True
            for index in window.iter_indices():
                yield from _split_paragraph(window.read_value(), f"{where}.paragraphs[{index}]", title)
        else:
            value = window.read_value()
            if key == "title" and isinstance(value, str):
                title = value
    if not found:
        raise error


def _split_article(article: JsonTable, where: str) -> Iterator[RawRecord | BadRecord]:
    paragraphs = article["paragraphs"]
    title = article.get("title") or ""
    if isinstance(article, DuplicateKeyObject):
        yield BadRecord(where, find_json_error(article) or "")
    elif not isinstance(paragraphs, list):
        yield BadRecord(where, f"'paragraphs' is {describe_kind(paragraphs)}. Allowed is a list. Correct the file.")
    else:
        for index, paragraph in enumerate(paragraphs):
            yield from _split_paragraph(paragraph, f"{where}.paragraphs[{index}]", title)


def _split_paragraph(paragraph: object, where: str, title: object) -> Iterator[RawRecord | BadRecord]:
    if not isinstance(paragraph, dict):
        yield BadRecord(where, f"{describe_value(paragraph)}. Allowed is an object. {_QUESTION_FORM}")
    elif isinstance(paragraph, DuplicateKeyObject):
        yield BadRecord(where, find_json_error(paragraph) or "")
    elif not isinstance(paragraph.get("qas"), list):
        yield BadRecord(where, f"{_describe_bad_field(paragraph, 'qas')}. {_QUESTION_FORM}")
    else:
        for index, question in enumerate(paragraph["qas"]):
            place = f"{where}.qas[{index}]"
            if wrong := find_json_error(question) or _find_question_error(question, paragraph):
                yield BadRecord(place, wrong)
            else:
                yield RawRecord(flatten_question(question, context=paragraph["context"], title=title), place)


def flatten_question(question: JsonTable, *, context: str, title: object = "") -> JsonTable:
    """Flatten a question of a SQuAD document, with its answers as columns; -1 is an unknown start.

    Absent answers and an absent `is_impossible` stay absent: only the task can interpret that.

    >>> flatten_question({"id": "q1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 4}]},
    ...               context="Dr. Ann slept.", title="Ann")["answers"]
    {'text': ['Ann'], 'answer_start': [4]}
    """
    fields = {name: question[name] for name in ("id", "question") if name in question}
    fields["title"] = title
    fields["context"] = context
    answers = question.get("answers")
    if answers is not None:
        texts = [answer["text"] for answer in answers]
        starts = [answer.get("answer_start", -1) for answer in answers]
        fields["answers"] = {"text": texts, "answer_start": starts}
    if "is_impossible" in question:
        fields["is_impossible"] = question["is_impossible"]
    return fields


def _find_question_error(question: object, paragraph: JsonTable) -> str:
    if not isinstance(question, dict):
        return f"{describe_value(question)}, not an object. {_QUESTION_FORM}"
    wrong = ""
    answers = question.get("answers")
    if not isinstance(question.get("question"), str):
        wrong = _describe_bad_field(question, "question")
    elif not isinstance(paragraph.get("context"), str):
        wrong = f"its paragraph: {_describe_bad_field(paragraph, 'context')}"
    elif not isinstance(question.get("is_impossible", False), bool):
        wrong = _describe_bad_field(question, "is_impossible")
    elif answers is not None and not isinstance(answers, list):
        wrong = _describe_bad_field(question, "answers")
    for index, answer in enumerate([] if wrong else answers or []):
        place = f"answers[{index}]: "
        if not isinstance(answer, dict):
            wrong = f"{place}{describe_kind(answer)}, not an object"
        elif not isinstance(answer.get("text"), str):
            wrong = place + _describe_bad_field(answer, "text")
        elif not isinstance(answer.get("answer_start", -1), int):
            wrong = place + _describe_bad_field(answer, "answer_start")
        if wrong:
            break
    return f"{wrong}. {_QUESTION_FORM}" if wrong else ""


def _describe_bad_field(fields: JsonTable, name: str) -> str:
    if name in fields:
        return f"{name!r} is {describe_value(fields[name])}"
    return f"no {name!r}; the keys are {', '.join(map(repr, [*fields][:8])) or 'none'}"
