"""Fine-tune by a recipe.

Checks, trains, evaluates, and writes model/ and report.html.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fivetune.commands import (
    add_flag,
    add_strategy,
    format_settings,
    print_json,
    print_scores,
    print_start,
    print_text,
)

if TYPE_CHECKING:
    from fivetune.config import RunConfig

TAKES_SETTINGS = True
REPORT_SECONDS = 10.0  # after a signal: SLURM kills a job 30 seconds after it, and the checkpoint comes first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        help="YAML file, name of a shipped recipe, a data file (see fivetune new), or a run directory (with --resume)",
    )
    add_flag(parser, "--resume", "continue the run in run.dir where it stopped")
    add_flag(parser, "--overwrite", "move an existing run in run.dir aside")
    add_flag(parser, "--no-preflight", "start without the pre-flight checks")
    add_flag(parser, "--quiet", "print the result and warnings only")
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = "Any setting can follow: --optimizer.lr 1e-3 --data.train train.json --train.num_epochs 3"


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.distributed import processes as launch
    from fivetune.distributed.world import World
    from fivetune.errors import IncompleteError
    from fivetune.rundir.figures import describe_weights, find_exported_eval
    from fivetune.scores.metrics.classification import describe_majority

    # One rank reads the recipe and says what is wrong with it.
    world = World.from_environment()
    with world.report_errors_once():
        settings = parse_overrides(args.settings)
        args.recipe = _find_recipe(args, settings)
        proposed = add_strategy(args.recipe, settings, quiet=args.quiet or not world.is_first)
        args.settings += format_settings(proposed)  # for the processes that this one starts
        config = load_config(args.recipe, {**settings, **proposed})
        if world.is_first and not args.resume:
            _refuse_absent_model(config)
    # Several processes are this command again, with the variables of torchrun.
    section = config.launch
    if launch.is_needed(section.nproc, section.nnodes):
        return launch.start_processes(
            _rebuild_words(args), nproc=section.nproc, nnodes=section.nnodes, timeout_minutes=section.timeout_minutes
        )
    from fivetune.training.run import train

    with _report_bad_ending(config.run.dir) if world.is_first else nullcontext():
        done = train(
            config,
            resume=args.resume,
            overwrite=args.overwrite,
            preflight=not args.no_preflight,
            quiet=args.quiet,
            command=shlex.join(["fivetune", *_rebuild_words(args)]),
        )
    if not world.is_first:
        return 0
    # The run is over and saved: what follows is for its user.
    page = _write_report(config.run.dir)
    record = find_exported_eval(done.records)
    if record and not args.json:
        print_text(f"best evaluation, {describe_weights(record, done.status.best)}, {record.num_examples:,} examples:")
        print_scores(record.scores, record.intervals)
        counts = done.data.eval.label_counts if done.data.eval else {}
        words = describe_majority(record.scores, record.rates, counts)
        if words:
            print_text(words)
    adapter = config.model.adapter
    is_virtual = adapter is not None and adapter.is_virtual
    print_text(f"model   {config.run.dir}/model{' (the unchanged base)' if is_virtual else ''}")
    if adapter:
        print_text(f"adapter {config.run.dir}/adapter{' (the virtual tokens)' if is_virtual else ''}")
    print_text(f"report  {page}")
    if args.json:
        best = done.status.best
        print_json(
            {
                "run": config.run.dir,
                "step": done.status.step,
                "best": asdict(best) if best else None,
                "scores": record.scores if record else {},
                "report": str(page),
                "adapter": f"{config.run.dir}/adapter" if adapter else None,
            }
        )
    # A result that misses something has an exit code of its own, after all is printed.
    if done.status.incomplete:
        raise IncompleteError(done.status.incomplete)
    return 0


def _refuse_absent_model(config: RunConfig) -> None:
    """Raise an error for a model that the hub does not give: at once, before torch is imported.

    Absent data and folders are left to the run, which looks at the data and at its bucket before the model.
    """
    from fivetune.data.readers.records import is_hub_name
    from fivetune.errors import ModelError
    from fivetune.model.files import find_folder

    name = config.model.path
    revision = config.model.revision
    sources = (*config.data.train, *config.data.eval)
    if not name or any(not is_hub_name(one) and not Path(one).expanduser().exists() for one in sources):
        return
    with suppress(ModelError):
        find_folder(name, revision=revision)


def _find_recipe(args: argparse.Namespace, settings: Mapping[str, Any]) -> str:
    """Return the recipe of the command; the recipe for a data file is written first."""
    from fivetune.config.recipes import refuse_missing_run
    from fivetune.model.tokenizer import load_hub_tokenizer
    from fivetune.start.files import find_data_recipe

    recipe, started = find_data_recipe(
        args.recipe, settings, resume=args.resume, overwrite=args.overwrite, load_tokenizer=load_hub_tokenizer
    )
    if args.resume:
        refuse_missing_run(recipe)
    if started and not args.quiet and not args.json:
        print_start(started)
    return recipe


def _write_report(folder: str) -> Path:
    """Write report.html; returns its path. The model is saved by now, so an error gives the command for the report."""
    from fivetune.distributed.processes.signals import report_interrupts
    from fivetune.errors import IncompleteError, InterruptedRunError, describe_failure
    from fivetune.reading.report import write_report

    advice = f"The model is saved in {folder}/model. Write the report with: fivetune report {folder}"
    try:
        with report_interrupts(lambda name: f"stopped by {name} while the report was written. {advice}"):
            return write_report(folder)
    except InterruptedRunError:
        raise
    except Exception as error:
        raise IncompleteError(f"{folder}: the report failed: {describe_failure(error)} {advice}") from error


@contextmanager
def _report_bad_ending(folder: str) -> Iterator[None]:
    """Write the report of a run that this process ends in an error after a step or more, and print its path.

    The state is saved by then. After a signal the report has REPORT_SECONDS, because a scheduler kills the process
    soon; another signal ends it at once. Whatever happens here, the error of the run is the one that is raised.
    """
    from fivetune.errors import InterruptedRunError
    from fivetune.rundir import STATUS, STEPS

    status = Path(folder, STATUS)
    steps = Path(folder, STEPS)
    before = _read_change_time(status)
    try:
        yield
    except Exception as error:  # a second signal is none: its user does not wait
        if _read_change_time(status) != before and steps.is_file() and steps.stat().st_size > 0:
            line = _try_report(folder, REPORT_SECONDS if isinstance(error, InterruptedRunError) else None)
            with suppress(OSError):  # a closed terminal
                print(line, file=sys.stderr)
        raise


def _read_change_time(path: Path) -> int | None:
    """Return the time of a file's last change in nanoseconds; None without the file."""
    return path.stat().st_mtime_ns if path.is_file() else None


