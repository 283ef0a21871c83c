"""The choices of a question, in the forms that data sets have, and the right one of them.

In: a record and the columns of its choices: one, whose value is a list, an object or a text that holds one, or a column
for each choice. Out: Choices, of which `find` gives the place of an answer: a text, a letter or another name, a number.
"""

from __future__ import annotations

import ast
import json
import re
import string
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fivetune.errors import RecordError
from fivetune.tasks import get_column, is_missing_label
from fivetune.types import RawRecord

CORRECT_TYPES = ("correct answer", "correct")  # values of `type` that mark the right choice
LETTERS = string.ascii_lowercase
# A) or 1. before a choice
MARK = re.compile(r"(?:^|(?<=[\s,;|]))\(?([a-z]|\d)\s?[).:、．：]\s*", re.IGNORECASE)
ENUMERATOR = re.compile(r"[^\W\d_]|\d{1,2}")
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
LATEX = (
    "times|text[a-z]*|t?frac|tbinom|theta|tanh|therefore|tilde|triangle[a-z]*|thinspace|neq|nabla|notin|nmid|nleq|ngeq|"
    "newline|nearrow|nexists|n?rightarrow|right|rangle|rfloor|rceil|rbrace|rbrack|root"
)
"""Commands that begin as the escapes of tabs and line ends do, and go on as no word does."""
MATH = re.compile(rf"\$|\\\(|\\(?:{LATEX})(?![a-zA-Z])")
MATH_LATEX = f"{LATEX}|tan|tau|to|top|ne|neg|nu|ni|not|rho|rm"  # where the text has mathematics
ESCAPES = r"""\\([\\"'/\n]|u[\da-fA-F]{4}|U[\da-fA-F]{8}|x[\da-fA-F]{2}|(?!(?:COMMANDS)(?![a-zA-Z]))[nrt])?"""
ESCAPE = re.compile(ESCAPES.replace("COMMANDS", LATEX))
MATH_ESCAPE = re.compile(ESCAPES.replace("COMMANDS", MATH_LATEX))
"""A backslash with what makes it an escape; bells, backspaces and form feeds are none, as no text has them."""


class Choices(NamedTuple):
    """The choices of one question.

    Args:
        texts: at least two.
        places: of each, its place among all columns or items, from 0: those that are blank have no text.
        names: of each, what an answer may call it.
        marked: the index of the one that the data mark as right, None without one.
    """

    texts: Sequence[str]
    places: Sequence[int]
    names: Sequence[Sequence[str]]
    marked: int | None = None

    def find(self, answer: object, *, numbers_from: int | None = None, names_first: bool = False) -> int | None:
        """Find the index of the choice that an answer means: its text, a name, or its place from 0; None without one.

        Args:
            numbers_from: the number of the first choice; answers are numbers then.
            names_first: whether a name precedes an equal text.

        >>> choices = Choices(["2", "1"], [0, 1], [["a"], ["b"]])
        >>> choices.find("1"), choices.find("(B)"), choices.find(1, numbers_from=1), choices.find("c")
        (1, 1, 0, None)
        """
        texts: dict[str, int] = {}
        names: dict[str, int] = {}
        numbers: dict[str, int] = {}
        for index, place in enumerate(self.places):
            texts.setdefault(_normalize_text(self.texts[index]), index)  # of equal texts the first
            names |= dict.fromkeys(map(_normalize_text, self.names[index]), index)
            numbers[str((numbers_from or 0) + place)] = index
        word = _normalize_text(str(answer))
        if numbers_from is not None:
            return numbers.get(word.removesuffix(".0"))
        for known in (names, texts, numbers) if names_first else (texts, names, numbers):
            if word in known:
                return known[word]
        return names.get(word.strip("()[].:"))


def _normalize_text(text: str) -> str:
    return " ".join(text.casefold().split())


def read_choices(record: RawRecord, columns: Sequence[str]) -> Choices:
    """Read the choices of a record. Raises RecordError for a value that holds none."""
    given: object
    if len(columns) > 1:
        given = [get_column(record, name) for name in columns]
        marks = [split_enumerator(name)[1] for name in columns]
        letters = marks if marks[0] == "a" else LETTERS
        items: list[_Item] = []
        for letter, mark, column, value in zip(letters, marks, columns, given, strict=False):
            own = [letter, mark, column] if len(column) > 1 else [letter, mark]
            items.append(_Item(as_choice(value), own, is_right=False))
    else:
        given = get_column(record, columns[0])
        items = _list_items(parse_choices(given) if isinstance(given, str) else given)
    texts: list[str] = []
    places: list[int] = []
    names: list[Sequence[str]] = []
    marked: list[int] = []
    for place, item in enumerate(items):
        if not item.text:
            continue
        if item.is_right:
            marked.append(len(texts))
        texts.append(item.text)
        places.append(place)
        names.append(item.names)
    if not 2 <= len(texts) <= len(LETTERS):
        raise RecordError(
            record.where,
            f"{', '.join(columns)} is {given!r:.80}. It must be a list of 2 to {len(LETTERS)} texts, none empty, "
            'of {"text": ...}, or {"text": [...], "label": [...]}, or a text that holds one.',
        )
    return Choices(texts, places, names, marked[0] if len(marked) == 1 else None)


