"""Classification of any text: a template over its columns, a label column, and labels taken from the training data.

Source: the user's own table. Licence: the file's. A record:

    {"id": "7", "text": "The parcel has not arrived.", "label": "delivery"}

With other columns: task: {name: classification, inputs: "ticket: {subject} {body}", label: category}. The labels are
read from the training data and written into the run's config.yaml, so that predict and evaluate use the same; or set
them with other target words: labels: {delivery: late, refund: money}. A blank label, or "nan", which pandas writes for
an empty cell, is a missing label: the record is left out of training and counted.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from fivetune.config.layers import parse_table
from fivetune.errors import MissingLabelError
from fivetune.tasks import (
    LABEL_FORM,
    LabelOptions,
    Template,
    check_labels,
    fill_from_record,
    find_clippable,
    get_column,
    get_record_id,
    is_missing_label,
    shorten_repr,
)
from fivetune.types import ConversionResult, RawRecord, TextExample


def _check_given_labels(labels: dict[str, str]) -> dict[str, str]:
    return check_labels(labels) if labels else labels


class Classification(LabelOptions):
    """Classification of any text, with labels read from the training data."""

    inputs: Template = Field(default="{text}", description="template of the inputs, over any columns")
    label: str = Field(default="label", min_length=1, description="column of the label")
    labels: Annotated[dict[str, str], BeforeValidator(parse_table), AfterValidator(_check_given_labels)] = Field(
        default={}, description="label: target word; default: the labels of the training data"
    )

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample:
        """Return an example. Raises RecordError for empty inputs or an unknown label, MissingLabelError without one."""
        inputs, _ = fill_from_record(record, self.inputs)
        clippable = find_clippable(self.inputs, inputs)
        if self.labels:
            return self.build_example(record, self.label, inputs, clippable, labelled=labelled)
        label = self.read_label(record) if labelled or self.label in record.fields else None
        if label is None and labelled:
            raise self._make_missing_label_error(record)
        if label is None:
            return TextExample(get_record_id(record), inputs, "", (), clippable)
        form = record.fields[self.label]
        meta = {LABEL_FORM: form} if isinstance(form, str) and form != label else {}
        return TextExample(get_record_id(record), inputs, label, (label,), clippable, meta)

    def to_score(self, record: RawRecord) -> ConversionResult:
        """Return the gold label without inputs, which scoring does not need."""
        label = self.read_label(record)
        if label is None:
            raise self._make_missing_label_error(record)
        label = self._find_label(label) or label
        meta = {"labels": list(self.labels)} if self.labels else {}
        return TextExample(get_record_id(record), "", label, (label,), meta=meta)

    def read_label(self, record: RawRecord) -> str | None:
        """Return the label of a record as text, None if it is blank or nan.

        >>> Classification().read_label(RawRecord({"label": " late "}, "a.csv:2"))
        'late'
        """
        value = get_column(record, self.label)
        if isinstance(value, bool):
            return str(value).lower()
        text = "" if value is None else str(value).strip()
        return None if is_missing_label(text) else text

    def _make_missing_label_error(self, record: RawRecord) -> MissingLabelError:
        value = record.fields.get(self.label)
        return MissingLabelError(
            record.where, f"{self.label} is {shorten_repr(value)}, which is not a label. Write the label."
        )


SAMPLE = (
    RawRecord({"id": "7", "text": "The parcel has not arrived.", "label": "delivery"}, where="tickets.csv:2"),
    TextExample(
        id="7",
        inputs="The parcel has not arrived.",
        targets="delivery",
        references=("delivery",),
        clippable=(0, 27),
    ),
)
