"""Reader of prediction files and no-answer score files: one value per id, or per record in order.

In: what `fivetune predict` writes (JSON lines, a JSON array, CSV, TSV, Parquet, a submission), what pandas makes of it,
`{id: value}` as JSON, BioASQ's {"questions": [{"id": ..., "exact_answer": ...}]}, or lines of text, plain or gzipped; a
folder of such files. Out: rankings of texts, or numbers, by id; in the order of the file if it has no ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fivetune.data.readers.delimited import read_first_cells, read_text_lines
from fivetune.data.readers.json_text import JsonWindow
from fivetune.data.readers.source_files import (
    HEAD_BYTES,
    SUFFIXES,
    get_data_suffix,
    is_workbook,
    list_tables,
    open_bytes,
    open_text,
    quote_value,
)
from fivetune.errors import DataError
from fivetune.scores.metrics import UNANSWERED
from fivetune.types import JsonValue
from fivetune.values import as_finite_number

T = TypeVar("T")
PREDICTION_KEYS = ("prediction", "prediction_text", "exact_answer")
NO_ANSWER_KEYS = ("no_answer_score", "no_answer_probability")
INDEX_NAMES = ("Unnamed: ", "__index_level_")  # of pandas in CSV, as it reads them, and in Parquet
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
SKIPPED: JsonValue = ("skipped",)  # JSON has no tuples


Values = dict[str, T] | list[T | None]
"""Values by id, or by the number of the record; None: the record has none."""


def read_rankings(source: str) -> Values[list[str]]:
    """Read the answers to each question, best first; a single text is a ranking of one.

    Raises DataError for a value that is neither a text nor a list of texts.
    """
    return _read_values(source, keys=PREDICTION_KEYS, parse=_parse_ranking)


def read_no_answer_scores(source: str) -> Values[float]:
    """Read the no-answer score of each prediction. Raises DataError for a value that is not a finite number."""
    return _read_values(source, keys=NO_ANSWER_KEYS, parse=_parse_number)


def _parse_ranking(value: JsonValue) -> list[str]:
    """Convert one text, a list of texts, or BioASQ's list of lists of synonyms to a ranked list of texts.

    A list without synonyms is no answer, as in BioASQ's own program. Raises ValueError for any other value.

    >>> _parse_ranking([["dystrophin", "DMD"], [], "utrophin"]), _parse_ranking([[]])
    (['dystrophin', 'utrophin'], [])
    """
    if isinstance(value, list):
        texts: list[str] = []
        for item in value:
            if item == []:
                continue
            first = _get_first(item)
            if type(first) is not str:
                raise ValueError("A ranking is a list of texts, the best first.")
            texts.append(first)
        return texts
    if type(value) is not str:  # the reader returns JSON's NaN as a subclass of str
        raise ValueError('It must be text; no answer is the empty text "".')
    return [value]


def _get_first(item: JsonValue) -> JsonValue:
    """The first of several synonyms, or the text itself."""
    return item[0] if isinstance(item, list) else item


def _parse_number(value: JsonValue) -> float:
    if isinstance(value, str):  # a cell of a table
        with suppress(ValueError):
            value = float(value)
    if (number := as_finite_number(value)) is None:
        raise ValueError("It must be a finite number.")
    return number


def _read_values(source: str, *, keys: Sequence[str], parse: Callable[[JsonValue], T]) -> Values[T]:
    """Read one value per id from `{id: value}`, or from rows with `id` and one of `keys`; a folder's files are joined.
    Rows and lines without an id give a list.

    Args:
        parse: converts a value; raises ValueError with what is allowed.

    Raises DataError with the file, and the id or the row.
    """
    # An answer without an id is known by its place, so that one without a value keeps its place as None.
    by_id: dict[str, T] = {}
    in_order: list[T | None] = []
    for path in list_tables(source):
        for key, value in _read_file(path, keys):
            try:
                parsed = None if value is SKIPPED else parse(value)
            except ValueError as error:
                what = f"the value of {key!r}" if key is not None else f"value {len(in_order) + 1}"
                raise DataError(f"{path}: {what} is {quote_value(value)}. {error}") from None
            if key is None:
                in_order.append(parsed)
            elif key in by_id:
                raise DataError(f"{path}: the id {key!r} occurs twice. Ids must be unique. Keep one.")
            elif parsed is not None:
                by_id[key] = parsed
    if by_id and in_order:
        raise DataError(f"{source}: some rows have an id, others none. Allowed are ids for all, or for none. Add them.")
    if not by_id and all(value is None for value in in_order):
        raise DataError(f"{source}: contains no values. {_describe_expected(keys)}")
    return by_id or in_order


def _read_file(path: Path, keys: Sequence[str]) -> Iterator[tuple[str | None, JsonValue]]:
    """Yield (id or None, value) of each entry of a file; SKIPPED for a record without a value that has its place."""
    # By the content first: files of predictions come from many programs, and their names say little.
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b"PAR1") or is_workbook(head):
        yield from _read_table(path, keys)
        return
    with open_text(path) as file:
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if start in (b"{", b"[") or get_data_suffix(path) in JSON_SUFFIXES:
            yield from _read_pairs(JsonWindow(file, path), path, keys)
            return
        # A table without a suffix is known by its first line; anything else is lines of text.
        cells = read_first_cells(head, path)
        names_columns = any(cell in keys for cell in cells) or (len(cells) > 1 and "id" in cells)
        if get_data_suffix(path) or names_columns:
            yield from _read_table(path, keys)
        else:
            yield from ((None, row.cells[0]) for row in read_text_lines(file, path, ()))


def _read_table(path: Path, keys: Sequence[str]) -> Iterator[tuple[str | None, JsonValue]]:
    """Yield (id, value) of each row; without a column of ids (None, value)."""
    from fivetune.data.readers.records import read_records  # readers of many formats, not for --help

    for record in read_records(str(path)):
        fields = dict(record.fields)
        if SUFFIXES.get(get_data_suffix(path)) == "workbook":  # has numbers, and no empty text
            fields = {name: "" if value is None else str(value) for name, value in fields.items()}
        if not record.has_own_id:  # the reader numbers records without an id
            del fields["id"]
        yield _parse_row(fields, path, keys)


def _find_value_column(fields: Mapping[str, object], keys: Sequence[str]) -> str | None:
    """Return the name of the value: one of the keys, with _2 after it where `predict` found that name in the record; or
    the only name, without the id and the index of pandas.

    >>> _find_value_column({"id": "1", "text": "a", "prediction": "x", "prediction_2": "y"}, PREDICTION_KEYS)
    'prediction_2'
    >>> _find_value_column({"id": "1", "Unnamed: 0": "0", "label": "y"}, PREDICTION_KEYS)
    'label'
    """
    for key in keys:
        named = [name for name in fields if re.sub("(_2)+$", "", name) == key]
        if named:
            return named[-1]  # `predict` adds its columns after the record's own
    others = [name for name in fields if name.lower() != "id" and not name.startswith(INDEX_NAMES)]
    return others[0] if len(others) == 1 else None


def _read_pairs(window: JsonWindow, path: Path, keys: Sequence[str]) -> Iterator[tuple[str | None, JsonValue]]:
    """Yield (id or None, value) of each entry; JSON lines are concatenated objects, so one loop reads all formats."""
    while start := window.peek():
        if start == "[":
            for _ in window.iter_indices():
                yield _parse_row(window.read_value(), path, keys)
        elif start == "{":
            # Pairs, not a table: an id that stands twice must be seen.
            members: list[tuple[str, JsonValue]] = [(name, window.read_value()) for name in window.iter_keys()]
            table = dict(members)
            rows = table.get("questions")
            if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):  # BioASQ's form
                for row in rows:
                    if any(key in row for key in keys):
                        yield _parse_row(row, path, keys)
            elif table.keys().isdisjoint(("id", "skipped", *keys)):  # {id: value}
                yield from members
            elif len(table) < len(members):
                raise DataError(f"{path}: {quote_value(table)} has a duplicate key. Keys must be unique. Remove one.")
            else:
                yield _parse_row(table, path, keys)
        else:
            raise DataError(
                f"{path}: holds {quote_value(window.read_value())} where an object was expected. "
                f"{_describe_expected(keys)}"
            )


def _parse_row(row: JsonValue, path: Path, keys: Sequence[str]) -> tuple[str | None, JsonValue]:
    """Return the id of a row, or None, and its value; SKIPPED for a record that `predict` could not answer.

    An answer that is withheld as unsure becomes UNANSWERED.
    """
    if isinstance(row, str):
        return None, row
    table = row if isinstance(row, dict) else {}
    own_id = None
    if table.get("id") is not None:
        own_id = str(table["id"])
    if table.get("skipped"):
        return own_id, SKIPPED
    if keys is PREDICTION_KEYS and str(table.get("unsure")).lower() == "true":  # a table has words for it
        return own_id, UNANSWERED
    column = _find_value_column(table, keys)
    if column is None:
        raise DataError(f"{path}: no {keys[0]} in {', '.join(table) or quote_value(row)}. {_describe_expected(keys)}")
    return own_id, table[column]


def _describe_expected(keys: Sequence[str]) -> str:
    return (
        f"Allowed is one JSON object {{id: value}}; JSON lines, CSV, TSV or Parquet with id and {keys[0]}, as predict "
        "writes them; or one row or line of text per record, in the order of the references."
    )
