"""UnifiedQA: four kinds of questions in one form, so that one model answers extractive, abstractive, choice and yes/no.

Source: https://github.com/allenai/unifiedqa (Khashabi et al. 2020; v2 2022). Licence: Apache-2.0, each set its own. The
inputs are question, choices and context with a backslash and an n between them, lower-cased. Records of each format:

    extractive       {"question": "Who?", "context": "Rollo came.", "answers": {"text": ["Rollo"]}}, or no answers
    abstractive      {"question": "Why?", "context": "...", "answers": ["he was bold", "out of courage"]}
    multiple_choice  {"question": "Where?", "choices": ["Seine", "Rhine"], "answer": "Rhine"}; choices also as
                     {"text": [...], "label": [...]}, the right one also in answerKey or label (its letter, or its
                     place from 0), or in the choice itself: {"text": "Rhine", "type": "correct answer"}
    yes_no           {"question": "Is rust iron?", "passage": "...", "answer": true}

OpenBookQA's question_stem is read where there is no question. Single quotes go as in UnifiedQA's training: the first
and the last one of a text, whatever stands between them.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from fivetune.errors import DataError
from fivetune.metrics import Spec
from fivetune.tasks import (
    SEPARATOR,
    TaskOptions,
    TrainAnswers,
    choose_targets,
    column,
    gold_answers,
    is_blank,
    no_gold,
    record_id,
    text_column,
)
from fivetune.types import RawRecord, TextExample

NO_ANSWER = "no answer"
RIGHT = ("correct answer", "correct")  # what a choice's `type` says of the right one
YES_NO = {"yes": "yes", "true": "yes", "1": "yes", "no": "no", "false": "no", "0": "no"}

_METRICS: Mapping[str, tuple[tuple[Spec, ...], str]] = {
    "extractive": (("squad_v2",), "f1"),
    "abstractive": (({"name": "rouge", "types": ("rougeL",), "stemmer": True},), "rougeL_f1"),
    "multiple_choice": (("multiple_choice",), "accuracy"),
    "yes_no": (("yes_no", "squad"), "accuracy"),
}


class Unifiedqa(TaskOptions):
    """UnifiedQA's four formats."""

    version: ClassVar[int] = 1

    format: Literal["extractive", "abstractive", "multiple_choice", "yes_no"] = Field(
        default="extractive", description="kind of questions; says which columns are read and which metric scores them"
    )
    lower_case: bool = Field(default=True, description="lower-case and take off quotes, as UnifiedQA was trained")
    shuffle_choices: bool = Field(
        default=False,
        description="put the choices into an order drawn by the id, for sets that list the right one first",
    )
    train_answers: TrainAnswers = Field(
        default="first",
        description="which gold answers to train on: the first, all distinct ones, or one drawn by the id",
    )

    @property
    def metrics(self) -> tuple[Spec, ...]:
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
        """One question. Raises DataError for a bad record, or for one without answers if it must be labelled."""
        stem = "question" not in record.fields and "question_stem" in record.fields
        question = text_column(record, "question_stem" if stem else "question")
        meta: dict[str, Any] = {"question": question}
        parts = [question]
        if self.format == "multiple_choice":
            choices, right = self._choices(record, labelled)
            meta["choices"] = [self._plain(choice) for choice in choices]
            answers = None if right is None else (choices[right],)
            parts.append(" ".join(f"({name}) {choice}" for name, choice in zip(_LETTERS, choices, strict=False)))
        elif self.format == "yes_no":
            answers = _yes_no(record, labelled)
        else:
            answers = gold_answers(record)
            if not labelled and not self.extractive:
                answers = answers or None
        context = _context(record)
        if answers is None and labelled:
            raise no_gold(record)
        inputs, clippable = self._composed(parts, context)
        targets, references = self._golds(record, answers)
        return TextExample(record_id(record), inputs, targets, references, clippable, meta)

    def from_text(self, text: str) -> str:
        """The model's text as an answer; of extractive ones any text with "no answer" in it is "", as in UnifiedQA.

        >>> Unifiedqa().from_text("<No answer>"), Unifiedqa(format="abstractive").from_text(" no answer ")
        ('', 'no answer')
        """
        return "" if self.extractive and NO_ANSWER in text.lower() else text.strip()

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """The targets to train on, at least one; an unanswerable question has the phrase."""
        return choose_targets(example, self.train_answers)

    def _golds(self, record: RawRecord, answers: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
        """Target and references."""
        if answers is None:
            return "", ()
        references = tuple(filter(None, map(self._plain, answers)))
        if references and all(map(self.from_text, references)):
            return references[0], references
        if self.extractive:
            return NO_ANSWER, ("",)
        raise DataError(
            f"{record.where}: the question has no answer, and {self.format} questions must have one. "
            "Use task.format: extractive, or set data.on_bad_record: skip."
        )

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return _without_quotes(text.lower(), 0)[0].strip() if self.lower_case else text

    def _composed(self, parts: Sequence[str], context: str) -> tuple[str, tuple[int, int]]:
        """The inputs, with the span of the context, of the question where there is none."""
        cleaned = [" ".join(part.split()) for part in (*parts, context) if part]
        if self.lower_case:
            cleaned = [part.lower() for part in cleaned]
        inputs = SEPARATOR.join(cleaned)
        edge = len(inputs) - len(cleaned[-1]) if context else len(cleaned[0])
        if self.lower_case:
            inputs, edge = _without_quotes(inputs, edge)
        return inputs, (edge, len(inputs)) if context else (0, edge)

    def _choices(self, record: RawRecord, labelled: bool) -> tuple[list[str], int | None]:
        """The choices in the order in which they are shown, and the place of the right one."""
        texts, names, marked = _read_choices(record)
        given = _given(record, labelled and marked is None)
        right = _place(record, texts, names, given) if given[0] else marked
        order = list(range(len(texts)))
        if self.shuffle_choices:
            order.sort(key=lambda i: hashlib.blake2b(f"{record_id(record)}\n{i}".encode(errors="replace")).digest())
        return [texts[i] for i in order], None if right is None else order.index(right)


_LETTERS = string.ascii_lowercase


def _without_quotes(text: str, place: int) -> tuple[str, int]:
    """A line without its first and last single quote if it has two, and where a place in it has moved to.

    >>> _without_quotes("who sang 'help' live?", 17)
    ('who sang help live?', 15)
    """
    first, last = text.find("'"), text.rfind("'")
    if first == last:
        return text, place
    return text[:first] + text[first + 1 : last] + text[last + 1 :], place - (first < place) - (last < place)


def _context(record: RawRecord) -> str:
    """The passage of the column context or passage, "" where there is none."""
    for name in ("context", "passage"):
        value = record.fields.get(name)
        if not isinstance(value, str | None):
            raise DataError(f"{record.where}: {name} is {value!r:.80}. It must be text, empty if there is none.")
        if value and value.strip():
            return value.strip()
    return ""


def _read_choices(record: RawRecord) -> tuple[list[str], list[str], int | None]:
    """Texts, names, and the place of the one that is marked as right, if one is."""
    given = column(record, "choices")
    names: Any = list(_LETTERS)
    if isinstance(given, Mapping):
        names = given.get("label") or names
        given = given.get("text")
    items = given if isinstance(given, list | tuple) else []
    texts: list[Any] = [item.get("text") if isinstance(item, Mapping) else item for item in items]
    if not 2 <= len(texts) <= len(_LETTERS) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(
            f"{record.where}: choices is {given!r:.80}. It must be a list of 2 to {len(_LETTERS)} texts, none empty, "
            'of {"text": ...}, or {"text": [...], "label": [...]}.'
        )
    if items and isinstance(items[0], Mapping) and "label" in items[0]:
        names = [item.get("label") for item in items]
    marked = [i for i, item in enumerate(items) if isinstance(item, Mapping) and item.get("type") in RIGHT]
    return texts, [str(name) for name in names[: len(texts)]], marked[0] if marked else None


def _given(record: RawRecord, labelled: bool) -> tuple[str, Any]:
    """The column that names the right choice, and its value; ("", None) if there is none and none is needed."""
    for name in ("answer", "answerKey", "label"):
        if not is_blank(record, name):
            return name, record.fields[name]
    if labelled:
        text_column(record, "answer")  # says what is wrong with it
    return "", None


def _place(record: RawRecord, texts: Sequence[str], names: Sequence[str], given: tuple[str, Any]) -> int:
    """The place of the right choice: `answer` is its text or name, the other columns its name, or a place from 0."""
    key, value = given
    word = str(value).strip().lower()
    for several in (texts, names) if key == "answer" else (names, texts):
        folded = [text.strip().lower() for text in several]
        if word in folded:
            return folded.index(word)
    if word.isdecimal() and int(word) < len(texts):
        return int(word)
    raise DataError(
        f"{record.where}: {key} is {value!r}, which is not in the list {list(texts)!r:.80}. Allowed is its text, "
        f"its name ({', '.join(names)}), or its place from 0. Correct it, or set data.on_bad_record: skip."
    )


def _yes_no(record: RawRecord, labelled: bool) -> tuple[str, ...] | None:
    name, given = _given(record, labelled)
    if not name:
        return None
    word = str(given).strip().lower()
    if word not in YES_NO:
        raise DataError(
            f"{record.where}: {name} is {given!r}. It must be yes or no, true or false, 1 or 0. Correct it, or set "
            "data.on_bad_record: skip."
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
