"""The shipped recipes: their folder, their names, and the file of a name or path."""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from pathlib import Path

from fivetune.errors import ConfigError, RunDirError, suggest_names

SWEEPS = "compare"  # folder of the shipped sweeps among the recipes


def is_run_directory(source: str | Path) -> bool:
    """Whether a source is a run directory, not just a folder with a recipe's name."""
    return (Path(source) / "config.yaml").is_file()


def find_recipes_folder() -> Path:
    """Find the folder of the recipes: beside the sources in a checkout, or inside the installed package."""
    inside = Path(__file__).parents[1] / "recipes"
    if inside.is_dir():
        return inside
    return Path(__file__).parents[2] / "recipes"


def list_recipe_names() -> list[str]:
    """List the names of the shipped recipes, as `fivetune train` accepts them."""
    folder = find_recipes_folder()
    names: list[str] = []
    for path in folder.rglob("*.yaml"):
        name = path.relative_to(folder).with_suffix("")
        if name.parts[0] != SWEEPS:
            names.append(str(name))
    return sorted(names)


def find_shipped_recipe(name: str) -> Path | None:
    """Find the file of a shipped recipe by name, with or without recipes/ and .yaml; None if there is none.

    >>> find_shipped_recipe("recipes/squad_v2.yaml") == find_shipped_recipe("squad_v2"), find_shipped_recipe("squad_v3")
    (True, None)
    """
    path = find_recipes_folder() / f"{name.removeprefix('recipes/').removesuffix('.yaml')}.yaml"
    return path if path.is_file() else None


def refuse_missing_run(source: str | Path) -> None:
    """Raise RunDirError for a name to resume that is neither a run directory nor a recipe."""
    path = Path(source)
    if is_run_directory(path) or path.is_file() or path.suffix in (".yaml", ".yml") or find_shipped_recipe(str(source)):
        return
    if path.is_dir():
        raise RunDirError(
            f"{source}: there is no run to resume: the folder has no config.yaml. If it is a run, restore that file."
        )
    near = [str(one.parent) for one in path.parent.glob("*/config.yaml")]
    advice = suggest_names(str(source), near) if near else f"{path.parent} holds no run. Train one without --resume."
    raise RunDirError(f"{source}: there is no run to resume: no such run directory. {advice}")


def find_recipe(source: str | Path) -> Path:
    """Find a recipe by path, run directory or shipped name. Raises ConfigError with the nearest names."""
    if not isinstance(source, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"recipe: is a {type(source).__name__}. Allowed are a file, the name of a shipped recipe, a run directory, "
            'a nested dict and a RunConfig. Give data by the setting data.train: {"data.train": TABLE}.'
        )
    path = Path(source)
    if is_run_directory(path):
        return path / "config.yaml"
    if re.search(r"\.(csv|tsv|jsonl|parquet)(\.gz)?$", path.name) and path.is_file():
        raise ConfigError(
            f"{source}: is data, not a recipe. Write a recipe for it: fivetune new {shlex.quote(str(path))}."
        )
    if (path / "config.json").is_file():
        raise ConfigError(
            f"{source}: is a model, not a recipe. Name it beside the task: fivetune train squad_v2 --model.path "
            f"{shlex.quote(str(source))} --data.train FILE (fivetune list recipes)."
        )
    found = path if path.is_file() else find_shipped_recipe(str(source))
    if found is not None:
        return found
    siblings = [sibling.name for sibling in path.parent.glob("*.y*ml")]
    if re.search(r"t5|ul2", path.name, re.IGNORECASE) and not path.suffix:
        raise ConfigError(
            f"{source}: no such recipe. If it is a model, name it beside the task: fivetune train squad_v2 "
            f"--model.path {shlex.quote(str(source))} --data.train FILE (fivetune list recipes)."
        )
    name = path.name if get_close_matches(path.name, siblings) else re.sub(r"^recipes/|\.ya?ml$", "", str(source))
    near = suggest_names(name, [*siblings, *list_recipe_names()], listing="fivetune list recipes")
    raise ConfigError(f"{source}: no such recipe. {near}")
