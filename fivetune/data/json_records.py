"""Records out of JSON: SQuAD documents, flat documents, arrays, objects by id, JSON lines; one record after the other.

In: a binary stream. Out: RawRecord or BadRecord, in the order of the file. Memory holds one article at most.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

from fivetune.data.json_text import Repeated, TooLong, Window, decode_line, flaw, kind_of
from fivetune.data.source_files import MAX_RECORD_BYTES, BadRecord, lines, not_utf8, shown, too_long
from fivetune.errors import DataError
from fivetune.types import RawRecord

RECORD_LISTS = ("data", "questions")  # where a document keeps its records: SQuAD's key, BioASQ's key
_DOCUMENT_FORM = (
    "Allowed: {'data': [...]} (SQuAD or flat), {'questions': [...]}, {id: object}, an array of objects, JSONL. "
    "Name the list 'data'."
)
_QUESTION_FORM = (
    "A question has 'question' (text), 'answers' (a list of objects with 'text' and 'answer_start') and in SQuAD 2.0 "
    "'is_impossible' (true or false); its paragraph has 'context' (text) and 'qas' (a list)."
)


def jsonl_records(file: IO[bytes], path: Path) -> Iterator[RawRecord | BadRecord]:
    """One record per line; blank lines are passed over."""
    for number, line in lines(file):
        if line.strip():
            yield _line_record(line, path, number)


def _line_record(line: bytes, path: Path, number: int) -> RawRecord | BadRecord:
    where = f"{path}:{number}"
    if len(line) > MAX_RECORD_BYTES:
        return BadRecord(where, too_long("the line"))
    torn = not line.endswith(b"\n")
    value, wrong = None, ""
    try:
        value, wrong = decode_line(line.decode("utf-8-sig" if number == 1 else "utf-8").strip())
    except UnicodeDecodeError as error:
        if not (torn and error.reason == "unexpected end of data"):
            raise not_utf8(path, error, line=number) from error
        wrong = "the last character is incomplete"
    if wrong and b"\0" in line:
        wrong = f"NUL byte at column {line.index(0) + 1}"
    elif wrong and torn:
        wrong = f"the last line is cut off: it has no line end, and {wrong}"
    if wrong:
        return BadRecord(where, f"{wrong}. Allowed is one JSON object per line. Repair or remove the line.")
    return _record(value, where)


def _record(value: Any, where: str) -> RawRecord | BadRecord:
    if isinstance(value, dict):
        return RawRecord(value, where)
    return BadRecord(
        where, f"{kind_of(value)}: {shown(value)}. A record is an object {{name: value}}. Repair or remove it."
    )


def document_records(file: IO[bytes], path: Path) -> Iterator[RawRecord | BadRecord]:
    """The records of a JSON document: an array of objects, an object with such an array under one of RECORD_LISTS, or
    an object of objects, {id: record}, as PubMedQA has it.

    An element that has "paragraphs" is a SQuAD article and gives one record per question.
    """
    window, by_id = Window(file, path), False
    if window.peek() == "[":
        yield from _list_records(window, f"{path}: ")
    elif window.peek() == "{":
        by_id = yield from _listed_records(window, path)
    else:
        value = window.value()
        raise DataError(f"{path}: {kind_of(value)}: {shown(value)}. {_DOCUMENT_FORM}")
    if window.peek():
        raise window.error("data after the end of the document")
    if by_id:
        file.seek(0)
        yield from _records_by_id(Window(file, path), path)


def _listed_records(window: Window, path: Path) -> Generator[RawRecord | BadRecord, None, bool]:
    """The records of the lists in an object; at its end, whether it has none of them but objects, records by id."""
    seen: dict[str, str] = {}
    for key in window.members():
        if key in seen:
            raise window.error(f"the key {key!r} stands more than once")
        if key in RECORD_LISTS and window.peek() == "[":
            seen[key] = ""
            yield from _list_records(window, f"{path}: {key}")
            continue
        seen[key] = kind_of(window.value())
    by_id = set(seen.values()) == {kind_of({})} and not seen.keys() & {*RECORD_LISTS}
    if not by_id and all(seen.values()):
        raise DataError(_no_list(path, seen))
    return by_id


def _records_by_id(window: Window, path: Path) -> Iterator[RawRecord]:
    for key in window.members():
        value = window.value()
        value.setdefault("id", key)
        yield RawRecord(value, f"{path}: {key!r}")


def _no_list(path: Path, seen: dict[str, str]) -> str:
    for name in RECORD_LISTS:
        if name in seen:
            return f"{path}: {name!r} is {seen[name]}. It must be a list of records. Correct the file."
    keys = ", ".join(repr(key) for key in list(seen)[:8]) or "none"
    return f"{path}: no list of records: the keys are {keys}. {_DOCUMENT_FORM}"


def _list_records(window: Window, place: str) -> Iterator[RawRecord | BadRecord]:
    for index in window.items():
        where = f"{place}[{index}]"
        try:
            value = window.value()
        except TooLong as error:
            yield from _long_article(window, where, error)
            continue
        if isinstance(value, dict) and "paragraphs" in value:
            yield from _article_records(value, where)
        else:
            yield _record(value, where)


def _long_article(window: Window, where: str, error: TooLong) -> Iterator[RawRecord | BadRecord]:
    """An article over the limit, paragraph by paragraph; its title is known only if it stands before them."""
    if window.peek() != "{":
        raise error
    title, found = "", False
    for key in window.members():
        if key == "paragraphs" and window.peek() == "[":
            found = True
            for index in window.items():
                yield from _paragraph_records(window.value(), f"{where}.paragraphs[{index}]", title)
        else:
            value = window.value()
            title = value if key == "title" and isinstance(value, str) else title
    if not found:
        raise error


def _article_records(article: dict[str, Any], where: str) -> Iterator[RawRecord | BadRecord]:
    paragraphs, title = article["paragraphs"], article.get("title") or ""
    if isinstance(article, Repeated):
        yield BadRecord(where, flaw(article) or "")
    elif not isinstance(paragraphs, list):
        yield BadRecord(where, f"'paragraphs' is {kind_of(paragraphs)}. Allowed is a list. Correct the file.")
    else:
        for index, paragraph in enumerate(paragraphs):
            yield from _paragraph_records(paragraph, f"{where}.paragraphs[{index}]", title)


def _paragraph_records(paragraph: Any, where: str, title: Any) -> Iterator[RawRecord | BadRecord]:
    if not isinstance(paragraph, dict):
        yield BadRecord(where, f"{kind_of(paragraph)}: {shown(paragraph)}. Allowed is an object. {_QUESTION_FORM}")
    elif isinstance(paragraph, Repeated):
        yield BadRecord(where, flaw(paragraph) or "")
    elif not isinstance(paragraph.get("qas"), list):
        yield BadRecord(where, f"{_lacking(paragraph, 'qas')}. {_QUESTION_FORM}")
    else:
        for index, question in enumerate(paragraph["qas"]):
            place = f"{where}.qas[{index}]"
            if wrong := flaw(question) or _question_flaw(question, paragraph):
                yield BadRecord(place, wrong)
            else:
                yield RawRecord(flat_question(question, context=paragraph["context"], title=title), place)


def flat_question(question: dict[str, Any], *, context: str, title: Any = "") -> dict[str, Any]:
    """One question of a SQuAD document as flat fields, answers turned into columns; -1 is an unknown start.

    Answers and `is_impossible` that the file leaves out stay out: only the task knows what that means.

    >>> flat_question({"id": "q1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 4}]},
    ...               context="Dr. Ann slept.", title="Ann")["answers"]
    {'text': ['Ann'], 'answer_start': [4]}
    """
    fields = {name: question[name] for name in ("id", "question") if name in question}
    fields["title"], fields["context"] = title, context
    answers = question.get("answers")
    if answers is not None:
        fields["answers"] = {
            "text": [answer["text"] for answer in answers],
            "answer_start": [answer.get("answer_start", -1) for answer in answers],
        }
    if "is_impossible" in question:
        fields["is_impossible"] = question["is_impossible"]
    return fields


def _question_flaw(question: Any, paragraph: dict[str, Any]) -> str:
    wrong = ""
    if not isinstance(question, dict):
        wrong = f"{kind_of(question)}: {shown(question)}, not an object"
    elif not isinstance(question.get("question"), str):
        wrong = _lacking(question, "question")
    elif not isinstance(paragraph.get("context"), str):
        wrong = f"its paragraph: {_lacking(paragraph, 'context')}"
    elif not isinstance(question.get("is_impossible", False), bool):
        wrong = _lacking(question, "is_impossible")
    elif not isinstance(question.get("answers") or [], list):
        wrong = _lacking(question, "answers")
    else:
        wrong = next(filter(None, map(_answer_flaw, question.get("answers") or [], count())), "")
    return f"{wrong}. {_QUESTION_FORM}" if wrong else ""


def _answer_flaw(answer: Any, index: int) -> str:
    if not isinstance(answer, dict):
        return f"answers[{index}]: {kind_of(answer)}, not an object"
    if not isinstance(answer.get("text"), str):
        return f"answers[{index}]: {_lacking(answer, 'text')}"
    if not isinstance(answer.get("answer_start", -1), int):
        return f"answers[{index}]: {_lacking(answer, 'answer_start')}"
    return ""


def _lacking(fields: dict[str, Any], name: str) -> str:
    if name in fields:
        return f"{name!r} is {kind_of(fields[name])}: {shown(fields[name])}"
    return f"no {name!r}; the keys are {', '.join(repr(key) for key in list(fields)[:8]) or 'none'}"
