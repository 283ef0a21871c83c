"""Measures of the source code: size, density, comments, functions.

python -m benchmarks.code_measures                    # the package and the folders around it
python -m benchmarks.code_measures fivetune/data      # other folders
"""

from __future__ import annotations

import ast
import io
import json
import statistics
import tokenize
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import make_parser

FOLDERS = ("fivetune", "reliability", "benchmarks")
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
"""Kinds of tokens that count as code: a line on which one of them begins is a code line."""


@dataclass
class CodeCounts:
    """Counts over the modules of a folder."""

    lines: int = 0
    tokens: int = 0
    code_lines: int = 0
    statements: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    whole_comments: int = 0
    trailing_comments: int = 0
    function_lines: list[int] = field(default_factory=list[int])
    private_functions: list[str] = field(default_factory=list[str])
    names: Counter[str] = field(default_factory=Counter[str])

    def add(self, text: str) -> None:
        """Add a module by its text."""
        self.lines += text.count("\n")
        begun: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in CODE:
                self.tokens += 1
                begun.add(token.start[0])
            if token.type == tokenize.NAME:
                self.names[token.string] += 1
            if token.type == tokenize.COMMENT:
                is_whole = token.line.lstrip().startswith("#")
                self.whole_comments += is_whole
                self.trailing_comments += not is_whole
        self.code_lines += len(begun)
        for node in ast.walk(ast.parse(text)):
            self._add_node(node)

    def _add_node(self, node: ast.AST) -> None:
        self.statements += isinstance(node, ast.stmt)
        self.comprehensions += isinstance(node, COMPREHENSIONS)
        self.conditionals += isinstance(node, ast.IfExp)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if node.name.startswith("_") and node.name[1:2].islower():
                self.private_functions.append(node.name)

    def describe(self) -> dict[str, str]:
        """The measures by name, as they are printed."""
        lengths = sorted(self.function_lines)
        # A name that occurs twice is the definition and its only call.
        used_once = sum(self.names[name] <= 2 for name in self.private_functions)
        return {
            "lines": f"{self.lines:,}",
            "code tokens": f"{self.tokens:,}",
            "tokens per code line": f"{self.tokens / self.code_lines:.2f}",
            "comprehensions per 1,000 statements": f"{1000 * self.comprehensions / self.statements:.0f}",
            "conditional expressions per 1,000 statements": f"{1000 * self.conditionals / self.statements:.0f}",
            "comment lines": f"{100 * self.whole_comments / self.lines:.2f} %",
            "lines with a trailing comment": f"{100 * self.trailing_comments / self.lines:.2f} %",
            "lines of a function: median / p95 / longest": (
                f"{statistics.median(lengths):.0f} / {lengths[int(0.95 * len(lengths))]} / {lengths[-1]}"
            ),
            "private functions used once": f"{100 * used_once / len(lengths):.0f} %",
        }


def count_code(folder: Path) -> CodeCounts:
    """Count the Python code below a folder."""
    counts = CodeCounts()
    for path in sorted(folder.rglob("*.py")):
        counts.add(path.read_text(encoding="utf-8"))
    return counts


def format_measures(found: Mapping[str, Mapping[str, str]]) -> str:
    """Format a Markdown table of the measures by folder: a row for each measure, a column for each folder."""
    lines = [f"| measure | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for name in next(iter(found.values())):
        values = " | ".join(column[name] for column in found.values())
        lines.append(f"| {name} | {values} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="default: fivetune, reliability and benchmarks")
    args = parser.parse_args()
    found = {folder: count_code(Path(folder)).describe() for folder in args.folders}
    print(format_measures(found))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
