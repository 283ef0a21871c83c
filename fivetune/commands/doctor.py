"""Check this machine and measure the speed of training.

Packages, processor, devices, memory, disk and hub.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_checks

DEFAULT_SECONDS, MOST_SECONDS = 20.0, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default="runs", metavar="DIR", help="folder of runs to write to; default: runs")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="S",
        help=f"length of the speed test after its first step, 0 leaves it out; default: {DEFAULT_SECONDS:g}",
    )
    add_flag(parser, "--json", "print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.errors import ConfigError
    from fivetune.machine.telemetry.devices import collect_machine_info
    from fivetune.training.checks.machine_checks import run_machine_checks

    if not 0 <= args.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {args.seconds:g}: allowed are 0 to {MOST_SECONDS:g}. Correct it.")
    device = load_config("quickstart", {"device": args.device}).device  # refuses unknown names
    checks = run_machine_checks(Path(args.folder), device=device, seconds=args.seconds)
    facts = {"machine": collect_machine_info("cpu")} if args.json else {}
    return print_checks(checks, json_wanted=args.json, facts=facts)
