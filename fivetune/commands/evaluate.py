"""Score a trained run on other data (or again on its own): official metrics, predictions in the run directory."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fivetune.commands import print_json, print_scores

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    parser.add_argument("--split", help="name of the predictions file; default: the data file's name")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "Settings of the run can be changed: --data.eval other.json --eval.batch_size 32"


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from fivetune.config_layers import parse_overrides
    from fivetune.progress import Progress
    from fivetune.rundir import EVALS, RunDir, read_data
    from fivetune.telemetry.devices import enough_memory
    from fivetune.training.inference import open_run

    progress = Progress()
    progress.start()
    trained = open_run(Path(args.run), parse_overrides(args.settings))
    evaluator = trained.evaluator(count=progress.count)
    own = read_data(args.run).get("eval", {}).get("fingerprint")
    is_own = not args.settings and evaluator.store.fingerprint == own
    split = split_name(args.split, evaluator.store.summary["source"][0], is_own=is_own)
    folder = RunDir.resume(args.run)
    try:
        with enough_memory():
            record = evaluator.run(
                trained.model,
                step=trained.step,
                split=split,
                write=lambda lines: folder.new_predictions(split, trained.step, lines),
                progress=progress.counter("evaluating"),
            )
        folder.append(EVALS, asdict(record))
    finally:
        folder.close()
        progress.close()
    if not args.json:
        print(f"{split}, {record.num_examples:,} examples, model of step {trained.step:,}:")
        print_scores(record.scores)
        print(f"predictions  {folder.path}/predictions/{split}-{trained.step}.jsonl")
    else:
        print_json({"scores": record.scores, "num_examples": record.num_examples, "rates": record.rates,
                    "loss": record.loss, "step": trained.step, "split": split})  # fmt: skip
    return 0


def split_name(given: str | None, source: str, *, is_own: bool) -> str:
    """Name under which an evaluation is kept; those of the run's own evaluations only for the same data and settings.

    >>> split_name(None, "data/dev.json", is_own=False), split_name(None, "data/eval.json", is_own=False)
    ('dev', 'other-eval')
    >>> split_name("eval", "data/dev.json", is_own=True), split_name("subset", "data/dev.json", is_own=True)
    ('eval', 'other-subset')
    """
    from fivetune.rundir import OWN_SPLITS

    name = re.sub(r"[^\w.-]+", "-", given or Path(source).name.partition(".")[0]).strip(".-") or "other"
    return f"other-{name}" if name in OWN_SPLITS and not (is_own and name == "eval") else name
