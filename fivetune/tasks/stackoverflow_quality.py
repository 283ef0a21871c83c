"""Quality of Stack Overflow questions as one of three labels: good, to be closed, or to be edited.

Source: https://www.kaggle.com/datasets/imoore/60k-stack-overflow-questions-with-quality-rate (Annamoradnejad,
Habibi and Fazli 2022); set `labels` for files with the same columns and other labels. Licence: posts CC BY-SA. A
record:

    {"Id": "34552656", "Title": "Java: Repeat Task Every Random Seconds", "Body": "<p>I'm already familiar with ...",
     "Tags": "<java><repeat>", "CreationDate": "2016-01-01 00:21:59", "Y": "LQ_CLOSE"}

Bodies with the label LQ_EDIT are raw text, the others HTML, so that `markup: true` leaks the label: T5 has no piece
for '<' and encodes it as <unk>. For a table with one text column set template: "quality: {text}", and name its label
column with data.columns: {Y: rating}.
"""

from __future__ import annotations

from pydantic import Field

from fivetune.tasks import LabelOptions, Labels, Template, fill_absent_inputs
from fivetune.tasks._posts import fill_post_template
from fivetune.types import RawRecord, TextExample


class StackOverflowQuality(LabelOptions):
    """Quality labels of Stack Overflow questions."""

    template: Template = Field(
        default="quality: {Title}</s>{Body}",
        description="the inputs, over any text columns; </s> is T5's end token, as between two sentences",
    )
    labels: Labels = Field(
        default={"LQ_CLOSE": "none", "LQ_EDIT": "low", "HQ": "high"},
        description="label in the column Y: target word",
    )
    markup: bool = Field(default=False, description="keep HTML tags and entities")

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample:
        """Return a post. Raises RecordError for a missing or empty text, or a label outside the set."""
        inputs, clippable = fill_post_template(record, self.template, markup=self.markup)
        return self.build_example(record, "Y", inputs, clippable, labelled=labelled)

    def to_score(self, record: RawRecord) -> TextExample:
        """Return the gold label; columns that the inputs alone need may be absent."""
        return self.to_text(fill_absent_inputs(record, self.template, ["Y"]))


SAMPLE = (
    RawRecord(
        {
            "id": "34552656",
            "Title": "Java: Repeat Task Every Random Seconds",
            "Body": "<p>I'm already familiar with repeating tasks every n seconds.</p>",
            "Tags": "<java><repeat>",
            "Y": "LQ_CLOSE",
        },
        where="train.csv:2",
    ),
    TextExample(
        id="34552656",
        inputs="quality: Java: Repeat Task Every Random Seconds</s>"
        "I'm already familiar with repeating tasks every n seconds.",
        targets="none",
        references=("LQ_CLOSE",),
        clippable=(0, 109),
        meta={"labels": ["LQ_CLOSE", "LQ_EDIT", "HQ"]},
    ),
)
