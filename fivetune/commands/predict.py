"""Answer new inputs with a trained run: a file of records, or texts on the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from fivetune.commands import print_json

TAKES_SETTINGS = True
OWN_SOURCE: dict[str, str] = dict.fromkeys(
    ("data.eval", "data.max_eval_examples", "data.cache_dir"), "predict answers all records of --input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", help="file in any format that data.eval takes; gold answers are not needed")
    source.add_argument("--inputs", nargs="+", metavar="TEXT", help="texts exactly as the model reads them")
    parser.add_argument("--output", help="JSONL file to write; default: standard output")
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON array instead of JSON lines; with --output, print one JSON object that tells of the file",
    )  # fmt: skip
    parser.epilog = "Settings of the run can be changed: --eval.batch_size 32 --data.columns.question Frage"


def run(args: argparse.Namespace) -> int:
    from fivetune.config_layers import parse_overrides
    from fivetune.progress import Progress
    from fivetune.training.inference import open_run

    progress = Progress()
    progress.start()
    try:
        trained = open_run(Path(args.run), parse_overrides(args.settings), without=OWN_SOURCE)
        lines = trained.answers(source=args.input, texts=args.inputs, count=progress.count)
    finally:
        progress.close()
    if args.output:
        _write(Path(args.output), lines)
        if args.json:
            print_json({"output": args.output, "num_answers": len(lines), "step": trained.step})
    elif args.json:
        print_json(lines)
    else:
        for line in lines:
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0


def _write(path: Path, lines) -> None:
    """Stream to a temporary name; the file is there whole or not at all."""
    from fivetune.errors import EnvironmentProblem
    from fivetune.rundir import fsync_folder

    staging = path.with_name(f".{path.name}.tmp")
    try:
        with staging.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise EnvironmentProblem(f"{path}: cannot be written: {error.strerror}. Choose another --output.") from None
    finally:
        staging.unlink(missing_ok=True)
