"""Look at data before training: counts, lengths and limits, duplicates, leaks into evaluation, lost characters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fivetune.commands import print_json
from fivetune.errors import ConfigError

TAKES_SETTINGS = True
TOKENIZER = "t5-nano"  # carried by the package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", nargs="+", help="data files, folders or hub names")
    parser.add_argument("--task", required=True, help="task that reads them, such as squad_v2 (fivetune list tasks)")
    parser.add_argument(
        "--tokenizer", default=TOKENIZER, help=f"folder or hub name of the model to be trained; default: {TOKENIZER}"
    )
    parser.add_argument("--against", metavar="EVAL", nargs="+", default=[], help="evaluation data: finds what leaks")
    parser.add_argument(
        "--near", metavar="SHARE", type=float, default=0.8,
        help="texts are near duplicates from this Jaccard similarity of their word triples on; default: 0.8",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write everything as one HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.epilog = "Settings: --task.OPTION VALUE, --data.columns.question Frage, --data.max_input_tokens 384"


def run(args: argparse.Namespace) -> int:
    from fivetune.config_layers import parse_overrides
    from fivetune.progress import Progress
    from fivetune.report.inspect import inspection_page, page_lines
    from fivetune.report.render import render
    from fivetune.rundir import write_text

    if not 0 < args.near <= 1:
        raise ConfigError(f"--near: {args.near} is no similarity. Allowed is more than 0, up to 1. Try 0.8.")
    progress = Progress()
    progress.start()
    try:
        facts = _facts(args, parse_overrides(args.settings), progress.count)
    finally:
        progress.close()
    page = inspection_page(facts)
    if args.html:
        write_text(args.html, render(page))
    if args.json:
        print_json(facts)
        return 0
    print(*page_lines(page), sep="\n")
    if args.html:
        print(f"page    {args.html}")
    return 0


def _facts(args: argparse.Namespace, settings: dict[str, Any], count: Any) -> dict[str, Any]:
    """Everything that --json prints."""
    from fivetune.analysis.slices import question_word
    from fivetune.config import load_config
    from fivetune.data.encode import Limits
    from fivetune.data.inspect import inspect, read
    from fivetune.model.load import load_tokenizer

    for key in settings:
        if not key.startswith(("task.", "data.")):
            raise ConfigError(f"--{key}: is no setting of inspect. Allowed: --task.OPTION VALUE, --data.SETTING VALUE.")
    config = load_config({"model": {"path": args.tokenizer}, "task": {"name": args.task}}, settings)
    task, data = config.task, config.data
    tokenizer = load_tokenizer(args.tokenizer, Path())
    sets = {"train": read(args.data, task, data.columns, max_records=data.max_train_examples, count=count)}
    if args.against:
        sets["eval"] = read(args.against, task, data.columns, max_records=data.max_eval_examples, count=count)
    limits = Limits(data.max_input_tokens, data.max_target_tokens, data.overlong, data.window_overlap)

    def word(example: Any) -> list[str]:
        return [question_word(str(example.meta["question"]))] if example.meta.get("question") else []

    facts = inspect(sets, task, tokenizer, limits=limits, near=args.near, kinds={"question word": word}, count=count)
    named = {"input": limits.max_input_tokens, "target": limits.max_target_tokens, "overlong": limits.overlong}
    return {"tokenizer": args.tokenizer, "is_default_tokenizer": args.tokenizer == TOKENIZER, "limits": named, **facts}
