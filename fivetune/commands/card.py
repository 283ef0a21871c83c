"""Write the model card of a run.

It has scores with intervals, data, limits, training, energy, and code that runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_json, print_text, print_warning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory, or an export of one")
    parser.add_argument("--license", metavar="ID", help="licence that you give the model, such as apache-2.0")
    add_flag(parser, "--overwrite", "replace a card that was edited by hand")
    parser.add_argument("--print", action="store_true", dest="shows", help="print the card and write nothing")
    add_flag(parser, "--json", "print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.delivery.hub.package import build_card, find_card_paths, read_edited_card
    from fivetune.errors import ConfigError
    from fivetune.rundir import refuse_foreign, write_text

    refuse_foreign(args.run)
    paths = find_card_paths(args.run)
    edited = [path for path in paths.values() if read_edited_card(path) is not None]
    if edited and not args.overwrite and not args.shows:
        raise ConfigError(
            f"{edited[0]}: was edited by hand. Add --overwrite to replace it, or --print to see the new one."
        )
    written: list[str] = []
    notes: list[str] = []
    for kind, path in paths.items():
        text = build_card(args.run, repo=None, license=args.license, kind=kind, on_note=notes.append)
        if not written:  # the cards of model/ and adapter/ have the same notes
            for note in notes:
                print_warning(note)
        if args.shows:
            print(text, end="")
            break
        write_text(path, text)
        written.append(str(path))
        print_text(f"card  {path}")
    if args.json:
        print_json({"cards": written})
    return 0
