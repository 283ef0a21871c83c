"""What a script does to the columns of its data, as texts over the columns of the file.

In: a PythonSource. Out: changes, which templates take in, and a finding for each line that is not a text over columns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from fivetune.importers import Argument, Finding
from fivetune.importers._python import Column, Data, PythonSource, Text, get_last_name, name_split
from fivetune.types import JsonValue

CHANGES = {  # methods of data that change which records, or which columns, the training has
    "rename", "rename_column", "rename_columns", "filter", "dropna", "drop_duplicates", "fillna", "select", "sample",
    "head", "explode", "merge", "concat", "groupby", "apply",
}  # fmt: skip
FEATURES = re.compile(r"ids$|mask$|^labels$")  # what the model reads: the texts of these are read at the tokenizer


class Change(NamedTuple):
    """A statement that changes the columns of the data: new column -> its text over the columns before."""

    line: int
    columns: dict[str, Text]


@dataclass(slots=True)
class Script:
    """What is read of a script: arguments by name, findings about lines, and changes of columns."""

    python: PythonSource
    arguments: dict[str, Argument] = field(default_factory=dict[str, Argument])
    findings: list[Finding] = field(default_factory=list[Finding])
    changes: list[Change] = field(default_factory=list[Change])

    def add(self, name: str, value: object, node: ast.AST) -> None:
        """Add an argument; the first one of a name counts."""
        known = value if not isinstance(value, Data) else name_split(value)
        line = getattr(node, "lineno", 0)
        self.arguments.setdefault(name, Argument(cast("JsonValue", known), f"line {line}" if line else ""))

    def report(self, node: ast.AST, reason: str) -> None:
        """Add a finding about a line that sets nothing."""
        code = ast.unparse(node).replace("\n", " ")
        code = code if len(code) <= 60 else f"{code[:57]}..."
        self.findings.append(Finding(f"{code} (line {getattr(node, 'lineno', 0)})", "left out", (), reason))


def read_changes(script: Script) -> None:
    """Read what statements do to the columns and rows of the data."""
    python = script.python
    for node in ast.walk(python.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            key = python.evaluate(target.slice)
            if isinstance(key, str) and isinstance(python.evaluate(target.value), Data):
                value = python.evaluate(node.value)
                _add_change(script, node, {key: value})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            value = python.evaluate(node.value)
            if not isinstance(python.evaluate(target.value), Data):
                continue
            if target.attr == "columns":
                script.report(node, "the columns get other names here; the templates name those of the file")
            elif isinstance(value, Text):
                _add_change(script, node, {target.attr: value})
    for call in python.calls:
        name = get_last_name(call.func)
        if not isinstance(call.func, ast.Attribute) or not isinstance(python.evaluate(call.func.value), Data):
            continue
        if name in ("rename", "rename_column", "rename_columns"):
            keywords = {one.arg: one.value for one in call.keywords}
            names = python.evaluate(keywords.get("columns") or (call.args[0] if len(call.args) == 1 else None))
            if len(call.args) == 2:
                names = {python.evaluate(call.args[0]): python.evaluate(call.args[1])}
            table = cast("dict[object, object]", names if isinstance(names, dict) else {})
            _add_change(script, call, {str(new): Text((Column(str(old)),)) for old, new in table.items()})
        elif name == "map" and call.args:
            columns = _read_mapped(python, call.args[0])
            if made := [key for key, value in columns.items() if not isinstance(value, Text | str)]:
                script.report(call, f"the column {', '.join(made)} is made by code; the file has none of that name")
            if len(made) < len(columns):
                _add_change(script, call, columns)
        elif name in CHANGES and not getattr(python.evaluate(call), "half", ""):
            script.report(call, "rows or values are changed here; FiveTune reads the file as it is")


def _read_mapped(python: PythonSource, function: ast.expr) -> dict[str, object]:
    """The columns that a function given to `map` writes: by a table that it returns, or by assignments."""
    node = python.functions.get(get_last_name(function)) if not isinstance(function, ast.Lambda) else function
    if node is None:
        return {}
    parameter = node.args.args[0].arg if node.args.args else ""
    found: dict[object, object] = {}
    returned = [node.body] if isinstance(node, ast.Lambda) else []
    returned += [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
    for one in returned:
        table = python.evaluate(one)
        found |= cast("dict[object, object]", table) if isinstance(table, dict) else {}
    for one in ast.walk(node):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Subscript):
            target = one.targets[0]
            if ast.unparse(target.value) == parameter:
                found[python.evaluate(target.slice)] = python.evaluate(one.value)
    return {str(key): value for key, value in found.items() if not FEATURES.search(str(key))}


def _add_change(script: Script, node: ast.AST, columns: Mapping[str, object]) -> None:
    fixed = {key: Text((value,)) for key, value in columns.items() if isinstance(value, str)}
    texts = {key: value for key, value in columns.items() if isinstance(value, Text)} | fixed
    if not texts:
        script.report(node, "columns are changed here by code; the templates name those of the file")
        return
    line = getattr(node, "lineno", 0)
    script.changes.append(Change(line, texts))
    code = ast.unparse(node).replace("\n", " ")
    code = code if len(code) <= 60 else f"{code[:57]}..."
    shown = ", ".join(f"{key} is {format_text(value)}" for key, value in texts.items())
    script.findings.append(Finding(f"{code} (line {line})", "set", ("task.inputs", "task.targets"), shown))


def format_text(text: Text) -> str:
    """Format a text as a template.

    >>> format_text(Text(("a{: ", Column("b"))))
    'a{{: {b}'
    """
    return "".join(
        f"{{{part.name}}}" if isinstance(part, Column) else part.replace("{", "{{").replace("}", "}}")
        for part in text.parts
    )


def resolve_changes(script: Script, text: Text) -> Text:
    """Replace columns that the script makes by the texts of which it makes them, the last change first."""
    for change in sorted(script.changes, reverse=True):
        parts: list[str | Column] = []
        for part in text.parts:
            new = change.columns.get(part.name) if isinstance(part, Column) else None
            parts += new.parts if new else [part]
        text = Text(tuple(parts))
    return text
