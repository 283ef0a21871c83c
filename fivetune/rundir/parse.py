"""JSON tables -> typed records; whatever is missing or of another kind is None or the field's default.

In: a table that was read back from a run directory, in which anything may be missing, null or of another kind.
Out: a frozen record whose fields hold what their types say, so that no reader has to check them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fivetune.values import as_finite_number

T = TypeVar("T")

_INVALID = object()  # of no use as a value of the field


def parse_record(kind: type[T], table: object) -> T | None:
    """Build a dataclass from a JSON object.

    Unknown keys are ignored. A value of the wrong kind, or a number that is not finite, counts as missing: the field
    takes its default. Returns None where `table` is no object or lacks a field without a default.

    >>> from fivetune.rundir.records import BestEval
    >>> parse_record(BestEval, {"step": 3, "metric": "f1", "score": 9, "note": "unknown key"})
    BestEval(step=3, metric='f1', score=9.0, loss=None)
    >>> parse_record(BestEval, {"step": "3"}), parse_record(BestEval, [])
    (None, None)
    """
    if not isinstance(table, Mapping):
        return None
    values: dict[str, Any] = {}
    for name, hint, required in _describe_fields(kind):
        value = _convert(table[name], hint) if name in table else _INVALID
        if value is not _INVALID:
            values[name] = value
        elif required:
            return None
    return kind(**values)


def parse_records(kind: type[T], tables: Iterable[object]) -> list[T]:
    """The tables that are records of a kind; the others are left out."""
    return [record for table in tables if (record := parse_record(kind, table)) is not None]


@cache
def _describe_fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether it is required, of each field that JSON can give."""
    hints = get_type_hints(kind)
    return tuple(
        (field.name, hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)  # type: ignore[arg-type]
    )


def _convert(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or _INVALID."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        if value is None:
            return None if NoneType in arguments else _INVALID
        converted = (_convert(value, each) for each in arguments if each is not NoneType)
        return next((each for each in converted if each is not _INVALID), _INVALID)
    if origin is tuple:
        return _convert_sequence(value, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return _INVALID
        items = ((str(key), _convert(each, arguments[1])) for key, each in value.items())
        return {key: each for key, each in items if each is not _INVALID}
    if is_dataclass(hint) and isinstance(hint, type):
        return found if (found := parse_record(hint, value)) is not None else _INVALID
    return _convert_scalar(value, hint)


def _convert_sequence(value: Any, arguments: tuple[Any, ...]) -> Any:
    """A list as a tuple.

    Elements of another kind are left out of records, each of which stands for itself, and invalidate a list of values
    as a whole, because its positions have meanings.
    """
    if not isinstance(value, list | tuple):
        return _INVALID
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if is_dataclass(arguments[0]):
            return tuple(each for one in value if (each := _convert(one, arguments[0])) is not _INVALID)
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        return _INVALID
    converted = tuple(_convert(each, hint) for each, hint in zip(value, arguments, strict=True))
    return _INVALID if any(each is _INVALID for each in converted) else converted


def _convert_scalar(value: Any, hint: Any) -> Any:
    if hint is bool or hint is str:
        return value if isinstance(value, hint) else _INVALID
    number = as_finite_number(value)
    if number is None or hint not in (int, float):
        return _INVALID
    if hint is float:
        return number
    return int(value) if value == int(value) else _INVALID
