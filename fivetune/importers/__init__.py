"""Importers: the configuration of another program as a recipe, one program per file.

An importer's file holds one subclass of `Importer`. In: the text of a configuration (words of a command line, a script,
a file), which is read and never executed. Out: an ImportedRecipe: settings, each with the reason for its value, and one
finding for each argument: what it became, or why it was left out. `_recipe.py` checks and prints it.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What becomes of an argument.

    Args:
        setting: the dotted setting, several separated by commas; "" for none.
        values: values that the setting writes otherwise. closed: whether it has no others.
        same: values with which FiveTune behaves so without a setting.
        ignored: whether any value is accepted, because no result depends on it.
        joint: whether the importer computes the setting from several arguments.
        note: why nothing is set, what to do, or what changes.
    """

    setting: str = ""
    values: Mapping[JsonValue, JsonValue] = field(default_factory=dict[JsonValue, JsonValue])
    closed: bool = False
    same: tuple[JsonValue, ...] = ()
    ignored: bool = False
    joint: bool = False
    note: str = ""


class Finding(NamedTuple):
    """What became of one argument.

    Args:
        argument: as the other program writes it, with its value. state: see State. settings: those it decided.
    """

    argument: str
    state: State
    settings: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class ImportedRecipe:
    """Settings with the reasons for their values, and the findings; `origin` names the program and the file."""

    origin: str
    settings: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    findings: list[Finding] = field(default_factory=list[Finding])
    defaults: dict[str, tuple[JsonValue, str]] = field(default_factory=dict[str, tuple[JsonValue, str]])

    def set(self, setting: str, value: JsonValue, reason: str) -> None:
        """Set a setting; a later value replaces an earlier one."""
        self.settings[setting] = value
        self.reasons[setting] = reason

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

    def leave_out(self, argument: str, reason: str) -> None:
        """Mark an argument as left out that was set before all arguments were known."""
        for place, finding in enumerate(self.findings):
            if finding.argument.removeprefix("--").partition(" ")[0] == argument:
                self.findings[place] = Finding(finding.argument, "left out", (), reason)

    def refuse(self, setting: str, reason: str) -> None:
        """Leave out a setting that a recipe cannot have, and say so at the arguments that gave it."""
        self.drop(setting)
        if setting in self.defaults:
            self.set(setting, *self.defaults[setting])
        for place, finding in enumerate(self.findings):
            if setting in finding.settings:
                rest = tuple(one for one in finding.settings if one != setting)
                state = finding.state if rest else "left out"
                self.findings[place] = Finding(finding.argument, state, rest, reason)

    def count_left_out(self) -> int:
        """The number of arguments that are left out or unknown."""
        return sum(finding.state in ("left out", "unknown") for finding in self.findings)


