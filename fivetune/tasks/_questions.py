"""Shared code of question-answering tasks: templates, gold answers in SQuAD's forms, and the training targets.

In: records with `question`, `context`, `title`, and `answers` or `answer`. Out: inputs, gold answers, targets.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fivetune.errors import DataError, RecordError, suggest_names
from fivetune.scores.metrics.mlqa import MLQA_LANGUAGES, Language, parse_language_code
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

SEPARATOR = " \\n "  # a backslash and an n: UnifiedQA's separator between the parts of a question
QA_FIELDS = ("question", "context", "title")
TrainAnswers = Literal["first", "all", "random"]


def check_qa_template(template: str) -> str:
    """Return the template if it has {question} and no columns but QA_FIELDS; else raise ValueError."""
    columns = list_template_columns(template)
    for name in columns:
        if name not in QA_FIELDS:
            raise ValueError(f"template {template!r}: there is no {{{name}}}. {suggest_names(name, QA_FIELDS)}")
    if "question" not in columns:
        raise ValueError(f"template {template!r} lacks {{question}}: the model would not see the question. Add it")
    return template


QATemplate = Annotated[
    str,
    AfterValidator(check_qa_template),
    Field(
        description="the inputs; may use {question}, {context}, and {title} where records have one; without {context} "
        "it is closed-book"
    ),
]
QA_TEMPLATE = "question: {question} context: {context}"


def fill_qa_template(record: RawRecord, template: str, *, padded: bool = False) -> tuple[str, tuple[int, int]]:
    """Fill a question-answering template from a record; return it with the context's span, (0, 0) without a context.

    Args:
        padded: apply `pad_punctuation` to every column, and strip it.
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
    """Put spaces around everything but letters, numbers, marks and the underscore, and collapse white space.

    The T5 paper's models of SQuAD use this form. Source: the SQuAD preprocessor of
    google-research/text-to-text-transfer-transformer.

    >>> pad_punctuation("the U.S. (1776)")
    'the U . S . ( 1776 ) '
    """
    spaced = re.sub(r"[^\w\s]", lambda m: m[0] if unicodedata.category(m[0])[0] == "M" else f" {m[0]} ", text)
    return re.sub(r"\s+", " ", spaced)


def build_qa_meta(record: RawRecord, language: str | None) -> JsonTable:
    """Return the `meta` of a question for reports and metrics; the record's `language` precedes the option's.

    If the option is set, raises RecordError for a record's language that is not a known code: MLQA's rules need one.
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
    """Return the first answer's span in the inputs for the extractive head; {} if the source gives no offset.

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
    """Return all gold answers in source order; () if the record states that it has none, None without an answer column.

    Reads `answers` in SQuAD's forms ({"text": [...]}, a list of {"text": ...} or of texts, or any of these as JSON
    text), else `answer` (one text, or a list). Raises RecordError for other forms, and for a list of blank answers
    only. A blank answer among others stays, as "": translated sets have such, and the v1.1 script counts them.

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
    """Decode `answers` given as JSON text, their only form in CSV; blank text is an empty list."""
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
    """Return the column `is_impossible`, as a boolean or as text (true, false, 1, 0); None if absent or blank."""
    value = record.fields.get("is_impossible")
    word = str(value).strip().lower()
    if value is None or word == "":
        return None
    if word not in ("true", "false", "1", "0"):
        raise RecordError(record.where, f"is_impossible is {shorten_repr(value)}. It must be true or false.")
    return word in ("true", "1")


def make_missing_answers_error(record: RawRecord) -> RecordError:
    """Return the error for a record without an answer column, or with null in it, where labels are required."""
    if empty := [name for name in ("answers", "answer") if name in record.fields]:
        reason = f"{empty[0]} is null. Give the answer; a question that has none has an empty text or list."
        return RecordError(record.where, reason)
    missing = describe_absent_column(record, "answers")
    return RecordError(record.where, f"{missing} Without answers a file is good for `fivetune predict` only.")


def choose_targets(example: TextExample, train_answers: TrainAnswers) -> tuple[str, ...]:
    """Return the targets to train on: the first answer, all distinct ones, or one drawn by a hash of the example's id.

    The draw is the same in every run and on every machine; an answer of several annotators is drawn more often.
    Raises DataError for an example without references.

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


def list_language_metrics(language: str | None) -> tuple[str, ...]:
    """Return the metric with rules of its own for the answers of a language; () if there is none.

    >>> list_language_metrics("es"), list_language_metrics("ko"), list_language_metrics("ru")
    (('mlqa',), ('korquad',), ())
    """
    if language == "ko":
        return ("korquad",)
    return ("mlqa",) if language in MLQA_LANGUAGES else ()


class QuestionOptions(TaskOptions):
    """Options of both versions of SQuAD, whose answers are parts of the context."""

    main_metric = "f1"

    template: QATemplate = QA_TEMPLATE
    train_answers: TrainAnswers = Field(
        default="first",
        description="which gold answers to train on: the first, all distinct ones, or one drawn by the id",
    )
    language: Language | None = Field(
        default=None,
        description="language of the set: ar, de, en, es, hi, vi, zh are also scored by MLQA's rules, ko by KorQuAD's",
    )
    head: Head = Field(
        default="generate", description="generate writes the answer; extractive predicts its span in the context"
    )
    pad_punctuation: bool = Field(
        default=False, description="spaces around punctuation in inputs and answers, as in the T5 paper"
    )

    @property
    def extractive(self) -> bool:
        return True

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """Return the targets to train on, at least one; an unanswerable question has the no-answer text."""
        return choose_targets(example, self.train_answers)
