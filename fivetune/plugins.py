"""The plugin registry is the file system: one file in a kind's package is one plugin, named like the file.

In: a kind (one of KINDS, such as "tasks") and a name.
Out: the module, or the one options class that it exports.

The environment variable FIVETUNE_PLUGINS adds the user's own folders: the file `<folder>/tasks/my_task.py` is the task
`my_task`. No other file is edited. A folder that contains no folder of plugins raises ConfigError.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol

from pydantic import BaseModel, ConfigDict, create_model

from fivetune.errors import ConfigError, FiveTuneError, UnknownPluginError, suggest_names

KINDS = {
    "tasks": "fivetune.tasks",
    "metrics": "fivetune.scores.metrics",
    "optimizers": "fivetune.training.optimizers",
    "schedules": "fivetune.training.schedules",
    "strategies": "fivetune.training.strategies",
    "adapters": "fivetune.model.adapters",
    "sinks": "fivetune.training.sinks",
    "launchers": "fivetune.fleet.launchers",
    "exporters": "fivetune.delivery.exporters",
    "importers": "fivetune.start.importers",
    "commands": "fivetune.commands",
}
"""Kind of plugin -> the package whose files are its plugins. Users' folders are named after the kind."""
CONTRACTS = {
    "tasks": ("fivetune.types", "Task"),
    "metrics": ("fivetune.scores.metrics", "Metric"),
    "optimizers": ("fivetune.types", "Optimizer"),
    "schedules": ("fivetune.types", "Schedule"),
    "strategies": ("fivetune.types", "Strategy"),
    "adapters": ("fivetune.types", "Adapter"),
    "sinks": ("fivetune.training.sinks", "SinkContract"),
    "launchers": ("fivetune.fleet.launchers", "Launcher"),
    "exporters": ("fivetune.delivery.exporters", "Exporter"),
    "importers": ("fivetune.start.importers", "Importer"),
}
"""Kind of plugin -> module and name of the class that has all members which other code asks of its plugins."""


class Options(BaseModel):
    """Base of every plugin's options class: frozen, typed, refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    version: ClassVar[int] = 1

    @classmethod
    def plugin_name(cls) -> str:
        """Name of the plugin: the last part of its module's name."""
        return cls.__module__.rpartition(".")[2]


def list_plugins(kind: str) -> list[str]:
    """Sorted names of all plugins of a kind.

    >>> list_plugins("sinks")
    ['mlflow', 'tensorboard', 'wandb']
    """
    return sorted(m.name for m in pkgutil.iter_modules(_build_search_path(kind)) if not m.name.startswith("_"))


def import_plugin(kind: str, name: str) -> ModuleType:
    """Import one plugin's module. Raises UnknownPluginError with the nearest names; ConfigError with file and line if
    importing a file outside the package fails."""
    search_path = _build_search_path(kind)
    loaded = sys.modules.get(f"{KINDS[kind]}.{name}")
    # Listing the folder takes a millisecond, and reading hundreds of runs asks for the same task each time.
    if loaded is not None and not name.startswith("_") and os.path.dirname(str(loaded.__file__)) in search_path:
        return loaded
    known = list_plugins(kind)
    if name not in known:
        raise UnknownPluginError(
            f"{kind}: there is no {name!r}. {suggest_names(name, known)} FIVETUNE_PLUGINS names folders of your own."
        )
    try:
        return import_module(f"{KINDS[kind]}.{name}")
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename}:{error.lineno}: not valid Python: {error.msg}. Correct the plugin."
        ) from None
    except Exception as error:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_file(frame.filename)]
        if not lines or isinstance(error, FiveTuneError):
            raise
        raise ConfigError(
            f"{lines[-1].filename}:{lines[-1].lineno}: {type(error).__name__}: {error}. Correct the plugin."
        ) from error


