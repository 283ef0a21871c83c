"""Layers of settings.

In: YAML files and dotted overrides. Out: one table of values with their origins. Numbers and booleans follow YAML 1.2:
`1e-4` and `1_000` are numbers, only true and false are booleans (`no` is a text). A repeated key is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import yaml

from fivetune.config.aliases import find_setting, is_known, needs_no_value, translate_argument
from fivetune.config.recipes import find_shipped_recipe, list_recipe_names
from fivetune.errors import ConfigError, suggest_names
from fivetune.redaction import name_invisible
from fivetune.types import JsonTable, JsonValue

PLUGIN_SECTIONS = {"task": "tasks", "optimizer": "optimizers", "schedule": "schedules", "strategy": "strategies"}
NESTED_PLUGINS = {"model.adapter": "adapters"}  # settings inside a section that hold a plugin, or null
SOURCE_TYPES: tuple[type[object], ...] = (list, tuple, str, int, float, dict, Path, type(None))
SHORTHANDS = {"train.early_stopping": "patience"}  # a number there is that entry of the table
PATHS = (
    "run.dir",
    "model.path",
    "model.config",
    "model.tokenizer",
    "data.train",
    "data.eval",
    "data.cache_dir",
    "distill.teacher",
    "checkpoint.url",
    "report.beside",
)
EXCLUSIVE = {  # a later layer that sets one removes the other
    "train.num_steps": "train.num_epochs",
    "train.num_epochs": "train.num_steps",
    "schedule.warmup_steps": "schedule.warmup_fraction",
    "schedule.warmup_fraction": "schedule.warmup_steps",
}


MAX_DEPTH = 100  # levels of nested tables and lists in a file


def find_plugin_setting(key: str) -> str:
    """The setting with a plugin that a dotted key belongs to; for other keys their section.

    >>> find_plugin_setting("optimizer.lr"), find_plugin_setting("model.adapter.r"), find_plugin_setting("model.path")
    ('optimizer', 'model.adapter', 'model')
    """
    for name in NESTED_PLUGINS:
        if f"{key}.".startswith(f"{name}."):
            return name
    return key.partition(".")[0]


class Setting(NamedTuple):
    """One value, its path in the table, and its origin (`file:line` or flag)."""

    path: tuple[str, ...]
    value: object
    where: str


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers and booleans of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [one for one in resolvers if not one[0].endswith((":bool", ":int", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), "-+0123456789"
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf)|\.(?:nan|NaN))$"
    ),
    "-+0123456789.",
)


def parse_value(text: str) -> object:
    """Parse a value of the command line as YAML.

    >>> parse_value("1e-4"), parse_value("1_000"), parse_value("true"), parse_value("null"), parse_value("no")
    (0.0001, 1000, True, None, 'no')
    >>> parse_value("question: {question}"), parse_value("file #1.json")  # no table, no comment
    ('question: {question}', 'file #1.json')
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        value: JsonValue = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError):
        return text
    if text[node.end_mark.index if node else 0 :].strip():  # YAML would drop the rest as a comment
        return text
    if isinstance(value, Mapping) and value:  # a template such as {question}
        return text
    return value


def parse_sources(value: object) -> object:
    """Put one source into a tuple. Raises ValueError for an empty one: `--data.eval "$DEV"` without DEV.

    >>> parse_sources("dev.json")
    ('dev.json',)
    """
    if not isinstance(value, SOURCE_TYPES):
        raise ValueError(
            f"is a {type(value).__module__.partition('.')[0]} {type(value).__name__}. Allowed are files, folders, hub "
            "names, DataFrames of pandas or polars, data sets of `datasets`, and lists of records"
        )
    sources = cast("Sequence[object]", value if isinstance(value, list | tuple) else (value,))
    if None in sources or "" in sources:
        raise ValueError(
            "an empty value (null) names no file. Allowed are files, folders and hub names. Give one, or leave the "
            "setting out; [] overrides one of the base with none"
        )
    return sources if isinstance(value, list | tuple | str) else value


