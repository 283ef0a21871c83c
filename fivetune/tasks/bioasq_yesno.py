"""BioASQ yes/no questions: yes or no, from snippets of articles chosen by experts.

Source: http://participants-area.bioasq.org/datasets (Tsatsaronis et al. 2015), Task B; registration is needed.
Licence: CC BY 2.5. A question of a training or golden file; those of other types are left out:

    {"id": "56c1f00eef6e394741000039", "type": "yesno", "body": "Does RNA polymerase II have RNA cleavage activity?",
     "snippets": [{"text": "the transcription factor TFIIS ...", ...}], "exact_answer": "yes", ...}

Tables with the columns question, ideal_answer and yesno_label (1 or 0) work too; their context is the ideal answer,
which often begins with "Yes".
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fivetune.errors import RecordError
from fivetune.tasks import LabelOptions, Labels
from fivetune.tasks._questions import QA_TEMPLATE, QATemplate, fill_qa_template
from fivetune.types import JsonTable, RawRecord, TextExample


class BioASQYesNo(LabelOptions):
    """BioASQ: yes or no."""

    main_metric = "macro_f1"
    metrics = ({"name": "classification", "count_absent": True},)

    template: QATemplate = QA_TEMPLATE
    labels: Labels = Field(default={"yes": "yes", "no": "no"}, description="exact_answer: target word")

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return a yes/no question, None for other types. Raises RecordError without question, context or answer."""
        if record.fields.get("type", "yesno") != "yesno":
            return None
        fields = _normalize_fields(record)
        if labelled and fields.get("exact_answer") is None:
            raise RecordError(
                record.where,
                f"there is no column 'exact_answer' or 'yesno_label'. Columns: "
                f"{', '.join(record.fields)}. Test sets of BioASQ come without answers: score on a golden file; "
                "without answers a file is good for `fivetune predict` only.",
            )
        flat = replace(record, fields=fields)
        inputs, clippable = fill_qa_template(flat, self.template)
        example = self.build_example(flat, "exact_answer", inputs, clippable, labelled=labelled)
        return replace(example, meta={**example.meta, "question": fields["question"]})


def _normalize_fields(record: RawRecord) -> JsonTable:
    """Return the columns of both forms as id, question, context and exact_answer; absent ones stay absent."""
    given = record.fields
    found = {name: given[name] for name in ("id", "question", "context", "exact_answer") if name in given}
    if "body" in given:
        found.setdefault("question", given["body"])
    if isinstance(given.get("snippets"), list) and given["snippets"]:
        texts = [snippet.get("text") for snippet in given["snippets"] if isinstance(snippet, dict)]
        found.setdefault("context", " ".join(text for text in texts if isinstance(text, str)))
    if "ideal_answer" in given and "snippets" not in given:
        found.setdefault("context", given["ideal_answer"])
    if given.get("yesno_label") is not None:
        answers = {"1": "yes", "0": "no"}
        found.setdefault("exact_answer", answers.get(str(given["yesno_label"]).strip(), given["yesno_label"]))
    return found


SAMPLE = (
    RawRecord(
        {
            "id": "56c1f00eef6e394741000039",
            "type": "yesno",
            "body": "Does RNA polymerase II have RNA cleavage activity?",
            "snippets": [{"text": "TFIIS enhances cleavage."}, {"text": "It is elongation."}],
            "exact_answer": "Yes",
        },
        where="golden.json:1",
    ),
    TextExample(
        id="56c1f00eef6e394741000039",
        inputs="question: Does RNA polymerase II have RNA cleavage activity? "
        "context: TFIIS enhances cleavage. It is elongation.",
        targets="yes",
        references=("yes",),
        clippable=(70, 112),
        meta={
            "labels": ["yes", "no"],
            "label_form": "Yes",
            "question": "Does RNA polymerase II have RNA cleavage activity?",
        },
    ),
)
