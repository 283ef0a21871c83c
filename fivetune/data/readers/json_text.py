"""Decode JSON strictly: one value, the check of a decoded value, and a sliding window over a large document.

In: text or a binary stream. Out: values; errors with file, line and column. Memory holds one element at most.

The decoder is Python's own. The streaming parser ijson is no alternative: it turns lone surrogates into "?", silently
keeps the last of two equal keys, and gives no line in its errors.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fivetune.data.readers.source_files import MAX_RECORD_BYTES, format_too_long_message, make_utf8_error, quote_value
from fivetune.errors import DataError
from fivetune.types import JsonTable

WINDOW_BYTES = 2**18
TOO_MANY_DIGITS = f"a whole number of more than {sys.get_int_max_str_digits():,} digits, which Python does not read"

_WHITE = re.compile(r"[ \t\r\n]*")
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


class DuplicateKeyObject(dict[str, Any]):
    """A JSON object with a duplicate key, the first of which is `key`."""

    key = ""


class _NonFiniteConstant(str):
    """NaN, Infinity or -Infinity: not JSON, but accepted by Python's decoder."""


def _build_object(pairs: list[tuple[str, object]]) -> JsonTable:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    times = Counter(key for key, _ in pairs)
    repeated = DuplicateKeyObject(fields)
    repeated.key = next(key for key in times if times[key] > 1)
    return repeated


_DECODER = json.JSONDecoder(object_pairs_hook=_build_object, parse_constant=_NonFiniteConstant)


def describe_kind(value: object) -> str:
    """Return the JSON type of a value, as messages name it.

    >>> describe_kind([1])
    'a list'
    >>> describe_kind(None)
    'null'
    """
    return _KINDS.get(type(value), "an object" if isinstance(value, dict) else "null")


def describe_value(value: object) -> str:
    """Return the JSON type and the value, as messages name them.

    >>> describe_value([1]), describe_value(None)
    ('a list: [1]', 'null')
    """
    return "null" if value is None else f"{describe_kind(value)}: {quote_value(value)}"


def find_json_error(value: object) -> str | None:
    """Return why a decoded value is unusable, or None: NaN, a duplicate key, a NUL character, half a surrogate pair.

    >>> find_json_error({"question": "Why?", "answers": {"text": ["a\\0b"]}})
    "field 'answers.text[0]': NUL character at position 1. Allowed is text without it. Remove it."
    """
    found = _locate_error(value)
    if found is None:
        return None
    place, wrong = found
    return f"field {place.lstrip('.')!r}: {wrong}" if place else wrong


def _locate_error(value: object) -> tuple[str, str] | None:
    """Return (path such as ".answers.text[0]", error) or None; the path is built only for an error."""
    if isinstance(value, str):
        wrong = _find_text_error(value)
        return ("", wrong) if wrong else None
    if isinstance(value, dict):
        if isinstance(value, DuplicateKeyObject):
            return "", f"the key {value.key!r} occurs more than once. Keys must be unique. Rename or remove one."
        for key, item in value.items():
            if wrong := _find_text_error(str(key)):
                return "", f"the name {quote_value(key)}: {wrong}"
            if found := _locate_error(item):
                return f".{key}{found[0]}", found[1]
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if found := _locate_error(item):
                return f"[{index}]{found[0]}", found[1]
    return None


def _find_text_error(text: str) -> str:
    if isinstance(text, _NonFiniteConstant):
        return f"{text} is not JSON. Allowed are finite numbers and null. Write null."
    if "\0" in text:
        return f"NUL character at position {text.index(chr(0))}. Allowed is text without it. Remove it."
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            return (
                f"{half} at position {error.start} is half a surrogate pair, no character. "
                f"Allowed is valid Unicode. Repair or remove it."
            )
    return ""


def decode_line(text: str) -> tuple[Any, str]:
    """Decode one JSON value: return (value, "") or (None, error).

    >>> decode_line('{"a": 1}')
    ({'a': 1}, '')
    >>> decode_line('{"a" 1}')
    (None, "malformed JSON at column 6: Expecting ':' delimiter, near '1}'")
    """
    try:
        return _DECODER.decode(text), ""
    except json.JSONDecodeError as error:
        near = quote_value(text[error.pos : error.pos + 30]) if error.pos < len(text) else "the end of the line"
        return None, f"malformed JSON at column {error.pos + 1}: {error.msg.removesuffix(' at')}, near {near}"
    except RecursionError:
        return None, "malformed JSON: nested too deeply"
    except ValueError:
        return None, f"malformed JSON: {TOO_MANY_DIGITS}"


