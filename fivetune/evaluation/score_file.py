"""Reader of prediction files and no-answer score files: one value per id.

In: `{id: value}` as JSON, JSON lines (or a list) of {"id": ..., "prediction": ...}, or BioASQ's
{"questions": [{"id": ..., "exact_answer": ...}]}, plain or gzipped; a folder of such files. Out: rankings of texts, or
numbers, by id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from fivetune.data.json_text import JsonWindow
from fivetune.data.source_files import list_local_files, open_text, quote_value
from fivetune.errors import DataError
from fivetune.types import JsonValue
from fivetune.values import as_finite_number

T = TypeVar("T")
PREDICTION_KEYS = ("prediction", "prediction_text", "exact_answer")
NO_ANSWER_KEYS = ("no_answer_score", "no_answer_probability")


def read_rankings(source: str) -> dict[str, list[str]]:
    """Read the answers to each question, best first; a single text is a ranking of one.

    Raises DataError for a value that is neither a text nor a list of texts.
    """
    return _read_values(source, keys=PREDICTION_KEYS, parse=_parse_ranking)


def read_no_answer_scores(source: str) -> dict[str, float]:
    """Read the no-answer score of each prediction. Raises DataError for a value that is not a finite number."""
    return _read_values(source, keys=NO_ANSWER_KEYS, parse=_parse_number)


def _parse_ranking(value: JsonValue) -> list[str]:
    """Convert one text, a list of texts, or BioASQ's list of lists of synonyms to a ranked list of texts.

    Raises ValueError for any other value.
    """
    if isinstance(value, list):
        texts = [first for item in value if type(first := _get_first(item)) is str]
        if len(texts) < len(value):
            raise ValueError("A ranking is a list of texts, the best first.")
        return texts
    if type(value) is not str:  # the reader returns JSON's NaN as a subclass of str
        raise ValueError('It must be text; no answer is the empty text "".')
    return [value]


def _get_first(item: JsonValue) -> JsonValue:
    return item[0] if isinstance(item, list) and item else item


def _parse_number(value: JsonValue) -> float:
    if (number := as_finite_number(value)) is None:
        raise ValueError("It must be a finite number.")
    return number


def _read_values(source: str, *, keys: Sequence[str], parse: Callable[[JsonValue], T]) -> dict[str, T]:
    """Read one value per id from `{id: value}`, or from rows with `id` and one of `keys`; a folder's files are joined.

    Args:
        parse: converts a value; raises ValueError with what is allowed.

    Raises DataError with the file, and the id or the row.
    """
    values: dict[str, T] = {}
    for path in list_local_files(source):
        with open_text(path) as file:
            for key, value in _read_pairs(JsonWindow(file, path), path, keys):
                try:
                    parsed = parse(value)
                except ValueError as error:
                    raise DataError(f"{path}: the value of {key!r} is {quote_value(value)}. {error}") from None
                if key in values:
                    raise DataError(f"{path}: the id {key!r} occurs twice. Ids must be unique. Keep one.")
                values[key] = parsed
    if not values:
        raise DataError(f"{source}: contains no values. {_describe_expected(keys)}")
    return values


def _read_pairs(window: JsonWindow, path: Path, keys: Sequence[str]) -> Iterator[tuple[str, JsonValue]]:
    """Yield (id, value) of each entry; JSON lines are concatenated objects, so one loop reads all formats."""
    while start := window.peek():
        if start == "[":
            rows = (window.read_value() for _ in window.iter_indices())
            yield from (_parse_row(row, path, keys) for row in rows if not _is_skipped(row))
        elif start == "{":
            members: list[tuple[str, JsonValue]] = [(name, window.read_value()) for name in window.iter_keys()]
            names = [name for name, _ in members]
            rows = dict(members).get("questions")
            if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):  # BioASQ's form
                yield from [_parse_row(row, path, keys) for row in rows if any(key in row for key in keys)]
                continue
            if _is_skipped(dict(members)):
                continue
            is_row = "id" in names and any(key in names for key in keys)
            if is_row and len(set(names)) < len(names):
                raise DataError(
                    f"{path}: {quote_value(dict(members))} has a duplicate key. Keys must be unique. Remove one."
                )
            yield from [_parse_row(dict(members), path, keys)] if is_row else members
        else:
            raise DataError(
                f"{path}: holds {quote_value(window.read_value())} where an object was expected. "
                f"{_describe_expected(keys)}"
            )


def _is_skipped(row: JsonValue) -> bool:
    """Whether a row is a record that `fivetune predict` could not answer."""
    return isinstance(row, dict) and bool(row.get("skipped"))


def _parse_row(row: JsonValue, path: Path, keys: Sequence[str]) -> tuple[str, JsonValue]:
    table = row if isinstance(row, dict) else {}
    present = [key for key in keys if key in table]
    if not present or table.get("id") is None:
        raise DataError(f"{path}: {quote_value(row)} has no id or no {keys[0]}. {_describe_expected(keys)}")
    return str(table["id"]), table[present[0]]


def _describe_expected(keys: Sequence[str]) -> str:
    return f'Allowed is one JSON object {{id: value}}, or lines {{"id": ..., "{keys[0]}": ...}}.'
