"""PubMedQA: yes, no or maybe, from the abstract of the article whose title is the question.

Source: https://github.com/pubmedqa/pubmedqa (Jin et al. 2019), ori_pqal.json, an object of records by PubMed id; or
qiaojin/PubMedQA:pqa_labeled of the hub, with the columns in lower case. Licence: MIT. A record:

    {"QUESTION": "Do mitochondria play a role in remodelling lace plant leaves during programmed cell death?",
     "CONTEXTS": ["Programmed cell death (PCD) is the regulated death of cells within an organism. ...", ...],
     "LABELS": ["BACKGROUND", "RESULTS"], "LONG_ANSWER": "Results depicted mitochondrial dynamics in vivo ...",
     "final_decision": "yes", ...}

The conclusion of the abstract (LONG_ANSWER) is not read, because it states the answer.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fivetune.tasks import LabelOptions, Labels
from fivetune.tasks._questions import QA_TEMPLATE, QATemplate, fill_qa_template
from fivetune.types import JsonTable, RawRecord, TextExample


class PubMedQA(LabelOptions):
    """PubMedQA: yes, no or maybe."""

    template: QATemplate = QA_TEMPLATE
    labels: Labels = Field(
        default={"yes": "yes", "no": "no", "maybe": "maybe"},
        description="final_decision: target word",
    )

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample:
        """Return a question. Raises RecordError if question, context or decision is missing."""
        flat = replace(record, fields=_normalize_fields(record))
        inputs, clippable = fill_qa_template(flat, self.template)
        example = self.build_example(flat, "final_decision", inputs, clippable, labelled=labelled)
        return replace(example, meta={**example.meta, "question": flat.fields["question"]})


def _normalize_fields(record: RawRecord) -> JsonTable:
    """Return the columns of both forms as id, question, context and final_decision; absent ones stay absent."""
    given = {name.lower(): value for name, value in record.fields.items()}
    found = {name: given[name] for name in ("id", "question", "context", "final_decision") if name in given}
    if "pubid" in given:
        found["id"] = given["pubid"]
    inner = found.get("context")
    passages = inner.get("contexts") if isinstance(inner, dict) else given.get("contexts")
    if isinstance(passages, list) and passages:
        found["context"] = " ".join(map(str, passages))
    return found


SAMPLE = (
    RawRecord(
        {
            "id": "21645374",
            "QUESTION": "Do mitochondria play a role in remodelling lace plant leaves?",
            "CONTEXTS": ["Programmed cell death (PCD) is regulated.", "The lace plant forms perforations."],
            "LABELS": ["BACKGROUND", "RESULTS"],
            "final_decision": "yes",
        },
        where="ori_pqal.json:1",
    ),
    TextExample(
        id="21645374",
        inputs="question: Do mitochondria play a role in remodelling lace plant leaves? "
        "context: Programmed cell death (PCD) is regulated. The lace plant forms perforations.",
        targets="yes",
        references=("yes",),
        clippable=(81, 157),
        meta={
            "labels": ["yes", "no", "maybe"],
            "question": "Do mitochondria play a role in remodelling lace plant leaves?",
        },
    ),
)
