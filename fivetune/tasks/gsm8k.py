"""GSM8K: grade-school math word problems, answered with the number alone or with the reasoning before it.

Source: https://github.com/openai/grade-school-math (Cobbe et al. 2021). Licence: MIT. A record:

    {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\\nNatalia sold 48+24 = <<48+24=72>>72 ...\\n#### 72"}

The final number follows "####". The calculator annotations <<48/2=24>> are for models that call a calculator; T5's
vocabulary has no '<', so they would train an unknown token, and are removed by default. T5 reads line ends as spaces.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fivetune.errors import RecordError
from fivetune.scores.metrics.gsm8k import extract_final_number
from fivetune.tasks import (
    TaskOptions,
    fill_absent_inputs,
    fill_template,
    get_record_id,
    get_text,
    is_blank,
    list_template_columns,
)
from fivetune.types import RawRecord, TextExample

PHRASE = "The answer is "
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def _check_question_template(template: str) -> str:
    if list_template_columns(template) != ["question"]:
        raise ValueError(f"template {template!r} must have {{question}} and no other column. Correct it")
    return template


class GSM8K(TaskOptions):
    """GSM8K, grade-school math."""

    metrics = ("gsm8k",)
    main_metric = "accuracy"

    template: Annotated[str, AfterValidator(_check_question_template)] = Field(
        default="{question}", description="the inputs; a prefix may precede {question}"
    )
    target: Literal["rationale", "phrase", "number"] = Field(
        default="rationale",
        description="the target: the reasoning and #### 72, the phrase The answer is 72, or 72",
    )
    calculator: Literal["remove", "keep"] = Field(
        default="remove", description="the annotations <<48/2=24>> of the reasoning; T5's vocabulary has no <"
    )

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return a question. Raises RecordError for a bad record, or an answer without its final number."""
        question = get_text(record, "question")
        inputs, spans = fill_template(self.template, {"question": question})
        targets, references = "", ()
        if labelled or not is_blank(record, "answer"):
            number = _read_gold_number(record)
            targets, references = self._build_target(record.fields["answer"], number), (number,)
        return TextExample(
            id=get_record_id(record),
            inputs=inputs,
            targets=targets,
            references=references,
            clippable=spans["question"],
            meta={"question": question},
        )

    def to_score(self, record: RawRecord) -> TextExample | None:
        """Return the gold number; the question may be absent."""
        return self.to_text(fill_absent_inputs(record, self.template, ["answer"]))

    def from_text(self, text: str) -> str:
        """Return the final number if the text has one, else the stripped text, which the lenient score reads.

        >>> GSM8K().from_text("He has 6 * 200 = 1,200 eggs. #### 1,200"), GSM8K().from_text(" 1200 eggs. ")
        ('1200', '1200 eggs.')
        >>> GSM8K(target="phrase").from_text("The answer is 72")
        '72'
        """
        marked = text.replace(PHRASE, "#### ") if self.target == "phrase" else text
        return extract_final_number(marked) or text.strip()

    def _build_target(self, answer: str, number: str) -> str:
        if self.target == "number":
            return number
        if self.target == "phrase":
            return PHRASE + number
        return _CALCULATOR.sub("", answer) if self.calculator == "remove" else answer


def _read_gold_number(record: RawRecord) -> str:
    """Return the final number of a gold answer, without commas."""
    answer = get_text(record, "answer")
    number = extract_final_number(answer) if "####" in answer else None
    if number is None or not re.fullmatch(r"-?[0-9]*\.?[0-9]+", number):
        raise RecordError(
            record.where,
            f"answer ends in {answer[-40:]!r}, which has no number after '#### '. It must end as in "
            "'#### 72'. Correct it.",
        )
    return number


SAMPLE = (
    RawRecord(
        {
            "id": "train-1",
            "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
            "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
        },
        where="train.jsonl:1",
    ),
    TextExample(
        id="train-1",
        inputs="Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
        targets="She sold 48/2 = 24 clips in May.\nAltogether 48+24 = 72.\n#### 72",
        references=("72",),
        clippable=(0, 88),
        meta={"question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?"},
    ),
)
