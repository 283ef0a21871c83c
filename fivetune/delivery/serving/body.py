"""The bodies of requests: JSON checked strictly, and what is asked for in it.

In: bytes. Out: records or texts. Raises RequestError with the HTTP code for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, cast

from fivetune.data.readers.json_text import decode_line, describe_kind, describe_value, find_json_error
from fivetune.types import JsonTable

MAX_DEPTH = 32
MAX_INTEGER = 2**63


class RequestError(Exception):
    """A request that is not answered.

    Args:
        code: HTTP status code.
        kind: the `type` of the answer's error.
        retry_seconds: value of Retry-After.
    """

    def __init__(self, code: int, kind: str, message: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.code, self.kind, self.retry_seconds = code, kind, retry_seconds


def parse_json(body: bytes) -> Any:
    """Parse a body. Raises RequestError 400 for what is not strict JSON, and for values beyond sense."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(400, "invalid_json", f"body: not UTF-8 at byte {error.start}. Send JSON in UTF-8.") from None
    value, wrong = decode_line(text.strip())
    wrong = wrong or _find_excess(value) or find_json_error(value) or ""
    if wrong:
        raise RequestError(400, "invalid_json", f"body: {wrong}")
    return value


def _find_excess(value: Any) -> str:
    """Return the error for a value that is nested too deeply or a number too large, level by level; "" without one."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        for one in level:
            if isinstance(one, float) and not isfinite(one):
                return "a number is too large for a double. Send it as text."
            if type(one) is int and abs(one) >= MAX_INTEGER:
                return "a whole number has more than 64 bits. Send it as text."
        children: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                children += cast("JsonTable", one).values()
            elif isinstance(one, list):
                children += cast("list[Any]", one)
        level = children
        if not level:
            return ""
    return f"nested too deeply. Allowed are {MAX_DEPTH} levels."


def check_table(value: Any, form: str) -> JsonTable:
    """Return the table of a request. Raises RequestError 422 for anything else; `form` shows what is allowed."""
    if not isinstance(value, dict):
        raise refuse(f"body: {describe_kind(value)}. Allowed is {form}.")
    return cast("JsonTable", value)


def read_inputs(value: Any, *, max_records: int) -> tuple[list[JsonTable | str], JsonTable | None]:
    """Read the records or texts of a prediction, and what stands beside a list of them; None: they are no list.

    >>> read_inputs({"inputs": ["a"], "n": 2}, max_records=2), read_inputs({"question": "Why?"}, max_records=2)
    ((['a'], {'n': 2}), ([{'question': 'Why?'}], None))
    """
    table = check_table(value, 'one record, or {"inputs": [records or texts]}')
    if not isinstance(table.get("inputs"), list):
        return [table], None
    others = {name: given for name, given in table.items() if name != "inputs"}
    return check_inputs(table["inputs"], "inputs", max_records=max_records), others


def read_min_confidence(value: Any, columns: Iterable[str]) -> float | None:
    """Take the least confidence of an answer out of a body; None if it names none, or if the records have that column.

    >>> body = {"question": "Why?", "min_confidence": 0.9}
    >>> read_min_confidence(body, ["question"]), body
    (0.9, {'question': 'Why?'})
    """
    if not isinstance(value, dict) or "min_confidence" not in value or "min_confidence" in columns:
        return None
    return read_number("min_confidence", cast("JsonTable", value).pop("min_confidence"), float, 0, 1)


def read_number(name: str, given: Any, kind: type[int] | type[float], least: float, most: float) -> float:
    """Return a number of a request. Raises RequestError 422 for another value, and for one out of range."""
    allowed = f"Allowed is {'a whole number' if kind is int else 'a number'}, {least:,} to {most:,}."
    if type(given) is not int and (kind is int or type(given) is not float):  # true and false are no numbers
        raise refuse(f"{name}: {describe_value(given)}. {allowed}")
    if not least <= given <= most:
        raise refuse(f"{name}: {given} is out of range. {allowed}")
    return given


def choose_model(given: Any, names: Sequence[str]) -> str:
    """Choose the model that a request names; without a name the only one.

    Raises RequestError 404 for another name, 422 if several are served and none is named.
    """
    known = ", ".join(names)
    if given is None and len(names) == 1:
        return names[0]
    if given is None:
        raise refuse(f"model: missing. Several are served: {known}. Name one.")
    if given not in names:
        shown = repr(given[:100]) if isinstance(given, str) else describe_value(given)
        raise RequestError(404, "unknown_model", f"model: {shown}: not served here. Known: {known}.")
    return given


def read_query(query: Iterable[tuple[str, str]]) -> str | None:
    """Read the name of a model from the parameters of a URL. Raises RequestError 422 for other ones."""
    given = list(query)
    for name, _ in given:
        if name != "model":
            raise refuse(f"{name[:100]!r}: no parameter of this route. Allowed is model.")
    if len(given) > 1:
        raise refuse("model: given twice. Name one.")
    return given[0][1] if given else None


def check_inputs(found: list[Any], name: str, *, max_records: int) -> list[JsonTable | str]:
    """Return a list of records or texts. Raises RequestError 413 for too many, 422 for others."""
    if not found:
        raise refuse(f"{name}: an empty list. Give at least one.")
    if len(found) > max_records:
        raise RequestError(
            413, "too_many_records", f"{name}: {len(found)} records. Allowed are {max_records}. Send several requests."
        )
    for number, one in enumerate(found):
        if not isinstance(one, dict | str):
            raise refuse(f"{name}[{number}]: {describe_value(one)}. Allowed are records and texts.")
    if len({isinstance(one, str) for one in found}) > 1:
        raise refuse(f"{name}: texts and records are mixed. Give one kind.")
    return found


def refuse(message: str) -> RequestError:
    """Make the error of a request that asks for what is not offered."""
    return RequestError(422, "invalid_request", message)
