"""What question-answering tasks share: the template of a question, SQuAD's answers, and which of them is learnt.

In: records with `question`, `context`, `title`, and `answers` or `answer`. Out: inputs, gold answers, targets.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from fivetune.errors import DataError, RecordError, suggest_names
from fivetune.metrics.mlqa import Language, parse_language_code
from fivetune.tasks import (
    Head,
    TaskOptions,
    describe_absent_column,
    fill_template,
    get_column,
    get_text,
    list_template_columns,
    shorten_repr,
)
from fivetune.types import JsonTable, RawRecord, TextExample

SEPARATOR = " \\n "  # a backslash and an n: what UnifiedQA saw between the parts of a question
QA_FIELDS = ("question", "context", "title")
TrainAnswers = Literal["first", "all", "random"]


def check_qa_template(template: str) -> str:
    """Return the template if it has {question} and nothing but QA_FIELDS; else raise ValueError."""
    columns = list_template_columns(template)
    for name in columns:
        if name not in QA_FIELDS:
            raise ValueError(f"template {template!r}: there is no {{{name}}}. {suggest_names(name, QA_FIELDS)}")
    if "question" not in columns:
        raise ValueError(f"template {template!r} lacks {{question}}: the model would not see what is asked. Add it")
    return template


def fill_qa_template(record: RawRecord, template: str, *, padded: bool = False) -> tuple[str, tuple[int, int]]:
    """Fill a question-answering template from a record; with the span of the context, (0, 0) if it has none.

    `padded`: with the punctuation of every column set apart (`pad_punctuation`), single spaces between the columns.
    """
    names = list_template_columns(template)
    values = {name: get_text(record, name) for name in names if name != "title"}
    if "title" in names:
        values["title"] = str(get_column(record, "title") or "")
    if padded:
        values = {name: pad_punctuation(value).strip() for name, value in values.items()}
    inputs, spans = fill_template(template, values)
    return inputs, spans.get("context", (0, 0))


def pad_punctuation(text: str) -> str:
    """Spaces around everything but letters, numbers, marks and the underscore, runs of space as one.

    What the T5 paper's models of SQuAD read and write. Source: the SQuAD preprocessor of
    google-research/text-to-text-transfer-transformer.

    >>> pad_punctuation("the U.S. (1776)")
    'the U . S . ( 1776 ) '
    """
    spaced = re.sub(r"[^\w\s]", lambda m: m[0] if unicodedata.category(m[0])[0] == "M" else f" {m[0]} ", text)
    return re.sub(r"\s+", " ", spaced)


def build_qa_meta(record: RawRecord, language: str | None) -> JsonTable:
    """What reports and metrics want to know of a question; the record's own `language` goes before the set's.

    Raises RecordError where the set has a language, so that MLQA's rules apply, and the record's own is no code.
    """
    meta = {"title": str(record.fields.get("title") or ""), "question": record.fields["question"]}
    spoken = record.fields.get("language") or language
    if not spoken:
        return meta
    try:
        return {**meta, "language": parse_language_code(str(spoken)) if language else str(spoken)}
    except ValueError as error:
        raise RecordError(record.where, f"{error}. Correct it, or drop task.language.") from None


def find_gold_span(record: RawRecord, context: tuple[int, int], *, head: Head) -> dict[str, list[int]]:
    """For the extractive head: the span of the first answer in the inputs, if the source gives its offset.

    >>> find_gold_span(RawRecord({"answers": {"text": ["Rollo"], "answer_start": [3]}}, "a.json:1"), (10, 50),
    ...           head="extractive")
    {'answer_span': [13, 18]}
    """
    answers = record.fields.get("answers")
    if head != "extractive" or not isinstance(answers, Mapping):
        return {}
    starts, texts = answers.get("answer_start"), answers.get("text")
    if not starts or not texts or not isinstance(starts[0], int) or not isinstance(texts[0], str):
        return {}
    return {"answer_span": [context[0] + starts[0], context[0] + starts[0] + len(texts[0])]}


def read_gold_answers(record: RawRecord) -> tuple[str, ...] | None:
    """All gold answers in source order; () if the record states that there are none, None if it has no answer column.

    Read from `answers` as SQuAD has it ({"text": [...]}, a list of {"text": ...} or of texts, or any of these as JSON
    text), else from `answer` (one text, or a list). Raises RecordError for other
    forms, and if all answers are blank.
    Some blank ones beside others stay, as "": translated sets have them, and the v1.1 script counts them.

    >>> read_gold_answers(RawRecord({"answers": {"text": ["Rollo", "the Rollo"], "answer_start": [0, 5]}},
    ...     "dev.json:1"))
    ('Rollo', 'the Rollo')
    >>> read_gold_answers(RawRecord({"answers": '["1066"]'}, "dev.csv:2"))
    ('1066',)
    >>> read_gold_answers(RawRecord({"answer": ""}, "dev.csv:3"))
    ()
    >>> read_gold_answers(RawRecord({"question": "Who?"}, "ask.jsonl:1")) is None
    True
    """
    if record.fields.get("answers") is not None:
        return _extract_answer_texts(record, "answers", _parse_answers(record, record.fields["answers"]))
    answer = record.fields.get("answer")
    if answer is None:
        return None
    if isinstance(answer, str):
        return (answer,) if answer.strip() else ()
    return _extract_answer_texts(record, "answer", answer)


def _parse_answers(record: RawRecord, value: object) -> object:
    """A CSV file can only hold `answers` as JSON text; blank text is an empty list."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except json.JSONDecodeError:
        raise RecordError(
            record.where,
            f"answers is the text {shorten_repr(value)}, which is not JSON. Write a list such as "
            f'["one", "two"], or put a single plain answer into a column named answer.',
        ) from None


