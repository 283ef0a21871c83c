"""Reading settings: YAML files and dotted overrides in, one table of values with their origins out.

YAML is read with the rules that people mean: `1e-4` and `1_000` are numbers, only true and false are
booleans (`no` is a word), a key that stands twice is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fivetune.errors import ConfigError

PLUGIN_SECTIONS = {"task": "tasks", "optimizer": "optimizers", "schedule": "schedules", "strategy": "strategies"}
EXCLUSIVE = {  # a later layer that gives one takes the other away
    "train.num_steps": "train.num_epochs",
    "train.num_epochs": "train.num_steps",
    "schedule.warmup_steps": "schedule.warmup_fraction",
    "schedule.warmup_fraction": "schedule.warmup_steps",
}

ALIASES: dict[str, str] = {
    "model_name_or_path": "model.path",
    "config_name": "model.config",
    "tokenizer_name": "model.tokenizer",
    "model_revision": "model.revision",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "max_source_length": "data.max_input_tokens",
    "max_target_length": "data.max_target_tokens",
    "max_train_samples": "data.max_train_examples",
    "max_eval_samples": "data.max_eval_examples",
    "output_dir": "run.dir",
    "seed": "run.seed",
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "eval.batch_size",
    "num_train_epochs": "train.num_epochs",
    "max_steps": "train.num_steps",
    "max_grad_norm": "train.max_grad_norm",
    "logging_steps": "train.log_every_steps",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "optim": "optimizer.name",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_fraction",
    "lr_scheduler_type": "schedule.name",
    "eval_steps": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "eval.metric",
    "generation_max_length": "eval.max_new_tokens",
    "report_to": "report.sinks",
}

VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "optim": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"},
    "lr_scheduler_type": {"constant_with_warmup": "constant"},
    "metric_for_best_model": {"exact_match": "exact"},
    "report_to": {"none": [], "all": ["tensorboard", "wandb", "mlflow"]},
}

NO_EQUIVALENT = {
    "gradient_accumulation_steps": "Set train.global_batch_size: accumulation is derived from it.",
    "fp16": "Set train.precision: fp16 (T5 overflows in fp16; bf16 or fp32 is what you want).",
    "bf16": "Set train.precision: bf16.",
    "source_prefix": "Put the prefix into task.template.",
    "predict_with_generate": "Evaluation always generates; leave it out.",
    "load_best_model_at_end": "model/ always holds the best checkpoint; leave it out.",
}


class Setting(NamedTuple):
    """One value, its path in the table, and where it was written."""

    path: tuple[str, ...]
    value: Any
    where: str


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers and booleans of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), "-+0123456789"
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
               r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf)|\.(?:nan|NaN))$"),
    "-+0123456789.",
)  # fmt: skip


def parse_value(text: str) -> Any:
    """A value from the command line, read as YAML reads it.

    >>> parse_value("1e-4"), parse_value("1_000"), parse_value("true"), parse_value("null"), parse_value("no")
    (0.0001, 1000, True, None, 'no')
    >>> parse_value("question: {question}"), parse_value("file #1.json")  # no table, no comment
    ('question: {question}', 'file #1.json')
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError:
        return text
    if text[node.end_mark.index if node else 0 :].strip():  # YAML takes the rest for a comment
        return text
    if isinstance(value, Mapping):  # a template such as {question}, unless it is the empty table
        return {} if not value else text
    return value


