"""Run the pre-flight checks of a recipe, and nothing else.

Files, model, tokenizer, truncation, one step, one evaluation, save and reload.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_checks

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file or name of a shipped recipe")
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = "Any setting can follow: --data.train train.json. Nothing is written but the data cache."


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides

    return print_checks(_run_checks(load_config(args.recipe, parse_overrides(args.settings))), json_wanted=args.json)


def _run_checks(config):
    """Run the checks. Bad records are counted, not raised; they fail the data check unless data.on_bad_record: skip."""
    from fivetune.errors import DataError
    from fivetune.rundir.progress import Progress
    from fivetune.training.checks.preflight import Check, check_run_directory, run_checks
    from fivetune.training.setup import set_up
    from fivetune.training.sinks import refuse_missing_sinks

    refuse_missing_sinks(config.report.sinks)
    # Bad records are counted in one pass; a run would stop at the first.
    lenient = config.replace("data", on_bad_record="skip")
    with Progress() as progress:
        setup = set_up(lenient, on_progress=progress.update)
    stores = [store for _, store in setup.data.stores]
    num_bad = sum(store.summary["num_skipped_bad"] for store in stores)
    for check in run_checks(setup):
        if check.name == "records" and num_bad and config.data.on_bad_record == "fail":
            advice = "Correct them, or set data.on_bad_record: skip to train without them"
            yield Check(check.name, "fail", f"{check.detail}. {advice}", DataError)
        else:
            yield check
    yield check_run_directory(Path(config.run.dir))
