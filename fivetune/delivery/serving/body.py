"""The bodies of requests: JSON checked strictly, and what is asked for in it.

In: bytes. Out: records or texts. Raises RequestError with the HTTP code for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, cast

from fivetune.data.readers.json_text import decode_line, describe_kind, describe_value, find_json_error
from fivetune.data.readers.source_files import quote_value
from fivetune.errors import suggest_names
from fivetune.types import JsonTable

MAX_DEPTH = 32
MAX_INTEGER = 2**63
COMPLETION_OPTIONS: dict[str, tuple[object, ...]] = {
    "temperature": (0, None),
    "n": (1, None),
    "best_of": (1, None),
    "stream": (False, None),
    "echo": (False, None),
    "logprobs": (None,),
    "stop": (None, []),
    "suffix": (None, ""),
}
"""Options of completions with the values that describe what a run does."""
IGNORED_OPTIONS = ("user", "seed", "top_p", "frequency_penalty", "presence_penalty", "logit_bias")
"""Without effect on a search for the most probable answer where they have their default value."""
NEUTRAL = {"top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}


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


def read_inputs(value: Any, *, max_records: int) -> tuple[list[JsonTable | str], bool]:
    """Read the records or texts of a prediction, and whether they are a list.

    >>> read_inputs({"inputs": ["a", "b"]}, max_records=2), read_inputs({"question": "Why?"}, max_records=2)
    ((['a', 'b'], True), ([{'question': 'Why?'}], False))
    """
    if not isinstance(value, dict):
        raise _refuse(f'body: {describe_kind(value)}. Allowed is one record, or {{"inputs": [records or texts]}}.')
    table = cast("JsonTable", value)
    if not isinstance(table.get("inputs"), list):
        return [table], False
    if len(table) > 1:
        other = next(name for name in table if name != "inputs")
        raise _refuse(f"body: {other!r} beside the list 'inputs'. Leave it out.")
    return check_inputs(table["inputs"], "inputs", max_records=max_records), True


def choose_model(given: Any, names: Sequence[str]) -> str:
    """Choose the model that a request names; without a name the only one.

    Raises RequestError 404 for another name, 422 if several are served and none is named.
    """
    known = ", ".join(names)
    if given is None and len(names) == 1:
        return names[0]
    if given is None:
        raise _refuse(f"model: missing. Several are served: {known}. Name one.")
    if given not in names:
        shown = repr(given[:100]) if isinstance(given, str) else describe_value(given)
        raise RequestError(404, "unknown_model", f"model: {shown}: not served here. Known: {known}.")
    return given


def read_query(query: Iterable[tuple[str, str]]) -> str | None:
    """Read the name of a model from the parameters of a URL. Raises RequestError 422 for other ones."""
    given = list(query)
    for name, _ in given:
        if name != "model":
            raise _refuse(f"{name[:100]!r}: no parameter of this route. Allowed is model.")
    if len(given) > 1:
        raise _refuse("model: given twice. Name one.")
    return given[0][1] if given else None


def check_inputs(found: list[Any], name: str, *, max_records: int) -> list[JsonTable | str]:
    """Return a list of records or texts. Raises RequestError 413 for too many, 422 for others."""
    if not found:
        raise _refuse(f"{name}: an empty list. Give at least one.")
    if len(found) > max_records:
        raise RequestError(
            413, "too_many_records", f"{name}: {len(found)} records. Allowed are {max_records}. Send several requests."
        )
    for number, one in enumerate(found):
        if not isinstance(one, dict | str):
            raise _refuse(f"{name}[{number}]: {describe_value(one)}. Allowed are records and texts.")
    if len({isinstance(one, str) for one in found}) > 1:
        raise _refuse(f"{name}: texts and records are mixed. Give one kind.")
    return found


def read_prompts(value: Any, *, max_records: int, max_new_tokens: int | None) -> list[JsonTable | str]:
    """Read the prompts of /v1/completions. Raises RequestError for options that the run does not support.

    Args:
        max_new_tokens: most tokens of an answer, which `max_tokens` must allow; None: answers have no tokens.
    """
    if not isinstance(value, dict):
        raise _refuse(f'body: {describe_kind(value)}. Allowed is {{"prompt": TEXT}}.')
    table = cast("JsonTable", value)
    names = {"model", "prompt", "max_tokens", *COMPLETION_OPTIONS, *IGNORED_OPTIONS}
    for name, given in table.items():
        if name not in names:
            raise _refuse(f"{name!r}: no option of completions. {suggest_names(name, names)}")
        if name in COMPLETION_OPTIONS and not _is_among(given, COMPLETION_OPTIONS[name]):
            wrong = "is not offered: the server returns the most probable answer, whole"
            raise _refuse(f"{name}: {quote_value(given)} {wrong}. {_advise_value(COMPLETION_OPTIONS[name][0])}")
        if name in NEUTRAL and not _is_among(given, (NEUTRAL[name], None)):
            wrong = "is not offered: the server does not sample"
            raise _refuse(f"{name}: {quote_value(given)} {wrong}. {_advise_value(NEUTRAL[name])}")
    asked = table.get("max_tokens")
    if asked is not None and (type(asked) is not int or asked < 1):
        raise _refuse(f"max_tokens: {describe_value(asked)}. Allowed is a whole number, 1 or more.")
    if asked is not None and max_new_tokens is not None and asked < max_new_tokens:
        raise _refuse(
            f"max_tokens: {asked}, and answers of this run have up to {max_new_tokens} tokens. Leave it out, or start "
            f"the server with --eval.max_new_tokens {asked}."
        )
    prompt = table.get("prompt")
    found = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(one, str) for one in found):
        raise _refuse("prompt: Allowed is a text, or a list of texts.")
    return check_inputs(found, "prompt", max_records=max_records)


def _advise_value(neutral: object) -> str:
    """Name the value that changes nothing: clients may send an option that their user cannot leave out."""
    return "Leave it out." if neutral is None else f"Allowed is {quote_value(neutral)}. Send it, or leave it out."


def _is_among(given: Any, values: Iterable[object]) -> bool:
    """Whether a value is one of several; true and false are no numbers."""
    return any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in values)


def _refuse(message: str) -> RequestError:
    return RequestError(422, "invalid_request", message)
