"""Text to text from any table: two templates over its columns, and the metrics of one's choice.

Source: the user's own JSONL, CSV, TSV or Parquet file. Licence: the file's. A record:

    {"id": "7", "inputs": "translate English to German: a tree", "targets": "ein Baum"}

With other columns: task: {name: jsonl, inputs: "summarize: {article}", targets: "{summary}"}.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from fivetune import plugins
from fivetune.errors import DataError, nearest
from fivetune.metrics import score_names
from fivetune.plugins import Options
from fivetune.tasks import column, fill, record_id, template_columns, template_pieces
from fivetune.types import RawRecord, TextExample


def _check(template: str) -> str:
    template_columns(template)
    return template


Template = Annotated[str, AfterValidator(_check)]


class Jsonl(Options):
    """Any text to any text, columns and metrics chosen in the config."""

    version: ClassVar[int] = 1

    inputs: Template = Field(default="{inputs}", description="template of what the model reads, over any columns")
    targets: Template = Field(default="{targets}", description="template of what it learns to write")
    references: str | None = Field(
        default=None, description="column with all right answers (text or list); default: the target"
    )
    clip: str | None = Field(
        default=None,
        description="column of the inputs that may be cut when too long; default: all but the first fixed words",
    )
    metrics: tuple[str, ...] = Field(default=("exact_match",), description="metrics that score it")
    main_metric: str = Field(default="exact_match", description="score that chooses the best checkpoint")

    @model_validator(mode="after")
    def _known_names(self) -> Jsonl:
        for metric in self.metrics:
            if metric not in plugins.names("metrics"):
                raise ValueError(f"metrics: there is no {metric!r}. {nearest(metric, plugins.names('metrics'))}")
        scores = score_names(self.metrics)
        if self.main_metric not in scores:
            metrics = ", ".join(self.metrics) or "no metric"
            raise ValueError(
                f"main_metric: {metrics} gives no score {self.main_metric!r}. {nearest(self.main_metric, scores)}"
            )
        if self.clip is not None and self.clip not in template_columns(self.inputs):
            columns = nearest(self.clip, template_columns(self.inputs))
            raise ValueError(f"clip: {self.clip!r} is not in inputs {self.inputs!r}. {columns}")
        return self

    @property
    def no_answer_text(self) -> None:
        return None

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """One pair of texts. Raises DataError for a missing or empty column."""
        inputs, spans = _filled(record, self.inputs)
        start = len(template_pieces(self.inputs)[0][0])
        needed = [*template_columns(self.targets), *([self.references] if self.references else [])]
        targets, references = "", ()
        if labelled or all(record.fields.get(name) is not None for name in needed):
            targets, _ = _filled(record, self.targets)
            references = self._references(record) or (targets,)
        return TextExample(
            id=record_id(record),
            inputs=inputs,
            targets=targets,
            references=references,
            clippable=spans[self.clip] if self.clip else (start, len(inputs)),
        )

    def from_text(self, text: str) -> str:
        """The model's text without surrounding space."""
        return text.strip()

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """The filled `targets` template."""
        if not example.targets:
            raise DataError(f"{example.id}: there is no target to learn. Train on records that have targets.")
        return (example.targets,)

    def _references(self, record: RawRecord) -> tuple[str, ...]:
        if self.references is None:
            return ()
        value = column(record, self.references)
        texts = value if isinstance(value, list | tuple) else [value]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(
                f"{record.where}: {self.references} is {value!r}. It must be a text or a list of texts, none empty."
            )
        return tuple(texts)


def _filled(record: RawRecord, template: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """Fill a template from a record; numbers are written out, nothing else than text and numbers is taken."""
    values: dict[str, str] = {}
    for name in template_columns(template):
        value = column(record, name)
        if not isinstance(value, str | int | float):
            raise DataError(f"{record.where}: {name} is {value!r}. It must be text or a number.")
        values[name] = str(value)
    if not "".join(values.values()).strip():
        raise DataError(
            f"{record.where}: {', '.join(values)} is empty. Give it a text, or set data.on_bad_record: skip."
        )
    return fill(template, values)


SAMPLE = (
    RawRecord({"id": 7, "inputs": "translate English to German: a tree", "targets": "ein Baum"}, where="pairs.jsonl:7"),
    TextExample(
        id="7",
        inputs="translate English to German: a tree",
        targets="ein Baum",
        references=("ein Baum",),
        clippable=(0, 35),
    ),
)
