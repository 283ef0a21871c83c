"""List tasks, metrics, optimizers, recipes, models, plugins.

With a line of help each.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import textwrap
from pathlib import Path

from fivetune.commands import add_flag, print_json

PLUGINS = (
    "tasks", "metrics", "optimizers", "schedules", "strategies", "adapters", "sinks", "launchers", "exporters",
    "importers",
)  # fmt: skip
KINDS = (*PLUGINS, "recipes", "models")
PIPED = (120, 24)  # columns and lines if the output is not a terminal
NARROWEST = 20  # characters of help to the right of the name; with fewer the help is below it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS)
    add_flag(parser, "--manual", "models only: print docs/models.md")
    add_flag(parser, "--json", "print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.config.recipes import find_recipes_folder, list_recipe_names
    from fivetune.errors import ConfigError
    from fivetune.model.family import FAMILIES
    from fivetune.model.manual import build_manual_of_models

    if args.manual and args.kind != "models":
        raise ConfigError(f"list: --manual with {args.kind}: there is no such page. Allowed: models.")
    if args.manual:
        print(build_manual_of_models(), end="")
        return 0
    found: dict[str, str] = {}
    if args.kind == "recipes":
        for name in list_recipe_names():
            text = (find_recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8")
            found[name] = _extract_first_sentence(text)
    elif args.kind == "models":
        found = {kind: family.models for kind, family in FAMILIES.items()}
    else:
        found = _list_plugins(args.kind)
    columns = shutil.get_terminal_size(PIPED).columns
    width = max(map(len, found), default=0)
    for name, line in found.items():
        print(_wrap_entry(name, line, width=width, columns=columns))
    if args.json:
        print_json({args.kind: [{"name": name, "help": line} for name, line in found.items()]})
    return 0


def _list_plugins(kind: str) -> dict[str, str]:
    """List plugins with their help; a broken file of the user has its error, so that all others are still listed."""
    from importlib.util import find_spec

    from fivetune import plugins
    from fivetune.errors import FiveTuneError

    found: dict[str, str] = {}
    for name in plugins.list_plugins(kind):
        spec = find_spec(f"{plugins.KINDS[kind]}.{name}")
        path = spec.origin if spec else None
        text = Path(path).read_text(encoding="utf-8") if path else ""
        try:
            # Read, not imported: some plugins import torch.
            found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            if path and plugins.is_own_file(path):
                plugins.load_plugin(kind, name)
        except SyntaxError as error:
            found[name] = f"(broken: {path or name}:{error.lineno}: {error.msg})"
        except FiveTuneError as error:
            found[name] = f"(broken: {error})"
    return found


def _wrap_entry(name: str, line: str, *, width: int, columns: int) -> str:
    """Wrap an entry: the name in a column of `width`, its help to the right, or below the name in a narrow terminal.

    >>> print(_wrap_entry("squad_v2", "SQuAD v2.0 by generation.", width=8, columns=30))
    squad_v2  SQuAD v2.0 by
              generation.
    >>> print(_wrap_entry("stackoverflow_quality", "Three labels.", width=21, columns=30))
    stackoverflow_quality
      Three labels.
    """
    is_narrow = columns - width - 2 < NARROWEST
    indent = "  " if is_narrow else " " * (width + 2)
    text = textwrap.fill(
        line,
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    if is_narrow:
        return f"{name}\n{text}"
    return f"{name:<{width}}{text[width:]}"  # the name in place of the first line's indent


def _extract_first_sentence(recipe: str) -> str:
    """Extract the first sentence of a recipe's comment.

    >>> _extract_first_sentence("# SQuAD v2.0 by\\n# generation. More.\\nmodel: {}")
    'SQuAD v2.0 by generation.'
    """
    lines: list[str] = []
    for line in recipe.split("\n"):
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return re.split(r"(?<=\S)\.\s+(?=[A-Z])", " ".join(lines))[0].rstrip(".") + "."
