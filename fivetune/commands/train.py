"""Fine-tune as a recipe says: checks, trains, evaluates, writes model/ and report.html."""

from __future__ import annotations

import argparse
import shlex

from fivetune.commands import print_json, print_scores

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, name of a shipped recipe, or a run directory (with --resume)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in run.dir where it stopped")
    parser.add_argument("--overwrite", action="store_true", help="move a run that is in run.dir aside")
    parser.add_argument("--no-preflight", action="store_true", help="start without the pre-flight checks")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "Any setting can follow: --optimizer.lr 1e-3 --data.train train.json --train.num_epochs 3"


def run(args: argparse.Namespace) -> int:
    from fivetune import launch
    from fivetune.config import load_config
    from fivetune.config_layers import parse_overrides
    from fivetune.errors import Incomplete
    from fivetune.report import write_report
    from fivetune.rundir import best_eval
    from fivetune.strategies import World

    world = World.here()
    with world.telling_once():
        config = load_config(args.recipe, parse_overrides(args.settings))
    if launch.is_needed(config.launch.nproc):
        return launch.start(_words(args), nproc=config.launch.nproc)
    from fivetune.training import train

    done = train(
        config, resume=args.resume, overwrite=args.overwrite, preflight=not args.no_preflight, quiet=args.quiet,
        command=shlex.join(["fivetune", *_words(args)]),
    )  # fmt: skip
    if not world.is_first:
        return 0
    try:
        page = write_report(config.run.dir)
    except Exception as error:
        raise Incomplete(f"{config.run.dir}: the model is trained and saved, but the report failed: {error}. "
                         f"Try: fivetune report {config.run.dir}") from error  # fmt: skip
    best = done.status.get("best")
    record = best_eval(done.evals, best)
    if record and not args.json:
        print(f"best evaluation, step {record['step']:,}, {record['num_examples']:,} examples:")
        print_scores(record["scores"])
    print(f"model   {config.run.dir}/model")
    print(f"report  {page}")
    if args.json:
        print_json({"run": config.run.dir, "step": done.status.get("step"), "best": best,
                    "scores": record["scores"] if record else {}, "report": str(page)})  # fmt: skip
    if done.status.get("incomplete"):
        raise Incomplete(done.status["incomplete"])
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The command as it was typed, without the program."""
    flags = [name for name in ("resume", "overwrite", "no_preflight", "quiet", "json") if getattr(args, name)]
    return ["train", args.recipe, *(f"--{name.replace('_', '-')}" for name in flags), *args.settings]
