"""Any supported source into raw records, one after the other: files, folders, hub names.

In: a source's name and the column mapping. Out: RawRecords with an `id` (text) and the columns that the task wants.
Memory holds one record, one SQuAD article or one small batch of rows, however large the source is.

Formats: SQuAD JSON (nested), {"data": [...]} or {"questions": [...]} with flat records, {id: record}, a JSON array,
JSONL, CSV, TSV, Parquet, each also gzipped; a folder of such files; a folder saved by `datasets`;
`org/name:config:split`. What a file holds is told by its content first, then by its suffix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from fivetune.data.json_records import RECORD_LISTS, document_records, jsonl_records
from fivetune.data.json_text import decode_line, flaw, kind_of
from fivetune.data.source_files import (
    FORMATS,
    HEAD_BYTES,
    SUFFIXES,
    BadRecord,
    data_suffix,
    iconv,
    is_saved_dataset,
    local_files,
    open_bytes,
    shown,
)
from fivetune.data.table_records import (
    csv_records,
    delimiter_of,
    hub_records,
    is_hub_form,
    lacking_columns,
    load_hub,
    parquet_records,
    saved_records,
)
from fivetune.errors import DataError
from fivetune.types import RawRecord

__all__ = ["BadRecord", "detect", "is_hub_name", "read_records", "refuse_duplicate_ids", "source_files"]

AS_NAMED: Mapping[str, str] = MappingProxyType({})

_FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "Unpack it and name the file inside"),
    b"\xfd7zXZ": ("an xz archive", "Unpack it with xz -d"),
    b"(\xb5/\xfd": ("a zstd archive", "Unpack it with zstd -d"),
    b"BZh": ("a bzip2 archive", "Unpack it with bzip2 -d"),
    b"ARROW1": ("an Arrow file", "Name the folder written by datasets.save_to_disk, or write Parquet"),
    b"version https://git-lfs.github.com/spec/": (
        "a Git-LFS pointer, not the data",
        "Fetch the data with git lfs pull",
    ),
    b"<!doctype html": ("a HTML page, not data", "Download the file itself (its raw link)"),
    b"<html": ("a HTML page, not data", "Download the file itself (its raw link)"),
}


def is_hub_name(source: str) -> bool:
    """True iff a source names a data set of the Hugging Face hub and nothing on this machine.

    >>> is_hub_name("rajpurkar/squad_v2::validation")
    True
    >>> is_hub_name("data/dev.json")
    False
    """
    if not is_hub_form(source) or os.path.exists(source):
        return False
    if ":" in source:
        return True
    return not data_suffix(Path(source)) and not Path(source).parent.is_dir()


def source_files(source: str) -> list[Path]:
    """All local files that make up a source, sorted; of a hub name those in the cache of `datasets`.

    Raises DataError if there are none.
    """
    if is_hub_name(source):
        return sorted(Path(file["filename"]) for file in load_hub(source).cache_files)
    return local_files(source)


def read_records(
    source: str, *, columns: Mapping[str, str] = AS_NAMED, on_bad: Callable[[BadRecord], None] | None = None
) -> Iterator[RawRecord]:
    """Read the records of a source, in its order.

    Args:
        source: a file, a folder, or `org/name:config:split`.
        columns: the name that the task wants -> the name in the source; other columns keep their names.
        on_bad: what to do with a record that cannot be used; None raises DataError at the first. A file that is not
            readable at all raises in any case.

    A record without an `id` gets that of its only column `Id` or `ID`, else one from its position: the file's stem and
    its number from 1, bad records counted.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "train.jsonl"
    >>> _ = path.write_text('{"Frage": "Wer?", "id": 7}\\n{"Frage": "Was?"}\\n')
    >>> for record in read_records(str(path), columns={"question": "Frage"}):
    ...     print(record.fields)
    {'id': '7', 'question': 'Wer?'}
    {'id': 'train-2', 'question': 'Was?'}
    """
    for name, stem, items in _readers(source, columns):
        number = 0
        for number, item in enumerate(items, 1):
            record = _finish(item, columns, f"{stem}-{number}") if isinstance(item, RawRecord) else item
            if isinstance(record, RawRecord):
                yield record
            elif on_bad is None:
                wrong_mapping = "data.columns" in record.reason  # no record would be left
                advice = "" if wrong_mapping else " To leave such records out, set data.on_bad_record: skip."
                raise DataError(f"{record.where}: {record.reason}{advice}")
            else:
                on_bad(record)
        if number == 0:
            raise DataError(f"{name}: holds no records. Allowed is at least one. Check how the file was written.")


def refuse_duplicate_ids(
    records: Iterable[RawRecord], *, on_bad: Callable[[BadRecord], None] | None = None
) -> Iterator[RawRecord]:
    """Pass records on as long as their ids are unique; the second of two is refused, both places named.

    Keeps an 8-byte hash and a position per record (about 150 bytes as Python counts), not the ids.

    >>> twice = [RawRecord({"id": "q1"}, "a.jsonl:1"), RawRecord({"id": "q1"}, "a.jsonl:2")]
    >>> list(refuse_duplicate_ids(twice))
    Traceback (most recent call last):
    fivetune.errors.DataError: a.jsonl:2: the id 'q1' is that of record 1 already. Ids must be unique. Rename one.
    """
    first: dict[int, int] = {}
    for number, record in enumerate(records, 1):
        earlier = first.setdefault(hash(str(record.fields["id"])), number)
        if earlier == number:
            yield record
            continue
        bad = BadRecord(
            record.where,
            f"the id {shown(record.fields['id'])} is that of record {earlier} already. Ids must be unique. Rename one.",
        )
        if on_bad is None:
            raise DataError(f"{bad.where}: {bad.reason}")
        on_bad(bad)


def _readers(
    source: str, columns: Mapping[str, str]
) -> Iterator[tuple[str, str, Iterator[RawRecord] | Iterator[RawRecord | BadRecord]]]:
    """(name for messages, stem for ids, records) of each part of a source."""
    if is_hub_name(source):
        yield source, re.sub(r"\W+", "-", source), hub_records(source, columns=columns)
        return
    files = local_files(source)
    folder = Path(source).expanduser()
    if is_saved_dataset(folder):
        yield source, folder.name, saved_records(folder, columns=columns)
        return
    for file in files:
        name = file.name.removesuffix(".gz")
        yield str(file), Path(name).stem if data_suffix(file) else name, _file_records(file, columns)


def _file_records(path: Path, columns: Mapping[str, str]) -> Iterator[RawRecord | BadRecord]:
    with open_bytes(path) as file:
        kind = detect(file.read(HEAD_BYTES), path)
        file.seek(0)
        if kind == "csv":
            yield from csv_records(file, path, columns=columns)
        elif kind == "parquet":
            yield from parquet_records(file, path, columns=columns)
        elif kind == "jsonl":
            yield from jsonl_records(file, path)
        else:
            yield from document_records(file, path)


def _finish(record: RawRecord, columns: Mapping[str, str], fallback_id: str) -> RawRecord | BadRecord:
    """Check the values, rename the columns, see to the id."""
    fields, where = record.fields, record.where
    if wrong := flaw(fields) or lacking_columns(fields, columns):
        return BadRecord(where, wrong)
    renamed = set(columns.values())
    wanted = {name: fields[old] for name, old in columns.items()}
    fields = {name: value for name, value in fields.items() if name not in renamed} | wanted
    given = fields.pop("id", None) if "id" in fields else _other_id(fields)
    if given is None or given == "":
        return RawRecord({"id": fallback_id} | fields, where, has_own_id=False)
    if isinstance(given, bool) or not isinstance(given, str | int):
        return BadRecord(
            where, f"'id' is {kind_of(given)}: {shown(given)}. Allowed is text or a whole number. Correct it."
        )
    return RawRecord({"id": str(given)} | fields, where)


def _other_id(fields: Mapping[str, object]) -> object:
    """The value of the only column that is `id` in another case, if it can be one; the column itself stays."""
    values = [value for name, value in fields.items() if name.lower() == "id"]
    is_usable = len(values) == 1 and isinstance(values[0], str | int) and not isinstance(values[0], bool)
    return values[0] if is_usable else None


def detect(head: bytes, path: Path) -> str:
    """Tell a file's format from its first bytes, then from its suffix: "json", "jsonl", "csv" or "parquet".

    Raises DataError for what is no data at all: empty, Git-LFS pointer, HTML page, archive, UTF-16, NUL bytes only.

    >>> detect(b'[{"question": "Why?"}]', Path("a.txt"))
    'json'
    >>> detect(b'{"question": "Why?"}\\n{"question": "Who?"}\\n', Path("a.json"))
    'jsonl'
    >>> detect(b"question;answer\\nWhy?;Because\\n", Path("a"))
    'csv'
    """
    _refuse_foreign(head, path)
    if head.startswith(b"PAR1"):
        return "parquet"
    text = head.decode("utf-8-sig", errors="replace")
    expected = SUFFIXES.get(data_suffix(path), "")
    if re.match(r"\s*\[\s*[{\]]", text):
        return "json"
    if re.match(r'\s*\{\s*["}]', text):
        return "jsonl" if expected == "jsonl" or _first_line_is_record(text) else "json"
    if expected == "parquet":
        raise DataError(
            f"{path}: not a Parquet file: begins with {shown(text, limit=20)}. {FORMATS} Rename or replace it."
        )
    if not expected and not delimiter_of(text, path):
        raise DataError(
            f"{path}: the format is not recognised; it begins with {shown(text, limit=20)}. {FORMATS} "
            f"Give the file the suffix of its format."
        )
    return expected or "csv"


def _refuse_foreign(head: bytes, path: Path) -> None:
    start = head[:200].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if not head:
        raise DataError(f"{path}: the file is empty. {FORMATS} Write or download it again.")
    if not head.strip(b"\0"):
        raise DataError(f"{path}: holds NUL bytes instead of text. {FORMATS} Copy or download it again.")
    if not head.removeprefix(b"\xef\xbb\xbf").strip():
        raise DataError(f"{path}: the file holds white space only. {FORMATS} Write or download it again.")
    if encoding := _wide_encoding(head):
        raise DataError(f"{path}: the text is {encoding}. Allowed is UTF-8. Convert it: {iconv(encoding, path)}")
    for magic, (what, advice) in _FOREIGN.items():
        if start.startswith(magic.lower()):
            raise DataError(f"{path}: this is {what}. {FORMATS} {advice}.")


def _wide_encoding(head: bytes) -> str:
    """Name of the 2- or 4-byte encoding of a text, "" if it is none: by byte order mark, else by where the NULs are."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    text = head[:1024]
    nuls = (text[::2].count(0), text[1::2].count(0))
    if max(nuls) > len(text) // 4 and min(nuls) <= len(text) // 50:
        return "utf-16-be" if nuls[0] > nuls[1] else "utf-16-le"
    return ""


def _first_line_is_record(text: str) -> bool:
    """True iff the first line is one whole JSON object that is a record, not a document of records."""
    value, _ = decode_line(text.lstrip().partition("\n")[0])
    if not isinstance(value, dict) or any(isinstance(value.get(name), list | dict) for name in RECORD_LISTS):
        return False
    return not value or not all(isinstance(member, dict) for member in value.values())
