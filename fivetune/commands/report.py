"""Write report.html of a run again.

torch and network are not needed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fivetune.commands import print_json, print_text, print_warning


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run directory (runs/<name>)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write; default: RUN_DIR/report.html")
    parser.add_argument("--json", action="store_true", help="print the report's headline as one JSON object")


def run(args: Namespace) -> int:
    from fivetune.reading.report import write_report
    from fivetune.reading.report.run.build import read_reference_runs
    from fivetune.reading.report.run.scores import build_run_summary
    from fivetune.rundir import read_run

    path = write_report(args.run_dir, output=args.output, on_damage=print_warning)
    if args.json:
        this = read_run(args.run_dir)
        beside, _ = read_reference_runs(args.run_dir, this)
        print_json({"report": str(path), **build_run_summary(this, reference_runs=beside)})
    else:
        print_text(str(path))
    return 0
