"""SQuAD v1.1: answer a question from a paragraph that always holds the answer.

Source: https://rajpurkar.github.io/SQuAD-explorer (Rajpurkar et al. 2016). Licence: CC BY-SA 4.0.
Data sets of the same schema (XQuAD, SQuAD-es v1.1) work unchanged. A record, as the reader returns it:

    {"id": "56be4db0acb8001400a502ec", "title": "Super_Bowl_50",
     "question": "Which NFL team represented the AFC at Super Bowl 50?",
     "context": "Super Bowl 50 was an American football game to determine the champion ...",
     "answers": {"text": ["Denver Broncos", "Denver Broncos", "Denver Broncos"], "answer_start": [177, 177, 177]}}
"""

from __future__ import annotations

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


class SQuAD(QuestionOptions):
    """SQuAD v1.1: extractive questions, each with an answer."""

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return a question. Raises RecordError for a bad record or, if `labelled`, one without answers."""
        inputs, clippable = fill_qa_template(record, self.template, padded=self.pad_punctuation)
        answers = read_gold_answers(record)
        if labelled and (answers == () or read_is_impossible(record)):
            raise RecordError(
                record.where,
                "the question has no answer, and squad (v1.1) cannot represent that. Use task.name: squad_v2.",
            )
        if answers is None and labelled:
            raise make_missing_answers_error(record)
        if self.pad_punctuation and answers:
            answers = tuple(map(pad_punctuation, answers))
        return TextExample(
            id=get_record_id(record),
            inputs=inputs,
            targets=next(filter(None, answers or ()), ""),
            references=answers or (),
            clippable=clippable,
            meta=build_qa_meta(record, self.language) | find_gold_span(record, clippable, head=self.head),
        )

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        return ("squad", *list_language_metrics(self.language))


SAMPLE = (
    RawRecord(
        {
            "id": "56be4db0acb8001400a502ec",
            "title": "Super_Bowl_50",
            "context": "The American Football Conference (AFC) champion Denver Broncos won Super Bowl 50.",
            "question": "Which NFL team represented the AFC at Super Bowl 50?",
            "answers": {"text": ["Denver Broncos"], "answer_start": [48]},
        },
        where="dev-v1.1.json:1",
    ),
    TextExample(
        id="56be4db0acb8001400a502ec",
        inputs="question: Which NFL team represented the AFC at Super Bowl 50? "
        "context: The American Football Conference (AFC) champion Denver Broncos won Super Bowl 50.",
        targets="Denver Broncos",
        references=("Denver Broncos",),
        clippable=(72, 153),
        meta={"title": "Super_Bowl_50", "question": "Which NFL team represented the AFC at Super Bowl 50?"},
    ),
)
