"""Tags of a Stack Overflow question, written as one text: "java, repeat".

Source: https://www.kaggle.com/datasets/imoore/60k-stack-overflow-questions-with-quality-rate (Annamoradnejad,
Habibi and Fazli 2022); any table with Title, Body and Tags works. Licence: posts CC BY-SA. A record:

    {"Id": "34552656", "Title": "Java: Repeat Task Every Random Seconds", "Body": "<p>I'm already familiar with ...",
     "Tags": "<java><repeat>", "CreationDate": "2016-01-01 00:21:59", "Y": "LQ_CLOSE"}

Tags may also be written as java|repeat, as "java, repeat" or "java repeat", or as a list.
"""

from __future__ import annotations

import re

from pydantic import Field

from fivetune.errors import RecordError
from fivetune.tasks import TaskOptions, Template, fill_absent_inputs, get_column, get_record_id, shorten_repr
from fivetune.tasks._posts import fill_post_template
from fivetune.types import RawRecord, TextExample

_SEPARATORS = re.compile(r"[<>|,\s]+")


class StackOverflowTags(TaskOptions):
    """Tags of Stack Overflow questions."""

    metrics = ("tags",)
    main_metric = "micro_f1"

    template: Template = Field(
        default="tags: {Title}</s>{Body}",
        description="the inputs, over any text columns; </s> is T5's end token, as between two sentences",
    )
    markup: bool = Field(default=False, description="keep HTML tags and entities")

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample:
        """Return a post. Raises RecordError for a missing or empty text or, if `labelled`, without tags."""
        inputs, clippable = fill_post_template(record, self.template, markup=self.markup)
        tags = parse_tags(get_column(record, "Tags") if labelled else record.fields.get("Tags"))
        if labelled and not tags:
            raise RecordError(
                record.where,
                f"Tags is {shorten_repr(record.fields['Tags'])}, which has no tag. Allowed are forms such as "
                "<java><repeat> and java|repeat, or a list of texts. Correct it.",
            )
        targets = ", ".join(tags)
        return TextExample(get_record_id(record), inputs, targets, (targets,) if tags else (), clippable)

    def to_score(self, record: RawRecord) -> TextExample:
        """Return the gold tags; columns that the inputs alone need may be absent."""
        return self.to_text(fill_absent_inputs(record, self.template, ["Tags"]))

    def from_answer(self, text: str) -> str:
        """Convert tags in the data's form, <a><b>, to the form of the references; other text is unchanged.

        >>> StackOverflowTags().from_answer("<java><repeat>"), StackOverflowTags().from_answer("java, data frame")
        ('java, repeat', 'java, data frame')
        """
        return ", ".join(parse_tags(text)) if text.strip().startswith("<") else text


def parse_tags(value: object) -> list[str]:
    """Return the distinct tags of a text in one of the known forms, or of a list of texts; [] for other values.

    >>> parse_tags("<c#><.net-3.5>"), parse_tags("python|pandas"), parse_tags(["c++", "c"]), parse_tags(None)
    (['c#', '.net-3.5'], ['python', 'pandas'], ['c++', 'c'], [])
    """
    tags: dict[str, None] = {}  # an ordered set
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, str):
            tags |= dict.fromkeys(_SEPARATORS.split(part))
    tags.pop("", None)
    return [*tags]


SAMPLE = (
    RawRecord(
        {
            "id": "34552656",
            "Title": "Java: Repeat Task Every Random Seconds",
            "Body": "<p>I'm already familiar with repeating tasks every n seconds.</p>",
            "Tags": "<java><repeat>",
        },
        where="train.csv:2",
    ),
    TextExample(
        id="34552656",
        inputs="tags: Java: Repeat Task Every Random Seconds</s>"
        "I'm already familiar with repeating tasks every n seconds.",
        targets="java, repeat",
        references=("java, repeat",),
        clippable=(0, 106),
    ),
)
