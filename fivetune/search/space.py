"""What is searched: every setting and value is tried on the recipe before anything runs.

In: a recipe with a section `search`. Out: its config, with ranges in the numbers of their settings; the config of one
trial; the points of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivetune.config import RunConfig, describe, layers_of, load_config
from fivetune.config_layers import Layers
from fivetune.config_search import Searched
from fivetune.errors import ConfigError

EXAMPLE = "search: {over: {optimizer.lr: {low: 1e-4, high: 1e-2, log: true}}}"
IRRATIONAL = 0.3719  # how far between two ends to look for a number that is not whole


def load_search(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """`load_config` of a recipe that says what to search over.

    Raises ConfigError for an empty search, an unknown setting, a value that its setting does not take, or a grid that
    has no end.
    """
    config = load_config(source, overrides)
    layers, _ = layers_of(source, overrides)
    where = layers.origin(("search", "over"))
    if not config.search.over:
        raise ConfigError(f"{where}: search.over is missing. Say which settings to search, for example {EXAMPLE}.")
    if not (config.data.eval or getattr(config.task, "parts", None)):
        raise ConfigError("data.eval: a search needs evaluation data to score trials by. Add --data.eval FILE.")
    over = {key: _in_its_numbers(key, searched, layers, where) for key, searched in config.search.over.items()}
    config = config.model_copy(update={"search": config.search.model_copy(update={"over": over})})
    num = config.search.num_trials
    if config.search.sampler == "grid" and (size := len(grid(config, where=where))) > num:
        raise ConfigError(f"{where}: search.num_trials {num} is less than the {size} points of the grid. "
                          f"Set search.num_trials {size}, or search.sampler random.")  # fmt: skip
    return config


def trial_config(config: RunConfig, settings: Mapping[str, Any], folder: str | Path) -> RunConfig:
    """The recipe of one trial, which runs in `folder`. Raises ConfigError where the settings do not go together."""
    return load_config(config.as_dict(), {**settings, "run.dir": str(folder), "search.over": {}})


def own_settings(config: RunConfig) -> dict[str, Any]:
    """The recipe's own values of the searched settings, as far as they are among those searched."""
    found = {}
    for key, searched in config.search.over.items():
        value: Any = config.as_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value in searched.choices if searched.choices else _is_inside(value, searched):
            found[key] = value
    return found


def grid(config: RunConfig, *, where: str = "search") -> list[dict[str, Any]]:
    """All combinations of choices and of steps. Raises ConfigError for a range without a step."""
    over = config.search.over
    for key, searched in over.items():
        if not searched.choices and not searched.step:
            raise ConfigError(f"{where}: search.over.{key}: a grid needs choices, or a step for its range.")
    return [dict(zip(over, values, strict=True)) for values in product(*map(_points, over.values()))]


def _points(searched: Searched) -> tuple[Any, ...]:
    """All values of choices or of a range with a step.

    >>> _points(Searched(low=0, high=10, step=4)), _points(Searched(low=0.1, high=0.3, step=0.1))
    ((0, 4, 8), (0.1, 0.2, 0.3))
    """
    if searched.choices:
        return searched.choices
    assert searched.low is not None and searched.high is not None and searched.step
    num = int((searched.high - searched.low) / searched.step + 1e-9) + 1
    kind = type(searched.low)
    return tuple(kind(round(searched.low + i * searched.step, 12)) for i in range(num))


def _is_inside(value: Any, searched: Searched) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    assert searched.low is not None and searched.high is not None
    steps = (value - searched.low) / searched.step if searched.step else 0
    return searched.low <= value <= searched.high and abs(steps - round(steps)) < 1e-9


def _in_its_numbers(key: str, searched: Searched, layers: Layers, where: str) -> Searched:
    """A range in whole numbers where its setting takes only these, else in floats."""
    for value in searched.samples:
        if refusal := _refusal(layers, key, value):
            raise ConfigError(f"{where}: search.over: {refusal}")
    if searched.choices:
        return searched
    low, high = searched.samples
    whole = low == int(low) and high == int(high) and _refusal(layers, key, low + IRRATIONAL * (high - low))
    kind = int if whole else float
    step = searched.step and kind(searched.step)
    if step != searched.step:
        raise ConfigError(f"{where}: search.over.{key}.step is {searched.step}, but the setting takes whole numbers.")
    return searched.model_copy(update={"low": kind(low), "high": kind(high), "step": step})


def _refusal(layers: Layers, key: str, value: Any) -> str | None:
    """Why a setting does not take a value, whatever the other settings are; None if it does."""
    changed = deepcopy(layers)
    changed.add_overrides({key: value})
    try:
        RunConfig.model_validate(changed.table())
    except ConfigError as error:  # a plugin that there is not
        return str(error)
    except ValidationError as error:
        own = [found for found in error.errors() if found["loc"]]  # rules between settings depend on the others
        return describe(own[0], changed).replace(f"--{key}: {key}", key).replace(f"--{key}", key) if own else None
    return None
