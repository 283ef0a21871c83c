"""Tolerant conversion of JSON to typed records, by pydantic: missing and invalid values become the field's default.

In: lines and tables of a run directory, whose values may be missing, null or of the wrong type.
Out: frozen records whose fields have the declared types, so that readers need no checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, ValidationError

from fivetune.types import JsonValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Keys: TypeAlias = tuple[str | int, ...]  # the way to a value inside nested tables and lists

LARGEST = 1e100  # sums and squares of larger numbers overflow; no measure of a run comes near


def parse_line(kind: type[T], line: bytes, *, largest: float = LARGEST) -> T | None:
    """Build a dataclass from a line of JSON; None if it has any flaw, which `parse_record` leaves out and names."""
    try:
        return _build_validator(kind, largest).validate_json(line)
    except ValidationError:
        return None


def parse_record(
    kind: type[T], table: JsonValue, *, invalid: list[str] | None = None, largest: float = LARGEST
) -> T | None:
    """Build a dataclass from a JSON object.

    Unknown keys are ignored. A value of the wrong type, or a number that is not finite or beyond `largest`, counts as
    missing: the field takes its default.

    Args:
        invalid: receives the dotted name of each value that counts as missing, nested ones included; null is not.

    Returns None if `table` is not an object or lacks a field without a default.

    >>> from fivetune.rundir.records import BestEval
    >>> parse_record(BestEval, {"step": 3, "metric": "f1", "score": 9, "note": "unknown key"})
    BestEval(step=3, metric='f1', score=9.0, loss=None, averaged=())
    >>> parse_record(BestEval, {"step": "3"}), parse_record(BestEval, [])
    (None, None)
    """
    validator = _build_validator(kind, largest)
    lost: dict[str, None] = {}  # an ordered set of dotted names
    while True:
        try:
            record = validator.validate_python(table)
            break
        except ValidationError as error:
            flaws = error.errors(include_url=False, include_context=False)
        # Each round mends or leaves out what the validator names, then validates again.
        places: set[Keys] = set()
        for flaw in flaws:
            place = flaw["loc"]
            value = flaw["input"]
            if flaw["type"] == "int_type" and isinstance(value, float) and value.is_integer() and abs(value) <= largest:
                table = _replace(table, place, int(value))  # 3.0, as programs write a column of numbers and nulls
                continue
            place = _widen_place(place, flaw["type"])
            places.add(place)
            if place and (name := _name_loss(table, place)):
                lost[name] = None
        if () in places:  # the table is no object, or lacks a field
            record = None
            break
        # The last element of a list first: leaving out an element moves all elements behind it.
        for place in sorted(places, reverse=True):
            table = _replace(table, place, None)
    if invalid is not None:
        invalid += (name for name in lost if not _is_inside(name, lost))
    return record


def _widen_place(place: Keys, kind: str) -> Keys:
    """Return the place of what a flaw takes with it: the value itself, its record, or its list.

    An invalid element is left out of a list of records, which are independent; it invalidates a list of values, whose
    positions have meanings.
    """
    if kind == "missing" and isinstance(place[-1], str):  # a field of a record; a number is a position of a tuple
        return place[:-1]
    if kind != "dataclass_type":
        while isinstance(place[-1], int):
            place = place[:-1]
    return place


def _name_loss(table: JsonValue, place: Keys) -> str:
    """Return the dotted name of a value that is left out, or of its list if it is an element; "" for null."""
    value: Any = table
    for key in place:
        value = value[key]
    if isinstance(place[-1], int):
        place = place[:-1]
    elif value is None:
        return ""
    return ".".join(map(str, place))


def _is_inside(name: str, others: Collection[str]) -> bool:
    """Return whether the name is inside another lost name: a lost record stands for all its fields."""
    return any(name.startswith(f"{other}.") for other in others)


def _replace(table: Any, place: Keys, value: int | None) -> JsonValue:
    """Return a table with another value at a place, or without it (None); what is on the way to it is copied."""
    key, *inner = place
    copied = table.copy()
    if inner:
        copied[key] = _replace(copied[key], tuple(inner), value)
    elif value is None:
        del copied[key]
    else:
        copied[key] = value
    return copied


@cache
def _build_validator(kind: type[T], largest: float) -> SchemaValidator:
    """Build the validator of a record once: a long run has 100,000 lines of 30 fields."""
    schema = TypeAdapter(kind).core_schema
    _set_limits(schema, largest)
    return SchemaValidator(schema)


def _set_limits(schema: object, largest: float) -> None:
    """Make the numbers and booleans of a schema strict, finite and at most `largest`, in place.

    Pydantic takes "1" and true as numbers otherwise. Its strict mode as a whole takes no dataclass from a table.
    """
    if isinstance(schema, list | tuple):
        for one in cast("Sequence[object]", schema):
            _set_limits(one, largest)
    elif isinstance(schema, dict):
        part = cast("dict[str, object]", schema)
        if part.get("type") == "float":
            part |= {"strict": True, "allow_inf_nan": False, "ge": -largest, "le": largest}
        elif part.get("type") == "int":
            part |= {"strict": True, "ge": -int(largest), "le": int(largest)}
        elif part.get("type") == "bool":
            part["strict"] = True
        for one in part.values():
            _set_limits(one, largest)


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
    records: list[T] = []
    for table in tables:
        record = parse_record(kind, table)
        if record is not None:
            records.append(record)
    return records
