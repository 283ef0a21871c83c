"""Text of a script or notebook as Python: commands of IPython and its shell are left out, and named.

In: a RawConfig. Out: Python with a line for each line of a script, or of the code cells of a notebook.
"""

from __future__ import annotations

import ast
import json
import re

from fivetune.errors import ConfigError
from fivetune.start.importers import NOT_PYTHON, RawConfig

TIMERS = {"time", "timeit", "capture", "prun"}  # magics of IPython before a cell of Python
MARKED = re.compile(r"\s*([!%?]|[\w, ]+=\s*[!%]|[\w.]+\?+\s*$)")  # commands of IPython and its shell
SHELL = "pip3?|conda|mamba|apt|apt-get|cd|ls|cp|mv|rm|mkdir|cat|pwd|git|wget|curl|unzip|tar|nvidia-smi|python3?|wandb"
COMMAND = re.compile(rf"{MARKED.pattern}|\s*({SHELL})(\s+[^\s=(]|\s*$)")  # `pip install` is read without a mark, too


def read_code(source: RawConfig) -> tuple[ast.Module, dict[str, str]]:
    """Parse a source. Returns its tree, and what is not Python with its place -> why it is not read.

    Raises ConfigError for a script that is not Python, with the line, and for a file that is no notebook.
    """
    skipped: dict[str, str] = {}
    if source.name.endswith(".ipynb"):
        try:
            cells = json.loads(source.text)["cells"]
            code = {i: "".join(cell["source"]) for i, cell in enumerate(cells, 1) if cell["cell_type"] == "code"}
        except (ValueError, KeyError, TypeError):
            advice = "not a notebook of Jupyter (format 4). Give the code as a .py file."
            raise ConfigError(f"{source.name}: {advice}") from None
        text = "\n".join(_read_cell(cell, number, skipped) for number, cell in code.items())
    else:
        text = _leave_out_commands(source.text, source.name, skipped)
    tree, line, reason = _parse(text)
    if tree is None:
        raise ConfigError(f"{source.name}:{line}: not valid Python: {reason}. Correct it.")
    return tree, skipped


def _parse(text: str) -> tuple[ast.Module | None, int, str]:
    """Parse Python. Returns the tree; for other text None, the line and what is wrong there."""
    try:
        return ast.parse(text), 0, ""
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, getattr(error, "lineno", None) or 1, str(getattr(error, "msg", error))


def _read_cell(text: str, number: int, skipped: dict[str, str]) -> str:
    """Return the Python of a cell; empty lines for a cell that is something else."""
    magic = re.match(r"\s*%%(\w*)", text)
    if magic and magic[1] in TIMERS:
        text = text.replace("%%", "#", 1)
    elif magic:
        skipped[f"{text.strip().splitlines()[0]} (cell {number})"] = "the cell is not Python, and is not read"
        return "\n" * text.count("\n")
    found = _leave_out_commands(text, f"cell {number}", skipped)
    tree, line, reason = _parse(found)
    if tree is None:
        lines = text.splitlines()
        wrong = lines[min(line, len(lines)) - 1].strip()
        skipped[f"{wrong} (cell {number}, its line {line})"] = f"{NOT_PYTHON}, {reason}: the whole cell is not read"
        return "\n" * text.count("\n")
    return found


def _leave_out_commands(text: str, place: str, skipped: dict[str, str]) -> str:
    """Put `pass` in place of commands; those that are not marked as such are named in `skipped`."""
    if _parse(text)[0]:  # a line such as `% x` may also be the second half of an expression
        return text
    lines = text.splitlines()
    is_continued = False
    for i, line in enumerate(lines):
        # The lines stay, so that places in the text stay true.
        is_command = COMMAND.match(line)
        if is_continued:
            lines[i] = ""
        elif is_command:
            if not MARKED.match(line):
                skipped[f"{line.strip()} ({place}, its line {i + 1})"] = "a command of the shell, not Python: not read"
            target = re.match(r"(\s*[\w, ]+=)\s*[!%]", line)
            lines[i] = f"{target[1]} ..." if target else re.sub(r"\S.*", "pass", line)
        is_continued = bool(is_continued or is_command) and line.rstrip().endswith("\\")
    return "\n".join(lines)
