"""Print the resolved settings of a recipe, the recipe of a transformers command line, the schema, or the manual."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from fivetune.commands import print_json

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="YAML file, name of a shipped recipe, or run directory")
    parser.add_argument("--from-args", metavar="TEXT", help="print a command line of transformers' scripts as a recipe")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors")
    parser.add_argument("--manual", action="store_true", help="print docs/config.md")
    parser.add_argument("--json", action="store_true", help="print the settings as one JSON object, not as YAML")
    parser.epilog = "Any setting can follow: --optimizer.lr 1e-3"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.config.manual import build_manual, build_schema
    from fivetune.errors import ConfigError

    if args.schema:
        print(json.dumps(build_schema(), indent=1, ensure_ascii=False))
    elif args.manual:
        print(build_manual(), end="")
    elif args.from_args is not None:
        print(_convert(args.from_args), end="")
    elif args.recipe:
        config = load_config(args.recipe, parse_overrides(args.settings))
        if args.json:
            print_json(config.as_redacted_dict())
        else:
            print(config.as_redacted_yaml(), end="")
    else:
        raise ConfigError("config: nothing to print. Give a recipe, --from-args, --schema or --manual.")
    return 0


def _convert(text: str) -> str:
    """Convert a command line to a recipe in YAML, after checking that the recipe loads."""
    from fivetune.config import load_config
    from fivetune.config.convert import convert_arguments
    from fivetune.errors import ConfigError, suggest_names
    from fivetune.redaction import redact_secrets, redact_settings

    recipe = convert_arguments(text)
    settings, left_out = dict(recipe.settings), recipe.left_out
    if not settings.keys() & {"model.path", "model.config"}:
        raise ConfigError("--from-args: names no model. Give the arguments with --model_name_or_path MODEL.")
    metric = settings.pop("eval.metric", None)
    allowed = load_config({}, settings).task.list_selectable_scores()
    found = next((name for name in (metric, f"{metric}_f1") if name in allowed), None)  # rougeL is rougeL_f1
    if found:
        settings = {**recipe.settings, "eval.metric": found}  # at its place
    elif metric is not None:
        left_out += (
            f"--metric_for_best_model: the task has no score {metric!r}. {suggest_names(str(metric), allowed)}",
        )
    load_config({}, settings)
    settings, left_out = redact_settings(settings), tuple(map(redact_secrets, left_out))
    return replace(recipe, settings=settings, left_out=left_out).as_yaml()
