"""The section `model` of a recipe, and the options of a plugin as settings.

In: nested plain values. Out: checked settings. A field's description is its documentation (docs/config.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

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
from pydantic_core import PydanticCustomError

from fivetune import plugins
from fivetune.config.layers import parse_names, parse_table
from fivetune.errors import UnknownPluginError, suggest_names
from fivetune.plugins import Options
from fivetune.types import Adapter, JsonTable

UNKNOWN_PLUGIN = "unknown_plugin"  # type of pydantic's error
ONLY_FOR_TRAINING = ("optimizers", "schedules", "strategies")  # kinds of plugins that no answer of a run needs
Fraction = Annotated[float, Field(ge=0, lt=1)]


def is_for_training(info: ValidationInfo) -> bool:
    """Whether settings are checked for training; a trained run is also opened where it could not train."""
    context = cast("Mapping[str, bool] | None", info.context)
    return not (context or {}).get("trained")


def parse_plugin(
    kind: str, default: str | None, value: Options | str | Mapping[str, object] | None, info: ValidationInfo
) -> Any:
    """Convert `{name: adafactor, lr: 1e-3}` or `adafactor` to the options of that plugin.

    Of a trained run a plugin that only training needs may be absent.
    """
    if isinstance(value, Options):
        return value
    table = {"name": value} if isinstance(value, str) else dict(value or {})
    name = table.pop("name", default)
    if not isinstance(name, str):
        given = f", has {', '.join(table)}" if table else ""
        saved = " Or give the path of one that was saved." if kind == "adapters" else ""
        raise ValueError(f"needs a name{given}. {suggest_names('', plugins.list_plugins(kind))}{saved}")
    try:
        found = plugins.load_plugin(kind, name)
    except UnknownPluginError as error:
        if is_for_training(info) or kind not in ONLY_FOR_TRAINING:
            text = str(error).removeprefix(f"{kind}: ")
            raise PydanticCustomError(UNKNOWN_PLUGIN, "{text}", {"text": text}) from None
        found = plugins.make_stand_in(kind, name)
    return found.model_validate(table, context=info.context)


def _parse_adapter(value: Options | str | Mapping[str, object] | None, info: ValidationInfo) -> Any:
    """Convert `{name: lora, r: 8}` or `lora` to the options of that adapter; `{path: DIR}` is one that was saved."""
    if value is None:
        return None
    is_saved = isinstance(value, Mapping) and "path" in value
    return parse_plugin("adapters", "saved" if is_saved else None, value, info)


def _as_table(options: Options | None) -> JsonTable | None:
    return options and {"name": options.plugin_name(), **options.model_dump(mode="json")}


class ModelSection(BaseModel):
    """The model that is fine-tuned."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    path: str | None = Field(default=None, description="local folder, hub name, or t5-nano (part of the package)")
    config: str | None = Field(default=None, description="folder or config.json to build from, with init: random")
    tokenizer: str | None = Field(default=None, description="folder or hub name; default: the model's own")
    add_tokens: Annotated[tuple[str, ...], BeforeValidator(parse_names)] = Field(
        default=(),
        description='signs and words that the vocabulary is grown by: ["<", "{", "\\n", metformin] (docs/models.md)',
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="load the weights, or initialise them randomly"
    )
    revision: str | None = Field(default=None, description="commit or tag on the hub")
    dropout: Fraction | None = Field(
        default=0.1, description="dropout rate in training; null keeps the checkpoint's (0 in v1.1 and mT5)"
    )
    any_seq2seq: bool = Field(
        default=False,
        description="also accept sequence-to-sequence models of other families (Bart, Pegasus), computed by "
        "transformers alone, at your own risk: docs/models.md",
    )
    freeze: Annotated[tuple[str, ...], BeforeValidator(parse_names)] = Field(
        default=(),
        description="weights that are not trained, by parts of their names: shared, encoder, encoder.block.0-3, "
        "relative_attention_bias, decoder.block.*.layer.1",
    )
    unfreeze: Annotated[dict[str, PositiveInt], BeforeValidator(parse_table)] = Field(
        default={}, description="weights that are trained from a step on: {encoder.block.8-11: 200, encoder: 500}"
    )
    adapter: Annotated[Adapter | None, PlainValidator(_parse_adapter), PlainSerializer(_as_table)] = Field(
        default=None,
        description="train an adapter beside frozen weights: lora, {name: lora, r: 8}, {path: DIR} (docs/adapters.md)",
    )

    @model_validator(mode="after")
    def _check_source(self) -> ModelSection:
        if self.init == "pretrained" and not self.path:
            raise ValueError("path is missing. Give model.path, or model.init: random with model.config")
        if self.init == "random" and not (self.config or self.path):
            raise ValueError("init: random needs model.config (a folder or a config.json)")
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> ModelSection:
        if self.adapter and self.init == "random":
            raise ValueError(
                f"adapter {self.adapter.plugin_name()} is trained beside frozen weights, and init: random has none "
                "that are worth keeping. Give model.path, or remove model.adapter"
            )
        if self.adapter and self.unfreeze:
            raise ValueError(
                f"unfreeze ({', '.join(self.unfreeze)}): adapter {self.adapter.plugin_name()} keeps the weights of the "
                "model frozen to the end. Remove one of the two"
            )
        return self