def read_table(value: Any) -> Any:
    """The table that a text from the command line writes out; any other value as it is.

    >>> read_table("{HQ: high, LQ: low}"), read_table("high")
    ({'HQ': 'high', 'LQ': 'low'}, 'high')
    """
    if not isinstance(value, str):
        return value
    try:
        table = yaml.load(value, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError:
        return value
    return table if isinstance(table, Mapping) else value


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text which this loader or a plain YAML 1.1 reader would take for something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def _quoted_breaks(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Unicode's line breaks would be read back as spaces; double quotes escape them."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted_breaks)


def as_yaml(table: Mapping[str, Any]) -> str:
    """A table as YAML that reads back equal.

    >>> as_yaml({"lr": 1e-05, "answer": "no", "revision": "1e3"})
    "lr: 1.0e-05\\nanswer: 'no'\\nrevision: '1e3'\\n"
    """
    return yaml.dump(table, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_file(path: Path) -> list[list[Setting]]:
    """The settings of a file, those of its `base:` first. Raises ConfigError with line and column."""
    return _read_chain(path, seen=())


def _read_chain(path: Path, seen: tuple[Path, ...]) -> list[list[Setting]]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base files form a circle. Take one `base:` out.")
    settings = read_settings(path)
    bases = [s for s in settings if s.path == ("base",)]
    own = [s for s in settings if s.path != ("base",)]
    if not bases:
        return [own]
    base = path.parent / str(bases[0].value)
    if not base.is_file():
        raise ConfigError(f"{bases[0].where}: base {str(bases[0].value)!r} is no file (looked for {base}).")
    return [*_read_chain(base, (*seen, path.resolve())), own]


def read_settings(path: Path) -> list[Setting]:
    """The settings of one file, down to the second level of its tables. Raises ConfigError with the place."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text. Save the file as UTF-8.") from None
    if root is None:
        raise ConfigError(f"{path}: the file is empty. A recipe needs at least model and task.")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a recipe is a table of sections, not a {root.id}.")
    return list(_settings(root, path, ()))


def _settings(node: yaml.MappingNode, path: Path, above: tuple[str, ...]):
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: the name of a setting is a word, not a {key_node.id}.")
        if key in seen:
            raise ConfigError(f"{path}:{line}: {'.'.join((*above, key))} stands twice (first in line {seen[key]}).")
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and not above:
            yield Setting((key,), {}, f"{path}:{line}")
            yield from _settings(value_node, path, (key,))
        else:
            loader = _Loader("")
            value = loader.construct_object(value_node, deep=True)
            yield Setting((*above, key), value, f"{path}:{line}")


class Layers:
    """Settings laid over each other; the last one of a path wins and its origin is kept."""

    def __init__(self) -> None:
        self._settings: dict[tuple[str, ...], Setting] = {}
        self._headers: dict[str, str] = {}  # sections and where they begin

    def add(self, settings: list[Setting]) -> None:
        """Lay the settings of one file over what is there."""
        translated = [_translate(setting) for setting in settings]
        _refuse_contradictions(settings, translated)
        for setting in sorted(translated, key=lambda s: len(s.path) > 1 and s.path[-1] != "name"):
            self._put(setting)  # a plugin's name before its options, which it would forget

    def add_table(self, table: Mapping[str, Any], *, where: str) -> None:
        """Lay a nested dict over what is there."""
        flat: list[Setting] = []
        for section, value in table.items():
            if isinstance(value, Mapping):
                flat.append(Setting((section,), {}, where))
                flat.extend(Setting((section, key), item, where) for key, item in value.items())
            else:
                flat.append(Setting((section,), value, where))
        self.add(flat)

    def add_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Lay dotted overrides over what is there, as one layer."""
        self.add([Setting(tuple(key.split(".")), value, f"--{key}") for key, value in overrides.items()])

    def table(self) -> dict[str, Any]:
        """All settings as a nested dict."""
        table: dict[str, Any] = {section: {} for section in self._headers}
        for path, setting in self._settings.items():
            inner = table
            for part in path[:-1]:
                below = inner.get(part, {})
                inner[part] = below = dict(below) if isinstance(below, Mapping) else {}
                inner = below
            inner[path[-1]] = setting.value
        return table

    def origin(self, path: tuple[str, ...]) -> str:
        """Where the value at `path`, or the nearest one above it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._settings:
                return self._settings[path[:length]].where
        if path and path[0] in self._headers:
            return self._headers[path[0]]
        wheres = [*self._headers.values(), *(s.where for s in self._settings.values())]
        return wheres[-1].rpartition(":")[0] or wheres[-1] if wheres else "config"

    def _put(self, setting: Setting) -> None:
        path = setting.path
        if len(path) == 1 and setting.value in ({}, None):
            self._headers[path[0]] = setting.where
            return
        if path[0] in PLUGIN_SECTIONS and (len(path) == 1 or path[1] == "name"):
            self._forget_options(path[0], setting.value)
        rival = EXCLUSIVE.get(".".join(path))
        if rival and setting.value is not None:
            before = self._settings.get(tuple(rival.split(".")))
            if before is not None and _layer(before) != _layer(setting):
                del self._settings[before.path]
        path = _full_path(setting)
        self._settings[path] = setting._replace(path=path)

    def _forget_options(self, section: str, name: Any) -> None:
        """Another plugin takes the place: the options of the one before do not fit it."""
        current = self._settings.get((section, "name"))
        if current is not None and current.value != name:
            for path in [p for p in self._settings if p[0] == section and len(p) > 1]:
                del self._settings[path]


def _full_path(setting: Setting) -> tuple[str, ...]:
    """The path of a value; that of `optimizer: adamw` is optimizer.name."""
    path = setting.path
    is_name = len(path) == 1 and not isinstance(setting.value, Mapping) and path[0] in PLUGIN_SECTIONS
    return (path[0], "name") if is_name else path


def _refuse_contradictions(written: list[Setting], translated: list[Setting]) -> None:
    """One layer may name a setting by two names (learning_rate, optimizer.lr) only if it says the same."""
    seen: dict[tuple[str, ...], tuple[str, Setting]] = {}
    for original, setting in zip(written, translated, strict=True):
        path, name = _full_path(setting), ".".join(original.path)
        if len(path) == 1 and setting.value in ({}, None):
            continue
        other, before = seen.setdefault(path, (name, setting))
        if before is not setting and before.value != setting.value:
            raise ConfigError(
                f"{setting.where}: {name} is {setting.value!r}, but {other} ({before.where}) is {before.value!r}, "
                "and both name the same setting. Keep one."
            )


def _layer(setting: Setting) -> str:
    """The layer that a setting belongs to: its file, the command line, the given dict."""
    return "--" if setting.where.startswith("--") else setting.where.rpartition(":")[0]


def _translate(setting: Setting) -> Setting:
    """Give transformers' names their place; refuse those that have none, with what to do instead."""
    if len(setting.path) != 1:
        return setting
    name = setting.path[0].replace("-", "_")
    if name in NO_EQUIVALENT:
        raise ConfigError(f"{setting.where}: {name} has no setting of its own here. {NO_EQUIVALENT[name]}")
    if name not in ALIASES:
        return setting
    value: Any = setting.value
    if isinstance(value, str):
        value = VALUE_ALIASES.get(name, {}).get(value, value)
        value = [value] if name == "report_to" and isinstance(value, str) else value
    return Setting(tuple(ALIASES[name].split(".")), value, setting.where)


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Dotted flags of a command line as a dict.

    >>> parse_overrides(["--optimizer.lr", "1e-3", "--data.train", "a.json", "b.json", "--device=cpu"])
    {'optimizer.lr': 0.001, 'data.train': ['a.json', 'b.json'], 'device': 'cpu'}
    """
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            if key in found:
                raise ConfigError(f"--{key} is given twice. Keep one.")
            found[key] = [value] if equals else []
        elif not key:
            raise ConfigError(f"{word!r} is not understood. Settings are given as --section.key value.")
        else:
            found[key].append(word)
    return {key: _joined(key, values) for key, values in found.items()}


def _joined(key: str, values: list[str]) -> Any:
    if not values:
        raise ConfigError(f"--{key} has no value. Write --{key} VALUE.")
    return parse_value(values[0]) if len(values) == 1 else [parse_value(v) for v in values]