class Importer(Options, ABC):
    """Reads the configurations of one program.

    Class attributes:
        title: of the program, as its users know it.
        written: how an argument is written, with {} for its name.
        rules: name of an argument -> its entry, what becomes of it.
        differences: sentences about what differs although the settings are equal.
        examples: name of a file, or "" for words of a command line -> its text. The first stands in the manual.
    """

    title: ClassVar[str]
    written: ClassVar[str] = "{}"
    rules: ClassVar[Mapping[str, Entry]]
    differences: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[Mapping[str, str]]

    @abstractmethod
    def can_read(self, source: RawConfig) -> bool:
        """Whether a configuration is one of this program."""

    @abstractmethod
    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        """Read the arguments by name. Raises ConfigError for text that is not what `can_read` expects."""

    @abstractmethod
    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        """Add the program's defaults and the settings that several arguments decide; `values` has all arguments."""

    def get_rule(self, name: str) -> Entry | None:
        """The rule for an argument; None for one that is not known."""
        return self.rules.get(name)

    def convert(self, source: RawConfig) -> ImportedRecipe:
        """Convert a configuration to a recipe. Raises ConfigError for one that cannot be read."""
        arguments = self.read_arguments(source)
        recipe = ImportedRecipe(f"{self.title}, {source.name}")
        self.apply_arguments(recipe, arguments)
        return recipe

    def apply_arguments(self, recipe: ImportedRecipe, arguments: Mapping[str, Argument]) -> None:
        """Apply the rules, complete the recipe, and resolve the findings."""
        values = {name: one.value for name, one in arguments.items() if not isinstance(one.value, Computed)}
        for name, argument in arguments.items():
            rule = self.get_rule(name)
            if isinstance(argument.value, Computed) and not (rule and rule.ignored):
                written = self.describe_argument(name, argument.value.code, argument.where)
                state, reason = ("left out", NOT_LITERAL) if rule else ("unknown", UNKNOWN)
                recipe.findings.append(Finding(written, state, (), reason))
            else:
                self.apply_rule(recipe, name, argument, rule, values)
        self.complete(recipe, values)
        recipe.findings = [_resolve_finding(finding, recipe.settings) for finding in recipe.findings]

    def describe_argument(self, name: str, value: JsonValue, where: str = "") -> str:
        """Write an argument with its value and place, as users of the program would."""
        shown = HIDDEN if is_secret_name(name) else value if isinstance(value, str) else format_value(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return f"{self.written.format(name)} {shown}{f' ({where})' if where else ''}"

    def apply_rule(
        self,
        recipe: ImportedRecipe,
        name: str,
        argument: Argument,
        rule: Entry | None,
        values: Mapping[str, JsonValue],
    ) -> None:
        """Set what a rule gives for an argument, and add the finding; `values` has all arguments."""
        value = argument.value.code if isinstance(argument.value, Computed) else argument.value
        written = self.describe_argument(name, value, argument.where)
        if rule is None:
            recipe.findings.append(Finding(written, "unknown", (), UNKNOWN))
        elif value is None and None not in rule.same:
            recipe.findings.append(Finding(written, "same", (), "its default"))
        elif value in rule.same:
            recipe.findings.append(Finding(written, "same", (), rule.note or "FiveTune does so without a setting"))
        elif rule.joint:
            recipe.findings.append(Finding(written, "set", tuple(rule.setting.split(", ")), rule.note))
        elif rule.closed and (isinstance(value, list | dict) or value not in rule.values):
            allowed = ", ".join(str(one) for one in rule.values)
            note = rule.note or f"{rule.setting} has no counterpart of it, only of {allowed}"
            recipe.findings.append(Finding(written, "left out", (), note))
        elif rule.setting:
            changed = rule.values.get(value, value) if isinstance(value, str | int | float | None) else value
            recipe.set(rule.setting, changed, written)
            recipe.findings.append(Finding(written, "set", (rule.setting,), rule.note))
        elif rule.ignored:
            recipe.findings.append(Finding(written, "no effect", (), rule.note or "changes no result"))
        else:
            recipe.findings.append(Finding(written, "left out", (), rule.note))


def _resolve_finding(finding: Finding, settings: Mapping[str, JsonValue]) -> Finding:
    """Name the settings that are in the recipe; an argument none of whose settings is there decided nothing."""
    kept = tuple(name for name in finding.settings if any(f"{key}.".startswith(f"{name}.") for key in settings))
    if finding.state == "set" and not kept:
        return finding._replace(
            state="left out", settings=(), reason=f"{BESIDE}{finding.reason and ': '}{finding.reason}"
        )
    return finding._replace(settings=kept)


def read_source_file(path: str) -> RawConfig:
    """Read a file. Raises ConfigError for one that is not UTF-8."""
    try:
        return RawConfig(path, Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text. Save the file as UTF-8.") from None


def read_number(recipe: ImportedRecipe, values: Mapping[str, JsonValue], name: str, default: float) -> float:
    """Return the value of an argument; the default, with a finding, for one that is no number."""
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        recipe.leave_out(name, f"{value!r} is not a number; {default:g} is taken")
        return default
    return value


def read_count(recipe: ImportedRecipe, values: Mapping[str, JsonValue], name: str, default: int) -> int:
    """Return the value of an argument that counts something; the default unless it is a whole number above 0."""
    value = read_number(recipe, values, name, default)
    if value != int(value) or value < 1:
        recipe.leave_out(name, f"{value!r} is not a whole number above 0; {default} is taken")
        return default
    return int(value)


def set_batch(
    recipe: ImportedRecipe, *, micro: int, accumulation: int, num_processes: int, names: tuple[str, str], given: bool
) -> None:
    """Set the examples per optimizer step: micro-batch times accumulation times processes.

    Args:
        names: those of the arguments of micro-batch and accumulation, for the reasons.
        given: whether the micro-batch is given.
    """
    total = micro * accumulation * num_processes
    recipe.set("train.batch_size", micro, names[0] if given else f"default of {names[0]}")
    if total != micro:
        factors = f"{names[0]} {micro} x {names[1]} {accumulation}"
        factors += f" x {num_processes} processes" if num_processes > 1 else ""
        recipe.set("train.global_batch_size", total, f"examples per step: {factors}")
    if num_processes > 1:
        recipe.set("launch.nproc", num_processes, f"{num_processes} processes")
        recipe.set("strategy.name", "ddp", "each process holds the model")


def set_plain_task(
    recipe: ImportedRecipe, inputs: str, targets: str, *, metrics: list[JsonValue], score: str, reason: str
) -> None:
    """Set the task jsonl with its two templates, its metrics, and the score that chooses the best weights."""
    recipe.set("task.name", "jsonl", reason)
    recipe.set("task.inputs", inputs, "what the model reads, over columns of the file")
    recipe.set("task.targets", targets, "what it learns to write")
    recipe.set("task.metrics", metrics, "scores of the evaluation")
    recipe.set("task.main_metric", score, "chooses the best weights")


def read_json_table(source: RawConfig) -> dict[str, JsonValue]:
    """Read a JSON object. Raises ConfigError for other text."""
    try:
        found = json.loads(source.text)
    except ValueError as error:
        raise ConfigError(f"{source.name}: not valid JSON: {error}. Correct the file.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source.name}: holds no table of arguments. Give a JSON object, {{name: value}}.")
    return cast("dict[str, JsonValue]", found)
