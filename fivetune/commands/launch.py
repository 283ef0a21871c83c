"""Start a run on a cluster: SLURM, Kubernetes or SkyPilot.

Writes the job, submits it and watches the run.
In: a recipe, and the options of the cluster. Out: the job's files beside the run directory, and its id: of one run, or
of an array of runs with different seeds, or of shards of a prediction or of data. The settings are checked here, and
what a run needs from the hub is downloaded, because the nodes often have no network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import (
    add_flag,
    add_launcher_arguments,
    assign_nodes,
    build_job,
    fetch_inputs,
    format_settings,
    launch_sweep,
    list_paths,
    print_json,
    print_text,
    read_launcher,
    submit_job,
)

if TYPE_CHECKING:
    from fivetune.config import RunConfig
    from fivetune.fleet.launchers import Launcher

TAKES_SETTINGS = True
POLL_SECONDS = 2.0
MAX_SHARDS = 10_000
CHECKED_RECORDS = 1_000  # from the first on, of which one must be usable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", help="YAML file, name of a shipped recipe, or a run directory (with --resume or --predict)"
    )
    add_flag(parser, "--dry-run", "check the settings and the data, write and print the job; submit nothing")
    add_flag(parser, "--resume", "continue the run in run.dir where it stopped")
    add_flag(parser, "--overwrite", "move an existing run in run.dir aside; replace --output")
    parser.add_argument(
        "--seeds",
        metavar="SEED",
        nargs="+",
        type=int,
        help="train the recipe once with each seed, as an array of runs in run.dir with one page",
    )
    work = parser.add_mutually_exclusive_group()
    work.add_argument(
        "--predict",
        metavar="FILE",
        help="answer FILE with the run, as an array of shards that the last one merges into --output; all arguments of "
        "fivetune predict can follow",
    )
    work.add_argument(
        "--prepare", metavar="PLACE", help="tokenise the recipe's data into a folder or URL, as an array of shards"
    )
    parser.add_argument("--output", metavar="FILE", help="with --predict: file that the last job writes")
    parser.add_argument("--shards", metavar="N", type=int, help="number of jobs that share the records")
    add_flag(parser, "--no-preflight", "start without the pre-flight checks")
    add_flag(parser, "--no-watch", "do not follow the run in the terminal")
    add_flag(parser, "--json", "print one JSON object as the last line")
    add_launcher_arguments(parser, required=True)
    parser.epilog = "Any setting can follow: --train.num_epochs 3"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import RunDirError
    from fivetune.fleet.launchers import JobRun
    from fivetune.rundir import build_sibling_path

    def read(settings: Mapping[str, Any]) -> RunConfig:
        return load_config(args.recipe, settings)

    # How many nodes and GPUs: options of the cluster, then settings, then the recipe.
    launcher = read_launcher(args)
    assert launcher is not None  # --on is required
    _refuse_mixed_words(args, launcher)
    if args.predict is not None:
        return _launch_prediction(args, launcher)
    if args.prepare is not None:
        return _launch_preparation(args, launcher)
    given = parse_overrides(args.settings)
    placed, settings = assign_nodes(launcher, given, read)
    config = load_config(args.recipe, settings)
    if args.seeds:
        return _launch_seeds(args, placed, config, given)
    folder = Path(config.run.dir)
    # Nodes that see these files would refuse a used run directory hours later; here it costs nothing.
    refusal = ""
    if launcher.shares_files:
        try:
            _refuse_wrong_start(args, folder, may_fetch=config.checkpoint.url is not None)
        except RunDirError as error:
            if not args.dry_run:
                raise
            refusal = str(error)
    # The words of `fivetune train` on the node: this command's words, and what was decided above.
    flags = [f"--{name.replace('_', '-')}" for name in ("resume", "overwrite", "no_preflight") if getattr(args, name)]
    if config.checkpoint.url and not (launcher.shares_files or args.resume or args.overwrite):
        flags.append("--resume")  # a job that is started again has an empty disk, and a first start nothing to resume
    added = {key: value for key, value in settings.items() if key not in given}
    run = JobRun(folder.name, str(folder), args.recipe, (*args.settings, *format_settings(added)), tuple(flags))
    plan = build_job(
        folder.name,
        [run],
        build_sibling_path(str(folder), args.on),
        nnodes=config.launch.nnodes,
        nproc=config.launch.nproc,
        paths=list_paths(config) if launcher.shares_files else (),
    )
    files = placed.render(plan)
    # The nodes often have no network.
    if launcher.shares_files:
        fetch_inputs([config], models=not args.dry_run)
    # An earlier run in the directory must not be taken for the new one.
    before = read_change_time(folder)
    submit_job(placed, plan, files, args, refusal)
    is_silent = args.no_watch or args.json or args.dry_run
    if launcher.shares_files and not is_silent and sys.stdout.isatty():
        watch_new_run(folder, before)
    return 0


def _refuse_mixed_words(args: argparse.Namespace, launcher: Launcher) -> None:
    """Raise ConfigError for words that have no effect together, and for shards without number or on several nodes."""
    from fivetune.errors import ConfigError

    work = next((name for name in ("predict", "prepare") if getattr(args, name) is not None), None)
    training = ("resume", "seeds", "no_preflight", "no_watch")
    refused = {"predict": training, "prepare": ("overwrite", "output", *training), None: ("shards", "output")}
    for name in refused[work]:
        if getattr(args, name):
            what = f"with --{work}" if work else "without --predict or --prepare"
            raise ConfigError(f"--{name.replace('_', '-')}: has no effect {what}. Leave it out.")
    if work is None:
        return
    if args.shards is None or not 1 <= args.shards <= MAX_SHARDS:
        raise ConfigError(
            f"--{work}: needs --shards N, the number of jobs that share the records, from 1 to {MAX_SHARDS:,}."
        )
    if not launcher.supports_shards:
        raise ConfigError(f"--on {args.on}: has no arrays of jobs. Use --on slurm or --on kubernetes.")
    if launcher.nodes not in (None, 1):
        raise ConfigError(f"--nodes {launcher.nodes}: each shard works on one node. Give more --shards instead.")


def _launch_prediction(args: argparse.Namespace, launcher: Launcher) -> int:
    """Start the jobs that answer a file with a run: `fivetune predict` with all words that follow."""
    from fivetune import plugins
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import ConfigError

    if args.output is None:
        raise ConfigError("--predict: needs --output FILE, which the last job writes.")
    words = ["predict", args.recipe, "--input", args.predict, "--output", args.output, *args.settings]
    if args.overwrite:
        words.append("--overwrite")
    command = plugins.import_plugin("commands", "predict")
    parser = argparse.ArgumentParser("fivetune launch --predict", usage=argparse.SUPPRESS, allow_abbrev=False)
    command.add_arguments(parser)
    given, rest = parser.parse_known_args([*words[1:], "--shard", f"1/{args.shards}"])
    command.refuse_wrong_words(given, sees_files=launcher.shares_files)
    settings = parse_overrides(rest)
    numbers = range(1, args.shards + 1)
    if launcher.shares_files:
        numbers = _find_open_shards(given, settings, args.shards)
    gpus = launcher.gpus
    if gpus is None:
        gpus = 0 if settings.get("device") == "cpu" else given.nproc
    if gpus > 1:
        words += ["--launch.nproc", str(gpus)]
    placed = launcher.model_copy(update={"gpus": gpus})
    return _launch_work(args, placed, args.output, words, numbers, [args.recipe, args.predict, args.output])


def _find_open_shards(given: argparse.Namespace, settings: Mapping[str, Any], count: int) -> Sequence[int]:
    """Return the numbers of the shards that no earlier launch has answered; the last one if only the merge is missing.

    Shards that a job answers now are left out. Raises what `fivetune predict` would raise on the nodes, for the first
    records too.

    Args:
        given: arguments of `fivetune predict`.
    """
    from fivetune.data.readers.records import check_source
    from fivetune.data.shard import Shard
    from fivetune.errors import ConfigError
    from fivetune.rundir import read_status, refuse_foreign
    from fivetune.rundir.export_file import read_export
    from fivetune.rundir.records import Prediction
    from fivetune.training.answers.answer_folder import find_answers, list_busy_shards
    from fivetune.training.answers.inputs import OWN_SOURCE, iter_input_rows
    from fivetune.training.answers.loading import resolve_config
    from fivetune.training.answers.model_folder import find_answering_checkpoint
    from fivetune.training.answers.predicted_file import PredictedRow, PredictionCounts
    from fivetune.training.answers.shards import list_open_shards, refuse_other_work

    run = Path(given.run)
    refuse_foreign(run)
    if read_export(run) is None:
        find_answering_checkpoint(run, read_status(run))
    check_source(given.input, allows_lines=True)
    config = resolve_config(run, settings, OWN_SOURCE)
    records = iter_input_rows(given.input, config.task, config.data.columns, config.data.header)
    rows = [PredictedRow(row, Prediction(id=row.id)) for row in islice(records, max(count, CHECKED_RECORDS))]
    if len(rows) < count:
        raise ConfigError(f"--shards {count}: {given.input} has {len(rows)} records. Give at most as many.")
    if config.task.plugin_name() != "mixture":  # its parts have columns of their own
        PredictionCounts.count(rows).refuse_none_answered()
    folder = find_answers(Path(given.output))
    if not folder.is_dir():
        return range(1, count + 1)
    shard = Shard(count=count)
    refuse_other_work(folder, shard)
    missing = list_open_shards(folder, shard) or [count]
    busy = list_busy_shards(folder, shard)
    if not busy:
        return missing
    named = f"{given.output}: a job still answers shard {', '.join(map(str, busy))} of {count}"
    free = [number for number in missing if number not in busy]
    if not free:
        raise ConfigError(f"{named}, and no other is missing. Wait for it.")
    print_text(f"{named}, not submitted again")
    return free


def _launch_preparation(args: argparse.Namespace, launcher: Launcher) -> int:
    """Start the jobs that tokenise the data of a recipe into one folder or bucket."""
    from fivetune import plugins
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides

    plugins.import_plugin("commands", "prepare").refuse_wrong_place("--prepare", args.prepare)
    config = load_config(args.recipe, parse_overrides(args.settings))
    words = ["prepare", args.recipe, "--output", args.prepare, "--quiet", *args.settings]
    if launcher.shares_files:
        fetch_inputs([config], models=not args.dry_run)
    paths = list_paths(config) if launcher.shares_files else []
    if "://" not in args.prepare:
        paths.append(args.prepare)
    placed = launcher.model_copy(update={"gpus": 0})
    return _launch_work(args, placed, args.prepare, words, range(1, args.shards + 1), paths)


def _launch_work(
    args: argparse.Namespace,
    launcher: Launcher,
    output: str,
    words: Sequence[str],
    numbers: Sequence[int],
    paths: Sequence[str],
) -> int:
    """Submit jobs that each do a shard of a command. Their files are beside the output; of a URL in this folder."""
    from fivetune.fleet.launchers import SharedWork
    from fivetune.rundir import build_sibling_path

    place = Path(output).name if "://" in output else output
    work = SharedWork(tuple(words), tuple(paths), tuple(numbers), args.shards)
    name = Path(place).resolve().name  # of `.` too
    plan = build_job(name, [], build_sibling_path(place, args.on), nproc=launcher.gpus or 1, work=work, paths=paths)
    submit_job(launcher, plan, launcher.render(plan), args)
    return 0


def _launch_seeds(args: argparse.Namespace, launcher: Launcher, config: RunConfig, given: Mapping[str, Any]) -> int:
    """Start the runs of a recipe with several seeds: one job per run, and one for the page."""
    from fivetune.errors import ConfigError
    from fivetune.fleet.experiments.seeds import build_seed_sweep

    if "run.seed" in given:
        raise ConfigError(f"--run.seed {given['run.seed']}: --seeds gives each run its seed. Omit one of them.")
    sweep = build_seed_sweep(args.recipe, config, args.seeds)
    if not launch_sweep(sweep, launcher, args, flags=["--no-preflight"] if args.no_preflight else []):
        print_text(f"{sweep.folder}: all {len(sweep.runs)} runs are finished. Compare: fivetune compare {sweep.folder}")
        if args.json:
            print_json({"job": None, "files": [], "runs": {}})
    return 0


def _refuse_wrong_start(args: argparse.Namespace, folder: Path, *, may_fetch: bool) -> None:
    """Raise what `fivetune train` would raise on the node: the run directory is in use, or has nothing to resume.

    Args:
        may_fetch: the run to resume may be in a bucket.
    """
    from fivetune.config.recipes import refuse_missing_run
    from fivetune.errors import RunDirError
    from fivetune.rundir import find_conflict

    if args.resume:
        refuse_missing_run(args.recipe)
        if not folder.is_dir() and not may_fetch:
            raise RunDirError(f"{folder}: there is no run to resume. Leave --resume out to start it.")
    elif not args.overwrite and (conflict := find_conflict(folder)):
        raise RunDirError(conflict)


def read_change_time(folder: Path) -> int:
    """Read when a run's status was written; 0 if it has none."""
    try:
        return (folder / "status.json").stat().st_mtime_ns
    except OSError:
        return 0


def watch_new_run(folder: Path, before: int) -> None:
    """Wait until the job has written the run's status, then show it as `fivetune watch` does.

    Args:
        before: the change time of the status before the submission, of an earlier run in the directory.
    """
    from fivetune import plugins

    print_text(f"waiting for {folder}; Ctrl-C leaves the job alone")
    try:
        while read_change_time(folder) in (0, before):
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return
    plugins.import_plugin("commands", "watch").run(argparse.Namespace(folder=folder, once=False, interval=1.0))
