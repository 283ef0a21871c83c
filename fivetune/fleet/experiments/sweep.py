"""Reader of sweep files: the runs, their order and their settings.

In: a YAML file (docs/compare.md shows one) and dotted overrides. Out: a Sweep with a checked RunConfig for every run.
It runs nothing and does not import torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from fivetune.config import RunConfig, load_config
from fivetune.config.aliases import is_known, translate_argument
from fivetune.config.layers import EXCLUSIVE, as_yaml, read_settings
from fivetune.config.recipes import SWEEPS, find_recipe, find_recipes_folder
from fivetune.errors import ConfigError, suggest_names
from fivetune.reading.compare.variants import make_unique_name
from fivetune.scores.metrics import list_score_names
from fivetune.types import JsonValue

Settings = dict[str, Any]
"""Dotted settings and their values."""

Factor = list[tuple[str, Settings]]
"""One varied factor: the name and the settings of each of its values."""

RESERVED_KEYS = {"run.seed": "seeds", "run.dir": "dir"}  # settings of a run that the sweep itself sets


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep; `name` is the name of its folder."""

    name: str
    variant: str
    seed: int
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file, checked.

    Args:
        folder: folder of its runs, their logs and sweep.json.
        variants: the varied settings of each variant, by name.
        varied: the settings that at least one variant sets.
        runs: planned runs in the order of training.
        baseline: the variant that the others are compared with.
        retries: number of retries of a failed run.
        price_per_hour: price of the machine, in any currency; None if unknown.
        corpus: the corpus to write before the first run; None if the data exist.
    """

    path: Path
    title: str
    folder: Path
    variants: Mapping[str, Settings]
    varied: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    baseline: str
    metric: str
    retries: int
    price_per_hour: float | None
    corpus: CorpusSection | None


def read_sweep(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file and check every run of it.

    Args:
        source: path of a YAML file, or the name of a shipped sweep: quick.
        overrides: dotted settings of all runs, which replace the settings of the file's `set:`.

    Raises ConfigError with file and line for an error in the sweep or in a variant's recipe.
    """
    path = find_sweep(source)
    file = _SweepFile(path)
    base = file.find_base_recipe()
    settings = _flatten_settings(file.keys.shared)
    file.check_reserved("set", settings)
    shared = _merge_settings(settings, _flatten_settings(overrides or {}))
    variants = _build_variants(file)
    varied: dict[str, None] = {}  # keys alone, in the order of the file
    for own in variants.values():
        varied |= dict.fromkeys(own)
    # A flag that replaced a varied setting would make all variants equal.
    for key, value in (overrides or {}).items():
        if _flatten_settings({key: value}).keys() & varied.keys():
            raise ConfigError(f"--{key}: is varied by {path}. Change it there.")
        if key in RESERVED_KEYS:
            raise ConfigError(f"--{key}: is set by the sweep. Change `{RESERVED_KEYS[key]}:` in {path}.")
    folder = Path(file.keys.dir or f"runs/{path.stem}")
    configs: dict[str, RunConfig] = {}
    seen: dict[str, str] = {}
    for name, own in variants.items():
        configs[name] = file.build_config(base, shared, name, own)
        other = seen.setdefault(configs[name].as_yaml(), name)
        if other != name:
            raise ConfigError(f"{path}: variants {other!r} and {name!r} have the same settings. Take one out.")
    return Sweep(
        path=path,
        title=file.keys.title or path.stem,
        folder=folder,
        variants=variants,
        varied=tuple(varied),
        runs=tuple(_plan_runs(configs, folder, file.keys.seeds, file.keys.order)),
        baseline=file.find_baseline(variants),
        metric=file.choose_metric(configs),
        retries=file.keys.retries,
        price_per_hour=file.keys.price_per_hour,
        corpus=file.keys.corpus,
    )


