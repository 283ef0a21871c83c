"""Values as JSON and YAML gave them, in which anything may be missing, null or of another kind.

In: tables and values that were read back. Out: finite numbers, what stands under a path of keys, dotted keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None for everything else.

    >>> number(3), number(True), number("3"), number(float("nan"))
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def known(values: Iterable[Any]) -> list[float]:
    """The finite numbers among values."""
    return [found for value in values if (found := number(value)) is not None]


def dig(table: Any, *path: str) -> Any:
    """Follow keys into nested tables; None as soon as one is missing."""
    for key in path:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def flat(table: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, in their order; {} for what is no table.

    >>> flat({"optimizer": {"name": "adamw", "lr": 0.1}, "device": "cpu"})
    {'optimizer.name': 'adamw', 'optimizer.lr': 0.1, 'device': 'cpu'}
    """
    if not isinstance(table, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
