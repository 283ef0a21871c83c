"""The section `distill` of a recipe: a teacher whose answers or predictions the model learns.

In: nested plain values. Out: checked settings. A field's description is its documentation (docs/config.md).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

KIND_OF = {"num_beams": "sequence", "alpha": "logits", "temperature": "logits"}


class DistillSection(BaseModel):
    """A teacher that the model learns from (docs/losses.md); its vocabulary must be the model's."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    teacher: str | None = Field(default=None, description="model folder, hub name, or run directory; null: no teacher")
    kind: Literal["sequence", "logits"] = Field(
        default="sequence",
        description="sequence: its answers to the training inputs are the targets, generated once and cached; logits: "
        "its probabilities of every token are part of the loss",
    )
    num_beams: PositiveInt = Field(
        default=1, description="kind sequence: beams of the teacher's search; 5 in the paper"
    )
    alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="kind logits: share of the teacher in the loss; the targets have the rest"
    )
    temperature: PositiveFloat = Field(
        default=2.0, description="kind logits: divides the logits of both; above 1 shows more of unlikely tokens"
    )

    @model_validator(mode="after")
    def _check_options(self) -> DistillSection:
        fields = type(self).model_fields
        changed = [name for name in fields if name != "teacher" and getattr(self, name) != fields[name].default]
        if changed and self.teacher is None:
            raise ValueError(f"{changed[0]} {getattr(self, changed[0])} has no effect without distill.teacher. Add it")
        for name in changed:
            if KIND_OF.get(name, self.kind) != self.kind:
                raise ValueError(
                    f"{name} {getattr(self, name)} is an option of kind {KIND_OF[name]}, not of {self.kind}. Remove it"
                )
        return self


def explain_unsupported_distillation(
    section: DistillSection,
    *,
    is_extractive: bool,
    is_mixture: bool,
    window_shards: int | None,
    sharded_strategy: str | None,
    r_drop: float,
) -> str:
    """Explain which setting distillation does not support, beginning with its key; empty if it supports all.

    Args:
        sharded_strategy: name of a strategy that divides the model among several processes; None for others.
    """
    if section.teacher is None:
        return ""
    key = f"distill.kind {section.kind}"
    if is_extractive:
        return "distill.teacher: answers of an extractive model are not generated. Remove it, or set task.head generate"
    if section.kind == "sequence" and is_mixture:
        return f"{key}: the parts of a mixture have answers of several kinds. Distil one task, or use kind logits"
    if section.kind == "sequence" and window_shards:
        return f"{key}: the teacher answers all training inputs at once. Remove data.window_shards, or use kind logits"
    if section.kind == "logits" and sharded_strategy:
        return f"{key}: strategy.name {sharded_strategy} divides the model, the teacher is whole. Use single or ddp"
    if section.kind == "logits" and r_drop:
        return f"{key}: loss.r_drop computes every example twice. Remove one of them"
    return ""
