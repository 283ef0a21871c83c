"""Print a recipe's settings, the manual, or the JSON schema."""

from __future__ import annotations

import argparse
import json

from fivetune.commands import add_flag, print_json

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="YAML file, name of a shipped recipe, or run directory")
    add_flag(parser, "--schema", "print the JSON schema of recipes, for editors")
    add_flag(parser, "--manual", "print docs/config.md")
    add_flag(parser, "--json", "print the settings as one JSON object, not as YAML")
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
    elif args.recipe:
        config = load_config(args.recipe, parse_overrides(args.settings))
        if args.json:
            print_json(config.as_redacted_dict())
        else:
            print(config.as_redacted_yaml(), end="")
    else:
        raise ConfigError("config: nothing to print. Give a recipe, --schema or --manual.")
    return 0
