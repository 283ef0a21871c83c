"""A number for a text or for two, written as text: a similarity, a rating, a price, as T5 learned STS-B.

Source: the user's own table. Licence: the file's. A record of STS-B (Cer et al. 2017):

    {"sentence1": "A plane is taking off.", "sentence2": "An air plane is taking off.", "score": "5.000"}

By default a number is rounded to steps of 0.2, half to even, and 2.57 is learned as 2.6, as in T5 (Raffel et al. 2020,
section 2.4), so that few texts stand for all numbers; the gold numbers of the evaluation are not rounded. With other
columns: task: {name: regression, inputs: "stsb sentence1: {sentence1} sentence2: {sentence2}", target: score}.
"""

from __future__ import annotations

from decimal import Decimal

from pydantic import Field, model_validator

from fivetune.errors import MissingLabelError, RecordError
from fivetune.scores.metrics.correlation import parse_number
from fivetune.tasks import (
    TaskOptions,
    Template,
    fill_absent_inputs,
    fill_from_record,
    find_clippable,
    get_column,
    get_record_id,
    is_blank,
    is_missing_label,
    shorten_repr,
)
from fivetune.types import RawRecord, TextExample


class Regression(TaskOptions):
    """A number for a text, learned as text in steps."""

    metrics = ("correlation",)
    main_metric = "pearson"

    inputs: Template = Field(default="{text}", description="template of the inputs, over any columns")
    target: str = Field(default="score", min_length=1, description="column of the number")
    step: float = Field(
        default=0.2, gt=0, allow_inf_nan=False, description="learned numbers are rounded to multiples of it"
    )
    low: float | None = Field(default=None, description="least number; a record with less is an error")
    high: float | None = Field(default=None, description="greatest number; a record with more is an error")

    @model_validator(mode="after")
    def _check_range(self) -> Regression:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high, {self.high}. Exchange them, or leave one out")
        return self

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample:
        """Return an example. Raises RecordError for a target that is no number or out of range, MissingLabelError for a
        blank one.
        """
        inputs, _ = fill_from_record(record, self.inputs)
        targets, references = "", ()
        if labelled or not is_blank(record, self.target):
            number = self._read_target(record)
            targets = self.round_number(number)
            references = (repr(number),)
        return TextExample(get_record_id(record), inputs, targets, references, find_clippable(self.inputs, inputs))

    def to_score(self, record: RawRecord) -> TextExample:
        """Return the gold number; columns of the inputs may be absent."""
        return self.to_text(fill_absent_inputs(record, self.inputs, [self.target]))

    def round_number(self, number: float) -> str:
        """Return the multiple of `step` that is nearest to a number, with the decimals of the step.

        >>> Regression().round_number(2.57), Regression().round_number(-0.04), Regression(step=5).round_number(12.6)
        ('2.6', '0.0', '15')
        """
        num_decimals = max(0, -int(Decimal(repr(self.step)).normalize().as_tuple().exponent))
        rounded = round(number / self.step) * self.step
        return f"{rounded + 0.0:.{num_decimals}f}"  # -0.0 + 0.0 is 0.0

    def _read_target(self, record: RawRecord) -> float:
        value = get_column(record, self.target)
        text = "" if value is None else str(value)
        if is_missing_label(text):
            raise MissingLabelError(record.where, f"{self.target} is {shorten_repr(value)}. Give it a number.")
        number = parse_number(text)
        if number is None:
            raise RecordError(
                record.where, f"{self.target} is {shorten_repr(value)}. It must be a number, such as 3.8 or -2."
            )
        bound = ""
        if self.low is not None and number < self.low:
            bound = f"task.low is {self.low:g}"
        elif self.high is not None and number > self.high:
            bound = f"task.high is {self.high:g}"
        if bound:
            raise RecordError(
                record.where,
                f"{self.target} is {text}, and {bound}. Correct it, or set task.low and task.high to the range of the "
                "data.",
            )
        return number


SAMPLE = (
    RawRecord({"id": "7", "text": "A plane is taking off.", "score": "3.800"}, where="sts.tsv:2"),
    TextExample(
        id="7",
        inputs="A plane is taking off.",
        targets="3.8",
        references=("3.8",),
        clippable=(0, 22),
    ),
)
