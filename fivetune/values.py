"""Tolerant access to values of JSON and YAML files, which may be missing, null or of the wrong type.

In: tables and values. Out: finite numbers, quotients, nested values, dotted keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fivetune.types import JsonTable, JsonValue

_NUMBER = re.compile(r"[\u2212+-]?[\d,.]+(e[+-]?\d+)?( %| s| to [\d.]+| \([\d.,]+ %\))?")


def as_finite_number(value: object) -> float | None:
    """Return a finite number as float; None for any other value, booleans and strings included.

    >>> as_finite_number(3), as_finite_number(True), as_finite_number("3"), as_finite_number(float("nan"))
    (3.0, None, None, None)
    """
    if type(value) is float:  # the usual case of long series
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def divide(numerator: object, denominator: object) -> float | None:
    """Return the quotient; None if an operand is not a finite number or the denominator is 0.

    >>> divide(1, 4), divide(None, 4), divide(1, 0)
    (0.25, None, None)
    """
    top, bottom = as_finite_number(numerator), as_finite_number(denominator)
    return None if top is None or not bottom else top / bottom


def select_finite(values: Iterable[object]) -> list[float]:
    """Return the finite numbers among values, as floats in their order."""
    return [found for value in values if (found := as_finite_number(value)) is not None]


def select_numbers(table: JsonValue) -> dict[str, float]:
    """Return the entries of a table that are finite numbers; {} if the value is not a table.

    >>> select_numbers({"f1": 92, "note": "dev"}), select_numbers(None)
    ({'f1': 92.0}, {})
    """
    items = table.items() if isinstance(table, Mapping) else ()
    return {str(key): found for key, value in items if (found := as_finite_number(value)) is not None}


def get_nested(table: JsonValue, *path: str) -> Any:
    """Follow keys into nested tables; None as soon as one is missing."""
    for key in path:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def flatten_table(table: JsonValue, prefix: str = "") -> JsonTable:
    """Flatten nested tables to dotted keys, in their order; {} if the value is not a table.

    >>> flatten_table({"optimizer": {"name": "adamw", "lr": 0.1}, "device": "cpu"})
    {'optimizer.name': 'adamw', 'optimizer.lr': 0.1, 'device': 'cpu'}
    """
    if not isinstance(table, Mapping):
        return {}
    found: JsonTable = {}
    for key, value in table.items():
        found |= flatten_table(value, f"{prefix}{key}.") or {f"{prefix}{key}": value}
    return found


def is_file_name(name: object) -> bool:
    """Return whether a value from a file is a name inside a folder: a text without a way to elsewhere.

    >>> [is_file_name(name) for name in ("a.bin", "..", "../a", "/a", "a\\\\b", "", 3)]
    [True, False, False, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0:")


def are_numbers(cells: Iterable[str]) -> bool:
    """Whether the known cells of a column are numbers, which a table aligns to the right.

    >>> are_numbers(["1,200", "n/a", "3.4 %"]), are_numbers(["8", "eight"]), are_numbers([""])
    (True, False, False)
    """
    known = [cell for cell in cells if cell not in ("n/a", "")]
    return bool(known) and all(_NUMBER.fullmatch(cell) for cell in known)
