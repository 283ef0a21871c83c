"""The section `train` of a recipe.

In: nested plain values. Out: checked settings. A field's description is its documentation (docs/config.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from fivetune.config.layers import format_value, parse_table


def _check_count_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(
        f"Input should be a valid integer of at least 1, or auto, not {'null' if value is None else repr(value)}"
    )


PositiveIntOrAuto = Annotated[PositiveInt | Literal["auto"], BeforeValidator(_check_count_or_auto)]


class ParamGroup(BaseModel):
    """Settings of the weights that a pattern selects."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    match: str = Field(description="a part of the weights' names, as in model.freeze")
    lr: PositiveFloat = Field(default=1.0, description="factor of optimizer.lr")
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="default: that of the optimizer; norms have none"
    )


class EarlyStopping(BaseModel):
    """When a run ends before its last step."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    patience: PositiveInt = Field(description="evaluations in a row without improvement")
    min_delta: NonNegativeFloat = Field(default=0.0, description="an improvement is larger than this")
    metric: str | None = Field(default=None, description="a score of the task, or loss; default: eval.metric")


def _parse_early_stopping(value: object) -> object:
    """Convert a patience to a table, and a table of the command line; refuse true, which names no patience."""
    value = parse_table(value)
    if isinstance(value, bool | str):
        raise ValueError(
            f"{format_value(value)} is not a number of evaluations. Give one, such as 3, or a table such as "
            "{patience: 3, min_delta: 0.5}; null is off"
        )
    if isinstance(value, int | float):
        return {"patience": value}
    return value


def _list_groups(value: object) -> object:
    """Put one group into a list, and convert groups of the command line to tables."""
    value = parse_table(value)
    if isinstance(value, Mapping):
        return (cast("Mapping[str, object]", value),)
    return [parse_table(one) for one in cast("Sequence[object]", value)] if isinstance(value, list | tuple) else value


EARLY_STOPPING_SCHEMA = {
    "anyOf": [{"type": "integer", "minimum": 1}, EarlyStopping.model_json_schema(), {"type": "null"}]
}


class TrainSection(BaseModel):
    """Length of the training, batch sizes and how a step is computed."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    num_steps: PositiveInt | None = Field(default=None, description="optimizer steps; excludes num_epochs")
    num_epochs: float | None = Field(
        default=None, gt=0, description="passes over the data; default 3 without num_steps"
    )
    batch_size: PositiveIntOrAuto = Field(
        default=8,
        description="examples per forward pass and device (micro-batch); auto: the largest divisor of "
        "global_batch_size that fits into memory, measured at the start",
    )
    global_batch_size: PositiveInt | None = Field(
        default=None,
        description="examples per optimizer step over all processes; default: batch_size; accumulation is derived",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = Field(
        default="auto",
        description="auto: bf16 products with fp32 weights if the device has units for them, on a CPU after a trial "
        "at the start; fp16 on a GPU without bf16, after a trial; else fp32. tf32: fp32 whose products round their "
        "factors to 10 bits (NVIDIA GPUs from A100 on)",
    )
    forward: Literal["auto", "flat", "padded", "buckets"] = Field(
        default="auto",
        description="flat computes real tokens only; padded a padded rectangle; buckets rectangles of fixed sizes; "
        "auto: chosen by device, printed at the start",
    )
    capture: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="replay steps as CUDA graphs; auto: if they agree with launched kernels and are faster, measured "
        "at the start; on: refuse to train without them; off: answers are written by launched kernels too",
    )
    recompute: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, a third slower"
    )
    max_grad_norm: PositiveFloat | None = Field(default=1.0, description="clip the gradient norm; null: no clipping")
    param_groups: Annotated[tuple[ParamGroup, ...], BeforeValidator(_list_groups)] = Field(
        default=(),
        description="other rates or weight decay for some weights; the first match counts: "
        "[{match: encoder, lr: 0.1}, {match: shared, weight_decay: 0.0}]",
    )
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="factor of the learning rate per layer, from the top of each stack down to the embedding; null: 1",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="decay of a moving average of the weights, such as 0.999; the average is evaluated, selected and "
        "exported in place of the weights; null: off (docs/optimizers.md)",
    )
    early_stopping: Annotated[
        EarlyStopping | None, BeforeValidator(_parse_early_stopping), WithJsonSchema(EARLY_STOPPING_SCHEMA)
    ] = Field(
        default=None,
        description="stop after this number of evaluations in a row without improvement (a better score; at equal "
        "scores a lower loss), or {patience: 3, min_delta: 0.5, metric: f1}: an improvement is above min_delta (0), "
        "metric is a score of the task or loss (default: eval.metric); null: off",
    )
    log_every_steps: PositiveInt = Field(default=10, description="steps between two progress lines outside a terminal")
    num_threads: PositiveInt | None = Field(
        default=None,
        description="CPU threads of each process; default: OMP_NUM_THREADS, else the process's share of the cores, "
        "or fewer where a measurement finds that other programs use them",
    )

    @model_validator(mode="after")
    def _check_one_length(self) -> TrainSection:
        if self.num_steps and self.num_epochs:
            raise ValueError("num_steps and num_epochs are both given. Keep one of them")
        return self

    @model_validator(mode="after")
    def _check_auto_batch_size(self) -> TrainSection:
        if self.batch_size == "auto" and not self.global_batch_size:
            raise ValueError(
                "batch_size auto needs global_batch_size, because it is the largest divisor of it that fits. "
                "Add it (128 in the T5 paper), or set batch_size to a number"
            )
        return self

    @property
    def examples_per_step(self) -> int:
        if self.global_batch_size:
            return self.global_batch_size
        assert self.batch_size != "auto"
        return self.batch_size