def load_plugin(kind: str, name: str) -> Any:
    """Return the only subclass of Options in a plugin's file.

    Raises ConfigError for none or several, and for one without a member of its kind's contract.
    """
    plugin = import_plugin(kind, name)
    found = [
        value
        for value in vars(plugin).values()
        if isinstance(value, type) and issubclass(value, Options) and value.__module__ == plugin.__name__
    ]
    if len(found) != 1:
        named = ", ".join(one.__name__ for one in found) or "none"
        raise ConfigError(
            f"{plugin.__file__}: defines {named}. Allowed is one class derived from fivetune.plugins.Options. "
            "Correct the plugin."
        )
    if missing := list_missing_members(kind, found[0]):
        module, contract = CONTRACTS[kind]
        raise ConfigError(
            f"{plugin.__file__}: {found[0].__name__} has no {', '.join(missing)}. The contract of {kind} is "
            f"{contract} in {module}. Add what is missing, or derive the class from a base that has it."
        )
    return found[0]


def list_options(kind: str) -> dict[str, list[str]]:
    """List the plugins of a kind that have each option, by the option's name.

    >>> list_options("exporters")
    {'quantization': ['ctranslate2']}
    """
    found: dict[str, list[str]] = {}
    for name in list_plugins(kind):
        for option in load_plugin(kind, name).model_fields:
            found.setdefault(option, []).append(name)
    return found


def list_missing_members(kind: str, options: type[Options]) -> list[str]:
    """List the members of a kind's contract that an options class has not, sorted."""
    module, name = CONTRACTS[kind]
    contract = getattr(import_module(module), name)
    asked = set[str]()
    for base in contract.__mro__:
        if base in Options.__mro__ or base in (Protocol, Generic):
            continue
        members: list[str] = [*vars(base), *base.__annotations__]
        asked.update(members)
    missing = {one for one in asked if not (hasattr(options, one) or one in options.model_fields)}
    return sorted(one for one in missing | options.__abstractmethods__ if not one.startswith("_"))


BASES = {"optimizers": "OptimizerOptions", "strategies": "StrategyOptions"}
"""Kind of plugin -> the base class in its package with defaults for what settings ask of a plugin."""


def make_stand_in(kind: str, name: str) -> type[Options]:
    """Make a class of options that takes any settings, for a plugin that is absent and that no answer needs."""
    bases = (getattr(import_module(KINDS[kind]), BASES[kind]), _AnyOptions) if kind in BASES else _AnyOptions
    stand_in: type[Options] = create_model(name, __base__=bases, __module__=f"{KINDS[kind]}.{name}")
    stand_in.__abstractmethods__ = frozenset()  # nothing is trained with it
    return stand_in


class _AnyOptions(Options):
    model_config = ConfigDict(extra="allow")


def is_own_file(filename: str) -> bool:
    """Whether a file is in a folder of FIVETUNE_PLUGINS."""
    return any(Path(filename).resolve().is_relative_to(folder.resolve()) for folder in _list_own_folders())


def _list_own_folders() -> list[Path]:
    """List the folders of FIVETUNE_PLUGINS."""
    return [Path(folder) for folder in os.environ.get("FIVETUNE_PLUGINS", "").split(os.pathsep) if folder]


def _build_search_path(kind: str) -> list[str]:
    package = import_module(KINDS[kind])
    for folder in _list_own_folders():
        _refuse_empty_folder(folder)
        extra = str(folder.absolute() / kind)  # the import system remembers relative folders
        if extra not in package.__path__:
            package.__path__.append(extra)
    return list(package.__path__)


def _refuse_empty_folder(folder: Path) -> None:
    """Raise ConfigError for a folder of FIVETUNE_PLUGINS without a folder of any plugin kind."""
    if not any((folder / kind).is_dir() for kind in KINDS):
        wrong = f"has no folder of plugins ({', '.join(KINDS)})" if folder.is_dir() else "no such folder"
        raise ConfigError(
            f"FIVETUNE_PLUGINS: {folder}: {wrong}. A task of one's own is {folder}/tasks/NAME.py. "
            "Correct the variable, or unset it."
        )
