"""What a script does to the columns of its data, as texts over the columns of the file.

In: a PythonSource. Out: changes, which templates take in, and a finding for each line that is not a text over columns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from fivetune.start.importers import Argument, Finding, shorten
from fivetune.start.importers._python import (
    COLUMN,
    Data,
    PythonSource,
    get_argument,
    get_last_name,
    name_split,
    write_column,
)
from fivetune.types import JsonValue

CHANGES = {  # methods of data that change which records, or which columns, the training has
    "rename", "rename_column", "rename_columns", "filter", "dropna", "drop_duplicates", "fillna", "select", "sample",
    "head", "explode", "merge", "concat", "groupby", "apply",
}  # fmt: skip
FEATURES = re.compile(r"ids$|mask$|^labels$")  # what the model reads: the texts of these are read at the tokenizer


Kind = Literal["trainer", "lightning", "keras", "loop"]  # what trains


class Change(NamedTuple):
    """A statement that changes the columns of the data: new column -> its text over the columns before."""

    node: ast.expr | ast.stmt
    columns: dict[str, str]

    def get_end(self) -> tuple[int, int]:
        """The end of the statement or call: of two calls in a chain, the one that is made first ends first."""
        return self.node.end_lineno or 0, self.node.end_col_offset or 0


@dataclass(slots=True)
class Script:
    """What is read of a script: arguments by name, findings about lines, and changes of columns."""

    python: PythonSource
    kind: Kind
    arguments: dict[str, Argument] = field(default_factory=dict[str, Argument])
    findings: list[Finding] = field(default_factory=list[Finding])
    changes: list[Change] = field(default_factory=list[Change])

    def add(self, name: str, value: object, node: ast.AST) -> None:
        """Add an argument; the first one of a name counts."""
        known = value if not isinstance(value, Data) else name_split(value)
        line = getattr(node, "lineno", 0)
        self.arguments.setdefault(name, Argument(cast("JsonValue", known), f"line {line}" if line else ""))

    def read(self, name: str, node: ast.expr | None) -> None:
        """Read an argument, which wins over an earlier one; None for one that is not given."""
        if node is not None:
            self.arguments[name] = self.python.read_argument(node)

    def read_call(self, call: ast.Call, names: Mapping[str, str], positional: tuple[str, ...] = ()) -> None:
        """Read the arguments of a call that have another name in `names`."""
        for name, one in self.python.read_table(call, positional).items():
            if names.get(name):
                self.arguments[names[name]] = one

    def add_finding(self, code: str, reason: str, *settings: str) -> None:
        """Add a finding about code: the settings that it gives, or why it gives none."""
        self.findings.append(Finding(code, "set" if settings else "left out", reason, settings))

    def report(self, node: ast.expr | ast.stmt, reason: str, *settings: str) -> None:
        """Add a finding about a line."""
        code = shorten(ast.unparse(node).replace("\n", " "))
        self.add_finding(f"{code} (line {node.lineno})", reason, *settings)


def read_changes(script: Script) -> None:
    """Read what statements do to the columns and rows of the data."""
    python = script.python
    for node in ast.walk(python.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript | ast.Attribute):
            continue
        target = node.targets[0]
        key = python.evaluate(target.slice) if isinstance(target, ast.Subscript) else target.attr
        if not isinstance(key, str) or not isinstance(python.evaluate(target.value), Data):
            continue
        if isinstance(target, ast.Attribute) and key == "columns":
            script.report(node, "the columns get other names here; the templates name those of the file")
        else:
            _add_change(script, node, {key: python.evaluate(node.value)})
    for call in python.calls:
        if not isinstance(call.func, ast.Attribute) or not isinstance(python.evaluate(call.func.value), Data):
            continue
        name = call.func.attr
        if name in ("rename", "rename_column", "rename_columns"):
            names = _read_names(python, call)
            _add_change(script, call, {new: write_column(old) for old, new in names.items()})
        elif name == "map" and call.args:
            _add_mapped(script, call)
        elif name in CHANGES and not getattr(python.evaluate(call), "half", ""):
            script.report(call, "rows or values are changed here; FiveTune reads the file as it is")


def _read_names(python: PythonSource, call: ast.Call) -> dict[str, str]:
    """The columns that a call renames, by their old names: a table, or two arguments."""
    if len(call.args) == 2:
        return {str(python.evaluate(call.args[0])): str(python.evaluate(call.args[1]))}
    table = python.evaluate(get_argument(call, "columns") or get_argument(call, "column_mapping", 0))
    return {str(old): str(new) for old, new in table.items()} if isinstance(table, dict) else {}


def _add_mapped(script: Script, call: ast.Call) -> None:
    """Add the columns that a function given to `map` writes: by a table that it returns, or by assignments."""
    python = script.python
    function = call.args[0]
    node = function if isinstance(function, ast.Lambda) else python.functions.get(get_last_name(function))
    if node is None or not node.args.args:
        return
    written: dict[object, object] = {}
    returned = [node.body] if isinstance(node, ast.Lambda) else []
    for one in ast.walk(node):
        target = one.targets[0] if isinstance(one, ast.Assign) else None
        if isinstance(one, ast.Return) and one.value:
            returned.append(one.value)
        elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == node.args.args[0].arg:
            written[python.evaluate(target.slice)] = python.evaluate(cast("ast.Assign", one).value)
    for value in returned:
        table = python.evaluate(value)
        written = {**table, **written} if isinstance(table, dict) else written
    columns = {str(key): value for key, value in written.items() if not FEATURES.search(str(key))}
    made = [key for key, value in columns.items() if not isinstance(value, str)]
    if made:
        script.report(call, f"the column {', '.join(made)} is made by code; the file has none of that name")
    if len(made) < len(columns):
        _add_change(script, call, columns)


def _add_change(script: Script, node: ast.expr | ast.stmt, columns: Mapping[str, object]) -> None:
    """Add the new columns that are texts over others, or the same in all rows."""
    texts = {name: value for name, value in columns.items() if isinstance(value, str)}
    if not texts:
        script.report(node, "columns are changed here by code; the templates name those of the file")
        return
    script.changes.append(Change(node, texts))
    shown = ", ".join(f"{name} is {format_text(text)}" for name, text in texts.items())
    script.report(node, shown, "task.inputs", "task.targets")


def format_text(text: str) -> str:
    """Format a text as a template.

    >>> format_text("a{: " + write_column("b"))
    'a{{: {b}'
    """
    return COLUMN.sub(r"{\1}", text.replace("{", "{{").replace("}", "}}"))


def resolve_changes(script: Script, text: str) -> str:
    """Replace columns that the script makes by the texts of which it makes them, the last change first."""
    for change in sorted(script.changes, key=Change.get_end, reverse=True):
        for name, new in change.columns.items():
            text = text.replace(write_column(name), new)
    return text
