"""What a script does to the columns of its data, as texts over the columns of the file.

In: a PythonSource. Out: changes, which templates take in, and a finding for each line that is not a text over columns.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

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
PARAMETERS = {  # of optimizers, schedules, loaders, callbacks and loops -> arguments of transformers' Trainer
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "init_lr": "learning_rate",
    "weight_decay": "weight_decay",
    "weight_decay_rate": "weight_decay",
    "eps": "adam_epsilon",
    "epsilon": "adam_epsilon",
    "num_warmup_steps": "num_warmup_steps",
    "max_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "patience": "early_stopping_patience",
    "early_stopping_patience": "early_stopping_patience",
    "early_stopping_threshold": "early_stopping_threshold",
}
FEATURES = re.compile(r"ids$|mask$|^labels$")  # what the model reads


Kind = Literal["trainer", "lightning", "keras", "loop"]  # what trains


@dataclass(slots=True)
class Script:
    """What is read of a script.

    Args:
        kind: what trains. arguments: by name. findings: about lines.
        changes: of the columns of the data, with the end of each line: new column -> its text over the columns before.
    """

    python: PythonSource
    kind: Kind
    arguments: dict[str, Argument] = field(default_factory=dict[str, Argument])
    findings: list[Finding] = field(default_factory=list[Finding])
    changes: list[tuple[tuple[int, int], dict[str, str]]] = field(
        default_factory=list[tuple[tuple[int, int], dict[str, str]]]
    )

    def add(self, name: str, value: object, node: ast.AST) -> None:
        """Add an argument; the first one of a name counts."""
        known = name_split(value) if isinstance(value, Data) else cast("JsonValue", value)
        self.arguments.setdefault(name, Argument(known, f"line {getattr(node, 'lineno', '')}"))

    def read(self, name: str, node: ast.expr | None) -> None:
        """Read an argument, which wins over an earlier one; None for one that is not given."""
        if node is not None:
            self.arguments[name] = self.python.read_argument(node)

    def read_call(self, pattern: str, *positional: str) -> list[ast.Call]:
        """Read the arguments of the first call that matches a pattern. Returns this call, or no call.

        Args:
            positional: names of the arguments that have no keyword.
        """
        calls = self.python.find_calls(pattern)[:1]
        for call in calls:
            for name, one in self.python.read_table(call, positional).items():
                if name in PARAMETERS:
                    self.arguments[PARAMETERS[name]] = one
        return calls

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
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=str(key), value=owner)]):
                pass
            case ast.Assign(targets=[ast.Subscript(slice=column, value=owner)]):
                key = python.evaluate(column)
            case _:
                continue
        if not isinstance(key, str) or not isinstance(python.evaluate(owner), Data):
            continue
        if key == "columns":
            script.report(node, "the columns get other names here; the templates name those of the file")
        else:
            _add_change(script, node, {key: python.evaluate(node.value)})
    for call in python.calls:
        if not isinstance(call.func, ast.Attribute) or not isinstance(python.evaluate(call.func.value), Data):
            continue
        name = call.func.attr
        if name in ("rename", "rename_column", "rename_columns"):
            _add_change(script, call, _read_names(python, call))
        elif name == "map" and call.args:
            _add_mapped(script, call)
        elif name in CHANGES and not getattr(python.evaluate(call), "half", ""):
            script.report(call, "rows or values are changed here; FiveTune reads the file as it is")


def _read_names(python: PythonSource, call: ast.Call) -> dict[str, str]:
    """The columns that a call renames, as texts, by their new names: a table, or two arguments."""
    if len(call.args) == 2:
        table = {python.evaluate(call.args[0]): python.evaluate(call.args[1])}
    else:
        table = python.evaluate(get_argument(call, "columns") or get_argument(call, "column_mapping", 0))
    if not isinstance(table, dict):
        return {}
    return {str(new): write_column(str(old)) for old, new in table.items()}


def _add_mapped(script: Script, call: ast.Call) -> None:
    """Add the columns that a function given to `map` writes: by a table that it returns, or by assignments."""
    python = script.python
    function = call.args[0]
    node = function if isinstance(function, ast.Lambda) else python.functions.get(get_last_name(function))
    if node is None or not node.args.args:
        return
    record = node.args.args[0].arg
    written: dict[object, object] = {}
    tables = [node.body] if isinstance(node, ast.Lambda) else []
    for one in ast.walk(node):
        match one:
            case ast.Return(value=ast.expr() as value):
                tables.append(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=column)]) if name == record:
                written[python.evaluate(column)] = python.evaluate(one.value)
            case _:
                pass
    for value in tables:
        table = python.evaluate(value)
        if isinstance(table, dict):
            written = table | written
    # The texts of what the model reads are found where they are tokenised.
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
    script.changes.append(((node.end_lineno or 0, node.end_col_offset or 0), texts))
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
    # Of two calls in a chain, the one that is made first ends first.
    for _, columns in sorted(script.changes, key=operator.itemgetter(0), reverse=True):
        for name, new in columns.items():
            text = text.replace(write_column(name), new)
    return text
