"""Reading a sweep file: which runs are to be made, in which order, with which settings.

In: a YAML file (docs/compare.md shows one) and dotted overrides. Out: a Sweep whose every run has a checked RunConfig.
Nothing is run, and nothing needs torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePath
from typing import Any

import yaml

from fivetune.compare.variants import free_name
from fivetune.config import SWEEPS, RunConfig, find_recipe, load_config, recipes_folder
from fivetune.config_layers import ALIASES, EXCLUSIVE, as_yaml, read_settings
from fivetune.errors import ConfigError, nearest
from fivetune.metrics import score_names

Settings = dict[str, Any]
"""Dotted settings and their values."""

Factor = list[tuple[str, Settings]]
"""One thing that is varied: the name and the settings of each of its values."""

ORDERS = ("interleaved", "by_variant")
OWN = {"run.seed": "seeds", "run.dir": "dir"}  # settings of a run that the sweep itself gives


@dataclass(frozen=True, slots=True)
class Planned:
    """One run that is to be made; `name` is that of its folder."""

    name: str
    variant: str
    seed: int
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file, checked.

    Args:
        folder: where its runs, their logs and sweep.json go.
        variants: the varied settings of each variant, by its name.
        varied: the settings that any variant gives.
        runs: in the order in which they are made.
        baseline: the variant that the others are compared with.
        retries: how often a run that failed is tried again.
        price_per_hour: of the machine, in any currency; None if it is not known.
        corpus: arguments of `write_reading_corpus`, and `dir`; None where the data are there already.
    """

    path: Path
    title: str
    folder: Path
    variants: Mapping[str, Settings]
    varied: tuple[str, ...]
    runs: tuple[Planned, ...]
    baseline: str
    metric: str
    retries: int
    price_per_hour: float | None
    corpus: Mapping[str, Any] | None


