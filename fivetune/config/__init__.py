"""The configuration of a run.

In: files and overrides. Out: a frozen, checked RunConfig. Layers, later ones win: the field defaults, `base:` files,
the file itself, dotted overrides. Every value keeps its origin, so that an error can name file and line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivetune import plugins
from fivetune.config.advice import advise_on_value, suggest_alias
from fivetune.config.aliases import ALIASES
from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS, Layers, format_value, read_file
from fivetune.config.model import UNKNOWN_PLUGIN
from fivetune.config.recipes import find_recipe, is_run_directory
from fivetune.config.search import SearchDimension
from fivetune.config.sections import RunConfig
from fivetune.errors import ConfigError, suggest_names

SWEEP_KEYS = {"grid", "zip", "list"}  # of a sweep's file (experiments/sweep.py), none of which is a section of a run
MAX_NAME_BYTES = 200  # of a run directory; file systems take 255, and runs/NAME.before-20261126T151201 is beside it
__all__ = ["RunConfig", "describe_error", "load_config", "load_layers"]


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, object] | None = None, *, trained: bool = False
) -> RunConfig:
    """Read a recipe (a file or a dict), apply dotted overrides, and check all settings.

    Args:
        source: path of a YAML or JSON file, name of a shipped recipe, a run directory (its config.yaml, with
            `run.dir` set to that directory), or a nested dict.
        overrides: dotted keys (or transformers' names) and their values: {"optimizer.lr": 1e-3}.
        trained: whether the run is trained, so that its device need not support the settings of training.

    Returns the RunConfig, which `fivetune.train` takes too. Raises ConfigError with file, line and the nearest allowed
    names.

    >>> load_config("squad_v2", {"train.num_steps": 100}).train.num_steps
    100
    """
    layers, name = load_layers(source, overrides)
    config = _validate_layers(layers, trained=trained)
    folder = config.run.dir.replace("{recipe}", name)
    size = len(os.fsencode(os.path.basename(folder)))
    if size > MAX_NAME_BYTES and not trained:
        raise ConfigError(
            f"{layers.find_origin(('run', 'dir'))}: the name of the run directory has {size} bytes. Allowed are "
            f"{MAX_NAME_BYTES}, because names beside it are longer. Give a shorter one: run.dir."
        )
    return config.replace("run", dir=folder)


def load_layers(source: str | Path | Mapping[str, Any], overrides: Mapping[str, object] | None) -> tuple[Layers, str]:
    """Load a recipe's settings with their origins; returns them and the recipe's name."""
    layers = Layers()
    if isinstance(source, Mapping):
        layers.add_table(source, where="the given dict")
        name = "run"
    else:
        path = find_recipe(source)
        for table in read_file(path):
            layers.add(table)
        name = path.stem
        if is_run_directory(source):
            _refuse_partial_config(path, layers)
            layers.add_table({"run": {"dir": str(source)}}, where=str(source))
            name = Path(source).resolve().name
    layers.add_overrides(overrides or {})
    return layers, name


def _refuse_partial_config(path: Path, layers: Layers) -> None:
    """Raise ConfigError for a run's config.yaml that lacks its last section: the file is truncated.

    Another missing section is newer than the run.
    """
    table = layers.to_dict()
    sections = list(RunConfig.model_fields)
    if sections[-1] not in table:
        missing = [section for section in sections if section not in table]
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        raise ConfigError(
            f"{path}:{num_lines}: the file is truncated: {', '.join(missing)} missing. A run's config.yaml holds every "
            "section. Restore the file, or start a new run from its recipe."
        )


def _validate_layers(layers: Layers, *, trained: bool) -> RunConfig:
    table = layers.to_dict()
    misplaced = sorted(SWEEP_KEYS & table.keys())
    if misplaced:
        key = misplaced[0]
        raise ConfigError(
            f"{layers.find_origin((key,))}: {key} is a key of a sweep, not a setting of a run. Start a "
            "sweep with: fivetune compare FILE."
        )
    try:
        return RunConfig.model_validate(table, context={"trained": trained})
    except ValidationError as error:
        raise ConfigError("\n".join(describe_error(one, layers) for one in error.errors())) from None


def describe_error(error: Any, layers: Layers) -> str:
    """Format a pydantic error as *where: key: what is wrong, with which value. What is allowed.*"""
    kind = error["type"]
    path = tuple(str(part) for part in error["loc"])
    key = ".".join(path)
    where = layers.find_origin((*path, "name") if kind == UNKNOWN_PLUGIN else path)
    if kind == "extra_forbidden":
        near = _suggest_settings(path[0], layers) if len(path) == 1 else ""
        near = near or suggest_names(path[-1], _list_field_names(path, layers))
        alias = "" if len(path) != 2 or near.startswith("Did you mean") else suggest_alias(path)
        return f"{where}: {key} is not a setting. {alias}{near}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error" and len(path) <= 1:  # a rule between settings, which its message names
        where = layers.find_rule_origin(message, path)
    if not path:
        return f"{where}: {message.rstrip('.')}."
    if where != key and not f"{where}.".startswith(f"--{key}."):
        where = f"{where}: {key}"
    if kind == "string_pattern_mismatch" and key in RunConfig.model_fields:
        return f"{where}: there is no {error['input']!r}. Allowed: {RunConfig.model_fields[key].description}."
    message = re.sub(r", unable to parse string as an? \w+", "", message)
    message = re.sub(r"valid dictionary( or instance of \w+)?", "table", message).replace("valid tuple", "list")
    if kind in ("missing", "value_error", UNKNOWN_PLUGIN):  # whose message has the value
        given = ""
    elif error["input"] is None:
        given = ", not null (an empty value). Leave the setting out for its default"
    else:
        given = f", not {format_value(error['input'])}"
    advice = advise_on_value(kind, key, error["input"])
    return f"{where}: {message.rstrip('.')}{given}.{advice}"


def _suggest_settings(name: str, layers: Layers) -> str:
    """Suggest for a name at the top level the dotted settings that end in it, or the nearest name of transformers.

    Empty if a section's name is nearer.
    """
    name = name.replace("-", "_")
    sections = list(RunConfig.model_fields)
    dotted = [f"{section}.{name}" for section in sections if name in _list_field_names((section, name), layers)]
    if dotted:
        return f"Did you mean {' or '.join(dotted)}?"
    near = get_close_matches(name, [*sections, *ALIASES], n=1, cutoff=0.75)
    if near and near[0] in ALIASES:
        return f"Did you mean {near[0]} (transformers' name of {ALIASES[near[0]]})?"
    return ""


def _list_field_names(path: tuple[str, ...], layers: Layers) -> list[str]:
    """List the settings that are allowed at the place of an unknown `path`."""
    if len(path) == 1:
        return list(RunConfig.model_fields)
    section = path[0]
    table = layers.to_dict().get(section, {})
    if path[:2] == ("search", "over"):
        return list(SearchDimension.model_fields)
    if len(path) > 2 and ".".join(path[:2]) in NESTED_PLUGINS:
        kind = NESTED_PLUGINS[".".join(path[:2])]
        given = table[path[1]]
        name = given.get("name") or ("saved" if "path" in given else None)
    elif section in PLUGIN_SECTIONS:
        kind = PLUGIN_SECTIONS[section]
        name = table.get("name")
        if name is None and section != "task":
            name = RunConfig.get_default_plugin(section)
    else:
        return list(getattr(RunConfig.model_fields[section].annotation, "model_fields", ()))
    if name is None:
        return ["name"]
    return ["name", *plugins.load_plugin(kind, name).model_fields]
