"""Values of JSON and YAML files, in which anything may be missing, null or of another kind.

In: tables and values. Out: finite numbers, quotients, the value under a path of keys, dotted keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def as_finite_number(value: Any) -> float | None:
    """A finite number, or None for everything else.

    >>> as_finite_number(3), as_finite_number(True), as_finite_number("3"), as_finite_number(float("nan"))
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def divide(numerator: Any, denominator: Any) -> float | None:
    """The quotient; None where one of them is no finite number or the denominator is 0.

    >>> divide(1, 4), divide(None, 4), divide(1, 0)
    (0.25, None, None)
    """
    top, bottom = as_finite_number(numerator), as_finite_number(denominator)
    return None if top is None or not bottom else top / bottom


def select_finite(values: Iterable[Any]) -> list[float]:
    """The finite numbers among values."""
    return [found for value in values if (found := as_finite_number(value)) is not None]


def select_numbers(table: Any) -> dict[str, float]:
    """The finite numbers of a table by their keys; {} for any other value.

    >>> select_numbers({"f1": 92, "note": "dev"}), select_numbers(None)
    ({'f1': 92.0}, {})
    """
    items = table.items() if isinstance(table, Mapping) else ()
    return {str(key): found for key, value in items if (found := as_finite_number(value)) is not None}


def get_nested(table: Any, *path: str) -> Any:
    """Follow keys into nested tables; None as soon as one is missing."""
    for key in path:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def flatten_table(table: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, in their order; {} for any other value.

    >>> flatten_table({"optimizer": {"name": "adamw", "lr": 0.1}, "device": "cpu"})
    {'optimizer.name': 'adamw', 'optimizer.lr': 0.1, 'device': 'cpu'}
    """
    if not isinstance(table, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flatten_table(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{key}": value}
        )
    return found