def read_sweep(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file and check every run of it.

    Args:
        source: path of a YAML file, or the name of a shipped sweep: quick.
        overrides: dotted settings of all runs, which win over the file's `set:`.

    Raises ConfigError with file and line for whatever is wrong, in the sweep or in a variant's recipe.
    """
    path = find_sweep(source)
    file = _File(path)
    base = file.base()
    shared = _laid_over(file.shared(), _flat(overrides or {}))
    variants = _variants(file)
    varied = tuple(dict.fromkeys(key for settings in variants.values() for key in settings))
    for key in overrides or {}:
        if ALIASES.get(key, key) in varied:
            raise ConfigError(f"--{key}: is varied by {path}. Change it there.")
        if key in OWN:
            raise ConfigError(f"--{key}: is given by the sweep. Change `{OWN[key]}:` in {path}.")
    folder = Path(file.get("dir", f"runs/{path.stem}"))
    configs = {name: file.config(base, shared, name, settings) for name, settings in variants.items()}
    _refuse_equal(path, configs)
    return Sweep(
        path=path,
        title=file.get("title", path.stem),
        folder=folder,
        variants=variants,
        varied=varied,
        runs=tuple(_planned(configs, folder, file.get("seeds", [0]), file.get("order", ORDERS[0]))),
        baseline=file.baseline(variants),
        metric=file.metric(configs),
        retries=file.get("retries", 1),
        price_per_hour=file.get("price_per_hour", None),
        corpus=file.get("corpus", None),
    )


def find_sweep(source: str | Path) -> Path:
    """A path as given, or the shipped sweep of that name. Raises ConfigError with the nearest names."""
    shipped = recipes_folder() / SWEEPS
    for candidate in (Path(source), shipped / f"{source}.yaml"):
        if candidate.is_file():
            return candidate
    names = [path.stem for path in shipped.glob("*.yaml")]
    raise ConfigError(f"{source}: no such sweep, nor a run directory. {nearest(str(source), names)}")


# --- the file ---


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_seeds(value: Any) -> bool:
    are_counts = isinstance(value, list) and bool(value) and all(map(_is_count, value))
    return are_counts and max(value) < 2**31 and len(set(value)) == len(value)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) and item for item in value)


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "title": (_is_text, "a text"),
    "base": (_is_text, "the name of a recipe or its file"),
    "dir": (_is_text, "a folder, such as runs/compare"),
    "set": (lambda value: isinstance(value, Mapping), "settings and their values"),
    "grid": (lambda value: isinstance(value, Mapping), "settings, each with a list of values"),
    "zip": (lambda value: isinstance(value, Mapping), "settings, each with a list of values, all equally long"),
    "list": (_are_tables, "a list of tables {name: ..., optimizer.lr: ...}"),
    "seeds": (_are_seeds, "a list of different whole numbers, such as [1, 2]"),
    "order": (lambda value: value in ORDERS, " or ".join(ORDERS)),
    "baseline": (lambda value: _is_text(value) or isinstance(value, Mapping), "a variant's name or its settings"),
    "metric": (_is_text, "the name of a score"),
    "retries": (_is_count, "a whole number, 0 or more"),
    "price_per_hour": (_is_price, "a number, 0 or more"),
    "corpus": (lambda value: isinstance(value, Mapping), "{dir: ..., num_train: ..., num_eval: ...}"),
}
CORPUS = {
    "dir": (_is_text, "a folder"),
    "num_train": (lambda value: _is_count(value, 1), "a whole number, 1 or more"),
    "num_eval": (lambda value: _is_count(value, 1), "a whole number, 1 or more"),
    "seed": (_is_count, "a whole number, 0 or more"),
    "max_facts": (lambda value: _is_count(value, 3), "a whole number, 3 or more"),
}


class _File:
    """The keys of a sweep file with the lines where they stand, each checked for its kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        _refuse_no_table(path)
        for setting in read_settings(path):
            self._where[".".join(setting.path)] = setting.where
            if len(setting.path) == 1:
                self._values[setting.path[0]] = setting.value
            else:
                self._values[setting.path[0]] = {**self._values[setting.path[0]], setting.path[1]: setting.value}
        self._check(self._values, KEYS, prefix="")
        self._check(self._values.get("corpus", {}), CORPUS, prefix="corpus.")

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)

    def where(self, key: str) -> str:
        """The line of a dotted key, or of the nearest one above it: `path:12`."""
        while key and key not in self._where:
            key = key.rpartition(".")[0]
        return self._where.get(key, str(self.path))

    def _check(self, table: Mapping[str, Any], allowed: Mapping[str, tuple[Any, str]], *, prefix: str) -> None:
        for key, value in table.items():
            where = self.where(f"{prefix}{key}")
            if key not in allowed:
                raise ConfigError(f"{where}: {prefix}{key} is not a key of a sweep. {nearest(key, allowed)}")
            is_right, kind = allowed[key]
            if not is_right(value):
                raise ConfigError(f"{where}: {prefix}{key} is {value!r}. Give {kind}.")
        if missing := [key for key in ("dir", "num_train", "num_eval") if prefix and table and key not in table]:
            raise ConfigError(f"{self.where('corpus')}: corpus has no {missing[0]}. Give {KEYS['corpus'][1]}.")

    def base(self) -> Path:
        """The recipe that all runs begin with: beside the sweep file, at the path as given, or a shipped one."""
        name = self.get("base", None)
        if name is None:
            raise ConfigError(f"{self.path}: base is missing. Give the recipe that all runs begin with.")
        beside = self.path.parent / name
        try:
            return beside if beside.is_file() else find_recipe(name)
        except ConfigError as error:
            raise ConfigError(f"{self.where('base')}: base: {error}") from None

    def shared(self) -> Settings:
        """The settings of all runs."""
        settings = _flat(self.get("set", {}))
        self.refuse_own("set", settings)
        return settings

    def refuse_own(self, key: str, settings: Iterable[str]) -> None:
        """Seed and folder of a run are the sweep's to give."""
        for name in settings:
            if name in OWN:
                raise ConfigError(f"{self.where(f'{key}.{name}')}: {key}: {name} is given by the sweep. "
                                  f"Use `{OWN[name]}:`.")  # fmt: skip

    def baseline(self, variants: Mapping[str, Settings]) -> str:
        """Name of the baseline: as given by name or by settings, else the first variant."""
        given = self.get("baseline", next(iter(variants)))
        if isinstance(given, Mapping):
            wanted = _flat(given).items()
            found = [name for name, settings in variants.items() if wanted <= settings.items()]
            if len(found) != 1:
                raise ConfigError(f"{self.where('baseline')}: baseline: {len(found)} of {len(variants)} variants have "
                                  f"{as_yaml(dict(given)).strip()}. Give settings that one of them has.")  # fmt: skip
            return found[0]
        if given not in variants:
            raise ConfigError(f"{self.where('baseline')}: baseline: there is no variant {given!r}. "
                              f"{nearest(given, variants)}")  # fmt: skip
        return given

    def metric(self, configs: Mapping[str, RunConfig]) -> str:
        """The score that the variants are compared by: the file's, else the one that picks the best checkpoint."""
        first = next(iter(configs.values()))
        metric = self.get("metric", first.eval.metric or first.task.main_metric)
        for name, config in configs.items():
            known = score_names(config.task.metrics)
            if metric not in known:
                raise ConfigError(f"{self.where('metric')}: metric: variant {name!r} has no score {metric!r}. "
                                  f"{nearest(metric, known)}")  # fmt: skip
        return metric

    def config(self, base: Path, shared: Settings, variant: str, settings: Settings) -> RunConfig:
        """The recipe of a variant. Raises ConfigError with the line of the setting that is wrong."""
        try:
            return load_config(base, _laid_over(shared, settings))
        except ConfigError as error:
            lines = [self._placed(line, settings) for line in str(error).splitlines()]
            raise ConfigError("\n".join(f"{line} (variant {variant})" for line in lines)) from None

    def _placed(self, message: str, settings: Settings) -> str:
        """An error about `--key` as one about the line of this file that gives it."""
        found = re.match(r"--([^\s:]+): ?(.*)", message, re.DOTALL)
        if not found:
            return message
        key, rest = found.groups()
        kinds = ("grid", "zip", "list") if key in settings else ("set",)
        kind = next((kind for kind in kinds if kind == "list" or key in _flat(self.get(kind, {}))), None)
        if kind is None:
            return message
        where = self.where(f"{kind}.{key}")
        return f"{where}: {rest}" if rest.startswith(key) else f"{where}: {key}: {rest}"