def _extract_answer_texts(record: RawRecord, name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Mapping) and "text" in value:
        value = [value["text"]] if isinstance(value["text"], str) else value["text"]
    if not isinstance(value, list | tuple):
        raise RecordError(
            record.where, f'{name} is {shorten_repr(value)}. It must be a list of texts or {{"text": [...]}}.'
        )
    texts: list[str] = []
    for i, item in enumerate(value):
        text = item.get("text") if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            raise RecordError(record.where, f"{name}[{i}] is {shorten_repr(value[i])}. Every answer must be text.")
        texts.append(text)
    if texts and not any(map(str.strip, texts)):
        raise RecordError(
            record.where, f"{name} holds empty text only. A question without an answer has an empty list."
        )
    return tuple(text if text.strip() else "" for text in texts)


def read_is_impossible(record: RawRecord) -> bool | None:
    """The column `is_impossible`; None where it is absent or blank. CSV's true, false, 1 and 0 are understood."""
    value = record.fields.get("is_impossible")
    word = str(value).strip().lower()
    if value is None or word == "":
        return None
    if word not in ("true", "false", "1", "0"):
        raise RecordError(record.where, f"is_impossible is {shorten_repr(value)}. It must be true or false.")
    return word in ("true", "1")


def make_missing_answers_error(record: RawRecord) -> RecordError:
    """The error for a record without a column of answers where they are needed."""
    missing = describe_absent_column(record, "answers")
    return RecordError(record.where, f"{missing} Without answers a file is good for `fivetune predict` only.")


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


class QuestionOptions(TaskOptions):
    """What the two versions of SQuAD have in common: answers are parts of the context."""

    main_metric: ClassVar[str] = "f1"

    template: Annotated[str, AfterValidator(check_qa_template)] = Field(
        default="question: {question} context: {context}",
        description="the inputs; may use {question}, {context} and {title}; without {context} it answers blindly",
    )
    train_answers: TrainAnswers = Field(
        default="first",
        description="which gold answers to train on: the first, all distinct ones, or one drawn by the id",
    )
    language: Language | None = Field(
        default=None,
        description="language of the set; MLQA's (ar, de, en, es, hi, vi, zh) are also scored by its rules",
    )
    head: Head = Field(
        default="generate", description="generate writes the answer; extractive points at it in the context"
    )
    pad_punctuation: bool = Field(
        default=False, description="spaces around punctuation in inputs and answers, as the T5 paper had it"
    )

    @property
    def extractive(self) -> bool:
        return True

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """The targets to train on, at least one; an unanswerable question has the phrase."""
        return choose_targets(example, self.train_answers)
