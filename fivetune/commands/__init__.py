"""Commands, one per file: the first line of the docstring is the help, `run(args)` gives the exit code.

A command with TAKES_SETTINGS = True gets the words that it does not know in `args.settings`: dotted overrides.
"""

from __future__ import annotations

import json
from typing import Any


def print_json(result: dict[str, Any] | list[Any]) -> None:
    """The machine-readable result: one JSON object (or array) as the last line of standard output."""
    print(json.dumps(result, ensure_ascii=False), flush=True)


def print_scores(scores: dict[str, float]) -> None:
    """Scores as aligned lines.

    >>> print_scores({"exact": 34.4226, "total": 11873})
    exact      34.42
    total  11,873
    """
    width = max((len(name) for name in scores), default=0)
    for name, value in scores.items():
        shown = f"{value:6,.0f}" if name.endswith("total") else f"{value:9.2f}"
        print(f"{name:<{width}}  {shown}")