def parse_names(value: object) -> object:
    """Put one name into a tuple, as a command line gives it.

    >>> parse_names("decoder"), parse_names(["shared", "encoder"])
    (('decoder',), ['shared', 'encoder'])
    """
    return (value,) if isinstance(value, str) else value


def parse_listed_names(value: object) -> object:
    """Divide a text of names at its commas, as a command line gives them; other values are returned unchanged.

    >>> parse_listed_names("en, de"), parse_listed_names(["en", "de"])
    (('en', 'de'), ['en', 'de'])
    """
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(","))


def parse_table(value: object) -> object:
    """Parse a text of the command line that holds a table; other values are returned unchanged.

    >>> parse_table("{HQ: high, LQ: low}"), parse_table("high")
    ({'HQ': 'high', 'LQ': 'low'}, 'high')
    """
    if not isinstance(value, str):
        return value
    try:
        table: JsonValue = yaml.load(value, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError):
        return value
    return table if isinstance(table, Mapping) else value


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes each text that this loader or a YAML 1.1 reader would not read as text."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote texts with Unicode line breaks, which would be read back as spaces."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def as_yaml(table: Mapping[str, object]) -> str:
    """Format a table as YAML that reads back equal.

    >>> as_yaml({"lr": 1e-05, "answer": "no", "revision": "1e3"})
    "lr: 1.0e-05\\nanswer: 'no'\\nrevision: '1e3'\\n"
    """
    text = yaml.dump(table, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if name_invisible(text) != text:  # a terminal would obey them
        text = yaml.dump(table, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return text


def format_value(value: object) -> str:
    """Format a value for a message, as a recipe has it; texts are quoted.

    >>> format_value({"name": "lora", "alpha": 32.0, "path": None}), format_value([]), format_value("a")
    ('{name: lora, alpha: 32.0, path: null}', '[]', "'a'")
    """
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return repr(value)
    try:
        text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1e9)
    except yaml.YAMLError:  # an object of Python, given by a program
        return repr(value)
    return text.removesuffix("\n...\n").rstrip("\n")


def read_file(path: Path) -> list[list[Setting]]:
    """Read the settings of a file, after the settings of its `base:` files. Raises ConfigError with line and column."""
    return _read_chain(path, seen=())


def _read_chain(path: Path, seen: tuple[Path, ...]) -> list[list[Setting]]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base files form a cycle. Remove one `base:`.")
    layers: list[list[Setting]] = []
    own: list[Setting] = []
    for setting in read_settings(path):
        if setting.path == ("base",):
            base = _find_base(setting, folder=path.parent)
            layers = _read_chain(base, (*seen, path.resolve()))
        else:
            own.append(setting)
    return [*layers, own]


def _find_base(base: Setting, *, folder: Path) -> Path:
    """Find the file that `base:` names: beside the recipe, in the working directory, or a shipped recipe."""
    name = str(base.value)
    for path in (folder / name, Path(name), find_shipped_recipe(name)):
        if path is not None and path.is_file():
            return path
    own = Path(base.where.rpartition(":")[0])
    siblings = [path.name for path in folder.glob("*.y*ml") if path != own]
    near = suggest_names(name, [*siblings, *list_recipe_names()], listing="fivetune list recipes")
    raise ConfigError(f"{base.where}: base {name!r} is neither a file nor a shipped recipe. {near}")


def read_settings(path: Path) -> list[Setting]:
    """Read the settings of one file, down to the second level of its tables. Raises ConfigError with the place."""
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_deep_nesting(text, path)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _make_yaml_error(error, path) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text. Save the file as UTF-8.") from None
    if root is None:
        raise ConfigError(f"{path}: the file is empty. A recipe needs at least model and task.")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a recipe is a table of sections, not a {root.id}.")
    return list(_parse_settings(root, path, ()))


def _refuse_deep_nesting(text: str, path: Path) -> None:
    """Raise ConfigError beyond MAX_DEPTH levels; YAML's composer would exhaust Python's stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise ConfigError(
                f"{path}:{line}: nested more than {MAX_DEPTH} levels deep. A recipe needs four. Correct it."
            )


def _make_yaml_error(error: yaml.YAMLError, path: Path) -> ConfigError:
    """Convert a YAML error to a ConfigError, with line and column if known."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.")
    mark = error.problem_mark
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    advice = " Indent with spaces: YAML takes no tabs." if "'\\t'" in str(error.problem) else ""
    return ConfigError(f"{place}: not valid YAML: {error.problem}.{advice}")


