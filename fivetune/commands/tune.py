"""Search for the best settings by many short runs.

Runs that fall behind are pruned early; a search can be resumed and shared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.commands import (
    add_flag,
    add_output_arguments,
    print_json,
    print_table,
    print_text,
    refuse_outputs,
    write_outputs,
)

if TYPE_CHECKING:
    from fivetune.types import Search

TAKES_SETTINGS = True
NUM_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file or name of a shipped recipe, with a section search")
    parser.add_argument("--dir", type=Path, help="folder of the study; default: the recipe's run.dir with -search")
    add_output_arguments(parser, page="search.html in the study's folder")
    add_flag(parser, "--quiet", "print the result only")
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = (
        "The same command continues a stopped study; run it several times at once to share the work.\n"
        "Any setting can follow: --search.num_trials 40 --search.sampler random"
    )


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.fleet.experiments.search import build_study_page, tune
    from fivetune.fleet.experiments.space import load_search
    from fivetune.reading.report.search import build_search_results

    config = load_search(args.recipe, parse_overrides(args.settings))
    folder = args.dir or Path(f"{config.run.dir}-search")
    refuse_outputs(args, folder)

    def say(text: str) -> None:
        if not args.quiet:
            print_text(text)

    found = tune(config, folder=folder, write_line=say)
    best = found.best
    if not args.json:
        _print_table(found)
        if best:
            print_text(f"recipe  {folder}/best.yaml (train it with: fivetune train {folder}/best.yaml)")
    page = build_study_page(found, folder)
    path, *written = write_outputs(args, page, build_search_results(found), default=folder / "search.html")
    if args.json:
        print_json(
            {
                "study": str(folder),
                "metric": found.metric,
                "num_trials": len(found.trials),
                "best": {"trial": best.number, "score": best.score, "settings": best.settings} if best else None,
                "importances": found.importances,
                "page": str(path),
                "written": list(map(str, written)),
            }
        )
    return 0


def _print_table(found: Search) -> None:
    """Print the best trials with their settings, and the reasons of failed ones."""
    from fivetune.reading.report.page.wording import format_decimal, format_duration, format_setting
    from fivetune.reading.report.search import sort_trials

    keys = list(found.best.settings) if found.best else []
    rows: list[list[str]] = []
    for one in sort_trials(found)[:NUM_SHOWN]:
        row = [str(one.number), one.state, format_decimal(one.score), format_duration(one.seconds)]
        for key in keys:
            row.append(format_setting(key, one.settings[key]) if key in one.settings else "")
        rows.append(row)
    print_table(("trial", "state", found.metric, "time", *keys), rows)
    for one in found.trials:
        if one.state == "failed":
            print_text(f"trial {one.number} failed: {one.why}")
    if len(found.trials) > NUM_SHOWN:
        print(f"and {len(found.trials) - NUM_SHOWN} more, all in the page")
