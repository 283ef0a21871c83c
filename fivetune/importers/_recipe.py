"""An imported recipe: found by format, checked, and written as YAML, as a table for the terminal and as a manual page.

In: a RawConfig. Out: text; the YAML has the reason for each value beside it, and all arguments that are not in it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from fivetune import plugins
from fivetune.config import load_config
from fivetune.config.layers import as_yaml
from fivetune.errors import ConfigError, suggest_names
from fivetune.importers import Entry, Finding, ImportedRecipe, Importer, RawConfig, read_source_file
from fivetune.redaction import redact_secrets, redact_settings
from fivetune.types import JsonTable, JsonValue

WIDTH = 118
SECTIONS = ("run", "model", "task", "data", "optimizer", "schedule", "train", "loss", "eval", "checkpoint", "report")
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
        raise ConfigError(f"{source.name}: names no model. Add --model.path MODEL.")
    _choose_metric(recipe)
    load_config({}, recipe.settings)
    recipe.settings = redact_settings(recipe.settings)
    return recipe


def load_importer(source: RawConfig, format_name: str | None) -> Importer:
    """Return the importer of a format, or the only one that can read a source."""
    if format_name is not None:
        return plugins.load_plugin("importers", format_name)()
    names = plugins.list_plugins("importers")
    found = [name for name in names if plugins.load_plugin("importers", name)().can_read(source)]
    if len(found) != 1:
        kind = f"can be read as {' and as '.join(found)}" if found else "is in no known format"
        raise ConfigError(f"{source.name}: {kind}. Choose with --format. {suggest_names('', names)}")
    return plugins.load_plugin("importers", found[0])()


def _choose_metric(recipe: ImportedRecipe) -> None:
    """Replace the metric that selects the best weights by the task's name of it, or leave it out."""
    metric = recipe.settings.get("eval.metric")
    if metric is None:
        return
    rest = {name: value for name, value in recipe.settings.items() if name != "eval.metric"}
    allowed = load_config({}, rest).task.list_selectable_scores()
    found = next((name for name in (metric, f"{metric}_f1") if name in allowed), None)  # rougeL is rougeL_f1
    if found:
        recipe.settings["eval.metric"] = found
        return
    recipe.drop("eval.metric")
    advice = f"the task has no score {metric!r}. {suggest_names(str(metric), allowed)}"
    recipe.findings = [
        one._replace(state="left out", settings=(), reason=advice) if "eval.metric" in one.settings else one
        for one in recipe.findings
    ]


def format_recipe(recipe: ImportedRecipe) -> str:
    """Format as YAML: the reason beside each setting, then the arguments that set nothing."""
    lines = [f"# From {recipe.origin}.", "# Beside each setting: the argument that gives it.", ""]
    table: dict[str, list[str]] = {}
    for setting in sorted(recipe.settings, key=_rank_setting):
        section, _, name = setting.partition(".")
        table.setdefault(section, [])
        table[section] += _format_setting(
            name or section, recipe.settings[setting], recipe.reasons.get(setting, ""), bool(name)
        )
    for section, inner in table.items():
        lines += ([] if inner and not inner[0].startswith(" ") else [f"{section}:"]) + inner
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


def _format_setting(name: str, value: JsonValue, reason: str, is_inner: bool) -> list[str]:
    """Lines of a setting: its reason behind it where both fit into a line, else above it."""
    plain = list(value) if isinstance(value, tuple) else value
    text = textwrap.indent(as_yaml({name: plain}).rstrip("\n"), "  " if is_inner else "")
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
    return rank, section, name not in ("name", "path")


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


def build_manual_page(format_name: str) -> str:
    """Build docs/migrating/<format>.md: how to convert, an example with its recipe, what differs, all arguments."""
    importer: Importer = plugins.load_plugin("importers", format_name)()
    name, text = next(iter(importer.examples.items()))
    recipe = import_recipe(RawConfig(name or "the command line", text), format_name, {})
    data = "" if "data.train" in recipe.settings else " --data.train train.json --data.eval dev.json"
    lines = [
        f"# From {importer.title}",
        "",
        f"Generated by `fivetune import-config --manual {format_name}`.",
        "",
        "```sh",
        f"fivetune import-config {name or 'ARGUMENTS'} --output my.yaml",
        f"fivetune check my.yaml{data}",
        f"fivetune train my.yaml{data}",
        "```",
        "",
        *(["ARGUMENTS is the command line in quotation marks, or a file with it."] if not name else []),
        "The command reads the text and executes nothing. It prints what became of each argument; what it does not "
        "know, it names.",
        "",
        "## What differs",
        "",
        *(f"- {sentence}" for sentence in importer.differences),
        "",
        "## Example",
        "",
        f"```{'python' if name.endswith('.py') else 'text'}",
        text.strip(),
        "```",
        "",
        "becomes",
        "",
        "```yaml",
        format_recipe(recipe).rstrip("\n"),
        "```",
        "",
        "## Arguments",
        "",
        "| argument | becomes | remark |",
        "|---|---|---|",
    ]
    for argument, rule in sorted(importer.rules.items(), key=lambda pair: pair[0].lower()):
        became = ", ".join(f"`{one}`" for one in rule.setting.split(", ")) if rule.setting else ""
        became = became or ("no effect" if rule.ignored else "nothing to set" if rule.same else "left out")
        lines.append(f"| `{argument}` | {became} | {_format_remark(rule)} |")
    return "\n".join(_wrap_paragraph(line) for line in lines) + "\n"


def _format_remark(rule: Entry) -> str:
    """What a rule has to say about values.

    >>> _format_remark(Entry(same=(False, None), note="set x")), _format_remark(Entry(setting="a", values={1: "b"}))
    ('for false, none; otherwise left out: set x', '1 is b')
    """
    remarks: list[str] = []
    if rule.same and not rule.ignored:
        values = ", ".join(dict.fromkeys(map(_format_plain, rule.same)))
        remarks.append(f"nothing to set for {values}" if rule.setting else f"for {values}")
    if rule.note:
        remarks.append(f"otherwise left out: {rule.note}" if remarks and not rule.setting else rule.note)
    remarks += dict.fromkeys(f"{_format_plain(old)} is {new}" for old, new in rule.values.items() if old != new)
    return "; ".join(remarks).replace("|", "/")


def _format_plain(value: JsonValue) -> str:
    return {"None": "none", "True": "true", "False": "false"}.get(str(value), str(value))


def _wrap_paragraph(text: str) -> str:
    """Wrap a line of prose; tables, headings and code stay as they are."""
    if text.startswith(("|", "#", "`", " ")) or "\n" in text:
        return text
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)
