"""BioASQ factoid questions: one example per snippet of a question, whose answers are merged into a ranking.

Source: http://bioasq.org, task B (Tsatsaronis et al. 2015), and the files of BioBERT (Lee et al. 2020) in SQuAD's
schema. Licence: CC BY 2.5, after registration. A record of a golden file, one question with all its snippets:

    {"id": "54f35a23c2a4ef3f6b000007", "type": "factoid", "body": "Which gene is mutated in muscular dystrophy?",
     "snippets": [{"text": "Mutations of dystrophin cause DMD.", "document": "..."}], "exact_answer": [["dystrophin"]]}

A record of BioBERT's files is one snippet; its id is the question's, of 24 hexadecimal digits, and a number:

    {"id": "54f35a23c2a4ef3f6b000007_001", "question": "Which gene ...?", "context": "Mutations of ...",
     "answers": ["dystrophin"]}

Questions of other types are left out. A snippet without the answer is predicted, but not trained on.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fivetune.errors import DataError, RecordError
from fivetune.tasks import DROPPED_SYNONYMS, TaskOptions, find_text, get_column, get_record_id, get_text, shorten_repr
from fivetune.tasks._questions import QA_TEMPLATE, QATemplate, fill_qa_template, read_gold_answers
from fivetune.types import ConversionResult, JsonTable, Merging, RawRecord, TextExample

_NUMBERED = re.compile(r"([0-9a-f]{24})[_:]\d+")


class BioASQFactoid(TaskOptions):
    """BioASQ factoid questions, golden files or BioBERT's."""

    metrics = ("bioasq", "squad")
    main_metric = "mrr"

    template: QATemplate = QA_TEMPLATE

    @property
    def extractive(self) -> bool:
        return True

    @property
    def merging(self) -> Merging:
        return "ranked"

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> ConversionResult:
        """Return one example per snippet, None for questions of other types.

        Raises RecordError for a question without snippets or, if `labelled`, without answers.
        """
        if "snippets" not in record.fields and "body" not in record.fields:
            return self._convert_snippet(record, labelled)
        if get_column(record, "type") != "factoid":
            return None
        question = get_text(record, "body")
        golds = read_exact_answers(record) if labelled or record.fields.get("exact_answer") else NO_GOLDS
        examples: list[TextExample] = []
        for number, snippet in enumerate(_read_snippets(record), 1):
            own = f"{get_record_id(record)}_{number:03}"
            examples.append(self._build_example(record, own, question, snippet, golds))
        return tuple(examples)

    def to_score(self, record: RawRecord) -> ConversionResult:
        """Return a golden question without its snippets, which scoring does not need."""
        if "body" not in record.fields or record.fields.get("type") != "factoid":
            return self.to_text(record)
        own = get_record_id(record)
        question = get_text(record, "body")
        golds = read_exact_answers(record)
        return TextExample(own, question, golds.texts[0], golds.texts, meta=_build_meta(question, golds), group=own)

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """Return the first gold answer that the snippet contains, as the snippet writes it; () if it contains none."""
        if not example.references:
            raise DataError(f"{example.id}: there is no answer to learn. Train on records that have answers.")
        context = example.inputs[slice(*example.clippable)]
        for gold in example.references:
            span = find_text(context, gold) if gold.strip() else None
            if span:
                return (context[slice(*span)],)
        return ()

    def _convert_snippet(self, record: RawRecord, labelled: bool) -> TextExample | None:
        given = record.fields.get("answers")
        texts = given.get("text") if isinstance(given, dict) else None
        if texts and all(isinstance(text, str) and not text.strip() for text in texts):
            return None  # made from a golden question whose answer is blank
        golds = read_gold_answers(record)
        if not golds and labelled:
            raise RecordError(
                record.where,
                "there is no column 'answers' with an answer. BioBERT's test files have none: answer "
                "them with fivetune predict, and score them against the golden file: fivetune score bioasq_factoid.",
            )
        own = get_record_id(record)
        numbered = _NUMBERED.fullmatch(own)
        return self._build_example(
            record,
            own,
            get_text(record, "question"),
            get_text(record, "context"),
            ExactAnswers(golds or ()),
            group=numbered[1] if numbered else own,
        )

    def _build_example(
        self, record: RawRecord, own: str, question: str, context: str, golds: ExactAnswers, group: str = ""
    ) -> TextExample:
        title = str(record.fields.get("title") or "")
        filled = RawRecord({"question": question, "context": context, "title": title}, record.where)
        inputs, clippable = fill_qa_template(filled, self.template)
        return TextExample(
            id=own,
            inputs=inputs,
            targets=golds.texts[0] if golds.texts else "",
            references=golds.texts,
            clippable=clippable,
            meta=_build_meta(question, golds),
            group=group or get_record_id(record),
        )


class ExactAnswers(NamedTuple):
    """Gold answers of a question with all synonyms, and the number of blank ones that were dropped."""

    texts: tuple[str, ...]
    num_blank: int = 0


NO_GOLDS = ExactAnswers(())


def read_exact_answers(record: RawRecord) -> ExactAnswers:
    """Return all gold answers of a factoid question; `[[]]` or only blank ones mean no answer, ("",).

    Raises RecordError if the column is absent, or holds anything but texts.

    >>> read_exact_answers(RawRecord({"exact_answer": [["dystrophin", "DMD", ""]]}, "6B1_golden.json:1"))
    ExactAnswers(texts=('dystrophin', 'DMD'), num_blank=1)
    >>> read_exact_answers(RawRecord({"exact_answer": [[]]}, "8B1_golden.json:1"))
    ExactAnswers(texts=('',), num_blank=0)
    """
    given = record.fields.get("exact_answer")
    if given is None:
        raise RecordError(
            record.where,
            "there is no column 'exact_answer', the gold answers of a golden file. Test sets have "
            "none before they are published: use them with fivetune predict.",
        )
    leaves = _flatten(given)
    texts = [leaf for leaf in leaves if isinstance(leaf, str)]
    if len(texts) < len(leaves):
        raise RecordError(
            record.where,
            f"exact_answer is {shorten_repr(given)}. It must be a list of lists of texts (synonyms). Correct it.",
        )
    filled = [text for text in texts if text.strip()]
    if not filled:
        return ExactAnswers(("",))
    return ExactAnswers(tuple(dict.fromkeys(filled)), len(texts) - len(filled))


def _build_meta(question: str, golds: ExactAnswers) -> JsonTable:
    meta: JsonTable = {"question": question}
    if golds.num_blank:
        meta[DROPPED_SYNONYMS] = golds.num_blank
    return meta


def _flatten(value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        return [value]
    leaves: list[object] = []
    for item in value:
        leaves += _flatten(item)
    return leaves


def _read_snippets(record: RawRecord) -> list[str]:
    snippets = record.fields.get("snippets") or []
    texts = [snippet.get("text") if isinstance(snippet, dict) else snippet for snippet in snippets]
    kept = [text for text in texts if isinstance(text, str) and text.strip()]
    if not kept:
        raise RecordError(record.where, "the question has no snippets. Add snippets, or remove it from the file.")
    return kept


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