def _construct_value(node: yaml.Node, path: Path) -> object:
    """Construct the value of a node. Raises ConfigError for a tag of code (`!!python/...`) or one that does not fit."""
    try:
        return _Loader("").construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise _make_yaml_error(error, path) from None
    except (ValueError, AttributeError) as error:  # !!int word, !!timestamp word, a number of 5,000 digits
        line = node.start_mark.line + 1
        reason = str(error).partition("; use sys.")[0]
        raise ConfigError(f"{path}:{line}: not valid YAML: {node.tag} does not fit the value ({reason}).") from None


def _parse_settings(node: yaml.MappingNode, path: Path, above: tuple[str, ...]) -> Iterator[Setting]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: the name of a setting must be a text, not a {key_node.id}.")
        key = key_node.value
        if key in seen:
            raise ConfigError(
                f"{path}:{line}: {'.'.join((*above, key))} is repeated (first in line {seen[key]}). Keep one."
            )
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and not above:
            yield Setting((key,), {}, f"{path}:{line}")
            yield from _parse_settings(value_node, path, (key,))
        else:
            yield Setting((*above, key), _construct_value(value_node, path), f"{path}:{line}")


class Layers:
    """Layers of settings: the last value of a path wins; each value keeps its origin."""

    def __init__(self) -> None:
        self._settings: dict[tuple[str, ...], Setting] = {}
        self._headers: dict[str, str] = {}  # section -> origin of its header

    def add(self, settings: list[Setting]) -> None:
        """Add the settings of one file as the topmost layer."""
        pairs: list[tuple[Setting, Setting]] = []
        for original, meant in _translate(settings):
            pairs += _flatten_plugin(original, meant)
        _refuse_contradictions(pairs)
        # A plugin's name comes before its options: the name removes the options of the previous plugin.
        names: list[Setting] = []
        options: list[Setting] = []
        for _, meant in pairs:
            is_option = len(meant.path) > 1 and meant.path[-1] != "name"
            (options if is_option else names).append(meant)
        for setting in (*names, *options):
            self._put(setting)

    def add_table(self, table: Mapping[str, JsonValue], *, where: str) -> None:
        """Add a nested dict as the topmost layer."""
        settings: list[Setting] = []
        for section, value in table.items():
            settings += _flatten_section(section, value, where)
        self.add(settings)

    def add_overrides(self, overrides: Mapping[str, object]) -> None:
        """Add dotted overrides as the topmost layer."""
        flat: list[Setting] = []
        for key, value in overrides.items():
            where = f"--{key}"
            if "." in key or is_known(key.replace("-", "_")):
                flat.append(Setting(tuple(key.split(".")), value, where))
            else:
                flat += _flatten_section(key, parse_table(value), where)
        self.add(flat)

    def to_dict(self) -> JsonTable:
        """All settings as a nested dict."""
        table: JsonTable = {section: {} for section in self._headers}
        for path, setting in self._settings.items():
            inner = table
            for depth, part in enumerate(path[:-1]):
                below: JsonValue = inner.get(part)
                short = SHORTHANDS.get(".".join(path[: depth + 1]))
                if short and below is not None and not isinstance(below, Mapping):
                    below = {short: below}
                inner[part] = dict(below) if isinstance(below, Mapping) else {}
                inner = inner[part]
            inner[path[-1]] = setting.value
        return table

    def find_origin(self, path: tuple[str, ...]) -> str:
        """The origin of the value at `path`, or of the nearest one above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._settings:
                return self._settings[path[:length]].where
            inner = self._list_origins(path[:length]) if length > 1 else []
            if inner:  # model.adapter: the origin of its options
                return _find_flag(inner) or inner[0]
        if path and path[0] in self._headers:
            return self._headers[path[0]]
        wheres = [*self._headers.values(), *self._list_origins(())]
        if not wheres:
            return "config"
        return wheres[-1].rpartition(":")[0] or wheres[-1]

    def find_rule_origin(self, message: str, section: tuple[str, ...]) -> str:
        """The origin of a broken rule between settings: a flag that is named in its first sentence, else its first key.

        Args:
            section: section of a rule that names its settings without the section; () for a rule between sections.
        """
        fault = message.partition(". ")[0]
        first = fault.partition(" ")[0].rstrip(":,")
        named = [first, *re.findall(r"[a-z]\w*(?:\.\w+)+", fault)]
        if section:
            named += re.findall(r"[a-z]\w*", fault)
        for name in named:
            key = tuple(name.split("."))
            for path in ((*section, *key), key):
                is_other_section = section and len(path) == 1
                flag = "" if is_other_section else _find_flag(self._list_origins(path))
                if flag:
                    return flag
        return self.find_origin(section or tuple(first.split(".")))

    def _list_origins(self, path: tuple[str, ...]) -> list[str]:
        """The origins of a setting and of those inside it."""
        return [one.where for own, one in self._settings.items() if own[: len(path)] == path]

    def _put(self, setting: Setting) -> None:
        path = setting.path
        if len(path) == 1 and setting.value in ({}, None):
            self._headers[path[0]] = setting.where
            return
        if path[0] in PLUGIN_SECTIONS and (len(path) == 1 or path[1] == "name"):
            self._forget_options(path[0], setting.value)
        if ".".join(path[:2]) in NESTED_PLUGINS:
            self._forget_nested(setting)
        rival = EXCLUSIVE.get(".".join(path))
        if rival and setting.value is not None:
            before = self._settings.get(tuple(rival.split(".")))
            if before is not None and _get_layer(before) != _get_layer(setting):
                del self._settings[before.path]
        path = _resolve_path(setting)
        if len(path) > 1:  # a whole table replaces what an earlier layer set inside it
            self._forget(path)
        self._settings[path] = setting._replace(path=path)

    def _forget(self, path: tuple[str, ...]) -> None:
        """Remove the settings inside a table."""
        for inner in list(self._settings):
            if len(inner) > len(path) and inner[: len(path)] == path:
                del self._settings[inner]

    def _forget_options(self, section: str, name: object) -> None:
        """Remove the options of the previous plugin, which do not fit another one."""
        current = self._settings.get((section, "name"))
        if current is not None and current.value != name:
            self._forget((section,))

    def _forget_nested(self, setting: Setting) -> None:
        """Remove what a plugin inside a section replaces: all of it for null, the options for another name."""
        path = setting.path
        name = self._settings.get((*path[:2], "name"))
        if len(path) == 2 or (path[2:] == ("name",) and (name is None or name.value != setting.value)):
            self._forget(path[:2])
        self._settings.pop(path[:2], None)  # options take the place of an earlier null


def _find_flag(origins: list[str]) -> str:
    """The first origin on the command line; empty without one."""
    for origin in origins:
        if origin.startswith("--"):
            return origin
    return ""


def _flatten_section(section: str, value: object, where: str) -> Iterator[Setting]:
    """Divide the table of a section into its settings."""
    if not isinstance(value, Mapping):
        yield Setting((section,), value, where)
        return
    yield Setting((section,), {}, where)
    for key, item in cast("Mapping[str, object]", value).items():
        yield Setting((section, key), item, where)


def _flatten_plugin(original: Setting, setting: Setting) -> Iterator[tuple[Setting, Setting]]:
    """Divide `model.adapter: {name: lora, r: 8}` or `lora` into its options, which later layers override one by one."""
    path = setting.path
    if ".".join(path) not in NESTED_PLUGINS or setting.value is None:
        yield original, setting
        return
    value = parse_table(setting.value)
    options = cast("Mapping[str, object]", value if isinstance(value, Mapping) else {"name": value})
    for key, option in options.items():
        inner = Setting((*path, str(key)), option, setting.where)
        yield (inner if original is setting else original), inner


def _resolve_path(setting: Setting) -> tuple[str, ...]:
    """The path of a value; the path of `optimizer: adamw` is optimizer.name."""
    path = setting.path
    if len(path) == 1 and path[0] in PLUGIN_SECTIONS and not isinstance(setting.value, Mapping):
        return (path[0], "name")
    return path


def _refuse_contradictions(pairs: list[tuple[Setting, Setting]]) -> None:
    """Raise ConfigError if one layer gives two names of a setting (learning_rate, optimizer.lr) different values."""
    seen: dict[tuple[str, ...], tuple[str, Setting]] = {}
    for original, setting in pairs:
        path, name = _resolve_path(setting), ".".join(original.path)
        if len(path) == 1 and setting.value in ({}, None):
            continue
        other, before = seen.setdefault(path, (name, setting))
        if before is not setting and before.value != setting.value:
            raise ConfigError(
                f"{setting.where}: {name} is {setting.value!r}, but {other} ({before.where}) is {before.value!r}, "
                "and both name the same setting. Keep one."
            )


def _get_layer(setting: Setting) -> str:
    """The layer of a setting: its file, the command line, or the given dict."""
    return "--" if setting.where.startswith("--") else setting.where.rpartition(":")[0]


def _translate(settings: list[Setting]) -> Iterator[tuple[Setting, Setting]]:
    """Yield each setting as written together with its translation; only transformers' names differ."""
    beside = {s.path[0].replace("-", "_"): s.value for s in settings if len(s.path) == 1}
    for setting in settings:
        name = setting.path[0].replace("-", "_")
        if len(setting.path) > 1 or not is_known(name):
            yield setting, setting
            continue
        translated = translate_argument(name, setting.value, where=setting.where, beside=beside)
        for key, value in translated.items():
            yield setting, Setting(tuple(key.split(".")), value, setting.where)


