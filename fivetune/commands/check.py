"""Run only the pre-flight checks: files, model, tokenizer, truncation, one step, one evaluation, save and reload."""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

from fivetune.commands import print_json

TAKES_SETTINGS = True
NAME_CHARS = 17
WIDTH = 100  # characters of a line that is not printed to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file or name of a shipped recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "Any setting can follow: --data.train train.json. Nothing is written but the data cache."


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import FiveTuneError

    config = load_config(args.recipe, parse_overrides(args.settings))
    console = Console(highlight=False, soft_wrap=True)
    colours = {"pass": "green", "warn": "yellow", "fail": "red"}
    checks, exit_code = [], 0
    try:
        for check in _run_checks(config):
            checks.append(check)
            console.print(check.state, style=colours[check.state], end="")
            console.print(f"  {check.name:<{NAME_CHARS}}", end="", markup=False)
            _print_wrapped(console, check.detail, indent=6 + NAME_CHARS)
            if check.state == "fail":
                exit_code = exit_code or check.error_class.exit_code
    except FiveTuneError as error:
        exit_code = error.exit_code
        console.print("fail", style="red", end="")
        console.print("  ", end="")
        _print_wrapped(console, str(error), indent=6)
        checks.append(None)
    states = [check.state if check else "fail" for check in checks]
    print(f"{states.count('pass')} passed, {states.count('warn')} to look at, {states.count('fail')} failed")
    if args.json:
        listed = [{"name": c.name, "state": c.state, "detail": c.detail} for c in checks if c]
        print_json({"checks": listed, "failed": states.count("fail"), "exit_code": exit_code})
    return exit_code


def _print_wrapped(console, text, *, indent):
    """Print the rest of a line, wrapped to the terminal under its beginning; each set has a paragraph of its own."""
    width = (console.width if console.is_terminal else WIDTH) - indent
    lines = [
        line
        for paragraph in re.split(r"; (?=(?:train|eval)[ :])", text)
        for line in textwrap.wrap(paragraph, max(width, 20), break_long_words=False, break_on_hyphens=False)
    ]
    console.print(("\n" + " " * indent).join(lines), markup=False)


def _run_checks(config):
    """Run the checks. Bad records are counted, not raised; they fail the data check unless data.on_bad_record: skip."""
    from fivetune.errors import DataError
    from fivetune.progress import Progress
    from fivetune.training.preflight import Check, check_run_directory, run_checks
    from fivetune.training.setup import set_up

    lenient = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_record": "skip"})})
    progress = Progress()
    progress.start()
    try:
        setup = set_up(lenient, on_progress=progress.update)
    finally:
        progress.close()
    stores = [store for _, store in setup.data.stores]
    num_bad = sum(store.summary["num_skipped_bad"] for store in stores)
    for check in run_checks(setup):
        if check.name == "data" and num_bad and config.data.on_bad_record == "fail":
            advice = "Correct them, or set data.on_bad_record: skip to train without them"
            yield Check(check.name, "fail", f"{check.detail}. {advice}", DataError)
        else:
            yield check
    yield check_run_directory(Path(config.run.dir))
