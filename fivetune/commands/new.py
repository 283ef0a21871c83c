"""Write a recipe for a data file.

Finds the task and says why, or asks; splits off a test set; the recipe is commented.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import describe_doubt, describe_start, print_json, print_start


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
    parser.add_argument("--overwrite", action="store_true", help="write the recipe and its sets again")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.data.readers.nested_records import describe_nested
    from fivetune.data.readers.source_files import format_parallel
    from fivetune.errors import ConfigError, DataError
    from fivetune.model.tokenizer import load_local_tokenizer
    from fivetune.start.choose import DoubtError
    from fivetune.start.files import choose_files, start_recipe
    from fivetune.start.roles import parse_columns

    source = args.data[0] if len(args.data) == 1 else format_parallel(args.data)
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: is negative. Allowed: 0 and more.")
    try:
        files = choose_files(source, args.output, overwrite=args.overwrite)
        started = start_recipe(
            source,
            files,
            task=args.task,
            model=args.model,
            given=parse_columns(args.column),
            header=args.header,
            seed=args.seed,
            load_tokenizer=load_local_tokenizer,
        )
    except DataError as error:
        if args.json and isinstance(error, DoubtError):
            print_json(describe_doubt(error))
        nested = "" if args.column else describe_nested(Path(source))
        if nested and isinstance(error, DoubtError):  # the records may be meant, or what they hold
            inner = nested.removeprefix(f"{source}: ")
            raise DataError(f"{error}\nOr {inner}") from error
        if nested:
            raise DataError(nested) from error
        raise
    if args.json:
        print_json(describe_start(started))
    else:
        print_start(started)
    return 0
