"""The text of gin files: includes, macros, bindings of parameters. Nothing is imported or called.

In: the text, and the folder of files that it includes. Out: macros and bindings with their lines, macros replaced.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fivetune.errors import ConfigError
from fivetune.importers import Argument, Computed, RawConfig, read_source_file
from fivetune.types import JsonValue

_REFERENCE = re.compile(r"(?<![\w'\"])([%@][\w./]+(?:\(\))?)")
_STATEMENT = re.compile(r"^([\w./]+)\s*=(?!=)\s*(.*)$", re.DOTALL)
_BLOCK = re.compile(r"^([\w./]+)\s*:$")
_INCLUDE = re.compile(r"^include\s+['\"](.+)['\"]$")
_IMPORT = re.compile(r"^(?:from\s+\S+\s+)?import\s")


@dataclass(slots=True)
class GinFile:
    """Content of a gin file and of those that it includes.

    Args:
        bindings: name -> value, with the names of gin: `MACRO`, or `scope/module.function.parameter`.
        includes: files that are not beside it, as named. imports: names of modules that it imports.
    """

    bindings: dict[str, Argument] = field(default_factory=dict[str, Argument])
    includes: list[str] = field(default_factory=list[str])
    imports: list[str] = field(default_factory=list[str])


def parse_gin(source: RawConfig) -> GinFile:
    """Parse a gin file. Raises ConfigError with the line for text that is no statement of gin.

    >>> parse_gin(RawConfig("a.gin", "N = 5\\nutils.Save:\\n  period = %N  # it")).bindings["utils.Save.period"].value
    5
    """
    found = GinFile()
    _parse_text(source, Path(source.name).parent, found, seen=())
    macros = {name: one.value for name, one in found.bindings.items() if "." not in name and "/" not in name}
    for name, argument in found.bindings.items():
        value = argument.value
        for _ in range(len(macros)):
            if not (isinstance(value, Computed) and value.code.startswith("%") and value.code[1:] in macros):
                break
            value = macros[value.code[1:]]
        found.bindings[name] = Argument(value, argument.where)
    return found


def _parse_text(source: RawConfig, folder: Path, found: GinFile, seen: tuple[str, ...]) -> None:
    block = ""
    for line, statement, is_indented in _split_statements(source):
        block = block if is_indented else ""
        if match := _INCLUDE.match(statement):
            _read_included(match[1], folder, found, (*seen, source.name))
        elif _IMPORT.match(statement):
            found.imports.append(statement.split()[-1])
        elif match := _BLOCK.match(statement):
            block = match[1]
        elif match := _STATEMENT.match(statement):
            name = f"{block}.{match[1]}" if block else match[1]
            found.bindings[name] = Argument(_parse_gin_value(match[2]), f"{Path(source.name).name}:{line}")
        else:
            raise ConfigError(
                f"{source.name}:{line}: {statement[:40]!r} is no statement of gin. Allowed are include, import, "
                "NAME = VALUE and function.parameter = VALUE. Correct the file."
            )


def _read_included(name: str, folder: Path, found: GinFile, seen: tuple[str, ...]) -> None:
    path = next((path for path in (folder / name, Path(name)) if path.is_file()), None)
    if path is None or str(path) in seen:
        found.includes.append(name)
        return
    _parse_text(read_source_file(str(path)), path.parent, found, seen)


def _split_statements(source: RawConfig) -> list[tuple[int, str, bool]]:
    """Statements with their first line and whether they are indented; brackets and backslashes continue a line."""
    found: list[tuple[int, str, bool]] = []
    held, start, depth, indented = "", 0, 0, False
    for number, raw in enumerate(source.text.splitlines(), 1):
        line = _strip_comment(raw)
        if not held:
            if not line.strip():
                continue
            start, indented = number, line[0].isspace()
        depth += sum(line.count(one) for one in "([{") - sum(line.count(one) for one in ")]}")
        held += f" {line.strip()}"
        if held.endswith("\\"):
            held = held[:-1]
        elif depth <= 0 and not re.search(r"=$", held):
            found.append((start, held.strip(), indented))
            held, depth = "", 0
    if held:
        raise ConfigError(f"{source.name}:{start}: a bracket stays open. Close it.")
    return found


def _strip_comment(line: str) -> str:
    """The line without its comment.

    >>> _strip_comment("A = '#1'  # one")
    "A = '#1'"
    """
    match = re.match(r"^((?:'[^']*'|\"[^\"]*\"|[^#'\"])*)", line)
    return (match[1] if match else line).rstrip()


def _parse_gin_value(text: str) -> JsonValue | Computed:
    """Parse a literal; a macro, a reference or an expression with one is Computed.

    >>> _parse_gin_value('{"inputs": 512}'), _parse_gin_value("1_000"), _parse_gin_value("%A")
    ({'inputs': 512}, 1000, Computed(code='%A'))
    """
    if _REFERENCE.search(text):
        return Computed(text.strip())
    try:
        return cast("JsonValue", ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError):
        return Computed(text.strip())
