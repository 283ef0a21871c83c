"""Score a trained run on other data, or on its own again.

Official metrics; the predictions are kept in the run directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.commands import add_flag, print_json, print_scores, print_text

if TYPE_CHECKING:
    from fivetune.rundir.records import EvalRecord
    from fivetune.types import JsonTable

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    parser.add_argument("--split", help="name of the predictions file; default: the data file's name")
    parser.add_argument(
        "--max-error",
        metavar="SHARE",
        help="promise that at most this share of answers is wrong: 5%%; the confidence that keeps it is chosen on this "
        "evaluation, with a confidence of 95 %%, and predict and serve withhold answers below it from now on",
    )
    parser.add_argument(
        "--error-below",
        type=float,
        metavar="SCORE",
        help="score (0-100) below which an answer is wrong, for a graded main score such as F1; needs --max-error",
    )
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = "Settings of the run can be overridden: --data.eval other.json --eval.batch_size 32"


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import ConfigError, PromiseError
    from fivetune.rundir.progress import Progress
    from fivetune.scores.analysis.abstention import parse_share
    from fivetune.training.answers.promise import read_promise
    from fivetune.training.answers.trained_run import evaluate

    if args.error_below is not None and args.max_error is None:
        raise ConfigError("--error-below: has no effect without --max-error. Give both, or leave it out.")
    if args.max_error is not None:
        parse_share(args.max_error, "--max-error")  # before a model is loaded
    broken: PromiseError | None = None
    with Progress() as progress:
        try:
            record = evaluate(
                args.run,
                parse_overrides(args.settings),
                split=args.split,
                max_error=args.max_error,
                error_below=args.error_below,
                on_progress=progress.update,
                on_damage=progress.warn,
                on_note=progress.log,
            )
        except PromiseError as error:  # after the scores, which the run keeps
            broken, record = error, error.record
    promise = {} if broken or args.max_error is None else read_promise(Path(args.run))
    if args.json:
        result = {
            name: getattr(record, name)
            for name in ("scores", "intervals", "num_examples", "rates", "loss", "step", "split")
        }
        print_json({**result, "promise": promise} if promise else result)
    else:
        _print_record(args.run, record, promise)
    if broken:
        raise broken
    return 0


def _print_record(run: str, record: EvalRecord, promise: JsonTable) -> None:
    from fivetune.scores.analysis.abstention import describe_promise

    print_text(f"{record.split}, {record.num_examples:,} examples, model of step {record.step:,}:")
    print_scores(record.scores, record.intervals)
    print_text(f"predictions  {Path(run)}/predictions/{record.split}-{record.step}.jsonl")
    if promise:
        print_text(describe_promise(promise))
        print_text(
            "The promise is kept in the model folder: predict and serve apply it, and --min-confidence 0 does not."
        )
