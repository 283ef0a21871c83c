"""Write a recipe for a data file.

Finds the task and says why, or asks; splits off a test set; the recipe is commented.
"""

from __future__ import annotations

import argparse

from fivetune.commands import add_flag, describe_doubt, describe_start, print_json, print_start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="data file, folder or hub name; a sheet of a workbook: FILE.xlsx#SHEET; files of lines that belong "
        "together: train.de train.en",
    )
    parser.add_argument("--task", help="the task, if another one is meant (fivetune list tasks)")
    parser.add_argument("--model", help="folder or hub name of the model; default: google-t5/t5-small")
    parser.add_argument(
        "--output", metavar="DIR|RECIPE", help="folder or recipe to write; default: DATA's name with .yaml, here"
    )
    parser.add_argument(
        "--column",
        metavar="ROLE=NAME",
        action="append",
        default=[],
        help="what a column is: text, label, tags, question, context, answer, choices, inputs, targets, id or group; "
        "repeatable, and text, inputs, tags and choices may be several columns: choices=A,B,C,D",
    )
    parser.add_argument("--header", metavar="NAMES", help="names of the columns of a table without a header: en,de")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split; default: 0")
    add_flag(parser, "--overwrite", "write the recipe and its sets again")
    add_flag(parser, "--json", "print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.start.choose import DoubtError
    from fivetune.start.files import new
    from fivetune.start.roles import parse_columns

    try:
        started = new(
            args.data[0] if len(args.data) == 1 else args.data,
            task=args.task,
            model=args.model,
            output=args.output,
            columns=parse_columns(args.column),
            header=args.header or (),
            seed=args.seed,
            overwrite=args.overwrite,
        )
    except DoubtError as doubt:
        if args.json:
            print_json(describe_doubt(doubt))
        raise
    if args.json:
        print_json(describe_start(started))
    else:
        print_start(started)
    return 0
