"""Describe the columns of unknown data: kinds of values, how many are filled and distinct, lengths in characters.

In: a source. Out: a RawTable of its first records, and errors for data that nothing can be learned from.
"""

from __future__ import annotations

import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from fivetune.data.source_files import BadRecord, quote_value
from fivetune.data.tables import replace_empty_cell
from fivetune.errors import DataError
from fivetune.tasks import is_missing_label
from fivetune.types import JsonTable, RawRecord

Kind = Literal["text", "number", "date", "link", "list", "object", "empty"]

MIN_RECORDS = 10  # fewer leave no validation or test set
MAX_RECORDS = 20_000  # records that the guesses are based on
MAX_LABELS = 200  # a column with more distinct values is not taken for labels
MAX_LABEL_CHARS = 60

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?")
_DATE = re.compile(r"(?:\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4})(?:[T ].*)?")
_LINK = re.compile(r"(?:https?://|www\.)\S+|\S+@\S+\.\w+")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the first records.

    Args:
        num_filled: records with a value that is not blank.
        num_distinct: distinct values.
        values: value -> records, of a column with few and short values; else empty.
        mean_words, mean_chars, max_chars: of the filled values as text.
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

    @property
    def has_labels(self) -> bool:
        """Whether the values may be labels: few, short, and each of several records on average."""
        return len(self.values) >= 2 and self.num_filled >= 3 * self.num_distinct and self.mean_words <= 5

    @property
    def has_names(self) -> bool:
        """Whether nearly all values differ and none is more than a word, as those of an id."""
        return self.mean_words <= 1.2 and self.num_distinct > 0.9 * self.num_filled

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


@dataclass(frozen=True, slots=True)
class RawTable:
    """The first records of a source and their columns, in the order of the file."""

    source: str
    records: Sequence[RawRecord]
    columns: Mapping[str, Column]

    @property
    def num_records(self) -> int:
        return len(self.records)


def build_table(source: str, records: Iterable[RawRecord], bad: Sequence[BadRecord] = ()) -> RawTable:
    """Describe the first MAX_RECORDS records. Raises DataError for data that no task can be learned from.

    Args:
        bad: where reading `records` appends those that are unreadable; an error names the first.
    """
    first = list(islice(records, MAX_RECORDS))
    names = dict.fromkeys(
        name
        for record in first
        for key, value in record.fields.items()
        if key != "id" or record.has_own_id
        for name in _list_names(key, value)
    )
    columns = {name: describe_column(name, [find_value(record.fields, name) for record in first]) for name in names}
    table = RawTable(source, first, columns)
    _refuse_hopeless(table, bad)
    return table


def find_value(fields: Mapping[str, object], name: str) -> object:
    """Return the value of a column, dotted for that of an object (`translation.en`); None without one."""
    if name in fields:
        return fields[name]
    outer, _, inner = name.partition(".")
    value = fields.get(outer)
    return value.get(inner) if isinstance(value, Mapping) else None


def describe_column(name: str, values: Sequence[object]) -> Column:
    """Describe the values of one column.

    >>> column = describe_column("y", ["late", "late", "refund", "late", "refund", "late", ""])
    >>> column.kind, column.num_filled, column.values, column.has_labels
    ('text', 6, {'late': 4, 'refund': 2}, True)
    """
    filled = [value for value in values if not is_empty_cell(value)]
    if not filled:
        return Column(name, "empty", 0, 0, {})
    texts = [as_text(value) for value in filled]
    counts = Counter(texts)
    kind = _find_kind(filled, texts)
    lengths = [len(text) for text in texts]
    is_short = len(counts) <= MAX_LABELS and max(lengths) <= MAX_LABEL_CHARS and kind in ("text", "number")
    return Column(
        name,
        kind,
        len(filled),
        len(counts),
        dict(counts.most_common()) if is_short else {},
        statistics.fmean(len(text.split()) for text in texts),
        statistics.fmean(lengths),
        max(lengths),
        texts[0],
    )


def as_text(value: object) -> str:
    """Return a value as text, without surrounding space; true and false as files have them."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def find_foreign_share(texts: Iterable[str]) -> tuple[float, str]:
    """Return the share of letters outside the Latin script, and the most frequent script among them.

    >>> find_foreign_share(["Привет, Bob"])
    (0.6666666666666666, 'Cyrillic')
    """
    scripts: Counter[str] = Counter()
    for text in texts:
        scripts.update(unicodedata.name(letter, "?").split()[0] for letter in text if letter.isalpha())
    total = scripts.total()
    num_foreign = total - scripts.pop("LATIN", 0)
    return (num_foreign / total, scripts.most_common(1)[0][0].capitalize()) if num_foreign else (0.0, "")


def is_empty_cell(value: object) -> bool:
    """Whether a cell holds nothing: null, NaN, an empty list or object, a text such as "" or "n/a"."""
    empty = replace_empty_cell(value) is None or value in ([], {})
    return empty or (isinstance(value, str) and is_missing_label(value))


def _list_names(key: str, value: object) -> list[str]:
    """List the columns of a value: those of an object of texts are named with a dot."""
    if isinstance(value, Mapping) and value and all(isinstance(part, str) for part in value.values()):
        return [f"{key}.{name}" for name in value]
    return [key]


def _find_kind(values: Sequence[object], texts: Sequence[str]) -> Kind:
    if all(isinstance(value, list) for value in values):
        return "list"
    if any(isinstance(value, list | Mapping) for value in values):
        return "object"
    forms: dict[Kind, re.Pattern[str]] = {"number": _NUMBER, "date": _DATE, "link": _LINK}
    for kind, form in forms.items():
        if all(form.fullmatch(text) for text in texts):
            return kind
    return "text"


def _refuse_hopeless(table: RawTable, bad: Sequence[BadRecord]) -> None:
    """Raise DataError for too few records, or one column."""
    if table.num_records < MIN_RECORDS:
        noun = "record" if table.num_records == 1 else "records"
        unread = f", and {len(bad):,} that cannot be read; the first: {bad[0].where}: {bad[0].reason}" if bad else ""
        remedy = "Correct the file." if bad else "Collect more."
        raise DataError(
            f"{table.source}: holds {table.num_records} {noun}{unread or '.'} At least {MIN_RECORDS} are needed to "
            f"train on some and score on others; some hundred give a useful model. {remedy}"
        )
    filled = [name for name, column in table.columns.items() if column.kind != "empty"]
    if len(filled) == 1 and "|" in filled[0]:
        raise DataError(
            f"{table.source}: the columns {quote_value(filled[0])} are separated by |. Allowed are commas, semicolons "
            "and tabs. Write it again with one of them."
        )
    if len(filled) < 2:
        raise DataError(
            f"{table.source}: has one column with values, {', '.join(filled) or 'none'}. Training needs inputs and "
            "what is to be learned for them, such as text,label or question,answer. Add the other column."
        )
