"""CausalQA: questions about causes and effects, with or without a passage, in UnifiedQA's input format.

Source: Webis-CausalQA-22, https://github.com/webis-de/coling22-benchmark-for-causal-question-answering (Bondarenko et
al. 2022), collected from ten sets. Licence: each part's own (SQuAD: CC BY-SA 4.0). A record; tabs separate several
answers, and the context is empty in some parts:

    id,question,question_processed,context,context_processed,answer,answer_processed
    5733,Why did it rain?,why did it rain?,A front came.,a front came.,a front\tthe front,a front\tthe front

The benchmark reads the processed question and context, and uses the plain `answer` for training and scoring. It trains
on the tab-joined text, this task on the answers chosen by `train_answers`. The separator is a backslash and an n, as in
UnifiedQA's training, not a line end.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from fivetune.errors import RecordError
from fivetune.tasks import TaskOptions, get_column, get_record_id, get_text, is_blank, shorten_repr
from fivetune.tasks._questions import SEPARATOR, TrainAnswers, choose_targets
from fivetune.types import RawRecord, TextExample

Form = Literal["processed", "plain"]

_NO_LETTER = re.compile("[^a-zа-яё0-9]+")
_RULES = re.compile(
    "|".join(
        (
            r"^why|^(?:if|when).*why | and why | why is \w+ | is \w+ why ",
            r"^cause.? | cause.? |because of what",
            r"how (?:come|did) ",
            r"^(?!.*dopplar).*effect.? | affect? ",
            r" lead to",
            r"^(?=.*what (?:happens|will happen|might happen)).*(?:if|when)",
            r"^what (?:to do|should be done) (?:if|when|to) ",
        )
    )
)
"""The benchmark's seven rules, for lower-case questions without punctuation. "what happens ... when" matches here; in
the published notebook a line break inside the pattern disables that half of the sixth rule."""


class CausalQA(TaskOptions):
    """CausalQA in UnifiedQA's form."""

    metrics = (
        "causalqa",
        {"name": "rouge", "types": ("rougeL",), "normalize": True},
        "squad",
    )
    main_metric = "f1"

    form: Form = Field(
        default="processed", description="columns of question and context: question_processed or the plain question"
    )
    answer_form: Form = Field(default="plain", description="column of the answers: answer, or answer_processed")
    lower_case: bool = Field(default=False, description="lower-case inputs and targets, as in UnifiedQA's training")
    separator: str = Field(default=SEPARATOR, description="between question and context")
    causal_only: bool = Field(
        default=False, description="leave out questions that match none of the benchmark's seven causal rules"
    )
    train_answers: TrainAnswers = Field(
        default="first",
        description="which gold answers to train on: the first, all distinct ones, or one drawn by the id",
    )

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return a question, None for one that `causal_only` leaves out. Raises RecordError for a bad record."""
        question = get_text(record, _format_column_name("question", self.form))
        if self.causal_only and not is_causal(question):
            return None
        context = self._read_context(record)
        answers = self._read_answers(record, labelled)
        head = self._apply_case(question + self.separator) if context else ""
        inputs = head + self._apply_case(context or question)
        return TextExample(
            id=get_record_id(record),
            inputs=inputs,
            targets=next(iter(answers), ""),
            references=answers,
            clippable=(len(head), len(inputs)),
            meta={"question": question},
        )

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """Return the targets to train on, at least one."""
        return choose_targets(example, self.train_answers)

    def _read_context(self, record: RawRecord) -> str:
        """Return the context, "" in parts of the benchmark that have none."""
        name = _format_column_name("context", self.form)
        context = get_column(record, name)
        if not isinstance(context, str | None):
            raise RecordError(
                record.where, f"{name} is {shorten_repr(context)}. It must be text, empty if there is none."
            )
        return (context or "").strip()

    def _read_answers(self, record: RawRecord, labelled: bool) -> tuple[str, ...]:
        """Return the distinct answers in order; () for a blank column if not `labelled`."""
        name = _format_column_name("answer", self.answer_form)
        if not labelled and is_blank(record, name):
            return ()
        answers = [answer.strip() for answer in get_text(record, name).split("\t")]
        return tuple(dict.fromkeys(self._apply_case(answer) for answer in answers if answer))

    def _apply_case(self, text: str) -> str:
        return text.lower() if self.lower_case else text


def is_causal(question: str) -> bool:
    """Return whether one of the benchmark's seven rules matches a question.

    >>> is_causal("What happens to the tide if the moon is full?"), is_causal("Who paints the moon?")
    (True, False)
    """
    return _RULES.search(" ".join(_NO_LETTER.sub(" ", question.lower()).split())) is not None


def _format_column_name(name: str, form: Form) -> str:
    return name if form == "plain" else f"{name}_processed"


SAMPLE = (
    RawRecord(
        {
            "id": "5733",
            "question": "Why did it rain?",
            "question_processed": "why did it rain?",
            "context": "A front came.",
            "context_processed": "a front came.",
            "answer": "a front\tthe front",
        },
        where="squad2_train_original_split.csv:2",
    ),
    TextExample(
        id="5733",
        inputs="why did it rain? \\n a front came.",
        targets="a front",
        references=("a front", "the front"),
        clippable=(20, 33),
        meta={"question": "why did it rain?"},
    ),
)
