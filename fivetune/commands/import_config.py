"""Convert the settings of another program to a recipe.

A Trainer script or notebook, transformers' command lines, or simpletransformers' arguments.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fivetune import plugins
from fivetune.commands import add_flag, print_json, print_table, print_text

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    formats = plugins.list_plugins("importers")
    parser.add_argument("source", nargs="?", help="command line in quotation marks, script, notebook, or file")
    parser.add_argument("--format", choices=formats, help="of the source; default: the one that it is in")
    parser.add_argument("--output", type=Path, metavar="RECIPE", help="write the recipe there; default: print it")
    add_flag(parser, "--overwrite", "write over an existing recipe")
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = "Any setting can follow, which wins over the source: --data.train train.csv"


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import ConfigError
    from fivetune.rundir import write_text
    from fivetune.start.importers._recipe import describe_recipe, format_recipe, import_recipe, list_rows, read_source

    if args.source is None:
        raise ConfigError("import-config: no source. Give a command line in quotation marks, or a file.")
    if args.output and args.output.exists() and not args.overwrite:
        raise ConfigError(f"{args.output}: exists already. Give another --output, or --overwrite.")
    recipe = import_recipe(read_source(args.source), args.format, parse_overrides(args.settings))
    text = format_recipe(recipe)
    if args.output:  # then what became of each argument, and the next command
        write_text(args.output, text)
        print_table(("argument", "became", "why"), list_rows(recipe))
        left_out = sum(finding.state in ("left out", "unknown") for finding in recipe.findings)
        counts = f"{len(recipe.settings)} settings, {left_out} of {len(recipe.findings)} arguments left out"
        print_text(f"{counts}: {args.output}")
        missing = "" if "data.train" in recipe.settings else " --data.train FILE --data.eval FILE"
        print_text(f"next: fivetune check {shlex.quote(str(args.output))}{missing}")
    elif not args.json:
        print(text, end="")
    if args.json:
        print_json(describe_recipe(recipe))
    return 0
