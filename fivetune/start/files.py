"""Write the files of a plan: three sets as JSONL, and the recipe that reads two of them. The source is never changed.

In: a source, and what its user named. Out: the files, and a Started with their paths.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import cast

from fivetune.config import load_config
from fivetune.config.layers import parse_listed_names
from fivetune.config.recipes import find_shipped_recipe, is_run_directory
from fivetune.data.readers.nested_records import describe_nested
from fivetune.data.readers.records import is_hub_name, list_source_files
from fivetune.data.readers.source_files import (
    format_parallel,
    get_data_suffix,
    is_saved_dataset,
    list_parallel,
    split_sheet,
)
from fivetune.data.store.token_store import translate_disk_errors
from fivetune.distributed.world import World
from fivetune.errors import ConfigError, DataError
from fivetune.model.tokenizer import load_local_tokenizer
from fivetune.rundir import CONFIG
from fivetune.rundir.files import replace_file
from fivetune.start.choose import DoubtError
from fivetune.start.plan import SEED, SETS, StartPlan, build_plan, read_sets
from fivetune.start.recipe import build_recipe, build_settings, list_lines
from fivetune.start.roles import Given

RECIPES = (".yaml", ".yml")
MAX_RECIPE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Started:
    """A plan and its files: the recipe, and set -> JSONL file.

    Args:
        run: the run directory that its commands train, which held no run when the recipe was written.
    """

    plan: StartPlan
    recipe: Path
    files: Mapping[str, Path]
    run: str

    def list_commands(self) -> list[str]:
        """Return the commands that train the recipe and score its test set."""
        test = shorten_path(self.files["test"])
        is_other = self.run != f"runs/{self.recipe.stem}"
        return [
            shlex.join(
                ["fivetune", "train", shorten_path(self.recipe), *(["--run.dir", self.run] if is_other else [])]
            ),
            shlex.join(["fivetune", "evaluate", self.run, "--data.eval", test]),
        ]


def is_data(source: str) -> bool:
    """Whether a path is a data file or a folder of data files, not a recipe and not a run directory."""
    if list_parallel(source):
        return True
    path = Path(source).expanduser()
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        is_run = not names.isdisjoint((CONFIG, "machine.json", "config.json"))  # or a model
        return is_saved_dataset(path) or (not is_run and any(get_data_suffix(Path(name)) for name in names))
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > MAX_RECIPE_BYTES:
        return bool(get_data_suffix(path))
    try:  # a recipe may be JSON, too, as YAML includes it
        content = json.loads(path.read_bytes())
    except ValueError:
        return True
    return not isinstance(content, dict) or content.keys().isdisjoint(("model", "task", "base"))


def find_data_recipe(
    source: str,
    settings: Mapping[str, object],
    *,
    resume: bool,
    overwrite: bool,
    load_tokenizer: Callable[[str], object | None],
) -> tuple[str, Started | None]:
    """Find the recipe of what is to be trained; the recipe of a data file is written first, with the task and model of
    the settings. A run of a data file is resumed with the recipe that its start wrote.

    Args:
        settings: dotted ones.

    Returns: the recipe, which is the source itself if that is no data; what was written.

    Raises ConfigError for data of several processes, and the errors of `start_recipe`.
    """
    if not is_data(source) or find_shipped_recipe(source) is not None:
        return source, None
    written = choose_recipe_path(source, None)
    if resume:
        return str(written) if written.is_file() else source, None
    if World.from_environment().size > 1:
        raise ConfigError(f"{source}: is data, and several processes are started. Run fivetune new first.")
    task, model = (None if one is None else str(one) for one in map(settings.get, ("task.name", "model.path")))
    header = settings.get("data.header", ())
    files = choose_files(source, None, overwrite=overwrite)
    started = start_recipe(
        source, files, task=task, model=model, given={}, header=header, load_tokenizer=load_tokenizer
    )
    return str(started.recipe), started


def new(
    data: str | Path | Sequence[str | Path],
    *,
    task: str | None = None,
    model: str | None = None,
    output: str | Path | None = None,
    columns: Mapping[str, str | Sequence[str]] = MappingProxyType({}),
    header: str | Sequence[str] = (),
    seed: int = SEED,
    overwrite: bool = False,
) -> Started:
    """Write a recipe for data, with its three sets as JSONL, as `fivetune new` does.

    Args:
        data: a data file, a folder or a hub name; a list: files of lines that belong together.
        task: the task, if another one is meant than the one that is found.
        model: folder or hub name of the model; default: google-t5/t5-small.
        output: folder or recipe to write; default: data's name with .yaml in the working directory.
        columns: role -> column, or several of text, inputs, tags and choices: {"text": ["Subject", "Body"]}.
        header: names of the columns of a table without a header.
        seed: seed of the split, 0 or more.
        overwrite: write the recipe and its sets again.

    Returns the plan with its reasons (`started.plan`), `started.recipe` and `started.files`. Raises DoubtError, whose
    text names the choices, if the data can be read in several ways, DataError for data that no task fits, ConfigError
    for a recipe that exists.

    >>> started = new("tickets.csv", model="t5-nano", output="made")
    >>> started.plan.reading.task, str(started.recipe), sorted(started.files)
    ('classification', 'made/tickets.yaml', ['test', 'train', 'validation'])
    """
    if seed < 0:
        raise ConfigError(f"--seed {seed}: is negative. Allowed: 0 and more.")
    source = str(data) if isinstance(data, str | Path) else format_parallel(list(map(str, data)))
    given: dict[str, Sequence[str]] = {}
    for role, names in columns.items():
        given[role] = (names,) if isinstance(names, str) else tuple(names)
    files = choose_files(source, None if output is None else str(output), overwrite=overwrite)
    try:
        return start_recipe(
            source,
            files,
            task=task,
            model=model,
            given=given,
            header=header,
            seed=seed,
            load_tokenizer=load_local_tokenizer,
        )
    except DataError as error:
        nested = "" if given else describe_nested(Path(source))
        if not nested:
            raise
        # The records may be meant, or what they hold.
        if isinstance(error, DoubtError):
            error.args = (f"{error}\nOr {nested.removeprefix(f'{source}: ')}",)
            raise
        raise DataError(nested) from error


@dataclass(frozen=True, slots=True)
class RecipeFiles:
    """The files that a start writes, none of which is among its data.

    Args:
        recipe: path of the recipe.
        sets: name of a set -> its JSONL file.
        flags: words of the command line that named them, which the commands of a doubt repeat.
    """

    recipe: Path
    sets: Mapping[str, Path]
    flags: tuple[str, ...]


def choose_files(source: str, output: str | None, *, overwrite: bool) -> RecipeFiles:
    """Choose the files of a recipe.

    Args:
        output: folder, or path of the recipe; default: a recipe in the working directory, named after the source.

    Raises ConfigError if a file exists and not `overwrite`, and for files among those of the source.
    """
    recipe = choose_recipe_path(source, output)
    sets = {one: recipe.with_name(f"{recipe.stem}-{one}.jsonl") for one in SETS}
    _refuse_conflicts(source, [recipe, *sets.values()], overwrite=overwrite)
    flags: list[str] = []
    if output:
        flags.append(f"--output={output}")
    if overwrite:
        flags.append("--overwrite")
    return RecipeFiles(recipe, sets, tuple(flags))


def start_recipe(
    source: str,
    files: RecipeFiles,
    *,
    task: str | None = None,
    model: str | None = None,
    given: Given,
    seed: int = SEED,
    header: object = (),
    load_tokenizer: Callable[[str], object | None],
) -> Started:
    """Plan a recipe and write it with its three sets; an error in the data or the plan leaves nothing behind.

    If the disk fails, some of the sets may be there, each of them whole; the recipe is there only with all of them.

    Args:
        header: names of the columns of a table without a header, also as one text.

    Raises FiveTuneEnvironmentError if the disk refuses a file.
    """
    recipe = files.recipe
    columns = cast("Sequence[str]", parse_listed_names(header or ()))
    flags: list[str] = []
    for role in ("id", "group"):
        flags += [f"--column={role}={name}" for name in given.get(role, ())]
    if model:
        flags.append(f"--model={model}")
    if seed:
        flags.append(f"--seed={seed}")
    plan = build_plan(
        source,
        task=task,
        model=model,
        given=given,
        header=columns,
        flags=[*flags, *files.flags],
        seed=seed,
        load_tokenizer=load_tokenizer,
    )
    names = {one: shorten_path(file) for one, file in files.sets.items()}
    lines = list_lines(plan, names)
    text = build_recipe(plan, lines, names["test"])
    load_config(build_settings(lines))  # refuses what a recipe cannot hold, before anything is written
    with translate_disk_errors(recipe.parent, "--output"), ExitStack() as stack:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(replace_file(recipe)).write(text.encode())  # opened first, so renamed last
        opened = {one: stack.enter_context(replace_file(file)) for one, file in files.sets.items()}
        for one, fields in read_sets(plan):  # times of Parquet become text
            opened[one].write(json.dumps(fields, ensure_ascii=False, default=str).encode() + b"\n")
    return Started(plan, recipe, files.sets, _choose_run(recipe.stem))


def _choose_run(name: str) -> str:
    """Choose a run directory that holds no run: runs/NAME, or with the first free number."""
    names = chain([f"runs/{name}"], (f"runs/{name}-{number}" for number in count(2)))
    return next(one for one in names if not is_run_directory(one))


def choose_recipe_path(source: str, output: str | None) -> Path:
    """Choose the path of the recipe of a source.

    >>> str(choose_recipe_path("data/My tickets.csv.gz", None)), str(choose_recipe_path("a.csv", "out"))
    ('My-tickets.yaml', 'out/a.yaml')
    """
    path, sheet = split_sheet(source.rstrip("/").removesuffix(".gz"))
    path = Path(re.sub(r"[{}]", "", path))
    stem = f"{path.stem}-{sheet}" if get_data_suffix(path) else path.name
    plain = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "data"
    name = f"{plain}.yaml"
    if output is None:
        return Path(name)
    return Path(output) if output.endswith(RECIPES) else Path(output) / name


def shorten_path(path: Path) -> str:
    """Return a path as recipes and commands name it: relative below the working directory, else absolute."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def _refuse_conflicts(source: str, written: list[Path], *, overwrite: bool) -> None:
    if not is_hub_name(source):
        sources = {file.resolve() for file in list_source_files(source)}
        folder = Path(source).expanduser().resolve()
        for path in written:
            if path.resolve() in sources or path.resolve().parent == folder:
                raise ConfigError(f"{path}: is among the data, which are never changed. Give --output ANOTHER-FOLDER.")
    existing = [path for path in written if path.exists()]
    if existing and not overwrite:
        recipe = written[0]
        known = f" It is trained with: fivetune train {shlex.quote(str(recipe))}." if recipe.exists() else ""
        raise ConfigError(f"{existing[0]}: exists.{known} Add --overwrite to write it again, or give --output.")
