"""Calls and assignments in Python source, read from its syntax tree; nothing is executed.

In: a script, or a notebook, whose cells are joined without their magic lines. Out: calls with literal arguments. A name
that is assigned once to a literal, to a table of arguments or to a file that pandas reads is followed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from fivetune.errors import ConfigError
from fivetune.importers import Argument, Computed, RawConfig
from fivetune.types import JsonValue

READERS = {"read_csv", "read_table", "read_json", "read_parquet"}


@dataclass(slots=True)
class PythonSource:
    """The syntax tree of a source.

    Args:
        assigned: name -> last expression assigned to it. attributes: name -> attribute -> (expression, line).
    """

    name: str
    tree: ast.Module
    assigned: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])
    attributes: dict[str, dict[str, ast.expr]] = field(default_factory=dict[str, dict[str, ast.expr]])

    def find_calls(self, pattern: str) -> list[ast.Call]:
        """Find the calls whose function ends in a name that matches a pattern, in the order of the text.

        >>> len(parse_python(RawConfig("a.py", "model.train(x)\\nT5Model('t5')")).find_calls("T5Model|fit"))
        1
        """
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        calls = [call for call in found if re.fullmatch(pattern, _get_last_name(call.func))]
        return sorted(calls, key=lambda call: call.lineno)

    def read_value(self, node: ast.expr) -> JsonValue | Computed:
        """Read a literal, a name assigned to one, or the path that pandas reads; Computed for other expressions."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id in self.assigned and node.id not in seen:
            seen.add(node.id)
            node = self.assigned[node.id]
        if isinstance(node, ast.Call) and _get_last_name(node.func) in READERS and node.args:
            return self.read_value(node.args[0])
        try:
            return cast("JsonValue", ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Computed(ast.unparse(node))

    def read_call(self, call: ast.Call, positional: tuple[str, ...]) -> dict[str, Argument]:
        """Read the arguments of a call; `positional` names those without a keyword."""
        pairs = [*zip(positional, call.args, strict=False), *((one.arg or "**", one.value) for one in call.keywords)]
        return {name: Argument(self.read_value(node), f"line {node.lineno}") for name, node in pairs}

    def read_table(self, node: ast.expr) -> dict[str, Argument]:
        """Read a table of arguments: a dict, a call with keywords, or a name of either with its attributes."""
        found: dict[str, Argument] = {}
        name = node.id if isinstance(node, ast.Name) else ""
        node = self.assigned.get(name, node)
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    found[str(key.value)] = Argument(self.read_value(value), f"line {value.lineno}")
        elif isinstance(node, ast.Call):
            found |= self.read_call(node, ())
        for attribute, value in self.attributes.get(name, {}).items():
            found[attribute] = Argument(self.read_value(value), f"line {value.lineno}")
        return found


def parse_python(source: RawConfig) -> PythonSource:
    """Parse a script or notebook. Raises ConfigError with the line for text that is not Python."""
    text = _join_cells(source) if source.name.endswith(".ipynb") else source.text
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(
            f"{source.name}:{line}: not valid Python: {getattr(error, 'msg', error)}. Correct it."
        ) from None
    found = PythonSource(source.name, tree)
    for target, value in _iter_assignments(tree):
        if isinstance(target, ast.Name):
            found.assigned[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            found.attributes.setdefault(target.value.id, {})[target.attr] = value
    return found


def _iter_assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value:
            yield node.target, node.value


def _get_last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _join_cells(source: RawConfig) -> str:
    """The code cells of a notebook; lines with ! and % are those of IPython."""
    try:
        cells = json.loads(source.text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{source.name}: not a notebook of Jupyter (format 4). Give the code as a .py file."
        ) from None
    return re.sub(r"^(\s*)[!%].*$", r"\1pass", "\n".join(code), flags=re.MULTILINE)
