"""Find a learning rate by a few steps in which it grows.

Prints a plot and the setting to use; it takes minutes at most.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_json, print_text

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file or name of a shipped recipe")
    parser.add_argument("--low", type=float, help="lowest rate; default: a tenth of the optimizer's usual lowest")
    parser.add_argument("--high", type=float, help="highest rate; default: a hundred times the usual highest")
    parser.add_argument("--steps", type=int, default=100, help="maximum number of steps (default: 100)")
    parser.add_argument("--out", type=Path, help="JSON file, with a page beside it; default: RUN_DIR.find-lr.json")
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = "The report of the run shows the result. Any setting can follow: --train.batch_size 16"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import IncompleteError
    from fivetune.reading.report.page.render import render_html
    from fivetune.reading.report.run.range_test import build_range_test_page
    from fivetune.rundir import build_sibling_path, write_json, write_text
    from fivetune.rundir.progress import Progress
    from fivetune.rundir.reader import FIND_LR
    from fivetune.training.autotune.find_lr import find_lr

    config = load_config(args.recipe, parse_overrides(args.settings))
    with Progress() as progress:
        found = find_lr(config, low=args.low, high=args.high, num_steps=args.steps, on_progress=progress.update)
    # The page and the numbers are written first, also if no rate is found.
    result = found.as_dict() | {"optimizer": config.optimizer.plugin_name()}
    path = args.out or build_sibling_path(config.run.dir, FIND_LR)
    write_json(path, result)
    page = path.with_suffix(".html")
    write_text(page, render_html(build_range_test_page(result, run=config.run.dir)))
    if args.json:
        print_json({"lr": found.lr, "steepest": found.steepest, "tenth": found.tenth, "page": str(page)})
    else:
        print(f"{len(found.lrs)} steps from {found.lrs[0]:.2g} to {found.lrs[-1]:.2g}; {found.stopped}")
    if found.lr is None:
        raise IncompleteError(
            f"find-lr: the loss did not fall between {found.lrs[0]:.2g} and {found.lrs[-1]:.2g}, so no "
            f"rate is chosen. Look at {page}; try another --low or more --steps."
        )
    if not args.json:
        print(f"lowest loss at a rate of {10 * found.lr:g}, steepest descent at {found.steepest:.2g}")
        print(f"use   --optimizer.lr {found.lr:g}")
        print_text(f"page  {page}")
    return 0