def find_sweep(source: str | Path) -> Path:
    """Find a sweep file by path or shipped name. Raises ConfigError with the nearest names."""
    shipped = find_recipes_folder() / SWEEPS
    name = str(source).removeprefix("recipes/").removeprefix(f"{SWEEPS}/").removesuffix(".yaml")
    for candidate in (Path(source), shipped / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    names = [path.stem for path in shipped.glob("*.yaml")]
    raise ConfigError(f"{source}: no such sweep, nor a run directory. {suggest_names(str(source), names)}")


# --- the file ---

Text = Annotated[str, StringConstraints(strict=True, pattern=r"\S")]
Count = Annotated[int, Field(strict=True, ge=0)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class _Section(BaseModel):
    """Keys of a sweep file; the description of each names its values, and completes "Give ..." in its error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CorpusSection(_Section):
    """The generated reading corpus, written before the first run."""

    dir: Text = Field(description="a folder")
    num_train: Annotated[int, Field(strict=True, ge=1)] = Field(description="a whole number, 1 or more")
    num_eval: Annotated[int, Field(strict=True, ge=1)] = Field(description="a whole number, 1 or more")
    seed: Count = Field(default=7, description="a whole number, 0 or more")
    max_facts: Annotated[int, Field(strict=True, ge=3)] = Field(default=4, description="a whole number, 3 or more")


class SweepKeys(_Section):
    """The keys of a sweep file (docs/compare.md)."""

    base: Text = Field(description="the name of a recipe or its file")
    title: Text | None = Field(default=None, description="a text")
    dir: Text | None = Field(default=None, description="a folder, such as runs/compare")
    shared: Settings = Field(default={}, alias="set", description="settings and their values")
    grid: Settings = Field(default={}, description="settings, each with a list of values")
    zipped: Settings = Field(
        default={}, alias="zip", description="settings, each with a list of values, all equally long"
    )
    listed: tuple[Annotated[Settings, Field(min_length=1)], ...] = Field(
        default=(), min_length=1, alias="list", description="a list of tables {name: ..., optimizer.lr: ...}"
    )
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = Field(
        default=(0,), description="a list of different whole numbers, such as [1, 2]"
    )
    order: Literal["interleaved", "by_variant"] = Field(default="interleaved", description="interleaved or by_variant")
    baseline: Text | Settings | None = Field(default=None, description="a variant's name or its settings")
    metric: Text | None = Field(default=None, description="the name of a score")
    retries: Count = Field(default=1, description="a whole number, 0 or more")
    price_per_hour: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        default=None, description="a number, 0 or more"
    )
    corpus: CorpusSection | None = Field(default=None, description="{dir: ..., num_train: ..., num_eval: ...}")

    @field_validator("seeds")
    @classmethod
    def _refuse_repetition(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("values are given twice")
        return seeds


DESCRIPTIONS = {
    f"{prefix}{field.alias or name}": str(field.description)
    for prefix, section in (("", SweepKeys), ("corpus.", CorpusSection))
    for name, field in section.model_fields.items()
}


class _SweepFile:
    """The checked keys of a sweep file and their lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._origins: dict[str, str] = {}
        _check_is_table(path)
        table: dict[str, Any] = {}
        for setting in read_settings(path):
            self._origins[".".join(setting.path)] = setting.where
            if len(setting.path) == 1:
                table[setting.path[0]] = setting.value
            else:
                table[setting.path[0]] = {**table[setting.path[0]], setting.path[1]: setting.value}
        try:
            self.keys = SweepKeys.model_validate(table)
        except ValidationError as error:
            raise ConfigError(self._describe_error(error, table)) from None

    def locate(self, key: str) -> str:
        """Find the line of a dotted key, or of the nearest one above it: `path:12`."""
        while key and key not in self._origins:
            key = key.rpartition(".")[0]
        return self._origins.get(key, str(self.path))

    def _describe_error(self, error: ValidationError, table: Mapping[str, Any]) -> str:
        """Describe the first error; a missing key is reported last, because another key may be misspelt."""
        first = min(error.errors(), key=lambda found: found["type"] == "missing")
        depth = 2 if first["loc"][0] == "corpus" else 1
        path = [str(part) for part in first["loc"][:depth]]
        key = ".".join(path)
        section = ".".join(path[:-1])
        if first["type"] == "missing":
            if section:
                return f"{self.locate(section)}: {section} has no {path[-1]}. Give {DESCRIPTIONS[section]}."
            return f"{self.path}: {key} is missing. Give {DESCRIPTIONS[key]}."
        if first["type"] == "extra_forbidden":
            prefix = f"{section}." if section else ""
            names = [name.removeprefix(prefix) for name in DESCRIPTIONS if name.rpartition(".")[0] == section]
            return f"{self.locate(key)}: {key} is not a key of a sweep. {suggest_names(path[-1], names)}"
        value = table[path[0]] if len(path) == 1 else table[path[0]][path[1]]
        return f"{self.locate(key)}: {key} is {value!r}. Give {DESCRIPTIONS[key]}."

    def find_base_recipe(self) -> Path:
        """Find the base recipe of all runs: beside the sweep file, at the path as given, or a shipped one."""
        beside = self.path.parent / self.keys.base
        try:
            return beside if beside.is_file() else find_recipe(self.keys.base)
        except ConfigError as error:
            raise ConfigError(f"{self.locate('base')}: base: {error}") from None

    def check_reserved(self, key: str, settings: Iterable[str]) -> None:
        """Raise ConfigError for the settings that the sweep itself sets for each run: seed and folder."""
        for name in settings:
            if name in RESERVED_KEYS:
                raise ConfigError(
                    f"{self.locate(f'{key}.{name}')}: {key}: {name} is set by the sweep. Use `{RESERVED_KEYS[name]}:`."
                )

    def find_baseline(self, variants: Mapping[str, Settings]) -> str:
        """Find the name of the baseline: given by name or by settings, else the first variant."""
        given = self.keys.baseline
        if given is None:
            return next(iter(variants))
        if not isinstance(given, str):
            wanted = _flatten_settings(given).items()
            found = [name for name, settings in variants.items() if wanted <= settings.items()]
            if len(found) != 1:
                raise ConfigError(
                    f"{self.locate('baseline')}: baseline: {len(found)} of {len(variants)} variants have "
                    f"{as_yaml(given).strip()}. Give settings that one of them has."
                )
            return found[0]
        if given not in variants:
            raise ConfigError(
                f"{self.locate('baseline')}: baseline: there is no variant {given!r}. {suggest_names(given, variants)}"
            )
        return given

    def choose_metric(self, configs: Mapping[str, RunConfig]) -> str:
        """Choose the score that variants are compared by: the file's, else the one that selects checkpoints."""
        first = next(iter(configs.values()))
        metric = self.keys.metric or first.eval.metric or first.task.main_metric
        for name, config in configs.items():
            known = list_score_names(config.task.metrics)
            if metric not in known:
                raise ConfigError(
                    f"{self.locate('metric')}: metric: variant {name!r} has no score {metric!r}. "
                    f"{suggest_names(metric, known)}"
                )
        return metric

    def build_config(self, base: Path, shared: Settings, variant: str, settings: Settings) -> RunConfig:
        """Build the config of a variant. Raises ConfigError with the line of the invalid setting."""
        try:
            return load_config(base, _merge_settings(shared, settings))
        except ConfigError as error:
            lines = [f"{self._add_location(line, settings)} (variant {variant})" for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines)) from None

    def _add_location(self, message: str, settings: Settings) -> str:
        """Replace `--key` in an error by the line of this file that sets the key."""
        found = re.match(r"--([^\s:]+): ?(.*)", message, re.DOTALL)
        if not found:
            return message
        key, rest = found.groups()
        if key in settings:
            if key in _flatten_settings(self.keys.grid):
                kind = "grid"
            elif key in _flatten_settings(self.keys.zipped):
                kind = "zip"
            else:
                kind = "list"
        elif key in _flatten_settings(self.keys.shared):
            kind = "set"
        else:
            return message
        where = self.locate(f"{kind}.{key}")
        return f"{where}: {rest}" if rest.startswith(key) else f"{where}: {key}: {rest}"


def _check_is_table(path: Path) -> None:
    """Raise ConfigError for a file that is empty or not a table; `read_settings` reports all other errors."""
    with suppress(yaml.YAMLError, UnicodeDecodeError):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if found is None:
            raise ConfigError(f"{path}: the file is empty. A sweep needs at least base, and grid, zip or list.")
        if not isinstance(found, dict):
            keys = ", ".join(key for key in DESCRIPTIONS if "." not in key)
            raise ConfigError(f"{path}: a sweep is a table with the keys {keys}. It is {found!r:.60}.")


# --- variants ---


def _flatten_settings(table: Mapping[str, Any]) -> Settings:
    """Flatten settings to dotted names; transformers' arguments are translated.

    An argument without an equivalent is unchanged: `load_config` refuses it, and its message gets the line.

    >>> _flatten_settings({"train": {"num_steps": 4}, "learning_rate": 0.1, "data.columns": {"a": "b"}})
    {'train.num_steps': 4, 'optimizer.lr': 0.1, 'data.columns': {'a': 'b'}}
    >>> _flatten_settings({"doc_stride": 64, "bf16": True})
    {'data.window_overlap': 64, 'data.overlong': 'windows', 'train.precision': 'bf16'}
    """
    return _translate_arguments(_flatten_sections(table))


def _translate_arguments(given: Settings) -> Settings:
    """Translate transformers' arguments among settings; other settings are unchanged."""
    beside = {key.replace("-", "_"): value for key, value in given.items()}
    settings: Settings = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        translated: Settings = {key: value}
        if is_known(name):
            with suppress(ConfigError):
                translated = translate_argument(name, value, where=key, beside=beside)
        settings |= translated
    return settings


def _flatten_sections(table: Mapping[str, JsonValue]) -> Settings:
    """Flatten settings to dotted names, as they are written."""
    flat: Settings = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and "." not in key:
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def _merge_settings(below: Settings, above: Settings) -> Settings:
    """Merge two layers; `above` replaces equal keys of `below`, and keys that its own exclude.

    >>> _merge_settings({"train.num_epochs": 3, "device": "cpu"}, {"train.num_steps": 4})
    {'device': 'cpu', 'train.num_steps': 4}
    """
    kept = {key: value for key, value in below.items() if EXCLUSIVE.get(key) not in above}
    return kept | above


def _build_variants(file: _SweepFile) -> dict[str, Settings]:
    """Build every combination of the entries of `list`, the rows of `zip` and the values of `grid`."""
    factors = [*_read_list_factors(file), *_read_zip_factors(file)]
    columns = _read_columns(file, "grid", file.keys.grid)
    for key, values in columns.items():
        factors.append([_build_choice({key: value}, columns) for value in values])
    if not factors:
        raise ConfigError(f"{file.path}: nothing is varied. Give grid, zip or list.")
    # A setting in two factors would have two values.
    taken: set[str] = set()
    for factor in factors:
        own: set[str] = set()
        for _, settings in factor:
            own |= settings.keys()
        twice = sorted(own & taken)
        if twice:
            raise ConfigError(f"{file.path}: {twice[0]} is varied twice. Keep it in one of grid, zip and list.")
        taken |= own
    variants: dict[str, Settings] = {}
    for combination in product(*factors):
        name = " ".join(label for label, _ in combination)
        if name in variants:
            raise ConfigError(f"{file.path}: two variants are called {name!r}. Give the entries of `list` names.")
        variants[name] = {}
        for _, settings in combination:
            variants[name] |= settings
    return variants


def _read_list_factors(file: _SweepFile) -> list[Factor]:
    unnamed: list[Settings] = []
    keys: set[str] = set()
    for entry in file.keys.listed:
        settings = _flatten_settings({key: value for key, value in entry.items() if key != "name"})
        unnamed.append(settings)
        keys |= settings.keys()
    factor: Factor = []
    for number, (entry, settings) in enumerate(zip(file.keys.listed, unnamed, strict=True), start=1):
        file.check_reserved("list", settings)
        name = entry.get("name", _format_label(settings, keys) or "as the base")
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{file.locate('list')}: list: the name of entry {number} is {name!r}. Give a text.")
        factor.append((name, settings))
    return [factor] if factor else []


def _read_zip_factors(file: _SweepFile) -> list[Factor]:
    columns = _read_columns(file, "zip", file.keys.zipped)
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} {num}" for key, num in lengths.items())
        raise ConfigError(
            f"{file.locate('zip')}: zip: the lists differ in length ({counts}). Give lists of one length."
        )
    factor: Factor = []
    for row in zip(*columns.values(), strict=True):
        factor.append(_build_choice(dict(zip(columns, row, strict=True)), columns))
    return [factor] if factor else []


