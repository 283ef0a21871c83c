"""Predict for new inputs with a trained run: a file of records, one question, or texts on the command line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import print_json

if TYPE_CHECKING:
    from fivetune.evaluation.output import PredictedRow
    from fivetune.progress import Progress
    from fivetune.training.inference import TrainedRun

TAKES_SETTINGS = True
STDIN = STDOUT = "-"
OWN_SOURCE: dict[str, str] = dict.fromkeys(
    ("data.eval", "data.max_eval_examples", "data.cache_dir"), "predict answers all records of --input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input", metavar="FILE", help="file in any format of data.eval, or - for stdin; needs no gold answers"
    )
    source.add_argument("--inputs", nargs="+", metavar="TEXT", help="texts exactly as the model reads them")
    parser.add_argument("--question", metavar="TEXT", help="one record: its question, which the run's template formats")
    parser.add_argument("--context", metavar="TEXT", help="one record: its context")
    parser.add_argument(
        "--column", action="append", default=[], metavar="NAME=VALUE", help="one record: any of its columns; repeatable"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file to write; .csv or .tsv: the input's columns with prediction and confidence; .json: an array; .jsonl "
        "or no suffix: JSON lines; default, or -: standard output",
    )
    parser.add_argument(
        "--format", choices=("bioasq",), help="bioasq: the official submission, factoid and yes/no questions together"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON array instead of JSON lines; with --output, print one JSON object of counts",
    )
    parser.epilog = "Settings of the run can be overridden: --eval.batch_size 32 --data.columns.question Frage"


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import DataError
    from fivetune.evaluation import output
    from fivetune.progress import Progress
    from fivetune.training.inference import open_run

    record = _build_record(args)
    target = Path(args.output) if args.output and args.output != STDOUT else None
    if target:
        _refuse_output(target, args.input, args.format)
    with tempfile.TemporaryDirectory(prefix="fivetune-stdin-") as folder:
        progress = Progress()
        progress.start()
        try:
            source = _find_source(args.input, Path(folder))
            settings = parse_overrides(args.settings)
            trained = open_run(args.run, settings, unsupported=OWN_SOURCE, on_damage=progress.warn)
            parts = trained.list_parts() if args.format == "bioasq" else {"": trained}
            found = {name: _predict(part, source, args.inputs, record, progress) for name, part in parts.items()}
            predicted = _merge_parts(list(found.values()))
            _refuse_unanswered(predicted)
        except DataError as error:  # names standard input as stdin, not by its copy
            raise DataError(str(error).replace(f"{folder}/", "")) from None
        finally:
            progress.close()
    if args.format == "bioasq":
        text = output.format_bioasq(found)
    elif target and (delimiter := output.choose_delimiter(target)):
        text = output.format_table(predicted, delimiter=delimiter)
    elif target and target.suffix.lower() == ".json":
        text = output.format_array(predicted)
    else:
        text = output.format_lines(predicted)
    summary = output.summarise(predicted).replace(f"{folder}/", "")
    print(output.escape_invisible(summary), file=sys.stderr)
    if target:
        _write(target, text)
        if args.json:
            print_json(_build_counts(predicted, args.output, trained.step))
    elif args.json and args.format is None:
        lines = [output.build_line(one.prediction) for one in predicted]
        print(output.escape_invisible(json.dumps(lines, ensure_ascii=False)), flush=True)
    else:
        sys.stdout.write(output.escape_invisible(text))
    return 0


def _build_record(args: argparse.Namespace) -> dict[str, str]:
    """Build the record of --question, --context and --column; {} without them.

    Raises ConfigError unless the input is given in exactly one way.
    """
    from fivetune.errors import ConfigError

    record = {name: value for name in ("question", "context") if (value := getattr(args, name)) is not None}
    for given in args.column:
        name, equals, value = given.partition("=")
        if not (name and equals):
            raise ConfigError(f"--column {given}: has no value. Write --column NAME=VALUE.")
        record[name] = value
    if bool(record) + bool(args.input) + bool(args.inputs) != 1:
        raise ConfigError(
            "predict: needs one kind of input. Give --input FILE, or --inputs TEXT, or --question, --context and "
            "--column NAME=VALUE for one record."
        )
    return record


def _refuse_output(path: Path, source: str | None, format: str | None) -> None:
    """Raise ConfigError, before any record is answered, for an --output that cannot or should not be written."""
    from fivetune.data.source_files import list_local_files
    from fivetune.errors import ConfigError
    from fivetune.evaluation.output import SUFFIXES_WRITTEN

    where = f"--output {path}"
    allowed = (".json",) if format else SUFFIXES_WRITTEN
    if path.suffix and path.suffix.lower() not in allowed:
        what = f" with --format {format}" if format else ""
        raise ConfigError(f"{where}: {path.suffix} is not written{what}. Allowed: {', '.join(allowed)}, or no suffix.")
    if os.path.isdir(path):  # unlike Path.is_dir, false for an impossible name
        raise ConfigError(f"{where}: is a folder. Give a file in it.")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"{where}: there is no folder {path.parent}. Create it, or give another file.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{where}: the folder {path.parent} is not writable. Give another file.")
    if source is None or source == STDIN or not (os.path.exists(source) and os.path.exists(path)):
        return
    if any(file.samefile(path) for file in list_local_files(source)):
        raise ConfigError(f"{where}: is the file of --input, which would be overwritten. Give another file.")


def _find_source(given: str | None, folder: Path) -> str | None:
    """Find the file to read; standard input is copied into `folder`, because it is read twice."""
    from fivetune.data.records import check_source

    if given == STDIN:
        path = folder / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        given = str(path)
    if given is not None:
        check_source(given)
    return given


def _predict(
    trained: TrainedRun, source: str | None, texts: Sequence[str] | None, record: dict[str, str], progress: Progress
) -> list[PredictedRow]:
    from fivetune.evaluation.inputs import InputRow
    from fivetune.evaluation.output import PredictedRow

    if source is not None:
        return trained.predict_file(source, on_progress=progress.update)
    given = list(texts) if texts else [record]
    predictions = trained.predict(given, on_progress=progress.update)
    rows = [InputRow(f"input {number}", one.id, record) for number, one in enumerate(predictions, start=1)]
    return [PredictedRow(*pair) for pair in zip(rows, predictions, strict=True)]


def _merge_parts(parts: Sequence[Sequence[PredictedRow]]) -> list[PredictedRow]:
    """Merge the rows of a mixture's parts: for each record the part with a prediction, else the first part's reason."""
    return [next((one for one in rows if not one.prediction.skipped), rows[0]) for rows in zip(*parts, strict=True)]


def _refuse_unanswered(predicted: Sequence[PredictedRow]) -> None:
    """Raise DataError if no record is answered: then the columns do not fit, and there is nothing to write."""
    from fivetune.errors import DataError

    if any(not one.prediction.skipped for one in predicted):
        return
    first = predicted[0]
    found = f"{first.row.where}: {(first.prediction.skipped or '').rstrip('.')}."
    if len(predicted) > 1:
        found = (
            f"{first.row.where.rpartition(':')[0] or 'predict'}: none of {len(predicted):,} records can be answered. "
            f"The first: {found} Check task.name and data.columns."
        )
    raise DataError(found)


def _build_counts(predicted: Sequence[PredictedRow], path: str, step: int) -> dict[str, Any]:
    skipped = [one for one in predicted if one.prediction.skipped]
    num_foreign = sum(one.row.is_foreign for one in skipped)
    return {
        "output": path,
        "num_records": len(predicted),
        "num_answers": len(predicted) - len(skipped),
        "num_skipped": len(skipped) - num_foreign,
        "num_other_types": num_foreign,
        "step": step,
    }


def _write(path: Path, text: str) -> None:
    """Write the output whole or not at all."""
    from fivetune.errors import FiveTuneEnvironmentError
    from fivetune.rundir import replace_file

    try:
        with replace_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise FiveTuneEnvironmentError(
            f"{path}: cannot be written: {error.strerror}. Choose another --output."
        ) from None
