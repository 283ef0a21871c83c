"""Tasks, one per file: a raw record in, a TextExample out, and back from the model's text to an answer.

A task's file has a docstring with source, licence and one real record, one frozen options class and its `SAMPLE`:

    version                  class variable, raised whenever the same record would give another example
    metrics, main_metric     metric plugins that score it; the score that chooses the best checkpoint
    no_answer_text           target text of an unanswerable question, None where there are none
    to_text(record, *, labelled=True) -> TextExample or None
                             None: skipped on purpose. A bad record raises DataError with record.where and the column.
                             labelled=False (prediction) lets the answers be absent: references (), targets "".
    from_text(text)          the model's text as an answer
    train_targets(example)   one training example for each
    SAMPLE                   (RawRecord, TextExample) that it must convert to

What they share is below: templates, columns, and the question-and-answer fields of SQuAD-like records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from string import Formatter
from typing import Any, ClassVar, Literal, Protocol

from fivetune.errors import DataError, nearest
from fivetune.types import RawRecord, TextExample

QA_FIELDS = ("question", "context", "title")
TrainAnswers = Literal["first", "all", "random"]


class Task(Protocol):
    """What the options class of every file in this folder offers."""

    version: ClassVar[int]

    @classmethod
    def plugin_name(cls) -> str: ...
    def model_dump(self, *, mode: str = ...) -> dict[str, Any]: ...
    @property
    def metrics(self) -> tuple[str, ...]: ...
    @property
    def main_metric(self) -> str: ...
    @property
    def no_answer_text(self) -> str | None: ...
    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None: ...
    def from_text(self, text: str) -> str: ...
    def train_targets(self, example: TextExample) -> tuple[str, ...]: ...


# --- templates ---


def template_pieces(template: str) -> list[tuple[str, str | None]]:
    """A template as (literal, column or None) pairs; a doubled brace is a brace. Raises ValueError.

    >>> template_pieces("question: {question} {{x}}")
    [('question: ', 'question'), (' {', None), ('x}', None)]
    """
    pieces: list[tuple[str, str | None]] = []
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            if name is not None and (spec or conversion or not name):
                raise ValueError("only {column} with a plain name")
            pieces.append((literal, name))
    except ValueError as error:
        raise ValueError(
            f"template {template!r}: {error}. Write a column as {{column}}, a brace as {{{{ or }}}}"
        ) from None
    return pieces


def template_columns(template: str) -> list[str]:
    """Names of the columns in a template, each once; raises ValueError if none is or one stands twice.

    >>> template_columns("question: {question} context: {context}")
    ['question', 'context']
    """
    columns = [name for _, name in template_pieces(template) if name is not None]
    if not columns:
        raise ValueError(
            f"template {template!r} names no column: every record would read the same. Write one as {{column}}"
        )
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ValueError(f"template {template!r} names {{{twice[0]}}} twice. Keep one")
    return columns


def check_qa_template(template: str) -> str:
    """Return the template if it has {question} and nothing but QA_FIELDS; else raise ValueError."""
    columns = template_columns(template)
    for name in columns:
        if name not in QA_FIELDS:
            raise ValueError(f"template {template!r}: there is no {{{name}}}. {nearest(name, QA_FIELDS)}")
    if "question" not in columns:
        raise ValueError(f"template {template!r} lacks {{question}}: the model would not see what is asked. Add it")
    return template


def fill(template: str, values: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """Fill a template; also say where each value lies in the result, as [start, end).

    >>> fill("q: {question} c: {context}", {"question": "Who?", "context": "Rollo."})
    ('q: Who? c: Rollo.', {'question': (3, 7), 'context': (11, 17)})
    """
    text = ""
    spans: dict[str, tuple[int, int]] = {}
    for literal, name in template_pieces(template):
        text += literal
        if name is not None:
            spans[name] = (len(text), len(text) + len(values[name]))
            text += values[name]
    return text, spans


# --- columns ---


def column(record: RawRecord, name: str) -> Any:
    """The value of a column; raises DataError that names the existing ones."""
    if name not in record.fields:
        raise DataError(_missing(record, name))
    return record.fields[name]


def text_column(record: RawRecord, name: str) -> str:
    """The value of a column that must hold text which is not blank."""
    value = column(record, name)
    if not isinstance(value, str):
        raise DataError(f"{record.where}: {name} is {_shown(value)}. It must be text.")
    if not value.strip():
        raise DataError(f"{record.where}: {name} is empty. Give it a text, or set data.on_bad_record: skip.")
    return value


def record_id(record: RawRecord) -> str:
    """The column `id` as text; where there is none, the record's place in its file."""
    value = record.fields.get("id")
    return record.where if value is None or value == "" else str(value)


