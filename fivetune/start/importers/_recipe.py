"""An imported recipe: found by format, checked, and written as YAML and as a table for the terminal.

In: a RawConfig. Out: text; the YAML has a reason for each value, and all arguments that set none.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from pydantic import ValidationError

from fivetune import plugins
from fivetune.config import RunConfig, describe_error, load_config, load_layers
from fivetune.config.layers import as_yaml, format_value
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, suggest_names
from fivetune.redaction import redact_secrets, redact_settings
from fivetune.start.importers import NOT_PYTHON, Finding, ImportedRecipe, Importer, RawConfig, read_source_file
from fivetune.types import JsonTable, JsonValue

WIDTH = 118
SECTIONS = ("run", "model", "task", "data", "optimizer", "schedule", "train", "loss", "eval", "checkpoint", "report")
BY_HAND = {"SimpleT5(": "simplet5", "base_model:": "autotrain", "INITIAL_CHECKPOINT_PATH": "t5x", "TRAIN_STEPS": "t5x"}
HEADINGS = {
    "same": "Needs no setting",
    "no effect": "Changes no result",
    "left out": "Left out",
    "unknown": "Unknown",
}


def read_source(given: str) -> RawConfig:
    """Read a file, or take words of a command line. Raises ConfigError for a file that does not exist."""
    path = Path(given)
    try:
        is_file = len(given) < 4096 and path.is_file()
    except OSError:
        is_file = False
    if is_file:
        return read_source_file(given)
    if given.strip() and " " not in given.strip() and not given.startswith("-"):
        raise ConfigError(f"{given}: no such file. Give a file, or a command line in quotation marks.")
    return RawConfig("the command line", given)


def import_recipe(source: RawConfig, format_name: str | None, overrides: Mapping[str, JsonValue]) -> ImportedRecipe:
    """Convert a configuration and check that the recipe loads.

    Args:
        format_name: name of an importer; None: the one that can read the source.
        overrides: dotted settings that win over the settings of the configuration.

    Raises ConfigError for a source that no importer or several can read, one without a model, and settings that a
    recipe refuses.
    """
    recipe = load_importer(source, format_name).convert(source)
    for setting, value in overrides.items():
        recipe.set(setting, value, f"--{setting}")
    if not recipe.settings.keys() & {"model.path", "model.config"}:
        raise ConfigError(f"{source.name}: names no model{_describe_missing_model(recipe)}")
    _leave_out_refused(recipe, overrides)
    recipe.settings = redact_settings(recipe.settings)
    _check_text(format_recipe(recipe))
    return recipe


def _describe_missing_model(recipe: ImportedRecipe) -> str:
    """What to do without a model: the expression that computes it; for accelerate's file, which has none, its flags."""
    unread = [f": {one.argument}: {one.reason}" for one in recipe.findings if one.reason.startswith(NOT_PYTHON)]
    computed = [f": {one.argument}" for one in recipe.findings if one.argument.startswith("model ")]
    text = f"{''.join([*unread, *computed][:1])}. Add --model.path MODEL."
    if not recipe.settings or "task.name" in recipe.settings:
        return text
    flags = " ".join(f"--{name} {format_value(value)}" for name, value in recipe.settings.items())
    return f"{text} Or give these to a recipe: {flags}."


def _leave_out_refused(recipe: ImportedRecipe, overrides: Mapping[str, JsonValue]) -> None:
    """Leave out each setting that a recipe refuses. Raises ConfigError for one of the `overrides`."""
    # Each round leaves out one setting, or ends: a refused one may hide the fault of another.
    while True:
        layers, _ = load_layers({}, recipe.settings)
        try:
            RunConfig.model_validate(layers.to_dict(), context={"trained": False})
            return
        except ValidationError as error:
            first = error.errors()[0]
            message = describe_error(first, layers)
        except FiveTuneEnvironmentError as error:  # a metric whose package is not installed
            if "task.metrics" in overrides or "metrics" not in str(error):
                raise
            names = recipe.settings["task.metrics"]
            recipe.findings.append(Finding(f"metrics {format_value(names)}", "left out", str(error)))
            recipe.set("task.metrics", ["exact_match"], "a metric whose package is installed")
            recipe.set("task.main_metric", "exact_match", "chooses the best weights")
            continue
        setting = _find_refused(first, message, recipe)
        if setting is None or setting in overrides:
            raise ConfigError(message)
        recipe.refuse(setting, re.sub(rf"^(--[\w.]+: |{re.escape(setting)}: )+", f"{setting}: ", message))


