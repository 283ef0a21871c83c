"""The settings, told to people (docs/config.md) and to editors (a JSON schema), from their field descriptions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fivetune import plugins
from fivetune.config import PLUGIN_SECTIONS, RunConfig
from fivetune.config_layers import ALIASES


def schema() -> dict[str, Any]:
    """JSON schema of a recipe; a section that names a plugin takes the options of that plugin."""
    full = RunConfig.model_json_schema()
    full["title"] = "FiveTune recipe"
    full["properties"]["base"] = {"type": "string", "description": "recipe that this one differs from"}
    full["required"] = []
    for section, kind in PLUGIN_SECTIONS.items():
        options = []
        for name in plugins.names(kind):
            table = plugins.load(kind, name).model_json_schema()
            full.setdefault("$defs", {}).update(table.pop("$defs", {}))
            table["properties"] = {"name": {"const": name}, **table.get("properties", {})}
            options.append({**table, "required": []})
        full["properties"][section] = {"anyOf": [*options, {"enum": plugins.names(kind)}]}
    return full


def manual() -> str:
    """docs/config.md."""
    lines = [
        "# Settings",
        "",
        "Written by `fivetune config --manual`. A recipe is a YAML file of the sections below; every setting is also a",
        "flag (`--optimizer.lr 1e-3`). `base: other.yaml` lets a recipe hold only its differences.",
        "",
    ]
    for name, field in RunConfig.model_fields.items():
        if name in PLUGIN_SECTIONS:
            lines += _plugin_section(name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += [f"## {name}", "", str(field.annotation.__doc__), "", *_table(field.annotation), ""]
        else:
            lines += [f"## {name}", "", f"{field.description}. Default: {_default(field)}.", ""]
    lines += ["## Names from transformers", "", "These are understood at the top level of a recipe and as flags:", ""]
    lines += ["| name | setting |", "|---|---|", *(f"| `{name}` | `{key}` |" for name, key in sorted(ALIASES.items()))]
    return "\n".join(lines) + "\n"


def _plugin_section(section: str) -> list[str]:
    kind = PLUGIN_SECTIONS[section]
    lines = [
        f"## {section}",
        "",
        f"`{section}: {{name: ..., options}}`; the names are those of `fivetune/{kind}/`.",
        "",
    ]
    for name in plugins.names(kind):
        options = plugins.load(kind, name)
        lines += [f"### {section}.name: {name}", "", (options.__doc__ or "").partition("\n")[0], ""]
        if options.model_fields:
            lines += [*_table(options), ""]
    return lines


def _table(model: type[BaseModel]) -> list[str]:
    rows = [
        f"| `{name}` | {_default(field)} | {(field.description or '').replace('|', '/')} |"
        for name, field in model.model_fields.items()
    ]
    return ["| setting | default | meaning |", "|---|---|---|", *rows]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    words = {"None": "null", "True": "true", "False": "false", "()": "[]"}
    return f"`{words.get(str(default), default)}`"