def _refuse_no_table(path: Path) -> None:
    """A file without keys; what else is wrong with it `read_settings` tells, with the place."""
    with suppress(yaml.YAMLError, UnicodeDecodeError):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if found is None:
            raise ConfigError(f"{path}: the file is empty. A sweep needs at least base, and grid, zip or list.")
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: a sweep is a table with the keys {', '.join(KEYS)}. It is {found!r:.60}.")


# --- variants ---


def _flat(table: Mapping[str, Any]) -> Settings:
    """Settings by dotted name, transformers' names translated.

    >>> _flat({"train": {"num_steps": 4}, "learning_rate": 0.1, "data.columns": {"a": "b"}})
    {'train.num_steps': 4, 'optimizer.lr': 0.1, 'data.columns': {'a': 'b'}}
    """
    flat: Settings = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and "." not in key:
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[ALIASES.get(key.replace("-", "_"), key)] = value
    return flat


def _laid_over(below: Settings, above: Settings) -> Settings:
    """`above` wins, also over the setting that it excludes.

    >>> _laid_over({"train.num_epochs": 3, "device": "cpu"}, {"train.num_steps": 4})
    {'device': 'cpu', 'train.num_steps': 4}
    """
    return {key: value for key, value in below.items() if EXCLUSIVE.get(key) not in above} | above


def _variants(file: _File) -> dict[str, Settings]:
    """Every combination of the entries of `list`, the rows of `zip` and the values of `grid`."""
    factors = [*_listed(file), *_zipped(file), *_gridded(file)]
    if not factors:
        raise ConfigError(f"{file.path}: nothing is varied. Give grid, zip or list.")
    keys = Counter(key for factor in factors for key in {key for _, settings in factor for key in settings})
    if twice := [key for key, num in keys.items() if num > 1]:
        raise ConfigError(f"{file.path}: {twice[0]} is varied twice. Keep it in one of grid, zip and list.")
    variants: dict[str, Settings] = {}
    for combination in product(*factors):
        name = " ".join(label for label, _ in combination)
        if name in variants:
            raise ConfigError(f"{file.path}: two variants are called {name!r}. Give the entries of `list` names.")
        variants[name] = {key: value for _, settings in combination for key, value in settings.items()}
    return variants


def _listed(file: _File) -> list[Factor]:
    entries = file.get("list", [])
    keys = [key for entry in entries for key in _flat(entry) if key != "name"]
    factor: Factor = []
    for number, entry in enumerate(entries, start=1):
        settings = _flat({key: value for key, value in entry.items() if key != "name"})
        file.refuse_own("list", settings)
        name = entry.get("name", _label(settings, keys) or "as the base")
        if not _is_text(name):
            raise ConfigError(f"{file.where('list')}: list: the name of entry {number} is {name!r}. Give a text.")
        factor.append((name, settings))
    return [factor] if factor else []


