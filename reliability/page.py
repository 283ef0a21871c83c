"""The table of docs/reliability.md, from the scoreboard of a campaign."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fivetune.rundir import replace_file

START, END = "<!-- scoreboard -->", "<!-- end of the scoreboard -->"


def write_table(page: Path, result: dict[str, Any]) -> None:
    """Replace what stands between the markers of `page`. Raises ValueError if they are missing."""
    before, after = read_page(page)
    with replace_file(page) as file:
        file.write(f"{before}{START}\n\n{make_table(result)}\n{END}{after}".encode())


def read_page(page: Path) -> tuple[str, str]:
    """What stands before and after the table. Raises ValueError if the markers are missing."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{page}: the markers {START} and {END} are missing")
    return before, after


def make_table(result: dict[str, Any]) -> str:
    """A line for each row: fault, promise, how many trials held, the bound, and the same of transformers' Trainer."""
    machine = result["machine"]
    lines = [
        "| row | fault | promise | held | failure rate below (95 %) | Trainer held |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        held = f"{row['num_trials'] - len(row['failures']):,} of {row['num_trials']:,}"
        if not row["num_trials"]:
            held = f"not run: {row['absent'] or 'in a release only'}"
        bound = "" if row["bound"] is None else f"{math.ceil(30_000 / row['num_trials']) / 100:g} %"
        peer = row["peer"]
        theirs = f"{peer['num_trials'] - peer['num_failures']} of {peer['num_trials']}" if peer else ""
        lines.append(f"| {row['name']} | {row['fault']} | {row['promise']} | {held} | {bound} | {theirs} |")
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    earlier = f", after {result['num_earlier']:,} trials of an interrupted start" if result["num_earlier"] else ""
    lines += [
        "",
        f"{'Release' if result['release'] else 'Per-change'} numbers, commit {result['code']}, seed {result['seed']}; "
        f"{machine['processor']}, {machine['num_cores']} cores, {machine['system']}, Python {machine['python']}, "
        f"{versions}. Begun {result['begun']}; {result['seconds'] / 60:.0f} min with {result['num_jobs']} trials "
        f"at a time{earlier}. FiveTune's trials took {sum(row['seconds'] for row in result['rows']) / 3600:.1f} hours.",
    ]
    return "\n".join(lines) + "\n"
