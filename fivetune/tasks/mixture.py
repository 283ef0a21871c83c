"""Multi-task training: parts mixed by rate, by size or by temperature, each scored by its own metrics.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
section 3.5.2, which defines the three mixing laws. Licence: those of the parts. A record outside a run names its part:

    {"part": "tags", "Title": "Java: Repeat Task Every Random Seconds", "Body": "<p>I'm ...", "Tags": "<java><repeat>"}

In a run every part has its own files, or those of `data`, and its share of each epoch (n is its number of examples):

    rate         its `rate` over the sum of all                   "set by hand"
    size         min(n, limit) over the sum of all                "examples-proportional mixing", limit is K
    temperature  min(n, limit)^(1/temperature) over the sum       "temperature-scaled mixing", T5: 2 and K = 2^21
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from fivetune import plugins
from fivetune.config.layers import parse_sources, parse_table
from fivetune.config.model import is_for_training
from fivetune.errors import RecordError, suggest_names
from fivetune.scores.metrics import find_absent, load_metric
from fivetune.tasks import TaskOptions, get_column, head_of, shorten_repr
from fivetune.types import ConversionResult, JsonTable, MetricSpec, RawRecord, Task, TextExample


def _parse_task(value: plugins.Options | str | Mapping[str, object] | None, info: ValidationInfo) -> plugins.Options:
    """Parse a task's name, or a table of its name and options, into its options. Raises ValueError."""
    if isinstance(value, plugins.Options):
        return value
    table = {"name": value} if isinstance(value, str) else dict(value or {})
    name = str(table.pop("name", ""))
    if name not in plugins.list_plugins("tasks") or name == "mixture":
        known = [task for task in plugins.list_plugins("tasks") if task != "mixture"]
        raise ValueError(f"there is no task {name!r} for a part. {suggest_names(name, known)}")
    options = plugins.load_plugin("tasks", name)
    return options.model_validate(_check_known_settings(table, options), context=info.context)


def _parse_part(value: object) -> object:
    """Convert a task's name to a part's table; raise ValueError for unknown settings of a table."""
    if isinstance(value, str):
        return {"task": value}
    return _check_known_settings(value, MixturePart) if isinstance(value, dict) else value


def _check_known_settings(table: JsonTable, model: type[BaseModel]) -> JsonTable:
    for name in table:
        if name not in model.model_fields:
            raise ValueError(f"{name} is not a setting here. {suggest_names(name, list(model.model_fields))}")
    return table


def _as_table(task: Task) -> JsonTable:
    return {"name": task.plugin_name(), **task.model_dump(mode="json")}


Files = Annotated[tuple[str, ...], BeforeValidator(parse_sources)]


