"""Tolerant conversion of JSON tables to typed records: missing and invalid values become the field's default.

In: a table of a run directory, whose values may be missing, null or of the wrong type.
Out: a frozen record whose fields have the declared types, so that readers need no checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fivetune.types import JsonTable, JsonValue
from fivetune.values import as_finite_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Converter = Callable[[JsonValue], object]  # a value as the type of a field, or _INVALID

LARGEST = 1e100  # sums and squares of larger numbers overflow; no measure of a run comes near
_INVALID = object()  # marks a value that a field's type does not accept


def parse_record(kind: type[T], table: JsonValue, *, on_invalid: Callable[[str], object] | None = None) -> T | None:
    """Build a dataclass from a JSON object.

    Unknown keys are ignored. A value of the wrong type, or a number that is not finite or beyond LARGEST, counts as
    missing: the field takes its default. Returns None if `table` is not an object or lacks a field without a default.

    Args:
        on_invalid: called with the dotted name of each value that counts as missing, nested ones included; null is not.

    >>> from fivetune.rundir.records import BestEval
    >>> parse_record(BestEval, {"step": 3, "metric": "f1", "score": 9, "note": "unknown key"})
    BestEval(step=3, metric='f1', score=9.0, loss=None, averaged=())
    >>> parse_record(BestEval, {"step": "3"}), parse_record(BestEval, [])
    (None, None)
    """
    if not isinstance(table, Mapping):
        return None
    values: JsonTable = {}
    for name, convert, required in _describe_fields(kind):
        value = convert(table[name]) if name in table else _INVALID
        if value is not _INVALID:
            values[name] = value
            if on_invalid:
                for place in _list_lost(values[name], table[name], name):
                    on_invalid(place)
            continue
        if on_invalid and table.get(name) is not None:
            on_invalid(name)
        if required:
            return None
    return kind(**values)


def _list_lost(made: DataclassInstance | JsonValue, given: JsonValue, name: str) -> Iterator[str]:
    """Yield the dotted names of the values in `given` that its conversion `made` lacks, other than null."""
    if made is given or given is None:
        return
    if is_dataclass(made) and isinstance(given, Mapping):
        for field in fields(made):
            yield from _list_lost(getattr(made, field.name), given.get(field.name), f"{name}.{field.name}")
    elif isinstance(made, Mapping) and isinstance(given, Mapping):
        for key, value in given.items():
            yield from _list_lost(made.get(str(key)), value, f"{name}.{key}")
    elif isinstance(made, tuple) and isinstance(given, list | tuple) and len(made) == len(given):
        for number, (one, other) in enumerate(zip(made, given, strict=True)):
            yield from _list_lost(one, other, f"{name}.{number}")
    elif made != given:
        yield name


def name_json_type(value: JsonValue) -> str:
    """Return the type of a JSON value as JSON calls it, with its article.

    >>> [name_json_type(value) for value in (None, True, 1, 0.5, "a", [], {})]
    ['null', 'a boolean', 'a number', 'a number', 'a string', 'an array', 'an object']
    """
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")


def parse_records(kind: type[T], tables: Iterable[JsonValue]) -> list[T]:
    """Convert tables to records; tables that `parse_record` refuses are omitted."""
    return [record for table in tables if (record := parse_record(kind, table)) is not None]


@cache
def _describe_fields(kind: type[DataclassInstance]) -> tuple[tuple[str, Converter, bool], ...]:
    """Return (name, converter, required) of each field that is read from JSON."""
    hints = get_type_hints(kind)
    return tuple(
        (field.name, _make_converter(hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    )


@cache
def _make_converter(hint: object) -> Converter:
    """Build the converter to a type, once per type: a long run has 100,000 lines of 30 fields."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (Union, UnionType):
        others = [_make_converter(each) for each in arguments if each is not NoneType]
        return partial(_convert_union, others, None if NoneType in arguments else _INVALID)
    if origin is tuple:
        if arguments[1:] == (Ellipsis,):
            return partial(_convert_list, _make_converter(arguments[0]), is_dataclass(arguments[0]))
        return partial(_convert_tuple, [_make_converter(each) for each in arguments])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return partial(_convert_mapping, _make_converter(arguments[1]))
    if is_dataclass(hint) and isinstance(hint, type):
        return partial(_convert_record, hint)
    if hint is bool or hint is str:
        return partial(_convert_instance, hint)
    return _convert_int if hint is int else _convert_float


def _convert_union(converters: list[Converter], none: object, value: JsonValue) -> object:
    if value is None:
        return none
    for convert in converters:
        if (converted := convert(value)) is not _INVALID:
            return converted
    return _INVALID


def _convert_list(convert: Converter, of_records: bool, value: JsonValue) -> object:
    """Convert a list to a tuple.

    An invalid element is omitted from a list of records, which are independent, but invalidates a list of values, whose
    positions have meanings.
    """
    if not isinstance(value, list | tuple):
        return _INVALID
    converted = tuple(map(convert, value))
    if of_records:
        return tuple(each for each in converted if each is not _INVALID)
    return _INVALID if _INVALID in converted else converted


def _convert_tuple(converters: list[Converter], value: JsonValue) -> object:
    if not isinstance(value, list | tuple) or len(value) != len(converters):
        return _INVALID
    converted = tuple(convert(each) for convert, each in zip(converters, value, strict=True))
    return _INVALID if _INVALID in converted else converted


def _convert_mapping(convert: Converter, value: JsonValue) -> object:
    if not isinstance(value, Mapping):
        return _INVALID
    items = ((str(key), convert(each)) for key, each in value.items())
    return {key: each for key, each in items if each is not _INVALID}


def _convert_record(kind: type[DataclassInstance], value: JsonValue) -> object:
    return found if (found := parse_record(kind, value)) is not None else _INVALID


def _convert_instance(kind: type[object], value: JsonValue) -> object:
    return value if isinstance(value, kind) else _INVALID


def _convert_float(value: JsonValue) -> object:
    number = as_finite_number(value)
    return _INVALID if number is None or abs(number) > LARGEST else number


def _convert_int(value: JsonValue) -> object:
    number = as_finite_number(value)
    if number is None or abs(number) > LARGEST or number != int(number):
        return _INVALID
    return value if isinstance(value, int) else int(number)  # a float would round a large integer
