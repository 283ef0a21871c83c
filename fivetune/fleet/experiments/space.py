"""The search space: checks every searched setting and value against the recipe before any trial runs.

In: a recipe with a section `search`. Out: its config, with ranges in the type of their settings (int or float); the
config of one trial; the points of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import product
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

    Raises ConfigError for an empty search, an unknown setting, a value that its setting refuses, or an infinite grid.
    """
    config = load_config(source, overrides)
    layers, _ = load_layers(source, overrides)
    where = layers.find_origin(("search", "over"))
    if not config.search.over:
        raise ConfigError(f"{where}: search.over is missing. Give the settings to search, for example {EXAMPLE}.")
    if not (config.data.eval or config.data.eval_share or config.task.part_tasks):
        raise ConfigError("data.eval: a search needs evaluation data to score trials by. Add --data.eval FILE.")
    over = {key: _convert_range_type(key, searched, layers, where) for key, searched in config.search.over.items()}
    config = config.model_copy(update={"search": config.search.model_copy(update={"over": over})})
    num = config.search.num_trials
    if config.search.sampler == "grid" and (size := len(build_grid(config, where=where))) > num:
        raise ConfigError(
            f"{where}: search.num_trials {num} is less than the {size} points of the grid. "
            f"Set search.num_trials {size}, or search.sampler random."
        )
    return config


def build_trial_config(config: RunConfig, settings: Mapping[str, Any], folder: str | Path) -> RunConfig:
    """Build the config of a trial that runs in `folder`. Raises ConfigError for settings that exclude each other.

    Trials have no copy at checkpoint.url, which would be that of the first one.
    """
    return load_config(
        config.as_dict(), {**settings, "run.dir": str(folder), "checkpoint.url": None, "search.over": {}}
    )


def select_recipe_values(config: RunConfig) -> dict[str, Any]:
    """The recipe's own values of the searched settings, without values outside their range or choices."""
    values = flatten_table(config.as_dict())
    return {
        key: values.get(key)
        for key, searched in config.search.over.items()
        if (values.get(key) in searched.choices if searched.choices else _is_inside(values.get(key), searched))
    }


def build_grid(config: RunConfig, *, where: str = "search") -> list[dict[str, Any]]:
    """Build all combinations of choices and steps. Raises ConfigError for a range without a step."""
    over = config.search.over
    for key, searched in over.items():
        if not searched.choices and not searched.step:
            raise ConfigError(f"{where}: search.over.{key}: a grid needs choices, or a step for its range.")
    return [dict(zip(over, values, strict=True)) for values in product(*map(_list_grid_values, over.values()))]


def _list_grid_values(searched: SearchDimension) -> tuple[Any, ...]:
    """List the values of choices or of a range with a step.

    >>> _list_grid_values(SearchDimension(low=0, high=10, step=4))
    (0, 4, 8)
    >>> _list_grid_values(SearchDimension(low=0.1, high=0.3, step=0.1))
    (0.1, 0.2, 0.3)
    """
    if searched.choices:
        return searched.choices
    assert searched.low is not None and searched.high is not None and searched.step
    num = int((searched.high - searched.low) / searched.step + 1e-9) + 1
    kind = type(searched.low)
    return tuple(kind(round(searched.low + i * searched.step, 12)) for i in range(num))


def _is_inside(value: Any, searched: SearchDimension) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    assert searched.low is not None and searched.high is not None
    steps = (value - searched.low) / searched.step if searched.step else 0
    return searched.low <= value <= searched.high and abs(steps - round(steps)) < 1e-9


def _convert_range_type(key: str, searched: SearchDimension, layers: Layers, where: str) -> SearchDimension:
    """Convert the ends of a range to int if its setting accepts only integers, else to float."""
    for value in searched.samples:
        if refusal := _find_setting_error(layers, key, value):
            raise ConfigError(f"{where}: search.over: {refusal}")
    if searched.choices:
        return searched
    low, high = searched.samples
    whole = low == int(low) and high == int(high) and _find_setting_error(layers, key, low + FRACTION * (high - low))
    kind = int if whole else float
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
        own = [found for found in error.errors() if found["loc"]]  # a rule between settings depends on the others
        return describe_error(own[0], changed).replace(f"--{key}: {key}", key).replace(f"--{key}", key) if own else None
    return None
