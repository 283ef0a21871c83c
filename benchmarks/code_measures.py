"""Measures of the source code: functions, names, types, comments.

python -m benchmarks.code_measures                 # of this checkout
python -m benchmarks.code_measures ../before       # of another checkout beside it
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

from benchmarks.harness import make_parser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def measure_code(root: Path) -> dict[str, float]:
    """The measures of the package below `root`, by name."""
    from test_vocabulary import CONTRACTS, OPERATIONS, PLUGINS, begins_with_verb, iter_functions

    found: dict[str, float] = defaultdict(int)
    lengths: list[int] = []
    places: dict[str, set[Path]] = defaultdict(set)
    for path in sorted((root / "fivetune").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found["modules"] += 1
        found["lines"] += text.count("\n")
        for name, node in iter_functions(tree):
            last = name.rpartition(".")[2]
            if not last.startswith("__") and last not in CONTRACTS | OPERATIONS:
                found["functions"] += 1
                found["functions that begin with a verb"] += begins_with_verb(last)
            lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
        if not PLUGINS & {path.parent.name}:
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].add(path)
        for node in ast.walk(tree):
            found["uses of Any"] += isinstance(node, ast.Name) and node.id == "Any"
            if isinstance(node, ast.ClassDef) and any("Error" in ast.unparse(base) for base in node.bases):
                found["exceptions"] += 1
                found["exceptions that end in Error"] += node.name.endswith("Error")
        comments = [
            t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT
        ]
        found["comments"] += sum(not re.match(r"# (fmt|type|noqa|pyright)", comment) for comment in comments)
        found["fmt: skip"] += sum("fmt: skip" in comment for comment in comments)
    found["median lines of a function"] = statistics.median(lengths)
    found["longest function"] = max(lengths)
    found["public names in several modules"] = sum(len(each) > 1 for each in places.values())
    return dict(found)


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    args = parser.parse_args()
    found = measure_code(args.checkout)
    for name, value in found.items():
        print(f"{value:10,.10g}  {name}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
