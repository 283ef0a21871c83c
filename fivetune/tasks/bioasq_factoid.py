"""BioASQ factoid questions: each snippet of a question is asked, the answers are ranked and merged.

Source: http://bioasq.org, task B (Tsatsaronis et al. 2015), and the files of BioBERT (Lee et al. 2020) in SQuAD's
schema. Licence: CC BY 2.5, after registration. A record of a golden file, one question with all its snippets:

    {"id": "54f35a23c2a4ef3f6b000007", "type": "factoid", "body": "Which gene is mutated in muscular dystrophy?",
     "snippets": [{"text": "Mutations of dystrophin cause DMD.", "document": "..."}], "exact_answer": [["dystrophin"]]}

A record of BioBERT's files is one snippet; its id is the question's, of 24 hexadecimal digits, and a number:

    {"id": "54f35a23c2a4ef3f6b000007_001", "question": "Which gene ...?", "context": "Mutations of ...",
     "answers": ["dystrophin"]}

Questions of the other types are left out. A snippet that holds no answer is asked, but not learned from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from fivetune.errors import DataError
from fivetune.metrics import Spec
from fivetune.tasks import (
    Converted,
    Merging,
    TaskOptions,
    check_qa_template,
    column,
    find_text,
    gold_answers,
    qa_inputs,
    record_id,
    text_column,
)
from fivetune.types import RawRecord, TextExample

_NUMBERED = re.compile(r"([0-9a-f]{24})[_:]\d+")


class BioasqFactoid(TaskOptions):
    """BioASQ factoid questions, golden files or BioBERT's."""

    version: ClassVar[int] = 1
    metrics: ClassVar[tuple[Spec, ...]] = ("bioasq", "squad")
    main_metric: ClassVar[str] = "mrr"

    template: Annotated[str, AfterValidator(check_qa_template)] = Field(
        default="question: {question} context: {context}",
        description="the inputs; may use {question}, {context} and {title}",
    )

    @property
    def extractive(self) -> bool:
        return True

    @property
    def merging(self) -> Merging:
        return "ranked"

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> Converted:
        """One example for each snippet. Raises DataError for a question without snippets or, labelled, answers."""
        if "snippets" not in record.fields and "body" not in record.fields:
            return self._snippet(record, labelled)
        if column(record, "type") != "factoid":
            return None
        question = text_column(record, "body")
        golds = exact_answers(record) if labelled or record.fields.get("exact_answer") else ()
        snippets = _snippets(record)
        return tuple(
            self._example(record, f"{record_id(record)}_{number:03}", question, snippet, golds)
            for number, snippet in enumerate(snippets, start=1)
        )

    def to_score(self, record: RawRecord) -> Converted:
        """A golden question without its snippets, which answers need not be scored."""
        if "body" not in record.fields or record.fields.get("type") != "factoid":
            return self.to_text(record)
        own, question, golds = record_id(record), text_column(record, "body"), exact_answers(record)
        return TextExample(own, question, golds[0], golds, meta={"question": question}, group=own)

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """The answer in the words of the snippet; none where the snippet does not hold it."""
        if not example.references:
            raise DataError(f"{example.id}: there is no answer to learn. Train on records that have answers.")
        context = example.inputs[slice(*example.clippable)]
        found = [held for gold in example.references if gold.strip() and (held := _held(gold, context))]
        return tuple(found[:1])

    def _snippet(self, record: RawRecord, labelled: bool) -> TextExample | None:
        given = record.fields.get("answers")
        texts = given.get("text") if isinstance(given, dict) else None
        if texts and all(isinstance(text, str) and not text.strip() for text in texts):
            return None  # made from a golden question whose answer is blank
        golds = gold_answers(record)
        if not golds and labelled:
            raise DataError(
                f"{record.where}: there is no column 'answers' with an answer. BioBERT's test files have none: answer "
                "them with fivetune predict, and score that against the golden file with fivetune score bioasq_factoid."
            )
        own = record_id(record)
        numbered = _NUMBERED.fullmatch(own)
        return self._example(
            record, own, text_column(record, "question"), text_column(record, "context"), golds or (),
            group=numbered[1] if numbered else own,
        )  # fmt: skip

    def _example(
        self, record: RawRecord, own: str, question: str, context: str, golds: Sequence[str], group: str = ""
    ) -> TextExample:
        title = str(record.fields.get("title") or "")
        filled = RawRecord({"question": question, "context": context, "title": title}, record.where)
        inputs, clippable = qa_inputs(filled, self.template)
        return TextExample(
            id=own,
            inputs=inputs,
            targets=golds[0] if golds else "",
            references=tuple(golds),
            clippable=clippable,
            meta={"question": question},
            group=group or record_id(record),
        )


def exact_answers(record: RawRecord) -> tuple[str, ...]:
    """All right answers of a golden factoid question, synonyms beside each other; raises DataError if there are none.

    A blank one stays (year 4 has one): nobody can be right there, but the question counts.

    >>> exact_answers(RawRecord({"exact_answer": [["dystrophin", "DMD"]]}, "6B1_golden.json:1"))
    ('dystrophin', 'DMD')
    """
    if record.fields.get("exact_answer") is None:
        raise DataError(
            f"{record.where}: there is no column 'exact_answer', the right answers of a golden file. Test sets have "
            "none before they are published: use them with fivetune predict."
        )
    texts = _flat(record.fields["exact_answer"])
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise DataError(
            f"{record.where}: exact_answer is {record.fields['exact_answer']!r}. It must be a list of lists of texts "
            "(synonyms), none empty."
        )
    return tuple(dict.fromkeys(texts))


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list | tuple) else [value]


def _snippets(record: RawRecord) -> list[str]:
    snippets = record.fields.get("snippets") or []
    texts = [snippet.get("text") if isinstance(snippet, dict) else snippet for snippet in snippets]
    kept = [text for text in texts if isinstance(text, str) and text.strip()]
    if not kept:
        raise DataError(
            f"{record.where}: the question has no snippets to read. Take them out of the file, or set "
            "data.on_bad_record: skip."
        )
    return kept


def _held(gold: str, context: str) -> str:
    """The answer as the context writes it, "" if it does not.

    >>> _held("Dystrophin", "Mutations of dystrophin.")
    'dystrophin'
    """
    return context[slice(*(find_text(context, gold) or (0, 0)))]


SAMPLE = (
    RawRecord(
        {
            "id": "54f35a23c2a4ef3f6b000007_001",
            "question": "Which gene is mutated in Duchenne muscular dystrophy?",
            "context": "Mutations of dystrophin cause DMD.",
            "answers": {"text": ["dystrophin"], "answer_start": [13]},
        },
        where="BioASQ-train-factoid-4b.json:1",
    ),
    TextExample(
        id="54f35a23c2a4ef3f6b000007_001",
        inputs="question: Which gene is mutated in Duchenne muscular dystrophy? "
        "context: Mutations of dystrophin cause DMD.",
        targets="dystrophin",
        references=("dystrophin",),
        clippable=(73, 107),
        meta={"question": "Which gene is mutated in Duchenne muscular dystrophy?"},
        group="54f35a23c2a4ef3f6b000007",
    ),
)
