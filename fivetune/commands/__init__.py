"""Commands, one per file (`find-lr` is find_lr.py): a docstring whose first line is the help; `run(args)`, which
returns the exit code.

A command with TAKES_SETTINGS = True receives unknown arguments as dotted overrides in `args.settings`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 160  # characters of a table that is not printed to a terminal


def print_json(result: dict[str, Any] | list[Any]) -> None:
    """Print the machine-readable result: one JSON object (or array) as the last line of standard output."""
    print(json.dumps(result, ensure_ascii=False), flush=True)


def print_warning(text: str) -> None:
    """Print a warning to standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def print_scores(scores: Mapping[str, float], intervals: Mapping[str, tuple[float, float]] | None = None) -> None:
    """Print scores as aligned lines, with their 95 % intervals if known.

    >>> print_scores({"exact": 34.4226, "total": 11873})
    exact      34.42
    total  11,873
    """
    width = max((len(name) for name in scores), default=0)
    for name, value in scores.items():
        shown = f"{value:6,.0f}" if name.endswith("total") else f"{value:9.2f}"
        low_high = (intervals or {}).get(name)
        interval = f"  95 % interval {low_high[0]:.1f} to {low_high[1]:.1f}" if low_high else ""
        print(f"{name:<{width}}  {shown}{interval}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as wide as the terminal; WIDTH characters if the output is not a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for cell in header:
        grid.add_column(Text(cell), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(highlight=False)
    Console(highlight=False, width=console.width if console.is_terminal else WIDTH).print(grid)


def write_finder_result(name: str, found: dict[str, Any], *, run: str, out: Path | None) -> Path:
    """Write the result of a finder beside the run, as JSON and as a page; returns the path of the page."""
    from fivetune.report.page.render import render_html
    from fivetune.report.run.finders import build_finder_page
    from fivetune.rundir import build_sibling_path, write_json, write_text

    path = out or build_sibling_path(run, f"{name}.json")
    write_json(path, found)
    page = path.with_suffix(".html")
    write_text(page, render_html(build_finder_page(name, found, run=run)))
    return page