class _Item(NamedTuple):
    text: str
    names: Sequence[str]
    is_right: bool


def as_choice(value: object) -> str:
    """Return the text of a choice; numbers count, blank ones do not."""
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    return "" if is_missing_label(text) else text


def split_enumerator(name: str) -> tuple[str, str]:
    """Split a name into what it says and its letter or number; "" without one.

    >>> [split_enumerator(name) for name in ("answer_A", "option1", "B. choice", "opc")]
    [('answer', 'a'), ('option', '1'), ('choice', 'b'), ('op', 'c')]
    """
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[^\W\d_A-Z])(?=[A-Z])", "_", name))
    places = [place for place, word in enumerate(words) if ENUMERATOR.fullmatch(word)]
    if places:
        mark = words.pop(places[-1])
        return "_".join(words).casefold(), mark.casefold()
    last = name[-1:].casefold()
    if last in tuple(LETTERS[:8]):
        return name[:-1].casefold(), last
    return name.casefold(), ""


def parse_literal(text: str) -> object:
    """Parse a list or object that is written as JSON, Python or NumPy write it; None for other texts.

    Line ends may stand in its quotes, and commands of LaTeX with one backslash: they are no escapes.

    >>> parse_literal(r'["$2 \\times 3$", "a\\nb"]') == [r"$2 \\times 3$", "a\\nb"]
    True
    """
    text = (MATH_ESCAPE if MATH.search(text) else ESCAPE).sub(_keep_letters, text)
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    plain = re.sub(r"array\((\[.*?\])(?:, dtype=\w+)?\)", r"\1", text, flags=re.DOTALL)
    plain = re.sub(r"""(?<=['"])\s+(?=['"])""", ", ", plain)
    plain = QUOTED.sub(_escape_line_ends, plain)
    try:
        with warnings.catch_warnings(action="ignore"):  # of what would be odd in a program, such as `5kg`
            return ast.literal_eval(plain)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _keep_letters(escape: re.Match[str]) -> str:
    """Return an escape as it is; a backslash that begins none is doubled, and so is a letter."""
    return escape[0] if escape[1] else "\\\\"


def _escape_line_ends(quoted: re.Match[str]) -> str:
    return quoted[0].replace("\r", "").replace("\n", "\\n")


def parse_choices(text: str) -> object:
    """Parse a text that holds choices: JSON, Python or NumPy as files have them, "A) hat B) coat", or lines; else None.

    >>> parse_choices('["hat", "coat"]'), parse_choices("{'A': 'hat', 'B': 'coat'}"), parse_choices("['hat' 'coat']")
    (['hat', 'coat'], {'A': 'hat', 'B': 'coat'}, ['hat', 'coat'])
    >>> parse_choices("a ) hat , b ) coat"), parse_choices("hat|coat"), parse_choices("a hat, a coat")
    ({'a': 'hat', 'b': 'coat'}, ['hat', 'coat'], None)
    """
    text = text.strip()
    if text[:1] in ("[", "{"):
        return parse_literal(text)
    marks: list[re.Match[str]] = []
    for match in MARK.finditer(text):
        if match[1].casefold() in (LETTERS[len(marks) % 26], str(len(marks) + 1)):
            marks.append(match)
    if len(marks) > 1 and marks[0].start() == 0:
        ends = [mark.start() for mark in marks[1:]]
        choices: dict[str, str] = {}
        for mark, end in zip(marks, [*ends, len(text)], strict=True):
            choices[mark[1]] = text[mark.end() : end].strip(" ,;|\n")
        return choices
    for sign in ("\n", "|", ";"):
        if sign in text:
            return [part.strip() for part in text.split(sign)]
    return None


def _list_items(given: object) -> list[_Item]:
    names: Sequence[object] = [*LETTERS]
    if isinstance(given, Mapping) and "text" not in given:
        names, given = list(given), list(given.values())
    elif isinstance(given, Mapping):
        names = given.get("label") or names
        given = given.get("text")
    values = given if isinstance(given, list | tuple) else []
    items: list[_Item] = []
    for value, name in zip(values, names, strict=False):
        if isinstance(value, Mapping):
            items.append(_read_object(value, str(name)))
        else:
            items.append(_Item(as_choice(value), [str(name)], is_right=False))
    return items


def _read_object(value: Mapping[object, object], name: str) -> _Item:
    """Read {"text": ..., "label": ..., "type": ...} under any names: the longest text, and a short text as its name."""
    texts = [part for part in value.values() if isinstance(part, str) and part not in CORRECT_TYPES]
    text = value.get("text") or max(texts, key=len, default="")
    names: list[str] = []
    for key in ("label", "id", "key", "letter", "index"):
        if key in value and value[key] != text:
            names.append(str(value[key]))
    short = [part for part in texts if part != text and ENUMERATOR.fullmatch(part)]
    is_right = value.get("type") in CORRECT_TYPES or any(part is True for part in value.values())
    return _Item(as_choice(text), [*names, *short] or [name], is_right)
