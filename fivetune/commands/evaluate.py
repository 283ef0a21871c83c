"""Score a trained run on other data, or on its own again.

Official metrics; the predictions are kept in the run directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import print_json, print_scores, print_text

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    parser.add_argument("--split", help="name of the predictions file; default: the data file's name")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "Settings of the run can be overridden: --data.eval other.json --eval.batch_size 32"


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.rundir.progress import Progress
    from fivetune.training.answers.trained_run import evaluate

    with Progress() as progress:
        record = evaluate(
            args.run,
            parse_overrides(args.settings),
            split=args.split,
            on_progress=progress.update,
            on_damage=progress.warn,
            on_note=progress.log,
        )
    if args.json:
        result = {
            name: getattr(record, name)
            for name in ("scores", "intervals", "num_examples", "rates", "loss", "step", "split")
        }
        print_json(result)
        return 0
    print_text(f"{record.split}, {record.num_examples:,} examples, model of step {record.step:,}:")
    print_scores(record.scores, record.intervals)
    print_text(f"predictions  {Path(args.run)}/predictions/{record.split}-{record.step}.jsonl")
    return 0