def _try_report(folder: str, seconds: float | None) -> str:
    """Write report.html in some seconds, which are limited for ranks of torchrun; returns the line to print."""
    from fivetune.distributed.processes.signals import ALL_SIGNALS, handle_signals, raise_interrupt

    def stop(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGTERM or not is_rank:  # torchrun ends this rank with it, because another has ended
            raise_interrupt(signum, frame)

    is_rank = "LOCAL_RANK" in os.environ
    try:
        with handle_signals(ALL_SIGNALS, stop), _restrict_time(REPORT_SECONDS if is_rank else seconds):
            from fivetune.reading.report import write_report

            return f"report  {write_report(folder)}"
    except (KeyboardInterrupt, Exception) as error:
        why = f": {str(error).rstrip('.')}" if isinstance(error, Exception) else ""
        return f"The report is not written{why}. Write it with: fivetune report {folder}"


@contextmanager
def _restrict_time(seconds: float | None) -> Iterator[None]:
    """Send SIGINT to the main thread if its block takes longer: a real signal, which ends a call of the system too."""
    main = threading.main_thread()
    if seconds is None or threading.current_thread() is not main or main.ident is None:
        yield
        return
    timer = threading.Timer(seconds, signal.pthread_kill, (main.ident, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # what it has sent is handled here


def _rebuild_words(args: argparse.Namespace) -> list[str]:
    """Rebuild the words of the command, without the program."""
    words = ["train", args.recipe]
    for name in ("resume", "overwrite", "no_preflight", "quiet", "json", "traceback"):
        if getattr(args, name):
            words.append(f"--{name.replace('_', '-')}")
    return [*words, *args.settings]