def _missing(record: RawRecord, name: str) -> str:
    existing = ", ".join(map(str, record.fields)) or "none"
    return (
        f"{record.where}: there is no column {name!r}. Columns: {existing}. "
        f"If one of them is meant, say so with data.columns: {{{name}: its name}}."
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- questions and answers ---


def qa_inputs(record: RawRecord, template: str) -> tuple[str, tuple[int, int]]:
    """Fill a question-answering template from a record; with the span of the context, (0, 0) if it has none."""
    names = template_columns(template)
    values = {name: text_column(record, name) for name in names if name != "title"}
    if "title" in names:
        values["title"] = str(column(record, "title") or "")
    inputs, spans = fill(template, values)
    return inputs, spans.get("context", (0, 0))


def gold_answers(record: RawRecord) -> tuple[str, ...] | None:
    """All gold answers in source order; () if it says that there are none, None if it says nothing about answers.

    Read from `answers` as SQuAD has it ({"text": [...]}, a list of {"text": ...} or of texts, or any of these as JSON
    text), else from `answer` (one text, or a list). Raises DataError for what is neither, and if all answers are blank.
    Some blank ones beside others stay, as "": translated sets have them, and the v1.1 script counts them.

    >>> gold_answers(RawRecord({"answers": {"text": ["Rollo", "the Rollo"], "answer_start": [0, 5]}}, "dev.json:1"))
    ('Rollo', 'the Rollo')
    >>> gold_answers(RawRecord({"answers": '["1066"]'}, "dev.csv:2"))
    ('1066',)
    >>> gold_answers(RawRecord({"answer": ""}, "dev.csv:3"))
    ()
    >>> gold_answers(RawRecord({"question": "Who?"}, "ask.jsonl:1")) is None
    True
    """
    if record.fields.get("answers") is not None:
        return _texts(record, "answers", _parsed(record, record.fields["answers"]))
    answer = record.fields.get("answer")
    if answer is None:
        return None
    if isinstance(answer, str):
        return (answer,) if answer.strip() else ()
    return _texts(record, "answer", answer)


def _parsed(record: RawRecord, value: Any) -> Any:
    """A CSV file can only hold `answers` as JSON text; blank text is an empty list."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except json.JSONDecodeError:
        raise DataError(
            f"{record.where}: answers is the text {_shown(value)}, which is not JSON. Write a list such as "
            f'["one", "two"], or put a single plain answer into a column named answer.'
        ) from None


def _texts(record: RawRecord, name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping) and "text" in value:
        value = [value["text"]] if isinstance(value["text"], str) else value["text"]
    if not isinstance(value, list | tuple):
        raise DataError(f'{record.where}: {name} is {_shown(value)}. It must be a list of texts or {{"text": [...]}}.')
    texts: list[Any] = [item.get("text") if isinstance(item, Mapping) else item for item in value]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{record.where}: {name}[{i}] is {_shown(value[i])}. Every answer must be text.")
    if texts and not any(map(str.strip, texts)):
        raise DataError(
            f"{record.where}: {name} holds empty text only. A question without an answer has an empty list."
        )
    return tuple(text if text.strip() else "" for text in texts)


def said_impossible(record: RawRecord) -> bool | None:
    """The column `is_impossible`; None where it is absent or blank. CSV's true, false, 1 and 0 are understood."""
    value = record.fields.get("is_impossible")
    word = str(value).strip().lower()
    if value is None or word == "":
        return None
    if word not in ("true", "false", "1", "0"):
        raise DataError(f"{record.where}: is_impossible is {_shown(value)}. It must be true or false.")
    return word in ("true", "1")


def no_gold(record: RawRecord) -> DataError:
    """The error for a record that says nothing about its answers where they are needed."""
    return DataError(_missing(record, "answers") + " Without answers a file is good for `fivetune predict` only.")


def choose_targets(example: TextExample, train_answers: TrainAnswers) -> tuple[str, ...]:
    """The targets to train on: the first answer, all distinct ones, or one drawn by a hash of the example's id.

    The draw is the same in every run and on every machine, and takes an answer that several annotators gave more often.

    >>> example = TextExample("q1", "Who?", "Rollo", ("Rollo", "Rolf", "Rollo"))
    >>> choose_targets(example, "first"), choose_targets(example, "all"), choose_targets(example, "random")
    (('Rollo',), ('Rollo', 'Rolf'), ('Rollo',))
    """
    if not example.references:
        raise DataError(f"{example.id}: there is no answer to learn. Train on records that have answers.")
    golds = [answer for answer in example.references if answer]
    if not golds:  # unanswerable: the phrase, not a gold answer
        return (example.targets,)
    if train_answers == "all":
        return tuple(dict.fromkeys(golds))
    if train_answers == "random":
        digest = hashlib.blake2b(example.id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return (golds[int.from_bytes(digest, "big") % len(golds)],)
    return (golds[0],)