def _find_refused(error: Any, message: str, recipe: ImportedRecipe) -> str | None:
    """The setting that an error is about: at its place, inside of it, or named in a rule between settings."""
    place = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    if place in recipe.settings:
        return place
    # A rule between settings has no place of its own: the first setting that its sentence names is left out.
    for word in re.findall(r"[\w.]+", message.partition(". ")[0]):
        for name in (f"{place}.{word}", word):
            if name in recipe.settings:
                return name
    return None


def _check_text(text: str) -> None:
    """Check that a recipe loads as it is written. Raises ConfigError otherwise."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(text, encoding="utf-8")
        load_config(path)


def load_importer(source: RawConfig, format_name: str | None) -> Importer:
    """Return the importer of a format, or the only one that can read a source."""
    if format_name is not None:
        return plugins.load_plugin("importers", format_name)()
    names = plugins.list_plugins("importers")
    found = [name for name in names if plugins.load_plugin("importers", name)().can_read(source)]
    if len(found) != 1:
        kind = f"can be read as {' and as '.join(found)}" if found else "is in no known format"
        page = next((page for words, page in BY_HAND.items() if words in source.text), "")
        table = f" docs/migrating/{page}.md says what to set in place of each of its arguments." if page else ""
        raise ConfigError(f"{source.name}: {kind}.{table} Choose with --format. {suggest_names('', names)}")
    return plugins.load_plugin("importers", found[0])()


def format_recipe(recipe: ImportedRecipe) -> str:
    """Format as YAML: the reason beside each setting, then the arguments that set nothing."""
    lines = [f"# From {recipe.origin}.", "# Beside each setting: the argument that gives it.", ""]
    for section, value in _build_tables(recipe).items():
        if not isinstance(value, dict):
            lines += _format_setting(recipe, section, value)
            continue
        lines.append(f"{section}:")
        for name, inner in cast("JsonTable", value).items():
            text = "\n".join(_format_setting(recipe, f"{section}.{name}", inner))
            lines += textwrap.indent(text, "  ").splitlines()
    for state, heading in HEADINGS.items():
        named = [f"{one.argument}: {one.reason}" for one in recipe.findings if one.state == state]
        lines += ["", f"# {heading}:"] if named else []
        for text in named:
            lines += textwrap.wrap(text, WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    if "data.train" not in recipe.settings:
        lines += ["", "# The training file is not named. Add data.train (and data.eval), or --data.train FILE."]
    return redact_secrets("\n".join(lines)) + "\n"


def _build_tables(recipe: ImportedRecipe) -> JsonTable:
    """The settings as tables inside tables, in the order of a recipe."""
    table: JsonTable = {}
    for setting in sorted(recipe.settings, key=_rank_setting):
        *sections, name = setting.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = recipe.settings[setting]
    return table


def _format_setting(recipe: ImportedRecipe, setting: str, value: JsonValue) -> list[str]:
    """Lines of a setting: its reason behind it where both fit into a line, else above it."""
    reasons = [reason for key, reason in recipe.reasons.items() if f"{key}.".startswith(f"{setting}.")]
    reason = " ".join("; ".join(filter(None, reasons)).split())
    name = setting.rpartition(".")[2]
    if isinstance(value, list | tuple | dict):
        text = f"{name}: {format_value(list(value) if isinstance(value, tuple) else value)}"
    else:
        text = as_yaml({name: value}).rstrip("\n")
    if not reason:
        return text.splitlines()
    if "\n" not in text and len(text) + len(reason) + 6 <= WIDTH:
        return [f"{text}  # {reason}"]
    return [*textwrap.wrap(reason, WIDTH - 2, initial_indent="# ", subsequent_indent="# "), *text.splitlines()]


def _rank_setting(setting: str) -> tuple[int, str, bool]:
    """Sort key: sections in the order of a recipe, a plugin's name before its options."""
    section, _, name = setting.partition(".")
    rank = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)
    return rank, section, name.rpartition(".")[2] not in ("name", "path")


def describe_findings(recipe: ImportedRecipe) -> list[JsonTable]:
    """The findings as JSON objects."""
    rows: list[JsonTable] = []
    for one in recipe.findings:
        shown = {"argument": redact_secrets(one.argument), "reason": redact_secrets(one.reason)}
        rows.append({**shown, "state": one.state, "settings": list(one.settings)})
    return rows


def list_rows(recipe: ImportedRecipe) -> list[tuple[str, str, str]]:
    """Rows of the terminal: argument, what it became, and why."""
    rows: list[tuple[str, str, str]] = []
    for one in describe_findings(recipe):
        rows.append((one["argument"], ", ".join(one["settings"]) or one["state"], one["reason"]))
    return rows


def describe_recipe(recipe: ImportedRecipe) -> JsonTable:
    """The recipe as one JSON object: nested settings, and the findings."""
    return {"origin": recipe.origin, "settings": _build_tables(recipe), "arguments": describe_findings(recipe)}
