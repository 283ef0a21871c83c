"""Inspect data: lengths, duplicates, leaks, lost characters.

Counts, lengths and limits, duplicates, leaks into the evaluation data, and characters that the tokenizer loses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_json, print_page, print_text

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA|RECIPE", nargs="+", help="data files, folders or hub names; or a recipe")
    parser.add_argument(
        "--task", help="task that reads them, such as squad_v2 (fivetune list tasks); default: the recipe's"
    )
    parser.add_argument(
        "--tokenizer", help="folder or hub name of the model to be trained; default: t5-nano, or the recipe's"
    )
    parser.add_argument("--against", metavar="EVAL", nargs="+", default=[], help="evaluation data, to find leaks")
    parser.add_argument(
        "--near",
        metavar="SHARE",
        type=float,
        default=0.8,
        help="least Jaccard similarity of word triples of near duplicates; default: 0.8",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the result as one HTML page")
    add_flag(parser, "--json", "print one JSON object instead of the tables")
    parser.epilog = (
        "Settings: --task.OPTION VALUE, --data.columns.question Frage, --header en,de, --data.max_input_tokens 384"
    )


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.reading.report.page.render import render_html
    from fivetune.rundir import write_text
    from fivetune.rundir.progress import Progress
    from fivetune.training.inspect import inspect

    with Progress() as progress:
        found = inspect(
            args.data,
            task=args.task,
            tokenizer=args.tokenizer,
            against=args.against,
            near=args.near,
            settings=parse_overrides(args.settings),
            on_progress=progress.update,
        )
    page = found.build_page()
    if args.html:
        write_text(args.html, render_html(page))
    if args.json:
        print_json(found.facts)
        return 0
    print_page(page)
    if found.recipe:
        print("A recipe for this data:", found.recipe, sep="\n")
    if args.html:
        print_text(f"page    {args.html}")
    return 0