def _build_choice(given: Settings, columns: Settings) -> tuple[str, Settings]:
    """Build the name and the settings of one value of a factor; an argument that changes no setting names it itself."""
    label = _format_label(_translate_arguments(given), _translate_arguments(columns))
    return label or _format_label(given, columns), _flatten_settings(given)


def _read_columns(file: _SweepFile, kind: str, table: Settings) -> dict[str, list[Any]]:
    """Read the settings of `grid` or `zip` with their lists of values."""
    columns = _flatten_sections(table)
    file.check_reserved(kind, _flatten_settings(columns))
    for key, values in columns.items():
        if not isinstance(values, list) or not values:
            where = file.locate(f"{kind}.{key}")
            raise ConfigError(f"{where}: {kind}: {key} is {values!r}. Give a list of values, such as [1, 2].")
    return columns


def _format_label(settings: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Format a short name of a variant: its settings, by the last part of their keys if that is unique.

    >>> _format_label({"optimizer.lr": 0.01, "optimizer.name": "adamw"}, ["optimizer.lr", "optimizer.name"])
    'lr=0.01 optimizer=adamw'
    >>> _format_label({"train.batch_size": 8}, ["train.batch_size", "eval.batch_size"])
    'train.batch_size=8'
    """
    counts = Counter(map(_shorten_key, set(keys)))
    words: list[str] = []
    for key, value in settings.items():
        short = _shorten_key(key)
        name = short if counts[short] == 1 else key
        words.append(f"{name}={format_label_value(value)}")
    return " ".join(words)


def _shorten_key(key: str) -> str:
    """Shorten optimizer.lr to `lr`, optimizer.name to `optimizer`."""
    section, _, last = key.rpartition(".")
    return section if section and last in ("name", "path", "config") else last


def format_label_value(value: JsonValue) -> str:
    """Format a value as one word: the last part of a path, the joined parts of a list or table."""
    if isinstance(value, list):
        return "+".join(map(format_label_value, value))
    if isinstance(value, Mapping):
        return "+".join(f"{key}={format_label_value(inner)}" for key, inner in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return PurePath(value).name or value
    return as_yaml({"_": value}).strip().removeprefix("_: ")


def _plan_runs(
    configs: Mapping[str, RunConfig], folder: Path, seeds: Sequence[int], order: str
) -> Iterable[PlannedRun]:
    """Yield the runs in order. Interleaved rounds alternate in direction: a steady drift affects all variants alike."""
    names = list(configs)
    slugs = _make_slugs(names)
    rounds: list[tuple[str, int]] = []
    if order == "interleaved":
        for seed in seeds:
            rounds += [(name, seed) for name in names]
            names.reverse()
    else:
        for name in names:
            rounds += [(name, seed) for seed in seeds]
    for name, seed in rounds:
        yield plan_run(configs[name], folder, slugs[name], variant=name, seed=seed)


def plan_run(config: RunConfig, folder: Path, name: str, *, variant: str, seed: int) -> PlannedRun:
    """Plan the run `NAME-seedN` in the folder of a sweep."""
    run = f"{name}-seed{seed}"
    return PlannedRun(run, variant, seed, config.replace("run", seed=seed, dir=str(folder / run)))


def _make_slugs(names: Sequence[str]) -> dict[str, str]:
    """Make unique folder names of variant names.

    >>> _make_slugs(["lr=0.01 forward=flat", "a-b-2", "a b", "a-b"])
    {'lr=0.01 forward=flat': 'lr-0.01-forward-flat', 'a-b-2': 'a-b-2', 'a b': 'a-b', 'a-b': 'a-b-3'}
    """
    slugs: dict[str, str] = {}
    for name in names:
        slug = re.sub(r"[^\w.+]+", "-", name).strip("-.") or "variant"
        slugs[name] = make_unique_name(slug, slugs.values(), template="{}-{}")
    return slugs
