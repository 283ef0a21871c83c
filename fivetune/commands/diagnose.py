"""Say what limits or invalidates a run, and what to change.

Each finding has the change and its predicted gain. torch is not imported.
In: run directories, finished or in progress, or other tools' CSV logs of utilisation, plain or gzipped. Out: the
verdicts, most important first, and the rules that were not checked; with --figures pictures of the load over time.
--verify measures the first change in short runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fivetune.commands import (
    add_flag,
    add_output_arguments,
    print_json,
    print_text,
    print_warning,
    refuse_outputs,
    write_outputs,
)
from fivetune.errors import ConfigError
from fivetune.reading.diagnosis.diagnose import Diagnosis, diagnose
from fivetune.reading.diagnosis.rules import TITLES
from fivetune.reading.diagnosis.verify import Verification, can_verify, verify_change
from fivetune.reading.report.page.wording import format_flags
from fivetune.redaction import name_invisible
from fivetune.rundir.records import TelemetryRecord
from fivetune.types import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN|CSV",
        nargs="+",
        type=Path,
        help="run directories, or CSV logs of utilisation; --figures draws several side by side",
    )
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices that were requested")
    add_flag(parser, "--verify", "measure the first change with a predicted gain, in short runs of a few dozen steps")
    add_flag(parser, "--verbose", "list the rules that lack data, with that data")
    add_output_arguments(parser, page="none")
    add_flag(parser, "--json", "print one JSON object instead; of several, an array")


def run(args: argparse.Namespace) -> int:
    if args.verify and len(args.runs) > 1:
        raise ConfigError(f"--verify: {len(args.runs)} sources are given. Give one run directory.")
    first = args.runs[0]
    if args.verify and first.exists() and not first.is_dir():
        raise ConfigError(f"--verify: {first} is a log; there is no recipe to run again. Give a run directory.")
    refuse_outputs(args)
    logs: dict[str, Sequence[TelemetryRecord]] = {}
    found: dict[str, tuple[Verdict, ...]] = {}
    tables: list[dict[str, Any]] = []
    for place, source in enumerate(args.runs):
        diagnosis = diagnose(source, devices=args.devices, on_damage=print_warning)
        name = source.name if source.name and source.name not in logs else str(source)
        logs[name] = diagnosis.telemetry
        found[name] = diagnosis.verdicts
        if args.json:
            verified = _verify_first_change(diagnosis) if args.verify else None
            tables.append({**diagnosis.as_dict(), "verified": asdict(verified) if verified else None})
        else:
            if place:
                print()
            _print_diagnosis(diagnosis, args)
    if args.output or args.figures is not None:
        from fivetune.reading.report.logs import build_logs_page

        written = write_outputs(args, *build_logs_page(logs, found))
        if args.json:
            tables[0]["written"] = list(map(str, written))
    if args.json:
        print_json(tables[0] if len(tables) == 1 else tables)
    return 0


def _print_diagnosis(diagnosis: Diagnosis, args: argparse.Namespace) -> None:
    console = Console(highlight=False)
    for line, remark in format_diagnosis(diagnosis, verbose=args.verbose):
        text = Text.assemble(name_invisible(line), (name_invisible(remark), "dim"))
        console.print(text, soft_wrap=not console.is_terminal)  # wrapped at words in a terminal
    verified = _verify_first_change(diagnosis) if args.verify else None
    if verified:
        print_text(
            f"\nVerified {format_flags(verified.change)}: {verified.num_rounds} rounds of {verified.num_steps} steps "
            f"with and without it.\n   predicted {verified.predicted:.2f} times as fast, measured "
            f"{verified.measured:.2f} ({verified.low:.2f} to {verified.high:.2f})"
        )


def format_diagnosis(diagnosis: Diagnosis, *, verbose: bool = False) -> list[tuple[str, str]]:
    """Format lines for the terminal, each with a remark in grey: verdicts with figures, change and gain; missing data.

    Args:
        verbose: list the rules that lack data.
    """
    name = str(diagnosis.source)
    state = diagnosis.stats.state
    found = [(f"{name}: {state}" if state else name, "")]
    for number, verdict in enumerate(diagnosis.verdicts, start=1):
        remark = f"  ({verdict.rule}, confidence {verdict.confidence:.2f})"
        found += [("", ""), (f"{number}. {TITLES[verdict.rule]}", remark)]
        found += [(f"   {verdict.message}", ""), (f"   {verdict.advice}", "")]
        if verdict.change:
            found.append((f"   change:    {format_flags(verdict.change)}", ""))
        if verdict.gain is not None:
            found.append((f"   predicted: {verdict.gain:.2f} times as fast", ""))
    lines: list[str] = []  # all others, which have no remark
    if not diagnosis.verdicts:
        lines += ["No problem found.", f"Time: {diagnosis.describe_time()}."]
    if diagnosis.note:
        lines += ["", f"Note: {diagnosis.note}"]
    missing = diagnosis.not_judged
    if missing and verbose:
        lines += ["", "Not checked, because data is missing:"]
        for data, rules in missing.items():
            lines.append(f"   {data}: {', '.join(TITLES[rule] for rule in rules)}")
    elif missing:
        num = len(set[str]().union(*missing.values()))  # a rule may lack several kinds of data
        what = "1 rule needs" if num == 1 else f"{num} rules need"
        lacking = "a run and its records" if diagnosis.stats.is_log else "records that are missing"
        lines += ["", f"{what} {lacking} (--verbose)."]
    return found + [(line, "") for line in lines]


def _verify_first_change(found: Diagnosis) -> Verification | None:
    """Verify the first change that has a predicted gain; progress and reasons go to standard error."""
    verdict = next(filter(can_verify, found.verdicts), None)
    if verdict is None:
        print("--verify: no verdict has both a change and a predicted gain.", file=sys.stderr)
        return None
    started = time.monotonic()
    verification = verify_change(
        found.source,
        found.stats,
        verdict,
        on_progress=lambda text: print(f"  {text} ...", file=sys.stderr, flush=True),
    )
    print(f"  measured in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return verification
