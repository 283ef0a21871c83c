"""Tables in memory as data: pandas DataFrames, data sets of `datasets`, and lists of records.

In: a table. Out: its rows as records, or a JSONL file of them with a hash of its content in its name. Neither pandas
nor datasets is imported: a table of theirs exists only where the user has imported them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any, cast

import numpy as np

from fivetune.data.class_labels import find_class_labels, name_row_labels
from fivetune.data.readers.source_files import quote_value
from fivetune.errors import ConfigError, DataError, FiveTuneEnvironmentError, FiveTuneError
from fivetune.rundir.files import replace_file
from fivetune.tasks import shorten_repr
from fivetune.types import JsonTable

FOLDER = "tables"  # in the folder of the run directories
ROWS_AT_ONCE = 10_000
SPLITS = {"train": ("train",), "eval": ("validation", "eval", "dev", "valid")}
"""Names of the splits of a DatasetDict that data.train and data.eval take, the first one that it has."""
EMPTY_CELLS = ("NAType", "NaTType")  # types of pandas.NA and pandas.NaT
ARRAY: type[Any] = np.ndarray
UNWRITABLE = (TypeError, ValueError, RecursionError)  # errors of `format_json`
NUMBERS: tuple[type[Any], ...] = (float, np.bool_, np.integer, np.floating)


def is_table(value: object) -> bool:
    """Return whether a value is a DataFrame of pandas or polars, a data set of `datasets`, or a list of records.

    >>> is_table([{"question": "Why?"}]), is_table(["train.json"]), is_table([])
    (True, False, False)
    """
    if isinstance(value, list | tuple):
        rows = cast("Sequence[object]", value)
        return bool(rows) and isinstance(rows[0], Mapping)
    return bool(_find_kind(value))


def _find_kind(value: object) -> str:
    """Return "frame", "dataset", "splits" or "polars" for an object of pandas, datasets or polars, else ""."""
    kinds = {
        "frame": ("pandas", "DataFrame"),
        "dataset": ("datasets", "Dataset"),
        "splits": ("datasets", "DatasetDict"),
        "polars": ("polars", "DataFrame"),
    }
    for kind, (module, name) in kinds.items():
        own = getattr(sys.modules.get(module), name, None)
        if own is not None and isinstance(value, own):
            return kind
    return ""


def iter_rows(table: object, where: str) -> Iterator[JsonTable]:
    """Yield the rows of a table as records with the values of JSON: an empty cell (NaN, NaT, NA) is null, a date text.

    Args:
        where: name of the table, for messages: `data.train`. Of a DatasetDict it chooses the split by SPLITS; else the
            table has one split.

    Raises DataError for a table without rows, with columns that are not text or occur twice, for a row that is no
    record, and for a value that JSON cannot represent.
    """
    number = 0
    for number, row in enumerate(_iter_raw_rows(_select_split(table, where), where), 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where}[{number - 1}]: is {quote_value(str(row))} ({type(row).__name__}). Allowed are records (dict "
                "of column and value), as in the first row."
            )
        fields = {str(name): replace_empty_cell(value) for name, value in cast("Mapping[Any, object]", row).items()}
        yield {name: _as_text_of_date(value) for name, value in fields.items()}
    if not number:
        raise DataError(f"{where}: the {type(table).__name__} has no rows. Allowed is at least one.")


def _as_text_of_date(value: Any) -> object:
    return value.isoformat() if callable(getattr(value, "isoformat", None)) else value


def _select_split(table: Any, where: str) -> Any:
    if _find_kind(table) != "splits":
        return table
    wanted = SPLITS.get(where.rpartition(".")[2], ())
    found = next((name for name in wanted if name in table), None)
    if found is None and len(table) == 1 and not wanted:
        found = next(iter(table))
    if found is None:
        advice = f"has no split named {' or '.join(wanted)}" if wanted else "has several splits"
        raise DataError(f"{where}: the DatasetDict {advice}. There are: {', '.join(table)}. Give one: dataset[NAME].")
    return table[found]


def _iter_raw_rows(table: Any, where: str) -> Iterator[object]:
    kind = _find_kind(table)
    if not kind:
        yield from table
        return
    if kind == "polars":
        yield from table.iter_rows(named=True)
        return
    names = list(table.columns if kind == "frame" else table.column_names)
    for name in names:
        if not isinstance(name, str):
            raise DataError(
                f"{where}: the column {quote_value(str(name))} is a {type(name).__name__}. Allowed are names. Set "
                "table.columns."
            )
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{where}: two columns are named {name!r}. Rename one.")
    labels = find_class_labels(table.features.to_dict()) if kind == "dataset" else {}
    for first in range(0, len(table), ROWS_AT_ONCE):
        if kind == "frame":
            yield from table.iloc[first : first + ROWS_AT_ONCE].to_dict("records")
        else:
            columns = table.with_format(None)[first : first + ROWS_AT_ONCE]
            for values in zip(*columns.values(), strict=True):
                yield name_row_labels(dict(zip(columns, values, strict=True)), labels)


def save_table(table: object, folder: Path, where: str) -> Path:
    """Write a table as <folder>/<name>-<hash>.jsonl; an equal one is there already, and stays.

    Args:
        where: as for `iter_rows`; its last part is the file's name.

    Raises the errors of `iter_rows`, FiveTuneEnvironmentError for a folder that cannot be written.
    """
    digest = sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as waiting:
            for number, row in enumerate(iter_rows(table, where)):
                try:
                    line = f"{format_json(row)}\n".encode("ascii")
                except UNWRITABLE:
                    raise DataError(find_unwritable_column(row, f"{where}[{number}]")) from None
                digest.update(line)
                waiting.write(line)
            path = folder / f"{where.rpartition('.')[2]}-{digest.hexdigest()[:12]}.jsonl"
            if not path.is_file():
                waiting.seek(0)
                with replace_file(path) as file:
                    while block := waiting.read(1 << 20):
                        file.write(block)
    except OSError as error:
        raise FiveTuneEnvironmentError(
            f"{folder}: cannot be written: {error.strerror}. Choose another run.dir."
        ) from None
    return path


def replace_tables(settings: Mapping[str, Any], replace: Callable[[object, str], str], *, under: str = "") -> JsonTable:
    """Return settings, nested or dotted, with `replace(table, name of the setting)` in place of each table of data.

    Raises ConfigError for a DataFrame or data set as the value of another setting.

    >>> replace_tables({"data": {"train": [{"text": "a"}]}, "run.seed": 1}, lambda table, name: f"{name}.jsonl")
    {'data': {'train': 'data.train.jsonl'}, 'run.seed': 1}
    """
    found: JsonTable = {}
    for key, value in settings.items():
        name = f"{under}.{key}" if under else str(key)
        if isinstance(value, Mapping) and not _find_kind(value):
            found[key] = replace_tables(cast("Mapping[str, Any]", value), replace, under=name)
        elif is_table(value) and re.fullmatch(r"data\.(train|eval)|task\.parts\.[^.]+\.(train|eval)", name):
            found[key] = replace(value, name)
        elif _find_kind(value):
            raise ConfigError(
                f"{name}: a {type(value).__name__}. Allowed for data.train, data.eval and parts of a mixture."
            )
        else:
            found[key] = value
    return found


@contextmanager
def name_tables(tables: Mapping[Path, str]) -> Iterator[None]:
    """Name the rows of tables, not the files that were written of them, in an error: data.train[16].

    Args:
        tables: the name of the setting by the path of its file.
    """
    try:
        yield
    except FiveTuneError as error:
        text = str(error)
        for path, name in tables.items():
            for number in re.findall(rf"{re.escape(str(path))}:(\d+)", text):
                text = text.replace(f"{path}:{number}", f"{name}[{int(number) - 1}]", 1)
            text = text.replace(str(path), name)
        if tables:
            error.args = (text, *error.args[1:])
        raise


def replace_empty_cell(value: Any) -> object:
    """Return None for NaN, NaT and NA, any other value unchanged."""
    if type(value).__name__ in EMPTY_CELLS or (isinstance(value, NUMBERS) and isnan(value)):
        return None
    return value


def find_unwritable_column(record: Mapping[str, object], where: str) -> str:
    """Return the error for the first column that JSON cannot represent, else ""."""
    for name, value in record.items():
        try:
            format_json({name: value})
        except UNWRITABLE as error:
            wrong = "nested too deeply" if isinstance(error, RecursionError) else error
            advice = "Decode it to text" if "of type bytes" in str(error) else "Convert it, or leave the column out"
            return (
                f"{where}[{name!r}]: {wrong}. Allowed are text, numbers, true and false, None, lists and "
                f"objects of them. {advice}."
            )
    return ""


def format_json(value: object) -> str:
    """Format a value as JSON in ASCII, NumPy's numbers and arrays as Python's. Raises one of UNWRITABLE."""
    return json.dumps(value, default=_as_python_value)


def _as_python_value(value: Any) -> object:
    """Convert a number or an array of NumPy. Raises TypeError for any other value, which JSON cannot represent."""
    if isinstance(value, ARRAY) and value.ndim:
        return list(value)
    if isinstance(value, NUMBERS):
        return value.item()
    raise TypeError(f"{shorten_repr(value)} is of type {type(value).__name__}")