class MixturePart(BaseModel):
    """One task of a mixture; settings that are not given are those of `data`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Annotated[Task, PlainValidator(_parse_task), PlainSerializer(_as_table)] = Field(
        description="name of the task, or a table of its name and options"
    )
    rate: float | None = Field(default=None, gt=0, description="share of the examples, of the sum of all rates")
    train: Files = Field(default=(), description="training files; default: data.train")
    eval: Files = Field(default=(), description="evaluation files; default: data.eval")
    columns: dict[str, str] = Field(default={}, description="in addition to those of data.columns")
    max_input_tokens: PositiveInt | None = Field(default=None, description="default: data.max_input_tokens")
    max_target_tokens: PositiveInt | None = Field(default=None, description="default: data.max_target_tokens")
    max_train_examples: PositiveInt | None = Field(default=None, description="default: data.max_train_examples")
    max_eval_examples: PositiveInt | None = Field(default=None, description="default: data.max_eval_examples")


class Mixture(TaskOptions):
    """A mixture of tasks: its parts and the mixing law."""

    parts: Annotated[
        dict[str, Annotated[MixturePart, BeforeValidator(_parse_part)]],
        BeforeValidator(parse_table),
        Field(min_length=2),
    ] = Field(
        default={"quality": "stackoverflow_quality", "tags": "stackoverflow_tags"},  # type: ignore[dict-item]
        description="name: a task, or a table of task, rate, train, eval, columns, max_input_tokens, "
        "max_target_tokens, max_train_examples, max_eval_examples; the defaults are those of data",
    )
    by: Literal["rate", "size", "temperature"] = Field(
        default="temperature", description="a part's share: its rate, its size, or its size to the power 1/temperature"
    )
    temperature: float = Field(default=2.0, ge=1, description="1 is by size; the higher, the more equal the parts")
    limit: PositiveInt | None = Field(default=2**21, description="by size or temperature: a part counts as no larger")
    part: str | None = Field(
        default=None, description="use this part only: to predict, or to evaluate it on other files"
    )

    @model_validator(mode="after")
    def _check_parts(self, info: ValidationInfo) -> Mixture:
        if self.part is not None and self.part not in self.parts:
            raise ValueError(f"part: there is no {self.part!r}. {suggest_names(self.part, list(self.parts))}")
        for name, part in self.parts.items():
            if (part.rate is None) == (self.by == "rate"):
                advice = "Give every part one" if self.by == "rate" else "Drop it, or take by: rate"
                raise ValueError(f"parts.{name}.rate is {part.rate} with by: {self.by}. {advice}")
            if head_of(part.task) != "generate":
                raise ValueError(
                    f"parts.{name}.task.head is {head_of(part.task)}. A mixture needs generate in all parts"
                )
            if not is_for_training(info) and find_absent(part.task.metrics):  # a trained run answers without them
                continue
            if not all(load_metric(spec).higher_is_better for spec in part.task.metrics):
                raise ValueError(
                    f"parts.{name}: lower is better for one of its metrics, so the parts have no mean. Leave it out"
                )
        return self

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        parts = {name: part.task.metrics for name, part in self.parts.items()}
        mains = {name: part.task.main_metric for name, part in self.parts.items()}
        return ({"name": "by_part", "parts": parts, "mains": mains},)

    @property
    def main_metric(self) -> str:
        return "mean"

    @property
    def part_tasks(self) -> tuple[Task, ...]:
        return tuple(part.task for part in self.parts.values())

    def list_selectable_scores(self) -> tuple[str, ...]:
        """Return the scores that eval.metric may name: those of the part that is used alone, or of the mixture."""
        return self.parts[self.part].task.list_selectable_scores() if self.part else super().list_selectable_scores()

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> ConversionResult:
        """Convert a record by its part's task. Raises RecordError if the record names no part."""
        return _name_part(record, self._find_task(record).to_text(record, labelled=labelled))

    def to_score(self, record: RawRecord) -> ConversionResult:
        """Convert a record for scoring by its part's task. Raises RecordError if the record names no part."""
        return _name_part(record, self._find_task(record).to_score(record))

    def _find_task(self, record: RawRecord) -> Task:
        name = get_column(record, "part")
        if name not in self.parts:
            raise RecordError(
                record.where, f"part is {shorten_repr(name)}. {suggest_names(str(name), list(self.parts))}"
            )
        return self.parts[name].task


def _name_part(record: RawRecord, converted: ConversionResult) -> ConversionResult:
    """Write the name of a record's part into `meta` of its examples."""
    if converted is None:
        return None
    named: list[TextExample] = []
    for example in converted if isinstance(converted, tuple) else (converted,):
        named.append(replace(example, meta={**example.meta, "source_task": record.fields["part"]}))
    return tuple(named) if isinstance(converted, tuple) else named[0]


SAMPLE = (
    RawRecord(
        {
            "id": "34552656",
            "part": "tags",
            "Title": "Java: Repeat Task Every Random Seconds",
            "Body": "<p>I'm already familiar with repeating tasks every n seconds.</p>",
            "Tags": "<java><repeat>",
        },
        where="posts.jsonl:2",
    ),
    TextExample(
        id="34552656",
        inputs="tags: Java: Repeat Task Every Random Seconds</s>"
        "I'm already familiar with repeating tasks every n seconds.",
        targets="java, repeat",
        references=("java, repeat",),
        clippable=(0, 106),
        meta={"source_task": "tags"},
    ),
)