def _zipped(file: _File) -> list[Factor]:
    columns = _columns(file, "zip")
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} {num}" for key, num in lengths.items())
        raise ConfigError(f"{file.where('zip')}: zip: the lists are not equally long ({told}). Make them so.")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [[(_label(row, columns), _flat(row)) for row in rows]] if rows else []


def _gridded(file: _File) -> list[Factor]:
    columns = _columns(file, "grid")
    found = [[{key: value} for value in values] for key, values in columns.items()]
    return [[(_label(settings, columns), _flat(settings)) for settings in factor] for factor in found]


def _columns(file: _File, kind: str) -> dict[str, list[Any]]:
    """The settings of `grid` or `zip` with their lists of values."""
    columns = _flat(file.get(kind, {}))
    file.refuse_own(kind, columns)
    for key, values in columns.items():
        if not isinstance(values, list) or not values:
            where = file.where(f"{kind}.{key}")
            raise ConfigError(f"{where}: {kind}: {key} is {values!r}. Give a list of values, such as [1, 2].")
    return columns


def _label(settings: Mapping[str, Any], keys: Iterable[str]) -> str:
    """What people call a variant.

    >>> _label({"optimizer.lr": 0.01, "optimizer.name": "adamw"}, ["optimizer.lr", "optimizer.name"])
    'lr=0.01 optimizer=adamw'
    >>> _label({"train.batch_size": 8}, ["train.batch_size", "eval.batch_size"])
    'train.batch_size=8'
    """
    shorts = Counter(map(_short, set(keys)))
    return " ".join(f"{_short(k) if shorts[_short(k)] == 1 else k}={shown(v)}" for k, v in settings.items())


def _short(key: str) -> str:
    """`lr` of optimizer.lr; `optimizer` of optimizer.name."""
    section, _, last = key.rpartition(".")
    return section if section and last in ("name", "path", "config") else last


def shown(value: Any) -> str:
    """A value as a word: a path by its last part, a list or table by its parts."""
    if isinstance(value, list):
        return "+".join(map(shown, value))
    if isinstance(value, Mapping):
        return "+".join(f"{key}={shown(inner)}" for key, inner in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return PurePath(value).name or value
    return as_yaml({"_": value}).strip().removeprefix("_: ")


def _refuse_equal(path: Path, configs: Mapping[str, RunConfig]) -> None:
    """Two variants with the same settings would compare a thing with itself."""
    seen: dict[str, str] = {}
    for name, config in configs.items():
        other = seen.setdefault(config.as_yaml(), name)
        if other != name:
            raise ConfigError(f"{path}: variants {other!r} and {name!r} have the same settings. Take one out.")


def _planned(configs: Mapping[str, RunConfig], folder: Path, seeds: Sequence[int], order: str) -> Iterable[Planned]:
    """The runs in their order. Interleaved, every other round goes backwards: a steady drift then hits all alike."""
    names = list(configs)
    slugs = _slugs(names)
    if order == "interleaved":
        rounds = [(name, seed) for i, seed in enumerate(seeds) for name in (names if i % 2 == 0 else reversed(names))]
    else:
        rounds = [(name, seed) for name in names for seed in seeds]
    for name, seed in rounds:
        run = f"{slugs[name]}-seed{seed}"
        section = configs[name].run.model_copy(update={"seed": seed, "dir": str(folder / run)})
        yield Planned(run, name, seed, configs[name].model_copy(update={"run": section}))


def _slugs(names: Sequence[str]) -> dict[str, str]:
    """Names as folders are called, each of its own.

    >>> _slugs(["lr=0.01 forward=flat", "a-b-2", "a b", "a-b"])
    {'lr=0.01 forward=flat': 'lr-0.01-forward-flat', 'a-b-2': 'a-b-2', 'a b': 'a-b', 'a-b': 'a-b-3'}
    """
    slugs: dict[str, str] = {}
    for name in names:
        slug = re.sub(r"[^\w.+]+", "-", name).strip("-.") or "variant"
        slugs[name] = free_name(slug, slugs.values(), numbered="{}-{}")
    return slugs
