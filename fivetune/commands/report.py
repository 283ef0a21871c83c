"""Write report.html of a run again.

torch and network are not needed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fivetune.commands import (
    add_flag,
    add_output_arguments,
    print_json,
    print_warning,
    refuse_outputs,
    write_outputs,
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run directory (runs/<name>)")
    add_output_arguments(parser, page="RUN_DIR/report.html")
    add_flag(parser, "--json", "print the report's headline as one JSON object")


def run(args: Namespace) -> int:
    from fivetune.reading.report.run.build import read_page
    from fivetune.reading.report.run.methods import build_run_results
    from fivetune.reading.report.run.scores import build_run_summary

    refuse_outputs(args, args.run_dir)
    loaded, beside, page = read_page(args.run_dir)
    for text in loaded.damage:
        print_warning(text)
    path, *written = write_outputs(args, page, build_run_results(loaded), default=args.run_dir / "report.html")
    if args.json:
        summary = build_run_summary(loaded, reference_runs=beside)
        print_json({"report": str(path), "written": list(map(str, written)), **summary})
    return 0
