"""Answer new inputs with a trained run.

Inputs are a file of records, one question, or texts on the command line.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import add_flag, add_silence_arguments, format_open_shards, print_json, refuse_wrong_silence
from fivetune.redaction import name_invisible

if TYPE_CHECKING:
    from fivetune.data.readers.delimited import TableForm
    from fivetune.data.shard import Shard
    from fivetune.distributed.world import World
    from fivetune.rundir.progress import Progress
    from fivetune.training.answers.inputs import InputRow
    from fivetune.training.answers.output import Predicted
    from fivetune.training.answers.predicted_file import PredictedRow
    from fivetune.training.answers.trained_run import TrainedRun

TAKES_SETTINGS = True
STDIN = STDOUT = "-"
TIMEOUT_MINUTES = 120.0  # that a rank waits for other ranks: their share of the questions may be slower


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        metavar="FILE",
        help="file in any format of data.eval, or lines of text for a task of one column; - for stdin; needs no gold "
        "answers",
    )
    source.add_argument(
        "--inputs",
        nargs="+",
        metavar="TEXT",
        help="texts: values of the only column that the task reads; for a task of several columns, such as question "
        "and context, the whole input exactly as the model reads it",
    )
    parser.add_argument("--question", metavar="TEXT", help="one record: its question, which the run's template formats")
    parser.add_argument("--context", metavar="TEXT", help="one record: its context")
    parser.add_argument(
        "--column", action="append", default=[], metavar="NAME=VALUE", help="one record: any of its columns; repeatable"
    )
    parser.add_argument(
        "--output",
        default=STDOUT,
        metavar="FILE",
        help="file to write; .csv, .tsv, .xlsx, .parquet: the input's columns with prediction and confidence, .csv and "
        ".tsv in the form of the input; .txt: a line per record; .json: an array; .jsonl or no suffix: JSON lines; "
        "default, or -: standard output. Answers stay in the folder FILE.partial until the file is whole: the same "
        "command goes on after it was stopped",
    )
    add_flag(parser, "--overwrite", "replace an existing --output, as soon as the new one is whole")
    parser.add_argument(
        "--shard",
        metavar="I/N",
        default="1/1",
        help="answer every N-th record, from the I-th on: N such commands, on any machines that share the folder of "
        "--output, answer the file, and the last one writes --output; fivetune launch RUN --predict FILE starts them",
    )
    parser.add_argument(
        "--delimiter", choices=(",", ";", "|", "tab"), help="separator of a .csv; default: the input's, or a comma"
    )
    add_flag(
        parser,
        "--safe-csv",
        "write an apostrophe before texts in .csv and .tsv that begin with = + - @, which spreadsheets run as formulas",
    )
    parser.add_argument(
        "--format",
        choices=("bioasq", "squad", "kaggle"),
        help="a submission: BioASQ's JSON, factoid and yes/no questions together; SQuAD's JSON of id and answer; a CSV "
        "of id and answer",
    )
    add_silence_arguments(parser)
    parser.add_argument(
        "--launch.nproc",
        dest="nproc",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the records, each with a GPU of its own if there are GPUs; needs --output",
    )
    add_flag(
        parser, "--json", "print one JSON array instead of JSON lines; with --output, print one JSON object of counts"
    )
    parser.epilog = "Settings of the run can be overridden: --eval.batch_size 32 --data.columns.question Frage"


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.distributed import processes as launch
    from fivetune.distributed.world import World
    from fivetune.training.answers.answer_folder import keep_answers

    # Wrong arguments are reported before torch is imported, and by one rank.
    world = World.from_environment()
    with world.report_errors_once():
        record, shard = refuse_wrong_words(args)
        settings = parse_overrides(args.settings)
    target = None if args.output == STDOUT else Path(args.output)
    # Several processes are this command again, with the variables of torchrun.
    if launch.is_needed(args.nproc):
        return launch.start_processes(args.words, nproc=args.nproc, timeout_minutes=TIMEOUT_MINUTES)
    with (
        tempfile.TemporaryDirectory(prefix="fivetune-predict-") as temporary,
        _connect(world) as world,
        world.report_errors_once(),
    ):
        place = keep_answers(target, shard, is_first=world.is_first) if target else nullcontext(Path(temporary))
        with place as folder:
            world.barrier()  # rank 0 has the folder
            answered = _answer(args, settings, record, Path(temporary), folder, shard, world)
            if answered is None:
                return 0
            if shard.count == 1:
                _write(args, target, folder, answered.predicted, temporary=temporary)
        missing: list[int] = []
        if target and shard.count > 1:
            print(name_invisible(f"shard {shard}: {answered.predicted.counts.describe()}"), file=sys.stderr)
            answered, missing = _merge(args, target, answered, shard)
        if missing:
            print(f"{target}: {format_open_shards(missing, shard.count)}", file=sys.stderr)
        if target and args.json:
            counts = answered.predicted.counts
            facts: dict[str, Any] = {
                "output": None if missing else args.output,
                "num_records": counts.num_records,
                "num_answers": counts.num_answered,
                "num_unsure": counts.num_unsure or 0,
                "num_skipped": counts.num_skipped - counts.num_foreign,
                "num_other_types": counts.num_foreign,
                "step": answered.step,
            }
            if shard.count > 1:
                facts["missing_shards"] = missing
            print_json(facts)
    return 0


def refuse_wrong_words(args: argparse.Namespace, *, sees_files: bool = True) -> tuple[dict[str, str], Shard]:
    """Raise ConfigError for words that do not go together or cannot be followed; returns the record and the shard.

    Args:
        sees_files: whether the files are on this machine.
    """
    from fivetune.data.shard import Shard
    from fivetune.errors import ConfigError
    from fivetune.training.answers.output import refuse_form, refuse_output

    record = _build_record(args)
    shard = Shard.parse(args.shard)
    refuse_wrong_silence(args)
    has_output = args.output != STDOUT
    has_input = args.input not in (None, STDIN)
    if has_output:
        if sees_files:
            refuse_output(Path(args.output), args.input if has_input else None, args.format, overwrite=args.overwrite)
    elif args.overwrite:
        raise ConfigError("--overwrite: has no effect without --output FILE. Leave it out, or give --output.")
    elif args.json and args.format:
        raise ConfigError("--json: has no effect with --format on standard output. Leave it out, or give --output.")
    if args.nproc < 1:
        raise ConfigError(f"--launch.nproc {args.nproc}: allowed are whole numbers from 1. Correct it.")
    for what, num in (("--launch.nproc", args.nproc), ("--shard", shard.count)):
        if num > 1 and not (has_output and has_input):
            raise ConfigError(f"{what}: several processes share a file. Give --input FILE and --output FILE.")
    refuse_form(args.output, args.format, args.delimiter, safe_csv=args.safe_csv)
    return record, shard


@dataclass(frozen=True, slots=True)
class _Answered:
    """What a command has answered.

    Args:
        step: of the weights.
    """

    predicted: Predicted
    step: int


def _answer(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    record: dict[str, str],
    temporary: Path,
    folder: Path,
    shard: Shard,
    world: World,
) -> _Answered | None:
    """Answer what the folder has no answer to; returns None on other ranks than the first."""
    from fivetune.errors import ConfigError
    from fivetune.rundir.progress import Progress
    from fivetune.training.answers.inputs import OWN_SOURCE, iter_input_rows
    from fivetune.training.answers.loading import load_run_model
    from fivetune.training.answers.output import Predicted, refuse_format
    from fivetune.training.answers.predicted_file import MergedParts, PredictionCounts
    from fivetune.training.answers.shards import DONE, list_shard_folders
    from fivetune.training.answers.trained_run import TrainedRun

    with Progress(silent=not world.is_first) as progress, _rename_standard_input(str(temporary)):
        source = _find_source(args.input, temporary)
        notes = {"on_damage": progress.warn, "on_note": progress.log}
        loaded = load_run_model(args.run, settings, unsupported=OWN_SOURCE, world=world, uses_checkpoint=True, **notes)
        trained = TrainedRun(Path(args.run), settings, loaded=loaded)
        # A submission to BioASQ has the questions of each type, which a mixture's parts answer.
        parts = trained.list_parts() if args.format == "bioasq" else {"": trained}
        # A format that cannot hold the answers is refused before the first one is computed.
        withheld = {"max_error": args.max_error, "min_confidence": args.min_confidence}
        silence = trained.find_silence(**withheld)
        if silence and args.format:
            raise ConfigError(
                f"--format {args.format}: a submission has no unsure answers. Add --min-confidence 0 to give all."
            )
        rows: list[Iterable[InputRow]] = []
        for part in parts.values():
            own = part.loaded.config
            rows.append(iter_input_rows(source, own.task, own.data.columns, own.data.header) if source else ())
        refuse_format(args.format, parts, chain.from_iterable(rows))
        found: dict[str, Iterable[PredictedRow]] = {}
        for name, part in parts.items():
            if source is None:
                found[name] = _answer_given(part, args.inputs, record, progress, withheld)
                continue
            (folder / name).mkdir(exist_ok=True)
            found[name] = part.predict_file(
                source,
                folder=folder / name,
                on_progress=progress.update,
                on_note=progress.log,
                world=world,
                shard=shard,
                shard_folders=[one / name for one in list_shard_folders(folder.parent, shard)],
                **withheld,
            )
        # Answers lie in the folder now; they are counted by one rank, which then writes them.
        if not world.is_first:
            return None
        merged = MergedParts(tuple(found.values()))
        counts = PredictionCounts.count(merged, counts_unsure=silence is not None)
        counts.num_answers = max(part.loaded.build_decoding().num_candidates for part in parts.values())
        if shard.count > 1:
            (folder / DONE).touch()
        else:
            counts.refuse_none_answered()
    form = _choose_form(args, source)
    return _Answered(Predicted(merged, counts, found, loaded.config.data.columns, form), trained.step)


def _merge(args: argparse.Namespace, target: Path, answered: _Answered, shard: Shard) -> tuple[_Answered, list[int]]:
    """Write the output if all shards are answered; returns what it holds, else the numbers of the missing shards.

    Of the jobs that end at the same time one writes it, after the others have left the folder.
    """
    from fivetune.distributed.processes.signals import report_interrupts
    from fivetune.rundir.files import extend_file_limit
    from fivetune.training.answers.answer_folder import find_answers, lock_answers, remove_answers
    from fivetune.training.answers.predicted_file import MergedParts, PredictionCounts
    from fivetune.training.answers.shards import list_open_shards, merge_shards

    folder = find_answers(target)
    extend_file_limit(shard.count)  # all are read at once
    own = answered.predicted
    with (
        report_interrupts(lambda name: f"stopped by {name}; all answers are kept. Run the same command again"),
        lock_answers(folder, waits=True),
    ):
        if not (folder / shard.name).is_dir():  # another job has merged them
            return answered, []
        if missing := list_open_shards(folder, shard):
            return answered, missing
        found = merge_shards(folder, shard, own.parts)
        rows = MergedParts(tuple(found.values()))
        counts = PredictionCounts.count(rows, counts_unsure=own.counts.num_unsure is not None)
        counts.num_answers = own.counts.num_answers
        counts.refuse_none_answered()
        answered = replace(answered, predicted=replace(own, rows=rows, counts=counts, parts=found))
        _write(args, target, folder / shard.name, answered.predicted)
        remove_answers(folder)
    return answered, []


def _choose_form(args: argparse.Namespace, source: str | None) -> TableForm:
    """Choose how a table is written: as the first file of the input; .tsv has tabs, and .csv of a .tsv commas."""
    from fivetune.data.readers.delimited import TableForm, read_form
    from fivetune.data.readers.records import is_hub_name, list_source_files

    files = [] if source is None or is_hub_name(source) else list_source_files(source)
    form = (read_form(files[0]) if files else None) or TableForm()
    separator = form.separator
    if args.delimiter:
        separator = args.delimiter.replace("tab", "\t")
    elif args.output.lower().endswith(".tsv"):
        separator = "\t"
    elif separator == "\t" and files[0].suffix.lower() != ".csv":
        separator = ","
    return replace(form, separator=separator, is_safe=args.safe_csv)


@contextmanager
def _rename_standard_input(folder: str) -> Generator[None]:
    """Name standard input as `stdin` in errors, not by its copy in a temporary folder."""
    from fivetune.errors import DataError

    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(f"{folder}/", "")) from None


@contextmanager
def _connect(world: World) -> Generator[World]:
    """Connect the ranks. Raises ConfigError if there are more than CUDA devices."""
    if world.size == 1:
        yield world
        return
    import torch

    from fivetune.distributed.world import refuse_shared_devices

    cuda = torch.cuda.is_available()
    if cuda:
        refuse_shared_devices(torch.cuda.device_count())
    with world.connect(cuda=cuda, timeout_minutes=TIMEOUT_MINUTES) as connected:
        yield connected


def _build_record(args: argparse.Namespace) -> dict[str, str]:
    """Build the record of --question, --context and --column; {} without them.

    Raises ConfigError unless the input is given in exactly one way.
    """
    from fivetune.errors import ConfigError

    record: dict[str, str] = {}
    for name in ("question", "context"):
        value = getattr(args, name)
        if value is not None:
            record[name] = value
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


def _find_source(given: str | None, folder: Path) -> str | None:
    """Find the file to read; standard input is copied into `folder`, because it is read twice."""
    from fivetune.data.readers.records import check_source

    if given == STDIN:
        path = folder / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        given = str(path)
    if given is not None:
        check_source(given, allows_lines=True)
    return given


def _answer_given(
    trained: TrainedRun,
    texts: Sequence[str] | None,
    record: dict[str, str],
    progress: Progress,
    withheld: Mapping[str, Any],
) -> list[PredictedRow]:
    """Answer inputs of the command line: there is no file to go on with, so no answers are kept."""
    from fivetune.training.answers.inputs import InputRow
    from fivetune.training.answers.predicted_file import PredictedRow

    given = list(texts) if texts else [record]
    size = trained.loaded.config.eval.batch_size
    rows: list[PredictedRow] = []
    for one in trained.predict(given, batch_size=size, on_progress=progress.update, on_note=progress.log, **withheld):
        row = InputRow(f"input {len(rows) + 1}", one.id, record, one.skipped or "")
        rows.append(PredictedRow(row, one))
    return rows


def _write(
    args: argparse.Namespace, target: Path | None, folder: Path, predicted: Predicted, *, temporary: str = ""
) -> None:
    """Print the counts, and write the predictions to a file, whole or not at all, or to standard output.

    Args:
        folder: for what a killed command leaves of the output.
        temporary: folder of inputs, which is not named.
    """
    from fivetune.errors import FiveTuneEnvironmentError
    from fivetune.rundir import replace_file
    from fivetune.training.answers.output import (
        FORMATS,
        ONE_ANSWER,
        EscapedOutput,
        choose_format,
        escape_invisible,
        write_predictions,
    )

    told = predicted.counts.describe()
    print(escape_invisible(told.replace(f"{temporary}/", "") if temporary else told), file=sys.stderr)
    name = args.format or choose_format(target)
    if predicted.counts.num_answers > 1 and name in ONE_ANSWER:
        print(
            f"{target or name}: has the first of {predicted.counts.num_answers} answers to each record. .jsonl has all "
            "with their scores, .csv has them as columns",
            file=sys.stderr,
        )
    if target is None:
        name = args.format or ("json" if args.json else "jsonl")
        is_escaped = name != "kaggle" or sys.stdout.isatty()  # JSON reads the escapes back, CSV does not
        FORMATS[name].write(EscapedOutput(sys.stdout) if is_escaped else sys.stdout, predicted)
        return
    try:
        with replace_file(target, staging_folder=folder) as file:
            write_predictions(file, name, predicted)
    except OSError as error:
        raise FiveTuneEnvironmentError(
            f"{target}: cannot be written: {error.strerror}. Choose another --output."
        ) from None
