"""UnifiedQA: extractive, abstractive, multiple-choice and yes/no questions in one input format.

Source: https://github.com/allenai/unifiedqa (Khashabi et al. 2020; v2 2022). Licence: Apache-2.0, each set its own. The
inputs are the lower-cased question, choices and context, separated by a backslash and an n. Records of each format:

    extractive       {"question": "Who?", "context": "Rollo came.", "answers": {"text": ["Rollo"]}}, or no answers
    abstractive      {"question": "Why?", "context": "...", "answers": ["he was bold", "out of courage"]}
    multiple_choice  {"question": "Where?", "choices": ["Seine", "Rhine"], "answer": "Rhine"}; choices also as
                     {"text": [...], "label": [...]} or {"A": "Seine", "B": "Rhine"}, as a text that holds one of
                     these, or "A) Seine B) Rhine"; a column for each with task.choices: [A, B]. The right one also in
                     answerKey or label (its letter, or its index from 0), or in the choice itself:
                     {"text": "Rhine", "type": "correct answer"}
    yes_no           {"question": "Is rust iron?", "passage": "...", "answer": true}

OpenBookQA's question_stem is read if there is no question. As in UnifiedQA's training, the first and the last single
quote of a text are removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fivetune.config.layers import parse_listed_names
from fivetune.errors import RecordError
from fivetune.tasks import TaskOptions, get_record_id, get_text, is_blank, shorten_repr
from fivetune.tasks._choices import LETTERS, read_choices
from fivetune.tasks._questions import (
    SEPARATOR,
    TrainAnswers,
    choose_targets,
    make_missing_answers_error,
    read_gold_answers,
)
from fivetune.types import JsonTable, MetricSpec, RawRecord, TextExample

NO_ANSWER = "no answer"
YES_NO = {"yes": "yes", "true": "yes", "1": "yes", "no": "no", "false": "no", "0": "no"}

_METRICS: Mapping[str, tuple[tuple[MetricSpec, ...], str]] = {
    "extractive": (("squad_v2",), "f1"),
    "abstractive": (({"name": "rouge", "types": ("rougeL",), "stemmer": True},), "rougeL_f1"),
    "multiple_choice": (("multiple_choice",), "accuracy"),
    "yes_no": (("yes_no", "squad"), "accuracy"),
}


class UnifiedQA(TaskOptions):
    """UnifiedQA's four formats."""

    version = 2

    format: Literal["extractive", "abstractive", "multiple_choice", "yes_no"] = Field(
        default="extractive", description="kind of questions; determines the columns and the metrics"
    )
    choices: Annotated[tuple[str, ...], BeforeValidator(parse_listed_names)] = Field(
        default=("choices",),
        min_length=1,
        max_length=len(LETTERS),
        description="column of the choices; of several columns each is one choice",
    )
    numbers_from: int | None = Field(
        default=None, description="number of the first choice, where all answers are numbers: 0 or 1", ge=0, le=1
    )
    lower_case: bool = Field(default=True, description="lower-case and remove quotes, as in UnifiedQA's training")
    shuffle_choices: bool = Field(
        default=False,
        description="shuffle the choices by a hash of the id, for sets that list the right one first",
    )
    train_answers: TrainAnswers = Field(
        default="first",
        description="which gold answers to train on: the first, all distinct ones, or one drawn by the id",
    )

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        return _METRICS[self.format][0]

    @property
    def main_metric(self) -> str:
        return _METRICS[self.format][1]

    @property
    def no_answer_text(self) -> str | None:
        return NO_ANSWER if self.format == "extractive" else None

    @property
    def extractive(self) -> bool:
        return self.format == "extractive"

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return a question. Raises RecordError for a bad record or, if `labelled`, one without answers."""
        stem = "question" not in record.fields and "question_stem" in record.fields
        question = get_text(record, "question_stem" if stem else "question")
        meta: JsonTable = {"question": question}
        parts = [question]
        if self.format == "multiple_choice":
            choices, right = self._order_choices(record, labelled)
            meta["choices"] = [self._normalize_text(choice) for choice in choices]
            answers = None if right is None else (choices[right],)
            parts.append(" ".join(f"({name}) {choice}" for name, choice in zip(LETTERS, choices, strict=False)))
        elif self.format == "yes_no":
            answers = _read_yes_no(record, labelled)
        else:
            answers = read_gold_answers(record)
            if not labelled and not self.extractive:
                answers = answers or None
        context = _read_context(record)
        if answers is None and labelled:
            raise make_missing_answers_error(record)
        inputs, clippable = self._build_inputs(parts, context)
        targets, references = self._build_targets(record, answers)
        return TextExample(get_record_id(record), inputs, targets, references, clippable, meta)

    def from_text(self, text: str) -> str:
        """Convert the model's text to an answer; extractive text that contains "no answer" is "", as in UnifiedQA.

        >>> UnifiedQA().from_text("<No answer>"), UnifiedQA(format="abstractive").from_text(" no answer ")
        ('', 'no answer')
        """
        return "" if self.extractive and NO_ANSWER in text.lower() else text.strip()

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """Return the targets to train on, at least one; an unanswerable question has the no-answer text."""
        return choose_targets(example, self.train_answers)

    def _build_targets(self, record: RawRecord, answers: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
        """Return target and references; RecordError without an answer where the format requires one."""
        if answers is None:
            return "", ()
        references = tuple(filter(None, map(self._normalize_text, answers)))
        if references and all(map(self.from_text, references)):
            return references[0], references
        if self.extractive:
            return NO_ANSWER, ("",)
        raise RecordError(
            record.where,
            f"the question has no answer, and {self.format} questions must have one. Use task.format: extractive.",
        )

    def _normalize_text(self, text: str) -> str:
        text = " ".join(text.split())
        return _strip_quotes(text.lower(), 0)[0].strip() if self.lower_case else text

    def _build_inputs(self, parts: Sequence[str], context: str) -> tuple[str, tuple[int, int]]:
        """Return the inputs and their clippable span: the context, or without one the question."""
        cleaned = [" ".join(part.split()) for part in (*parts, context) if part]
        if self.lower_case:
            cleaned = [part.lower() for part in cleaned]
        inputs = SEPARATOR.join(cleaned)
        edge = len(inputs) - len(cleaned[-1]) if context else len(cleaned[0])
        if self.lower_case:
            inputs, edge = _strip_quotes(inputs, edge)
        return inputs, (edge, len(inputs)) if context else (0, edge)

    def _order_choices(self, record: RawRecord, labelled: bool) -> tuple[list[str], int | None]:
        """Return the choices in the order of the inputs, and the index of the right one, None if unknown."""
        choices = read_choices(record, self.choices)
        texts, right = choices.texts, choices.marked
        name, given = _read_answer_column(record, labelled and right is None)
        if name:
            right = choices.find(given, numbers_from=self.numbers_from, names_first=name != "answer")
            if right is None:
                names = ", ".join(of_choice[0] for of_choice in choices.names)
                raise RecordError(
                    record.where,
                    f"{name} is {shorten_repr(given)}, which is not in the list {list(texts)!r:.80}. Allowed is its "
                    f"text, its name ({names}), or its index from {self.numbers_from or 0}. Correct it.",
                )
        order = list(range(len(texts)))
        if self.shuffle_choices:
            order.sort(key=lambda i: hashlib.blake2b(f"{get_record_id(record)}\n{i}".encode(errors="replace")).digest())
        return [texts[i] for i in order], None if right is None else order.index(right)


def _strip_quotes(text: str, place: int) -> tuple[str, int]:
    """Remove the first and last single quote of a line with two or more; return it with the shifted index `place`.

    >>> _strip_quotes("who sang 'help' live?", 17)
    ('who sang help live?', 15)
    """
    first, last = text.find("'"), text.rfind("'")
    if first == last:
        return text, place
    return text[:first] + text[first + 1 : last] + text[last + 1 :], place - (first < place) - (last < place)


def _read_context(record: RawRecord) -> str:
    """Return the text of the column context or passage, "" without one."""
    for name in ("context", "passage"):
        value = record.fields.get(name)
        if not isinstance(value, str | None):
            raise RecordError(record.where, f"{name} is {value!r:.80}. It must be text, empty if there is none.")
        if value and value.strip():
            return value.strip()
    return ""


def _read_answer_column(record: RawRecord, labelled: bool) -> tuple[str, object]:
    """Return the name and value of the answer column; ("", None) without one if not `labelled`, else RecordError."""
    for name in ("answer", "answerKey", "label"):
        if not is_blank(record, name):
            return name, record.fields[name]
    if labelled:
        get_text(record, "answer")  # raises with the reason
    return "", None


def _read_yes_no(record: RawRecord, labelled: bool) -> tuple[str, ...] | None:
    name, given = _read_answer_column(record, labelled)
    if not name:
        return None
    word = str(given).strip().lower()
    if word not in YES_NO:
        raise RecordError(
            record.where, f"{name} is {shorten_repr(given)}. It must be yes or no, true or false, 1 or 0. Correct it."
        )
    return (YES_NO[word],)


SAMPLE = (
    RawRecord(
        {
            "id": "q1",
            "question": "Who gave Normandy the name 'Normandy'?",
            "context": "The Normans gave their name to Normandy.",
            "answers": {"text": ["The Normans", "Normans"], "answer_start": [0, 4]},
        },
        where="dev.json:1",
    ),
    TextExample(
        id="q1",
        inputs="who gave normandy the name normandy? \\n the normans gave their name to normandy.",
        targets="the normans",
        references=("the normans", "normans"),
        clippable=(40, 80),
        meta={"question": "Who gave Normandy the name 'Normandy'?"},
    ),
)
