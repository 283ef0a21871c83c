"""An imported recipe: found by format, checked, and written as YAML and as a table for the terminal.

In: a RawConfig. Out: text; the YAML has the reason for each value beside it, and all arguments that are not in it.
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
from fivetune.config.model import UNKNOWN_PLUGIN
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, FiveTuneError, suggest_names
from fivetune.importers import Finding, ImportedRecipe, Importer, RawConfig, read_source_file
from fivetune.redaction import redact_secrets, redact_settings
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
        overrides: dotted settings that win over those of the configuration.

    Raises ConfigError for a source that no importer or several can read, one without a model, and settings that a
    recipe refuses.
    """
    recipe = load_importer(source, format_name).convert(source)
    for setting, value in overrides.items():
        recipe.set(setting, value, f"--{setting}")
    if not recipe.settings.keys() & {"model.path", "model.config"}:
        flags = " ".join(f"--{name} {format_value(value)}" for name, value in recipe.settings.items())
        beside = (
            f" Or give these to a recipe: {flags}." if recipe.settings and "task.name" not in recipe.settings else ""
        )
        computed = next((f": {one.argument}" for one in recipe.findings if one.argument.startswith("model ")), "")
        raise ConfigError(f"{source.name}: names no model{computed}. Add --model.path MODEL.{beside}")
    _choose_metric(recipe)
    _leave_out_refused(recipe, overrides)
    recipe.settings = redact_settings(recipe.settings)
    _check_text(format_recipe(recipe))
    return recipe


def _leave_out_refused(recipe: ImportedRecipe, overrides: Mapping[str, JsonValue]) -> None:
    """Leave out each setting that a recipe refuses. Raises ConfigError for one of the `overrides`."""
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
            recipe.findings.append(Finding(f"metrics {format_value(names)}", "left out", (), str(error)))
            recipe.set("task.metrics", ["exact_match"], "a metric whose package is installed")
            recipe.set("task.main_metric", "exact_match", "chooses the best weights")
            continue
        setting = _find_refused(first, message, recipe)
        if setting is None or setting in overrides:
            raise ConfigError(message)
        recipe.refuse(setting, re.sub(rf"^(--[\w.]+: |{re.escape(setting)}: )+", f"{setting}: ", message))


def _find_refused(error: Any, message: str, recipe: ImportedRecipe) -> str | None:
    """The setting that an error is about: at its place, or named in a rule between settings."""
    place = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    inner = [one for one in recipe.settings if one == place or (place.count(".") and place.startswith(f"{one}."))]
    if not inner and error["type"] == UNKNOWN_PLUGIN:
        inner = [one for one in recipe.settings if one == f"{place}.name"]
    if not inner:
        fault = message.partition(". ")[0]
        named = [f"{place}.{name}" if place else name for name in re.findall(r"[\w.]+", fault)]
        inner = [name for name in named if name in recipe.settings] + [
            one for one in recipe.settings if place.count(".") and one.startswith(f"{place}.")
        ]
    return inner[0] if inner else None


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


def _choose_metric(recipe: ImportedRecipe) -> None:
    """Replace the metric that selects the best weights by the task's name of it, or leave it out."""
    metric = recipe.settings.get("eval.metric")
    if metric is None:
        return
    task = {name: value for name, value in recipe.settings.items() if name.startswith("task.")}
    try:
        allowed = load_config({}, {"model.path": "t5-nano", **task}).task.list_selectable_scores()
    except FiveTuneError:  # reported where the recipe is checked
        return
    found = next((name for name in (metric, f"{metric}_f1") if name in allowed), None)  # rougeL is rougeL_f1
    if found:
        recipe.settings["eval.metric"] = found
        return
    recipe.refuse("eval.metric", f"the task has no score {metric!r}. {suggest_names(str(metric), allowed)}")


def format_recipe(recipe: ImportedRecipe) -> str:
    """Format as YAML: the reason beside each setting, then the arguments that set nothing."""
    lines = [f"# From {recipe.origin}.", "# Beside each setting: the argument that gives it.", ""]
    section = ""
    for name, value, reason in _group_settings(recipe):
        inner = name.partition(".")[2]
        if inner and not name.startswith(f"{section}."):
            section = name.partition(".")[0]
            lines.append(f"{section}:")
        lines += _format_setting(inner or name, value, reason, bool(inner))
    for state, heading in HEADINGS.items():
        named = [finding for finding in recipe.findings if finding.state == state]
        if named:
            lines += ["", f"# {heading}:"]
            for finding in named:
                text = f"{finding.argument}: {finding.reason}".replace("\n", " ")
                lines += textwrap.wrap(text, WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    if "data.train" not in recipe.settings:
        lines += ["", "# The training file is not named. Add data.train (and data.eval), or --data.train FILE."]
    return redact_secrets("\n".join(lines)) + "\n"


def _group_settings(recipe: ImportedRecipe) -> list[tuple[str, JsonValue, str]]:
    """Settings of two levels with their reasons; deeper ones, such as model.adapter.r, are tables."""
    found: dict[str, tuple[JsonValue, list[str]]] = {}
    for setting in sorted(recipe.settings, key=_rank_setting):
        value, reason = recipe.settings[setting], recipe.reasons.get(setting, "")
        head, *deeper = re.findall(r"^[^.]+(?:\.[^.]+)?|[^.]+", setting)
        if not deeper:
            found[head] = (value, [reason])
            continue
        table, reasons = found.setdefault(head, ({}, []))
        cast("dict[str, JsonValue]", table)[".".join(deeper)] = value
        reasons.append(reason)
    return [(name, value, "; ".join(filter(None, reasons))) for name, (value, reasons) in found.items()]


def _format_setting(name: str, value: JsonValue, reason: str, is_inner: bool) -> list[str]:
    """Lines of a setting: its reason behind it where both fit into a line, else above it."""
    plain = list(value) if isinstance(value, tuple) else value
    inline = isinstance(plain, list | dict)
    text = f"{name}: {format_value(plain)}" if inline else as_yaml({name: plain}).rstrip("\n")
    text = textwrap.indent(text, "  " if is_inner else "")
    reason = " ".join(reason.split())
    if not reason:
        return text.splitlines()
    if "\n" not in text and len(text) + len(reason) + 4 <= WIDTH:
        return [f"{text}  # {reason}"]
    return [*textwrap.wrap(reason, WIDTH, initial_indent="  # ", subsequent_indent="  # "), *text.splitlines()]


def _rank_setting(setting: str) -> tuple[int, str, bool]:
    """Sort key: sections in the order of a recipe, a plugin's name before its options."""
    section, _, name = setting.partition(".")
    rank = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)
    return rank, section, name.rpartition(".")[2] not in ("name", "path")


def list_rows(recipe: ImportedRecipe) -> list[tuple[str, str, str]]:
    """Rows of the terminal: argument, what it became, and why."""
    return [
        (redact_secrets(one.argument), _describe_result(one), redact_secrets(one.reason)) for one in recipe.findings
    ]


def _describe_result(finding: Finding) -> str:
    return ", ".join(finding.settings) if finding.state == "set" else finding.state


def describe_recipe(recipe: ImportedRecipe) -> JsonTable:
    """The recipe as one JSON object: nested settings, and the findings."""
    table: JsonTable = {}
    for setting, value in recipe.settings.items():
        *sections, name = setting.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    rows = [
        {
            "argument": redact_secrets(one.argument),
            "state": one.state,
            "settings": list(one.settings),
            "reason": redact_secrets(one.reason),
        }
        for one in recipe.findings
    ]
    return {"origin": recipe.origin, "settings": table, "arguments": rows}
