"""Importers: the configuration of another program as a recipe, one program per file.

An importer's file holds one subclass of `Importer`. In: the text of a configuration (words of a command line, a script,
a file), which is read and never executed. Out: an ImportedRecipe: settings, each with the reason for its value, and one
finding for each argument: what it became, or why it was left out. `_recipe.py` checks and prints it.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, cast

from fivetune.config.layers import format_value
from fivetune.errors import ConfigError
from fivetune.plugins import Options
from fivetune.redaction import HIDDEN, is_secret_name
from fivetune.types import JsonValue

State = Literal["set", "same", "no effect", "left out", "unknown"]
UNKNOWN = "not an argument that FiveTune knows"
BESIDE = "does not apply beside the other arguments"
NOT_LITERAL = "its value is computed, and the source is read, not executed; set it yourself"
NOT_PYTHON = "not Python"  # before what is wrong in a cell of a notebook
SAME = "FiveTune does so without a setting"
NO_EFFECT = "changes no result"


class RawConfig(NamedTuple):
    """A configuration as given: the name of its file (`the command line` for words), and its text."""

    name: str
    text: str


class Computed(NamedTuple):
    """The value of an argument that is an expression, not a literal."""

    code: str


class Argument(NamedTuple):
    """One argument: its value and its place, which is empty for words of a command line."""

    value: JsonValue | Computed
    where: str = ""


class Rules(NamedTuple):
    """What becomes of the arguments of a program, by name; the tables are as in `config/aliases.py`.

    Args:
        settings: the dotted setting. values: the only values that it takes, as the setting writes them.
        unchanged: values with which FiveTune behaves so without a setting, and what to do for others.
        no_effect: arguments of which no result depends.
        joint: settings that the importer computes from several arguments, separated by commas, and how.
    """

    settings: Mapping[str, str]
    values: Mapping[str, Mapping[str | float, JsonValue]]
    unchanged: Mapping[str, tuple[tuple[JsonValue, ...], str]]
    no_effect: Iterable[str]
    joint: Mapping[str, tuple[str, str]]

    def list_names(self) -> set[str]:
        """The names of all arguments that have a rule."""
        return {*self.settings, *self.unchanged, *self.no_effect, *self.joint}


@dataclass(slots=True)
class Finding:
    """What became of one argument.

    Args:
        argument: as the other program writes it, with its value. state: see State. settings: those it decided.
    """

    argument: str
    state: State
    reason: str = ""
    settings: tuple[str, ...] = ()

    def leave_out(self, reason: str) -> None:
        """Say why the argument decides nothing."""
        self.state, self.reason, self.settings = "left out", reason, ()


@dataclass(slots=True)
class ImportedRecipe:
    """Settings with the reasons for their values, and the findings.

    Args:
        origin: the program and the file. flag: what stands before the name of an argument, `--` or nothing.
        defaults: settings of the program where nothing else is given, with their reasons.
    """

    origin: str
    flag: str = ""
    settings: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    findings: list[Finding] = field(default_factory=list[Finding])
    defaults: dict[str, tuple[JsonValue, str]] = field(default_factory=dict[str, tuple[JsonValue, str]])

    def set(self, setting: str, value: JsonValue, reason: str) -> None:
        """Set a setting; a later value replaces an earlier one."""
        self.settings[setting] = value
        self.reasons[setting] = reason

    def has(self, setting: str) -> bool:
        """Whether a setting, or one inside it, is set."""
        return any(f"{key}.".startswith(f"{setting}.") for key in self.settings)

    def set_defaults(self, table: Mapping[str, JsonValue], reason: str) -> None:
        """Set what has no value yet; a default also takes the place of a value that a recipe refuses."""
        for setting, value in table.items():
            self.defaults[setting] = (value, reason)
            if setting not in self.settings:
                self.set(setting, value, reason)

    def drop(self, *settings: str) -> None:
        """Remove settings that do not apply."""
        for setting in settings:
            self.settings.pop(setting, None)
            self.reasons.pop(setting, None)

    def add(self, argument: str, state: State, reason: str = "", settings: tuple[str, ...] = ()) -> None:
        """Add the finding about an argument."""
        self.findings.append(Finding(argument, state, reason, settings))

    def describe(self, name: str, argument: Argument) -> str:
        """Write an argument with its value and place, as users of the program would."""
        value = argument.value.code if isinstance(argument.value, Computed) else argument.value
        shown = shorten(value if isinstance(value, str) else format_value(value))
        if is_secret_name(name):
            shown = HIDDEN
        if not name.isupper():  # a variable before a command has no dashes
            name = self.flag + name
        place = f"({argument.where})" if argument.where else ""
        return " ".join(filter(None, (name, shown, place)))

    def apply_rule(self, rules: Rules, name: str, argument: Argument) -> None:
        """Set what a rule gives for an argument, and add the finding."""
        value, written = argument.value, self.describe(name, argument)
        same, advice = rules.unchanged.get(name, ((), ""))
        setting, allowed = rules.settings.get(name), rules.values.get(name)
        if name not in rules.list_names():
            self.add(written, "unknown", UNKNOWN)
        elif name in rules.no_effect:
            self.add(written, "no effect", NO_EFFECT)
        elif isinstance(value, Computed):
            self.add(written, "left out", NOT_LITERAL)
        elif value is None or value in same:
            self.add(written, "same", SAME)
        elif name in rules.joint:
            names, how = rules.joint[name]
            self.add(written, "set", how, tuple(names.split(", ")))
        elif setting is None:
            self.add(written, "left out", advice)
        elif allowed is None:
            self.set(setting, value, written)
            self.add(written, "set", "", (setting,))
        elif isinstance(value, str | int | float) and value in allowed:
            self.set(setting, allowed[value], written)
            self.add(written, "set", "", (setting,))
        else:
            only = ", ".join(str(one) for one in allowed)
            self.add(written, "left out", advice or f"{setting} has a counterpart of {only} alone")

    def leave_out(self, argument: str, reason: str) -> None:
        """Mark an argument as left out that was set before all arguments were known."""
        for one in self.findings:
            if one.argument.removeprefix("--").partition(" ")[0] == argument:
                one.leave_out(reason)

    def refuse(self, setting: str, reason: str) -> None:
        """Leave out a setting that a recipe cannot have, and say so at the arguments that gave it."""
        self.drop(setting)
        if setting in self.defaults:
            self.set(setting, *self.defaults[setting])
        for one in self.findings:
            if setting in one.settings:
                one.leave_out(reason)

    def resolve_findings(self) -> None:
        """Name the settings that are in the recipe; an argument none of whose settings is there decided nothing."""
        for one in self.findings:
            one.settings = tuple(name for name in one.settings if self.has(name))
            if one.state == "set" and not one.settings:
                one.leave_out(f"{BESIDE}: {one.reason}" if one.reason else BESIDE)


class Importer(Options, ABC):
    """Reads the configurations of one program.

    Class attributes:
        title: of the program, as its users know it. rules: what becomes of its own arguments.
    """

    title: ClassVar[str]
    rules: ClassVar[Rules]

    @abstractmethod
    def can_read(self, source: RawConfig) -> bool:
        """Whether a configuration is one of this program."""

    @abstractmethod
    def convert(self, source: RawConfig) -> ImportedRecipe:
        """Convert a configuration to a recipe. Raises ConfigError for one that cannot be read."""


def shorten(text: str) -> str:
    """Cut a text for a table.

    >>> len(shorten("a" * 99))
    60
    """
    return text if len(text) <= 60 else f"{text[:57]}..."


def list_literals(arguments: Mapping[str, Argument]) -> dict[str, JsonValue]:
    """The values of the arguments that are known."""
    return {name: one.value for name, one in arguments.items() if not isinstance(one.value, Computed)}


def read_source_file(path: str) -> RawConfig:
    """Read a file. Raises ConfigError for one that is not UTF-8."""
    try:
        return RawConfig(path, Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text. Save the file as UTF-8.") from None


def read_count(recipe: ImportedRecipe, values: Mapping[str, JsonValue], name: str, default: int) -> int:
    """Return the value of an argument that counts something; the default unless it is a whole number above 0."""
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, int | float) and math.isfinite(value) and value == int(value) >= 1:
        return int(value)
    recipe.leave_out(name, f"{value!r} is not a whole number above 0; {default} is taken")
    return default


def set_batch(
    recipe: ImportedRecipe, values: Mapping[str, JsonValue], name: str, *, micro: int, processes: int, nodes: int
) -> None:
    """Set the examples per optimizer step: micro-batch times accumulation times processes.

    Args:
        name: name of the argument with the micro-batch, for the reasons. processes: of all nodes.
    """
    accumulation = read_count(recipe, values, "gradient_accumulation_steps", 1)
    total = micro * accumulation * processes
    factors = f"{name} {micro} x gradient_accumulation_steps {accumulation} x {processes} processes"
    is_searched = recipe.settings.get("train.batch_size") == "auto"
    if not is_searched:
        recipe.set("train.batch_size", micro, name if name in values else f"default of {name}")
    if is_searched or total != micro:
        recipe.set("train.global_batch_size", total, f"examples per step: {factors.removesuffix(' x 1 processes')}")
    if processes > 1:
        recipe.set("launch.nproc", max(1, processes // nodes), f"{processes} processes")
        if "strategy.name" not in recipe.settings:
            recipe.set("strategy.name", "ddp", "each process holds the model")
    if nodes > 1:
        recipe.set("launch.nnodes", nodes, f"{nodes} nodes")


def set_plain_task(
    recipe: ImportedRecipe, inputs: str, targets: str, *, metrics: list[JsonValue], score: str, reason: str
) -> None:
    """Set the task jsonl with its two templates, its metrics, and the score that chooses the best weights."""
    recipe.set("task.name", "jsonl", reason)
    recipe.set("task.inputs", inputs, "what the model reads, over columns of the file")
    recipe.set("task.targets", targets, "what it learns to write")
    recipe.set("task.metrics", metrics, "scores of the evaluation")
    recipe.set("task.main_metric", score, "chooses the best weights")


def read_json_table(source: RawConfig) -> dict[str, Argument]:
    """Read the arguments of a JSON object. Raises ConfigError for other text."""
    try:
        found = json.loads(source.text)
    except ValueError as error:
        raise ConfigError(f"{source.name}: not valid JSON: {error}. Correct the file.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source.name}: holds no table of arguments. Give a JSON object, {{name: value}}.")
    return {name: Argument(value) for name, value in cast("dict[str, JsonValue]", found).items()}
