"""Text to text from any table: two templates over its columns, and any metrics.

Source: the user's own JSONL, CSV, TSV or Parquet file. Licence: the file's. A record:

    {"id": "7", "inputs": "translate English to German: a tree", "targets": "ein Baum"}

With other columns: task: {name: jsonl, inputs: "summarize: {article}", targets: "{summary}"}. With other metrics,
with or without options: task: {name: jsonl, metrics: [squad, {name: rouge, stemmer: true}], main_metric: rougeL_f1}.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from fivetune import plugins
from fivetune.config.model import is_for_training
from fivetune.errors import ConfigError, MissingLabelError, RecordError, suggest_names
from fivetune.scores.metrics import find_absent, list_selectable_scores, load_metric
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
    list_template_columns,
    shorten_repr,
)
from fivetune.types import MetricSpec, RawRecord, TextExample


class JSONL(TaskOptions):
    """Text to text, with columns and metrics from the config."""

    inputs: Template = Field(default="{inputs}", description="template of the inputs, over any columns")
    targets: Template = Field(default="{targets}", description="template of the targets")
    references: str | None = Field(
        default=None, description="column with all gold answers (text or list); default: the target"
    )
    clip: str | None = Field(
        default=None,
        description="clippable column of the inputs; default: all but the fixed text before the first column",
    )
    metrics: tuple[MetricSpec, ...] = Field(
        default=("exact_match",), description="metrics that score it, with or without options"
    )
    main_metric: str = Field(default="exact_match", description="score that chooses the best checkpoint")

    @model_validator(mode="after")
    def _check_metrics(self, info: ValidationInfo) -> JSONL:
        if not is_for_training(info) and find_absent(self.metrics):  # a trained run answers without its metrics
            return self
        for spec in self.metrics:
            _check_metric(spec)
        scores = list_selectable_scores(self.metrics)
        if self.main_metric not in scores:
            metrics = ", ".join(s if isinstance(s, str) else str(s["name"]) for s in self.metrics) or "no metric"
            raise ValueError(
                f"main_metric: {metrics} gives no score {self.main_metric!r}. {suggest_names(self.main_metric, scores)}"
            )
        return self

    @model_validator(mode="after")
    def _check_clip(self) -> JSONL:
        if self.clip is not None and self.clip not in list_template_columns(self.inputs):
            columns = suggest_names(self.clip, list_template_columns(self.inputs))
            raise ValueError(f"clip: {self.clip!r} is not in inputs {self.inputs!r}. {columns}")
        return self

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> TextExample | None:
        """Return an example. Raises RecordError for an absent or empty column, MissingLabelError for the target nan."""
        inputs, spans = fill_from_record(record, self.inputs)
        needed = self._list_gold_columns()
        targets, references = "", ()
        if labelled or not any(is_blank(record, name) for name in needed):
            targets, _ = fill_from_record(record, self.targets)
            if is_missing_label(targets):  # "nan"; a blank one is refused above
                columns = ", ".join(list_template_columns(self.targets))
                raise MissingLabelError(
                    record.where, f"{columns} is {targets!r}, an empty cell of pandas. Write a text."
                )
            references = self._read_references(record) or (targets,)
        return TextExample(
            id=get_record_id(record),
            inputs=inputs,
            targets=targets,
            references=references,
            clippable=spans[self.clip] if self.clip else find_clippable(self.inputs, inputs),
        )

    def to_score(self, record: RawRecord) -> TextExample | None:
        """Return the gold answers; columns that the inputs alone need may be absent."""
        return self.to_text(fill_absent_inputs(record, self.inputs, self._list_gold_columns()))

    def _list_gold_columns(self) -> list[str]:
        return [*list_template_columns(self.targets), *([self.references] if self.references else [])]

    def _read_references(self, record: RawRecord) -> tuple[str, ...]:
        if self.references is None:
            return ()
        value = get_column(record, self.references)
        texts = value if isinstance(value, list | tuple) else [value]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise RecordError(
                record.where,
                f"{self.references} is {shorten_repr(value)}. It must be a text or a list of texts, none empty.",
            )
        return tuple(texts)


def _check_metric(spec: MetricSpec) -> None:
    """Raise ValueError, with a message of one sentence, for an unknown metric or an invalid option."""
    try:
        load_metric(spec)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        assert isinstance(spec, Mapping)
        option = str(wrong["loc"][0])
        if wrong["type"] == "extra_forbidden":
            options = suggest_names(option, plugins.load_plugin("metrics", spec["name"]).model_fields)
            raise ValueError(f"metrics: {spec['name']} has no option {option!r}. {options}") from None
        raise ValueError(f"metrics: {spec['name']}: {option} {spec[option]!r}: {wrong['msg']}") from None


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
