"""Run the scoreboard of reliability: faults injected into real runs, and whether each promise held.

python -m reliability                        the numbers of each change, in minutes
python -m reliability --release              those of a release, in hours; interrupted, it goes on where it stopped
python -m reliability --only R1,R8           some rows
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import reliability.rows
from fivetune.distributed.processes.signals import get_signum, raise_interrupt
from fivetune.rundir import replace_file
from reliability.campaign import ROOT, Campaign, Row, derive_seed, describe_code
from reliability.page import read_page, write_table
from reliability.warm import prepare_peer


def main() -> int:
    """Exit code 0 if every promise held, 1 if one broke or, in a release, a row did not run, 2 for wrong arguments, 130
    after Ctrl-C, 143 after SIGTERM.
    """
    parser = argparse.ArgumentParser(
        prog="python -m reliability", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--release", action="store_true", help="the number of trials of a release")
    parser.add_argument("--only", metavar="R1,R8", help="these rows")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    parser.add_argument("--seed", type=int, help="of random times and places (default: the commit's own)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "reliability", help="workload and journal")
    parser.add_argument("--output", type=Path, help="the scoreboard (default: reliability.json in the folder)")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its markers")
    args = parser.parse_args()
    if args.only is not None and args.page:
        parser.error("--page: the table has all rows. Leave --only out.")
    rows = select_rows(parser, list_rows(), args.only)
    if args.list:
        print("\n".join(f"{row.name:4} {row.fault}: {row.promise}" for row in rows))
        return 0
    if args.folder.exists() and not args.folder.is_dir():
        parser.error(f"--folder {args.folder}: is a file")
    seed = derive_seed(describe_code()) if args.seed is None else args.seed
    output = args.output or args.folder / "reliability.json"
    # A trial's process that is killed does not return its semaphores, of which Python would warn at the end.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    signal.signal(signal.SIGTERM, raise_interrupt)
    prepare_peer()
    try:  # before hours of trials: can the results be written?
        if args.page:
            read_page(args.page)
        args.folder.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise IsADirectoryError(f"--output {output}: is a folder")
        if not output.parent.is_dir():
            raise FileNotFoundError(f"--output {output}: its folder is missing")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        result = Campaign(args.folder, release=args.release, seed=seed).run(rows)
    except BlockingIOError as error:
        parser.error(str(error))
    except KeyboardInterrupt as stop:
        print(
            "interrupted; if all changes are committed, the same command goes on, else it begins again", file=sys.stderr
        )
        return 128 + get_signum(stop)
    with replace_file(output) as file:
        file.write(json.dumps(result, indent=1).encode() + b"\n")
    if args.page:
        write_table(args.page, result)
    failed = sum(bool(row["failures"]) for row in result["rows"])
    ran = sum(row["num_trials"] > 0 for row in result["rows"])
    print(f"{ran - failed} of {ran} rows are green, {len(rows) - ran} not run; seed {seed}; {output}")
    return int(failed > 0 or (args.release and ran < len(rows)))


def select_rows(parser: argparse.ArgumentParser, rows: list[Row], only: str | None) -> list[Row]:
    """The rows of --only, where R7 stands for R7a to R7d; all without it; an unknown name ends the program."""
    if only is None:
        return rows
    found: list[str] = []
    for wanted in only.split(","):
        name = wanted.strip().upper()
        names = [row.name for row in rows if row.name.upper() == name]
        names = names or [row.name for row in rows if row.name.rstrip("abcd") == name]
        if not names:
            parser.error(f"--only: no row {wanted.strip()!r}; rows: {' '.join(row.name for row in rows)}")
        found += names
    return [row for row in rows if row.name in found]


def list_rows() -> list[Row]:
    """The rows of all modules in reliability/rows, by number."""
    modules = [import_module(f"reliability.rows.{module.name}") for module in iter_modules(reliability.rows.__path__)]
    rows = [row for module in modules for row in module.ROWS]
    return sorted(rows, key=lambda row: (int("".join(filter(str.isdigit, row.name))), row.name))


if __name__ == "__main__":
    sys.exit(main())
