"""The section `loss` of a recipe: what is minimised beside the negative log-likelihood.

In: nested plain values. Out: checked settings. A field's description is its documentation (docs/config.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Annotated, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat

from fivetune.config.layers import format_value, parse_table
from fivetune.types import Task


def _check_class_weights(value: object) -> object:
    """Convert the labels of `{0: 3, 1: 1}` to texts, as those of a task are; refuse other words than balanced."""
    table = parse_table(value)
    if isinstance(table, Mapping):
        weights = cast("Mapping[object, object]", table)
        for label, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
                raise ValueError(
                    f"the weight of {label} is {format_value(weight)}. Allowed is a number above 0, such as 3"
                )
        return {str(label).lower() if isinstance(label, bool) else str(label): weights[label] for label in weights}
    if table != "balanced":
        raise ValueError(f"there is no {table!r}. Allowed: balanced, or a table such as {{rare: 3, frequent: 1}}")
    return "balanced"


ClassWeights = Annotated[dict[str, PositiveFloat] | Literal["balanced"], BeforeValidator(_check_class_weights)]


class LossSection(BaseModel):
    """What training minimises beside the negative log-likelihood (docs/losses.md). Recorded losses stay plain."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of the target probability that is spread over all tokens; usual: 0.1"
    )
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="factor of log(Z)^2, which keeps the logits' log-partition near 0; usual: 1e-4"
    )
    class_weights: ClassWeights = Field(
        default={},
        description="label tasks: factors of the loss by label, {rare: 3, frequent: 1}, others 1; balanced: number of "
        "examples / (number of labels * examples of the label)",
    )
    r_drop: NonNegativeFloat = Field(
        default=0.0,
        description="alpha of R-Drop: two passes with different dropout, whose predictions shall agree; twice the "
        "computation; usual: 1 to 5",
    )

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the options that are on."""
        return tuple(name for name in type(self).model_fields if getattr(self, name))


def explain_unsupported_loss(section: LossSection, task: Task, *, dropout: float | None) -> str:
    """Explain which option a task or a model without dropout does not support, beginning with its key; else empty."""
    name = task.plugin_name()
    if section.class_weights and task.labels is None:
        return (
            f"loss.class_weights weighs the labels of a label task, and the answers of task {name} are free text. "
            "Remove it, or use task.name classification"
        )
    for option in section.used:
        if getattr(task, "head", "generate") == "extractive":
            return f"loss.{option} is an option of generated answers. Remove it, or set task.head: generate"
    if section.r_drop and dropout == 0:
        return (
            f"loss.r_drop {section.r_drop:g} compares two passes with different dropout, and model.dropout is 0. Set "
            "model.dropout: 0.1, or remove loss.r_drop"
        )
    return ""
