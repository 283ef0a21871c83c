"""Describe the columns of unknown data: kinds of values, how many are filled and distinct, lengths in characters.

In: a source. Out: a RawTable of an even sample of its records, and errors for data that nothing can be learned from.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from fivetune.data.readers.delimited import NUMBER, describe_quotes, read_first_cells
from fivetune.data.readers.records import (
    detect_format,
    draw_records,
    find_column,
    ignore_bad_record,
    is_hub_name,
    read_records,
)
from fivetune.data.readers.source_files import (
    HEAD_BYTES,
    BadRecord,
    is_saved_dataset,
    list_tables,
    open_bytes,
    split_sheet,
)
from fivetune.data.readers.tables import replace_empty_cell
from fivetune.data.readers.workbooks import describe_sheets
from fivetune.tasks import is_missing_label
from fivetune.tasks.tags import FLAGS, parse_tags
from fivetune.types import JsonTable, RawRecord

Kind = Literal["text", "number", "text list", "date", "link", "list", "object", "empty"]

MIN_RECORDS = 10  # fewer leave no validation or test set
MAX_RECORDS = 20_000  # records that the readings are based on
MAX_LABELS = 200  # a column with more distinct values is not taken for labels
LABELLED, LABELLED_FEW = 3.0, 1.5  # records per value of labels, also of fewer records than MIN_RECORDS
MAX_LABEL_CHARS = 60
DOCUMENTS = "docs documents passages articles paragraphs contexts sources"  # lists that are read as one text
DOCUMENT_TEXTS = ("text", "content", "body", "passage_text", "paragraph_text")  # members of an object that is a text
NUM_COMPARED = 200  # records of which texts are compared
MIN_WORDS = 3  # mean words from which on texts are running text

MONTH = (
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?)"
)
ZONE = r"(?:[ap]m|t|z|utc|gmt|[pmce][sd]t)"
FORMS: Mapping[Kind, re.Pattern[str]] = {
    "number": NUMBER,
    # lists written as text: [15, 16, 17], ['joy', 'fear'], [('Oslo', 0, 4)]
    "text list": re.compile(r"""[\[(][-+\d\s.,;:eE()\[\]]*[\])]|(?s:\[[\[\]()\s,]*['"].*['"][-\d.()\[\]\s,]*\])"""),
    # 2024-01-02T10:00, 2.1.24, 10:00:05, 5:30 PM, Mon Apr 06 22:19:45 2009, January 2024
    "date": re.compile(
        rf"(?=.{{,40}}$)(?=.*(?:\d[-/.]\d+[-/.]\d|\d:\d\d|{MONTH}.*\d|\d.*{MONTH}))"
        rf"(?:[\d\s,.:/+-]|{MONTH}|{ZONE}|(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?)+",
        re.IGNORECASE,
    ),
    # or where a text is from: CC-BY 2.0 (France) Attribution: tatoeba.org #2877272 (CM)
    "link": re.compile(
        r"(?:https?://|www\.)\S+|\S+@\S+\.\w+|(?i:(?:cc[ -]?(?:by|0)|creative commons|public domain|attribution|"
        r"licen[cs]ed?|copyright|©|\(c\)|tatoeba|(?:sources?|url|link|quelle|fuente):).{,200})"
    ),
}
# Thai, Lao, Burmese, Khmer; kana, Chinese
WITHOUT_BLANKS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
# letters mixed with digits, as of R_2PoEZfAptrk; several long numbers
LONG_CODE = re.compile(r"(?=.*[A-Za-z])(?=(?:.*\d){2})(?!.*[-_]\d+$)[\w=-]{10,}|\d{9,}(?:[\s,;|]+\d{9,})+")
FRACTION = re.compile(r".*[.,]0*[1-9]\d*")  # 2.5, but not 2.0
CODE = re.compile(
    r"(?ims)select\s.+\sfrom\s|[;{}]\s*$|\w\(.*\)\s*[;{:.]?$|[=!<>]=|</(?!s>)\w+>|\b[A-Za-z_]\w* ?= ?\S|->"
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the first records.

    Args:
        num_filled: records with a value that is not blank.
        num_distinct: distinct values.
        values: value -> records, of a column with few and short values; else empty.
        mean_words, mean_chars, max_chars: length of the filled values as text.
        code_share: share of the values that look like code, SQL or a formula.
        has_fractions: a number with a fraction is among the values.
        has_codes: nearly all values are different single words with digits, as ids are.
        least: records per value, from which on values may be labels.
    """

    name: str
    kind: Kind
    num_filled: int
    num_distinct: int
    values: Mapping[str, int]
    mean_words: float = 0.0
    mean_chars: float = 0.0
    max_chars: int = 0
    example: str = ""
    code_share: float = 0.0
    has_fractions: bool = False
    has_codes: bool = False
    least: float = LABELLED

    @property
    def has_labels(self) -> bool:
        """Whether the values may be labels: few, short, whole numbers if numbers, each of several records on average;
        one label may be all that few records of a sorted file have.
        """
        least_distinct = 1 if self.least < LABELLED else 2
        if len(self.values) < least_distinct or self.num_filled < self.least * self.num_distinct:
            return False
        return self.mean_words <= 5 and not self.has_fractions

    @property
    def has_flags(self) -> bool:
        """Whether the values are 1 and 0, or other words for yes and no, and both are there."""
        return {FLAGS.get(value.casefold()) for value in self.values} == {True, False}

    @property
    def has_text(self) -> bool:
        """Whether the values are free text: neither labels nor ids."""
        return self.kind == "text" and self.num_distinct > 1 and not self.has_labels and not self.has_codes

    @property
    def has_lists(self) -> bool:
        """Whether the values are lists, also as text."""
        return self.kind in ("list", "text list")

    @property
    def is_list_of_texts(self) -> bool:
        """Whether the first value is a list of texts."""
        return self.kind == "list" and self.example.startswith(("['", '["'))

    @property
    def has_objects(self) -> bool:
        """Whether the first value is a list of objects or lists."""
        return self.kind in ("list", "object") and self.example[1:2] in ("{", "[")

    @property
    def share_distinct(self) -> float:
        return self.num_distinct / max(1, self.num_filled)

    @property
    def is_running(self) -> bool:
        return self.kind == "text" and self.mean_words >= MIN_WORDS

    @property
    def has_code(self) -> bool:
        return self.kind == "text" and self.code_share > 0.7

    def as_dict(self) -> JsonTable:
        return {
            "name": self.name,
            "kind": self.kind,
            "filled": self.num_filled,
            "distinct": self.num_distinct,
            "mean_chars": round(self.mean_chars, 1),
            "max_chars": self.max_chars,
            "values": dict(Counter(self.values).most_common(20)),
        }


class Division(Protocol):
    """What makes the records of a table from the records of its source."""

    def is_meant(self, learned: Collection[str], tasks: Collection[str]) -> bool:
        """Whether the division may be meant although the undivided records have readings.

        Args:
            learned: columns that these readings learn.
            tasks: tasks of these readings.
        """
        ...

    def describe(self) -> str:
        """Describe the division, as a clause."""
        ...

    def iter_records(self, records: Iterable[RawRecord], on_bad: Callable[[BadRecord], None]) -> Iterator[RawRecord]:
        """Yield the records; a record of another form goes to `on_bad`."""
        ...


@dataclass(frozen=True, slots=True)
class RawTable:
    """A sample of the records of a source and their columns, in the order of the file.

    Args:
        header: the names of --header.
        first_line: the names that the first line of a table of text gives, if it does.
        flags: further words of the command line that commands repeat.
        num_read: records of the source.
        num_names: first records that are further lines of names.
        division: what made the records from the records of the source.
    """

    source: str
    records: Sequence[RawRecord]
    columns: Mapping[str, Column]
    header: Sequence[str] = ()
    flags: Sequence[str] = ()
    num_read: int = 0
    first_line: Sequence[str] = ()
    num_names: int = 0
    division: Division | None = None

    @property
    def num_records(self) -> int:
        return len(self.records)

    def list_values(self, name: str, most: int | None = None) -> list[object]:
        """List the values of a column, None where a record has none; with `most` of the first records only."""
        return [find_value(record.fields, name) for record in self.records[:most]]

    def describe(self, name: str) -> Column:
        """Describe a column, or a part of one that is named by dots."""
        return self.columns.get(name) or describe_column(name, self.list_values(name))


def build_table(
    source: str,
    records: Iterable[RawRecord],
    *,
    header: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> RawTable:
    """Describe up to MAX_RECORDS records, a sample of all."""
    first, num_read = draw_records(records, MAX_RECORDS)
    values: dict[str, list[object]] = {}
    for record in first:
        # the reader numbers records without an id, and copies a column Id
        copies = [value for key, value in record.fields.items() if key.lower() == "id" != key]
        has_id = record.has_own_id and str(record.fields.get("id")) not in map(str, copies)
        for key, value in record.fields.items():
            if key != "id" or has_id:
                values.setdefault(key, []).append(value)
    least = LABELLED if len(first) >= MIN_RECORDS else LABELLED_FEW
    columns: dict[str, Column] = {}
    for key, of_key in values.items():
        for name in _list_names(key, of_key):
            all_values = [find_value(record.fields, name) for record in first]
            columns[name] = describe_column(name, all_values, least=least)
    first_line = () if header else read_first_line(source)
    return RawTable(source, first, columns, header, flags, num_read, first_line)


def read_table(source: str, header: Sequence[str], flags: Sequence[str]) -> RawTable:
    """Read a source with names for its columns; bad records, which another reading reports, are passed over."""
    records = read_records(source, header=header, on_bad=ignore_bad_record)
    return build_table(source, records, header=header, flags=flags)


def describe_form(source: str) -> list[str]:
    """Describe what is unusual in how the first file of a source is written, if that is a table of text."""
    path, _, form = _read_head(source)
    note = ""
    if form == "workbook":
        note = describe_sheets(path)
    elif form == "csv":
        note = describe_quotes(path)
    return [note] if note else []


def read_first_line(source: str) -> list[str]:
    """Read the names of the columns from the first file of a source, if that is a table of text."""
    path, head, form = _read_head(source)
    return read_first_cells(head, path) if form in ("csv", "workbook") else []


def _read_head(source: str) -> tuple[Path, bytes, str]:
    """Read the beginning of the first file of a source; return its path, the first bytes and the format, "" for a
    source that is no data file or folder of them.
    """
    if is_hub_name(source) or not Path(split_sheet(source)[0]).exists() or is_saved_dataset(Path(source)):
        return Path(source), b"", ""
    path = list_tables(source)[0]
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    return path, head, detect_format(head, path)


def find_value(fields: Mapping[str, object], name: str) -> object:
    """Return the value of a column, dotted for a part of an object or list (`translation.en`); None without one."""
    found = find_column(fields, name)
    return found[0] if found else None


def describe_column(name: str, values: Sequence[object], *, least: float = LABELLED) -> Column:
    """Describe the values of one column.

    Args:
        least: records per value, from which on values may be labels.

    >>> column = describe_column("y", ["late", "late", "refund", "late", "refund", "late", ""])
    >>> column.kind, column.num_filled, column.values, column.has_labels
    ('text', 6, {'late': 4, 'refund': 2}, True)
    """
    filled = [value for value in values if not is_empty_cell(value)]
    if not filled:
        return Column(name, "empty", 0, 0, {})
    texts = [*map(as_text, filled)]
    counts = Counter(texts)
    kind = _find_kind(filled, texts)
    lengths = [*map(len, texts)]
    mean_words = statistics.fmean(map(count_words, texts))
    has_fractions = kind == "number" and any(map(FRACTION.fullmatch, counts))
    # codes: long ones, or different single words with digits
    has_codes = sum(map(bool, map(LONG_CODE.fullmatch, texts))) > 0.9 * len(texts)
    if mean_words <= 1.2 and len(counts) > 0.9 * len(texts) and not has_fractions:
        num_with_digits = sum(any(map(str.isdigit, text)) for text in texts)
        has_codes |= num_with_digits > 0.5 * len(texts)
    first = [text[:2_000] for text in texts[:200]]  # code is looked for in these
    few: dict[str, int] = {}
    if kind in ("text", "number") and len(counts) <= MAX_LABELS and max(lengths) <= MAX_LABEL_CHARS:
        few = dict(counts.most_common())
    return Column(
        name,
        kind,
        len(filled),
        len(counts),
        few,
        mean_words,
        statistics.fmean(lengths),
        max(lengths),
        texts[0],
        code_share=count_matches(CODE, first) / len(first),
        has_fractions=has_fractions,
        has_codes=has_codes,
        least=least,
    )


def count_words(text: str) -> int:
    """Count words; of scripts that have no blanks between words, two characters count as one.

    >>> count_words("red hat"), count_words("什么是人工智能")
    (2, 3)
    """
    return max(len(text.split()), len(WITHOUT_BLANKS.findall(text)) // 2)


def count_matches(form: re.Pattern[str], texts: Iterable[str]) -> int:
    """Count the texts that hold a form."""
    return sum(form.search(text) is not None for text in texts)


def as_text(value: object) -> str:
    """Return a value as text, without surrounding space; true and false as files have them."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def read_list(value: object) -> Sequence[object] | None:
    """Return a list, also if it is written as text; None for other values."""
    found = parse_tags(value.strip(), ",") if isinstance(value, str) else value
    return cast("Sequence[object]", found) if isinstance(found, list | tuple) else None


def is_empty_cell(value: object) -> bool:
    """Whether a cell holds nothing: null, NaN, an empty list or object, a text such as "" or "n/a"."""
    empty = replace_empty_cell(value) is None or value in ([], {})
    return empty or (isinstance(value, str) and is_missing_label(value))


def are_cells_empty(fields: Mapping[str, object], names: Iterable[str]) -> bool:
    """Whether a record has nothing in any of some columns."""
    return all(is_empty_cell(find_value(fields, name)) for name in names)


def _list_names(key: str, values: Sequence[object]) -> dict[str, None]:
    """List the columns of some values: an object that holds a text has one, dotted, for each of its members.

    {A: text} is a list of choices. A list of one object with two texts, in all records, counts as that object; a list
    of documents as their texts together.

    >>> list(_list_names("x", [{"en": "a hat", "de": "ein Hut"}])), list(_list_names("x", [[{"in": "a", "out": "b"}]]))
    (['x.en', 'x.de'], ['x.0.in', 'x.0.out'])
    """
    filled = [value for value in values if value]
    is_single = bool(filled) and all(isinstance(value, list) and len(value) == 1 for value in filled)
    names: dict[str, None] = {}
    stem = f"{key}.0" if is_single else key
    are_documents = not is_single and key.casefold() in DOCUMENTS.split()
    for value in filled:
        inner = value[0] if is_single else value  # pyright: ignore
        parts = inner if isinstance(inner, Mapping) else {}
        num_texts = sum(isinstance(part, str) for part in parts.values())
        member = _find_text_member(value) if are_documents and isinstance(value, list) else ""
        if member:
            names[f"{key}.*.{member}"] = None
        elif num_texts > is_single and any(len(name) > 1 for name in parts):
            names |= {f"{stem}.{name}": None for name in parts}
        else:
            names[key] = None
    return names or {key: None}


def _find_text_member(items: Sequence[object]) -> str:
    """Find the member that all objects of a list have a text in."""
    objects = [item for item in items if isinstance(item, Mapping)]
    for name in DOCUMENT_TEXTS:
        if objects and all(isinstance(one.get(name), str) for one in objects):
            return name
    return ""


def _find_kind(values: Sequence[object], texts: Sequence[str]) -> Kind:
    if all(isinstance(value, list) for value in values):
        return "list"
    if any(isinstance(value, list | Mapping) for value in values):
        return "object"
    for kind, form in FORMS.items():
        if all(map(form.fullmatch, texts)):
            return kind
    return "text"


def find_wholes(table: RawTable, columns: Mapping[str, Column]) -> dict[str, list[str]]:
    """Find the texts that are made of at least two others, and of words that repeat: the whole prompt with its answer.

    Returns: column -> the columns that it holds.
    """
    texts = [name for name, column in columns.items() if column.has_text and column.mean_words >= 2]
    texts.sort(key=lambda name: -columns[name].mean_chars * columns[name].num_filled)
    records = table.records[:: 1 + table.num_records // NUM_COMPARED]
    # each cell once: a survey of people has hundreds of texts, and each is looked for in each longer one
    cells = {name: [as_text(find_value(one.fields, name) or "") for one in records] for name in texts}
    num_filled = {name: sum(map(bool, cells[name])) for name in texts}
    found: dict[str, list[str]] = {}
    for place, name in enumerate(texts[:-2]):
        frames: list[tuple[set[str], str]] = []
        for row, frame in enumerate(cells[name]):
            held: set[str] = set()
            for part in texts[place + 1 :]:
                value = cells[part][row]
                if value and value in frame:
                    held.add(part)
                    frame = frame.replace(value, " ", 1)
            frames.append((held, "".join(frame.split())))
        times = Counter(part for held, _ in frames for part in held)
        parts = [part for part in texts if times[part] > 0.9 * num_filled[part]]
        # where a cell is blank, its text is a part of the frame
        whole = [frame for held, frame in frames if held.issuperset(parts)]
        if len(parts) > 1 and len({*whole}) <= max(3, 0.1 * len(whole)) < len(whole):
            found[name] = parts
    return found
