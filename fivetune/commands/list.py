"""Name the tasks, metrics, optimizers, schedules, strategies, sinks or recipes that there are."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import textwrap
from itertools import takewhile
from pathlib import Path

from fivetune.commands import print_json

KINDS = ("tasks", "metrics", "optimizers", "schedules", "strategies", "sinks", "recipes")
PIPED = (120, 24)  # columns and lines where there is no terminal
NARROWEST = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, nothing shortened, as the last line"
    )


def run(args: argparse.Namespace) -> int:
    columns = shutil.get_terminal_size(PIPED).columns
    found = _recipes() if args.kind == "recipes" else _plugins(args.kind)
    width = max(map(len, found), default=0)
    for name, line in found.items():
        print(f"{name:<{width}}  {_shortened(line, columns - width - 2)}")
    if args.json:
        print_json({args.kind: [{"name": name, "help": line} for name, line in found.items()]})
    return 0


def _plugins(kind: str) -> dict[str, str]:
    from importlib.util import find_spec

    from fivetune import plugins

    found = {}
    for name in plugins.names(kind):
        spec = find_spec(f"fivetune.{kind}.{name}")
        text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        found[name] = _first_docstring_line(text, where=str(spec.origin if spec else name))
    return found


def _first_docstring_line(text: str, *, where: str) -> str:
    """The help of a plugin; a file that is not valid Python is named, and the others are listed all the same."""
    try:
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    except SyntaxError as error:
        return f"(broken: {where}:{error.lineno}: {error.msg})"


def _shortened(line: str, width: int) -> str:
    """A line that fits, cut after a word.

    >>> _shortened("SQuAD v2.0 by generation.", 19)
    'SQuAD v2.0 by ...'
    """
    return textwrap.shorten(line, max(width, NARROWEST), break_on_hyphens=False, placeholder=" ...")


def _first_sentence(recipe: str) -> str:
    """The first sentence of a recipe's comment.

    >>> _first_sentence("# SQuAD v2.0 by\\n# generation. More.\\nmodel: {}")
    'SQuAD v2.0 by generation.'
    """
    lines = [
        line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), recipe.split("\n"))
    ]
    return re.split(r"(?<=\S)\.\s+(?=[A-Z])", " ".join(lines))[0].rstrip(".") + "."


def _recipes() -> dict[str, str]:
    from fivetune.config import recipe_names, recipes_folder

    found = {}
    for name in recipe_names():
        found[name] = _first_sentence((recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    return found
