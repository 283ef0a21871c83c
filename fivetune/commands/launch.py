"""Start a run on a cluster: SLURM, Kubernetes or SkyPilot.

Writes the job, submits it and watches the run.
In: a recipe, and the options of the cluster. Out: the job's files beside the run directory, and its id: of one run, or
of an array of runs with different seeds. The settings are checked here, and what a run needs from the hub is
downloaded, because the nodes often have no network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import (
    add_launcher_arguments,
    assign_nodes,
    build_job,
    fetch_inputs,
    format_settings,
    launch_sweep,
    print_job,
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, name of a shipped recipe, or a run directory (with --resume)")
    parser.add_argument("--dry-run", action="store_true", help="print the job; do not write or submit it")
    parser.add_argument("--resume", action="store_true", help="continue the run in run.dir where it stopped")
    parser.add_argument("--overwrite", action="store_true", help="move an existing run in run.dir aside")
    parser.add_argument(
        "--seeds",
        metavar="SEED",
        nargs="+",
        type=int,
        help="train the recipe once with each seed, as an array of runs in run.dir with one page",
    )
    parser.add_argument("--no-preflight", action="store_true", help="start without the pre-flight checks")
    parser.add_argument("--no-watch", action="store_true", help="do not follow the run in the terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
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
    given = parse_overrides(args.settings)
    placed, settings = assign_nodes(launcher, given, read)
    config = load_config(args.recipe, settings)
    if args.seeds:
        return _launch_seeds(args, placed, config, given)
    folder = Path(config.run.dir)
    # Nodes that see these files would refuse a used run directory hours later; here it costs nothing.
    if launcher.shares_files:
        try:
            _refuse_wrong_start(args, folder, may_fetch=config.checkpoint.url is not None)
        except RunDirError as error:
            if not args.dry_run:
                raise
            print(f"fivetune: without --dry-run this is refused: {error}", file=sys.stderr)
    # The words of `fivetune train` on the node: this command's words, and what was decided above.
    flags = [f"--{name.replace('_', '-')}" for name in ("resume", "overwrite", "no_preflight") if getattr(args, name)]
    if config.checkpoint.url and not (launcher.shares_files or args.resume or args.overwrite):
        flags.append("--resume")  # a job that is started again has an empty disk, and a first start nothing to resume
    added = {key: value for key, value in settings.items() if key not in given}
    run = JobRun(folder.name, str(folder), args.recipe, (*args.settings, *format_settings(added)), tuple(flags))
    plan = build_job(folder.name, [run], config, build_sibling_path(str(folder), args.on))
    files = placed.render(plan)
    if args.dry_run:
        print_job(files, as_json=args.json)
        return 0
    # The nodes often have no network.
    if launcher.shares_files:
        fetch_inputs([config])
    # An earlier run in the directory must not be taken for the new one.
    before = read_change_time(folder)
    submit_job(placed, plan, files, as_json=args.json)
    if launcher.shares_files and not (args.no_watch or args.json) and sys.stdout.isatty():
        watch_new_run(folder, before)
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
