"""The search space: checks every searched setting and value against the recipe before any trial runs.

In: a recipe with a section `search`. Out: its config, with ranges in the type of their settings (int or float); the
config of one trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivetune.config import RunConfig, describe_error, load_config, load_layers
from fivetune.config.layers import Layers
from fivetune.config.search import SearchDimension
from fivetune.errors import ConfigError
from fivetune.values import flatten_table

EXAMPLE = "search: {over: {optimizer.lr: {low: 1e-4, high: 1e-2, log: true}}}"
FRACTION = 0.3719  # of an integer range: a value that is not an integer


def load_search(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Load a recipe with a section `search`.

    Raises ConfigError for an empty search, an unknown setting, or a value that its setting refuses.
    """
    config = load_config(source, overrides)
    layers, _ = load_layers(source, overrides)
    where = layers.find_origin(("search", "over"))
    if not config.search.over:
        raise ConfigError(f"{where}: search.over is missing. Give the settings to search, for example {EXAMPLE}.")
    if not (config.data.eval or config.data.eval_share or config.task.part_tasks):
        raise ConfigError("data.eval: a search needs evaluation data to score trials by. Add --data.eval FILE.")
    over: dict[str, SearchDimension] = {}
    for key, searched in config.search.over.items():
        over[key] = _convert_range_type(key, searched, layers, where)
    return config.replace("search", over=over)


def build_trial_config(config: RunConfig, settings: Mapping[str, Any], folder: str | Path) -> RunConfig:
    """Build the config of a trial that runs in `folder`. Raises ConfigError for settings that exclude each other.

    Trials have no copy at checkpoint.url, which would be that of the first one.
    """
    own: dict[str, Any] = {"run.dir": str(folder), "checkpoint.url": None, "search.over": {}}
    return load_config(config.as_dict(), {**settings, **own})


def select_recipe_values(config: RunConfig) -> dict[str, Any]:
    """The recipe's own values of the searched settings, without values outside their range or choices."""
    values = flatten_table(config.as_dict())
    own: dict[str, Any] = {}
    for key, searched in config.search.over.items():
        value = values.get(key)
        if _is_inside(value, searched):
            own[key] = value
    return own


def _is_inside(value: Any, searched: SearchDimension) -> bool:
    if searched.choices:
        return value in searched.choices
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    assert searched.low is not None and searched.high is not None
    if not searched.low <= value <= searched.high:
        return False
    steps = (value - searched.low) / searched.step if searched.step else 0
    return abs(steps - round(steps)) < 1e-9


def _convert_range_type(key: str, searched: SearchDimension, layers: Layers, where: str) -> SearchDimension:
    """Convert the ends of a range to int if its setting accepts only integers, else to float."""
    for value in searched.samples:
        if refusal := _find_setting_error(layers, key, value):
            raise ConfigError(f"{where}: search.over: {refusal}")
    if searched.choices:
        return searched
    low, high = searched.samples
    kind = float
    # a setting of whole numbers refuses a number between the ends
    if low == int(low) and high == int(high) and _find_setting_error(layers, key, low + FRACTION * (high - low)):
        kind = int
    step = searched.step and kind(searched.step)
    if step != searched.step:
        raise ConfigError(f"{where}: search.over.{key}.step is {searched.step}, but the setting needs whole numbers.")
    return searched.model_copy(update={"low": kind(low), "high": kind(high), "step": step})


def _find_setting_error(layers: Layers, key: str, value: Any) -> str | None:
    """The error of a setting with a value, regardless of other settings; None if it accepts the value."""
    changed = deepcopy(layers)
    changed.add_overrides({key: value})
    try:
        RunConfig.model_validate(changed.to_dict())
    except ConfigError as error:  # an unknown plugin
        return str(error)
    except ValidationError as error:
        for found in error.errors():
            if found["loc"]:  # a rule between settings, which has no place, depends on the others
                return describe_error(found, changed).replace(f"--{key}: {key}", key).replace(f"--{key}", key)
    return None
