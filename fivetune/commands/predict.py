"""Answer new inputs with a trained run: a file of records, or texts on the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", help="file in any format that data.eval takes; gold answers are not needed")
    source.add_argument("--inputs", nargs="+", metavar="TEXT", help="texts exactly as the model reads them")
    parser.add_argument("--output", help="JSONL file to write; default: standard output")
    parser.epilog = "Settings of the run can be changed: --eval.batch_size 32 --data.columns.question Frage"


def run(args: argparse.Namespace) -> int:
    from fivetune.config_layers import parse_overrides
    from fivetune.progress import Progress
    from fivetune.training.inference import open_run

    progress = Progress()
    progress.start()
    try:
        trained = open_run(Path(args.run), parse_overrides(args.settings))
        lines = trained.answers(source=args.input, texts=args.inputs, count=progress.count)
    finally:
        progress.close()
    if args.output:
        _write(Path(args.output), lines)
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
