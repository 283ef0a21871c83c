"""Several labels for one text, from any table: a list, a separated text, or a column of 0 and 1 for each label.

Source: the user's own table. Licence: the file's. A record:

    {"id": "7", "text": "I cannot log in, and was billed twice.", "tags": "login; billing"}

With other columns: task: {name: tags, inputs: "{title} {body}", tags: [topics], separator: "|"}. Line ends separate
labels, too. A list may be written as text, as CSV has it: ['login', 'billing']. A record with a column for each label,
as in Jigsaw's comments: tags: [toxic, threat, insult]; the names of those that are 1, true, yes or x are its labels,
and blank cells are 0. Other columns, such as tags: [tag1, tag2, tag3], hold the labels themselves, and blank cells
none. The target is the labels in the order of the data, written as one text; a record without any has the target
`none`, which the metric counts as no label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from fivetune.errors import RecordError
from fivetune.tasks import (
    TaskOptions,
    Template,
    fill_absent_inputs,
    fill_from_record,
    find_clippable,
    get_column,
    get_record_id,
    is_missing_label,
    shorten_repr,
)
from fivetune.tasks._choices import parse_literal
from fivetune.types import MetricSpec, RawRecord, TextExample

FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(
        ("1", "1.0", "true", "t", "yes", "y", "ja", "oui", "si", "sí", "sì", "sim", "да", "是", "はい"), True
    ),
    **dict.fromkeys(("x", "✓", "✔", "☑"), True),
    **dict.fromkeys(("0", "0.0", "false", "f", "no", "n", "nein", "non", "não", "нет", "否", "いいえ", ""), False),
}
"""Values of a column that stands for one label -> whether a record has it."""


def _parse_names(value: object) -> object:
    """A single column may be given without a list."""
    return [value] if isinstance(value, str) else value


class Tags(TaskOptions):
    """Several labels per text, from a list, a separated text, several columns, or a column for each label."""

    version = 2
    main_metric = "micro_f1"

    inputs: Template = Field(default="{text}", description="template of the inputs, over any columns")
    tags: Annotated[tuple[str, ...], BeforeValidator(_parse_names)] = Field(
        default=("tags",),
        min_length=1,
        description="column of the labels; several: columns of labels, or one for each label that holds 0 or 1",
    )
    separator: str = Field(
        default=",", min_length=1, description="what separates labels, in a column of text and in the targets"
    )
    no_tags: str = Field(default="none", min_length=1, description="target of a record without labels")

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        return ({"name": "tags", "separator": self.separator},)

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample:
        """Return an example. Raises RecordError for empty inputs, values that are no labels, labels with separators."""
        inputs, _ = fill_from_record(record, self.inputs)
        clippable = find_clippable(self.inputs, inputs)
        if not labelled and not all(name in record.fields for name in self.tags):
            return TextExample(get_record_id(record), inputs, "", (), clippable)
        tags = self._read_tags(record)
        if held := [tag for tag in tags if self.separator in tag]:
            raise RecordError(
                record.where,
                f"the label {shorten_repr(held[0])} holds the separator {self.separator!r}, and would count as "
                "several. Set task.separator to what no label holds, such as '; '.",
            )
        written = f"{self.separator.rstrip()} ".join(tags)
        return TextExample(get_record_id(record), inputs, written or self.no_tags, (written,), clippable)

    def to_score(self, record: RawRecord) -> TextExample:
        """Return the gold labels; columns that the inputs alone need may be absent."""
        return self.to_text(fill_absent_inputs(record, self.inputs, self.tags))

    def from_text(self, text: str) -> str:
        """Return the labels that the model wrote as one text, "" for none.

        >>> Tags().from_text(" None "), Tags().from_text("login, billing")
        ('', 'login, billing')
        """
        plain = text.strip()
        return "" if plain.casefold() == self.no_tags.casefold() else plain

    def _read_tags(self, record: RawRecord) -> list[str]:
        """Return the distinct labels of a record."""
        words: dict[str, str] = {}  # "" for an empty cell
        for name in self.tags:
            value = get_column(record, name)
            word = "" if value is None else str(value).strip().casefold()
            words[name] = "" if word == "nan" else word
        if len(words) > 1 and FLAGS.keys() >= {*words.values()}:
            return [name for name, word in words.items() if FLAGS[word]]
        tags: dict[str, None] = {}  # an ordered set
        for name, word in words.items():
            # A number among several columns could be a flag as well as a label.
            if len(words) > 1 and word and (word in FLAGS or is_number(word)):
                raise RecordError(
                    record.where,
                    f"{name} is {shorten_repr(get_column(record, name))}. Of several columns, all hold 1 or 0, true or "
                    "false, or all hold labels in words. Correct it, or name one column of labels in task.tags.",
                )
            if word:
                tags |= dict.fromkeys(split_tags(record, name, self.separator))
        return [*tags]


def is_number(text: str) -> bool:
    """Whether a text is a number.

    >>> is_number("2.0"), is_number("b2")
    (True, False)
    """
    return re.fullmatch(r"[-+]?\d+(?:[.,]\d+)?", text) is not None


def split_tags(record: RawRecord, name: str, separator: str) -> list[str]:
    """Return the distinct labels in a column of a record: of a list, of one that is written as text, or of a text at
    the separators and line ends.

    >>> split_tags(RawRecord({"tags": "login; billing;login"}, "a.csv:2"), "tags", ";")
    ['login', 'billing']
    >>> split_tags(RawRecord({"tags": "['login', 'billing, late']"}, "a.csv:2"), "tags", ";")
    ['login', 'billing, late']

    Raises RecordError for other values.
    """
    value = get_column(record, name)
    if isinstance(value, str) and value.strip()[:1] in ("[", "{", "("):
        value = parse_tags(value.strip(), separator)
    parts: list[object] = []
    if isinstance(value, list | tuple):
        parts += value
    elif isinstance(value, str):
        for line in [] if is_missing_label(value) else value.splitlines():
            parts += line.split(separator)
    elif value is not None:
        raise RecordError(record.where, f"{name} is {shorten_repr(value)}. It must be a list of labels, or a text.")
    tags: dict[str, None] = {}  # an ordered set
    for part in parts:
        if not isinstance(part, str | int):
            raise RecordError(record.where, f"{name} holds {shorten_repr(part)}. Each label must be text or a number.")
        tags[" ".join(str(part).split())] = None
    tags.pop("", None)
    return [*tags]


def parse_tags(text: str, separator: str) -> object:
    """Parse a list that is written as text, as JSON, Python, NumPy and PostgreSQL have it; other texts are returned.

    >>> parse_tags("['a' 'b']", ";"), parse_tags("[a, b]", ";"), parse_tags("{a,b}", ","), parse_tags("(a) or [b]", ";")
    (['a', 'b'], ['a', 'b'], ['a', 'b'], '(a) or [b]')
    """
    parsed = parse_literal(text)
    if isinstance(parsed, set):
        return sorted(map(str, parsed))
    if isinstance(parsed, list | tuple | dict):
        return parsed
    plain = re.fullmatch(r"\[([^\[\]]*)\]|\{([^{}]*)\}", text)
    if not plain:
        return text
    inner = plain[1] or plain[2] or ""
    return [part.strip(" '\"") for part in inner.split(separator if separator in inner else ",")]


SAMPLE = (
    RawRecord({"id": "7", "text": "I cannot log in, and was billed twice.", "tags": "login, billing"}, where="a.csv:2"),
    TextExample(
        id="7",
        inputs="I cannot log in, and was billed twice.",
        targets="login, billing",
        references=("login, billing",),
        clippable=(0, 38),
    ),
)
