"""SQuAD v2.0: answer a question from a paragraph, or recognise that the paragraph does not hold the answer.

Source: https://rajpurkar.github.io/SQuAD-explorer (Rajpurkar, Jia and Liang 2018). Licence: CC BY-SA 4.0.
Data sets of the same schema (SQuAD-es v2.0) work unchanged. A record, as the reader returns it:

    {"id": "56ddde6b9a695914005b9628", "title": "Normans", "question": "In what country is Normandy located?",
     "context": "The Normans (Norman: Nourmands; ...", "is_impossible": false,
     "answers": {"text": ["France", "France", "France", "France"], "answer_start": [159, 159, 159, 159]}}

Without `is_impossible` an empty list of answers marks the question as unanswerable.
"""

from __future__ import annotations

import string
from typing import Annotated

from pydantic import AfterValidator, Field

from fivetune.errors import RecordError
from fivetune.tasks import get_record_id
from fivetune.tasks._questions import (
    QuestionOptions,
    build_qa_meta,
    fill_qa_template,
    find_gold_span,
    list_language_metrics,
    make_missing_answers_error,
    pad_punctuation,
    read_gold_answers,
    read_is_impossible,
)
from fivetune.types import MetricSpec, RawRecord, TextExample

_FINAL = string.punctuation + string.whitespace + "。\uff01\uff1f…"  # with the full-width punctuation


def _normalize_phrase(text: str) -> str:
    """Casefold a phrase, collapse its white space and strip final punctuation, so that its spellings compare equal.

    >>> _normalize_phrase(" Unanswerable. ")
    'unanswerable'
    """
    return " ".join(text.split()).casefold().rstrip(_FINAL)


def _check_phrase(phrase: str) -> str:
    if not any(map(str.isalnum, phrase)):
        raise ValueError(
            f"no_answer {phrase!r} has no letter or digit: empty answers and broken output would count as no answer. "
            "Use a word, such as unanswerable"
        )
    if "<" in phrase or ">" in phrase:
        raise ValueError(
            f"no_answer {phrase!r} looks like a special token: T5 drops those when it decodes, never learns to write "
            "<pad>, and has no piece for '<'. Use a word, such as unanswerable"
        )
    return phrase


class SQuADV2(QuestionOptions):
    """SQuAD v2.0: extractive questions, some unanswerable."""

    no_answer: Annotated[str, AfterValidator(_check_phrase)] = Field(
        default="unanswerable", description="target of an unanswerable question, read back as no answer"
    )

    @property
    def no_answer_text(self) -> str | None:
        return self.no_answer

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        return ("squad_v2", *list_language_metrics(self.language))

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return a question. Raises RecordError for a bad record or, if `labelled`, one without answers."""
        inputs, clippable = fill_qa_template(record, self.template, padded=self.pad_punctuation)
        answers = self._read_answers(record, labelled)
        if answers is None and labelled:
            raise make_missing_answers_error(record)
        meta = build_qa_meta(record, self.language) | find_gold_span(record, clippable, head=self.head)
        if answers is None:
            return TextExample(get_record_id(record), inputs, "", (), clippable, meta)
        if self.pad_punctuation:
            answers = tuple(map(pad_punctuation, answers))
        return TextExample(
            id=get_record_id(record),
            inputs=inputs,
            targets=next(filter(None, answers), self.no_answer),
            references=answers or ("",),
            clippable=clippable,
            meta={**meta, "answerable": bool(answers)},
        )

    def from_text(self, text: str) -> str:
        """Convert the model's text to an answer; the no-answer phrase, ignoring case and final punctuation, is "".

        >>> SQuADV2().from_text(" Rollo"), SQuADV2().from_text("Unanswerable.")
        ('Rollo', '')
        """
        return "" if _normalize_phrase(text) == _normalize_phrase(self.no_answer) else text.strip()

    def _read_answers(self, record: RawRecord, labelled: bool) -> tuple[str, ...] | None:
        """Return the gold answers, () if unanswerable, None if unknown; RecordError if `is_impossible` contradicts."""
        answers, impossible = read_gold_answers(record), read_is_impossible(record)
        if answers and impossible:
            raise RecordError(
                record.where, f"is_impossible is true, but there is the answer {answers[0]!r}. Correct one."
            )
        if answers == () and impossible is False:
            if not labelled:
                return None
            raise RecordError(record.where, "is_impossible is false, but there are no answers. Correct one of the two.")
        for answer in filter(None, answers or ()):
            if not self.from_text(answer):
                raise RecordError(
                    record.where,
                    f"the answer {answer!r} reads as the no-answer phrase {self.no_answer!r}. "
                    "Choose another phrase with task.no_answer.",
                )
        return () if impossible else answers


SAMPLE = (
    RawRecord(
        {
            "id": "56ddde6b9a695914005b9628",
            "title": "Normans",
            "context": "The Normans gave their name to Normandy, a region in France.",
            "question": "In what country is Normandy located?",
            "answers": {"text": ["France", "in France"], "answer_start": [53, 50]},
            "is_impossible": False,
        },
        where="dev-v2.0.json:1",
    ),
    TextExample(
        id="56ddde6b9a695914005b9628",
        inputs="question: In what country is Normandy located? "
        "context: The Normans gave their name to Normandy, a region in France.",
        targets="France",
        references=("France", "in France"),
        clippable=(56, 116),
        meta={"title": "Normans", "question": "In what country is Normandy located?", "answerable": True},
    ),
)