def parse_overrides(words: list[str]) -> JsonTable:
    """Parse the dotted flags of a command line to a dict.

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
            raise ConfigError(f"{word!r} is neither a setting nor a value. Write --section.key VALUE.")
        else:
            found[key].append(word)
    return {key: _parse_values(key, values) for key, values in found.items()}


def _parse_values(key: str, values: list[str]) -> object:
    if not values:
        if needs_no_value(key.replace("-", "_")):
            return True
        raise ConfigError(f"--{key} has no value. Write --{key} VALUE.")
    parse = _parse_path if find_setting(key) in PATHS else parse_value
    parsed = [parse(value) for value in values]
    return parsed[0] if len(parsed) == 1 else parsed


def format_override(key: str, value: object) -> str:
    """Write a value as `parse_overrides` reads it: a path as it is, other values as JSON.

    >>> format_override("run.dir", "runs/a b"), format_override("report.title", "1e3")
    ('runs/a b', '"1e3"')
    """
    if key in PATHS and isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _parse_path(text: str) -> object:
    """Parse a path of the command line: the text as it is, unless it is null or a list.

    >>> _parse_path("runs/a. "), _parse_path("'x'"), _parse_path("2026"), _parse_path("null"), _parse_path("[a, b]")
    ('runs/a. ', "'x'", '2026', None, ['a', 'b'])
    """
    value = parse_value(text)
    return value if type(value) in (list, type(None)) else text