class JsonTooLongError(DataError):
    """Raised for a value over MAX_RECORD_BYTES."""


class JsonWindow:
    """Reads a JSON file forwards through a window of text, and keeps line and column for errors."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False
        self._line, self._column = 1, 1  # of the window's first character

    def peek(self) -> str:
        """Return the next character that is not white space without consuming it; "" at the end of the file."""
        while True:
            match = _WHITE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_more()

    def take(self, allowed: str) -> str:
        """Read and return the next character. Raises DataError if it is none of `allowed`."""
        char = self.peek()
        if not char or char not in allowed:
            raise self.make_error(f"Expecting {' or '.join(repr(wanted) for wanted in allowed)}")
        self._at += 1
        return char

    def read_value(self) -> Any:
        """Read one value. Raises JsonTooLongError, consuming nothing, if it is over MAX_RECORD_BYTES."""
        self.peek()
        failed: tuple[str, int] | None = None
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end + 2 < len(self._text) or self._ended:  # else a number may be incomplete: 1, 1e, 1e+
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                before = failed
                failed = (error.msg, error.pos - self._at)
                final = before == failed and not error.msg.startswith("Unterminated")
                if final or self._ended:
                    raise self.make_error(error.msg, at=error.pos) from error
            except RecursionError as error:
                raise self.make_error("nested too deeply") from error
            except ValueError as error:
                raise self.make_error(TOO_MANY_DIGITS) from error
            if len(self._text) - self._at > MAX_RECORD_BYTES:
                line, column = self._locate(self._at)
                raise JsonTooLongError(f"{self._path}:{line}:{column}: {format_too_long_message('this value')}")
            self._read_more()

    def iter_keys(self) -> Iterator[str]:
        """Yield each key of the object at the current position; the caller must read its value before the next key."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            if self.peek() != '"':
                raise self.make_error("Expecting property name enclosed in double quotes")
            key = self.read_value()
            self.take(":")
            yield key
            if self.take(",}") == "}":
                return

    def iter_indices(self) -> Iterator[int]:
        """Yield each index of the list at the current position; the caller must read the item before the next index."""
        self.take("[")
        if self.peek() == "]":
            self.take("]")
            return
        index = 0
        while True:
            yield index
            index += 1
            if self.take(",]") == "]":
                return

    def read_item(self) -> Any:
        """Read one item of a list. Raises DataError for a name before a colon: the list's bracket is missing."""
        value = self.read_value()
        if isinstance(value, str) and self.peek() == ":":
            raise self.make_error(f"Expecting ']' before {quote_value(value)}")
        return value

    def make_error(self, wrong: str, *, at: int | None = None) -> DataError:
        """Return the error for the text at `at` (default: the current position)."""
        at = self._at if at is None else at
        line, column = self._locate(at)
        near = quote_value(self._text[at : at + 30])
        if at >= len(self._text):
            near = "the end of the file: it is cut off"
        return DataError(
            f"{self._path}:{line}:{column}: malformed JSON: {wrong.removesuffix(' at')}, near {near}. Allowed is one "
            f"JSON document, or one object per line in a .jsonl file. Repair it or download it again."
        )

    def _locate(self, at: int) -> tuple[int, int]:
        num_lines = self._text.count("\n", 0, at)
        if num_lines:
            return self._line + num_lines, at - self._text.rfind("\n", 0, at)
        return self._line, self._column + at

    def _read_more(self) -> None:
        """Drop the consumed text and at least double the rest, so that repeated decoding takes linear time in total."""
        self._line, self._column = self._locate(self._at)
        rest = self._text[self._at :]
        chunk = self._file.read(max(WINDOW_BYTES, len(rest)))
        self._ended = not chunk
        try:
            self._text = rest + self._decoder.decode(chunk, final=self._ended)
        except UnicodeDecodeError as error:
            raise make_utf8_error(self._path, error, line=self._line + rest.count("\n")) from error
        self._at = 0
