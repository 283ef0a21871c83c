"""Inspect data: lengths, duplicates, leaks, lost characters.

Counts, lengths and limits, duplicates, leaks into the evaluation data, and characters that the tokenizer loses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fivetune.commands import print_json, print_page, print_text
from fivetune.errors import ConfigError

TAKES_SETTINGS = True
TOKENIZER = "t5-nano"  # part of the package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA|RECIPE", nargs="+", help="data files, folders or hub names; or a recipe")
    parser.add_argument(
        "--task", help="task that reads them, such as squad_v2 (fivetune list tasks); default: the recipe's"
    )
    parser.add_argument(
        "--tokenizer", help=f"folder or hub name of the model to be trained; default: {TOKENIZER}, or the recipe's"
    )
    parser.add_argument("--against", metavar="EVAL", nargs="+", default=[], help="evaluation data, to find leaks")
    parser.add_argument(
        "--near",
        metavar="SHARE",
        type=float,
        default=0.8,
        help="least Jaccard similarity of word triples of near duplicates; default: 0.8",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the result as one HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.epilog = (
        "Settings: --task.OPTION VALUE, --data.columns.question Frage, --header en,de, --data.max_input_tokens 384"
    )


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.reading.report.inspect import build_inspection_page
    from fivetune.reading.report.page.render import render_html
    from fivetune.rundir import write_text
    from fivetune.rundir.progress import Progress

    if not 0 < args.near <= 1:
        raise ConfigError(f"--near: {args.near} is not a similarity. Allowed: above 0, at most 1. Try 0.8.")
    with Progress() as progress:
        facts = _collect_facts(args, parse_overrides(args.settings), progress.update)
    page = build_inspection_page(facts)
    if args.html:
        write_text(args.html, render_html(page))
    if args.json:
        print_json(facts)
        return 0
    print_page(page)
    if facts["recipe"]:
        print("A recipe for this data:", facts["recipe"], sep="\n")
    if args.html:
        print_text(f"page    {args.html}")
    return 0


def _collect_facts(args: argparse.Namespace, settings: dict[str, Any], on_progress: Any) -> dict[str, Any]:
    """Collect the facts that --json prints."""
    from fivetune.config import load_config
    from fivetune.config.layers import as_yaml
    from fivetune.data.inspect import InspectedDataset, inspect_datasets, read_dataset
    from fivetune.data.readers.records import check_source
    from fivetune.data.store.encode import LengthLimits
    from fivetune.model.added_tokens import add_tokens
    from fivetune.model.tokenizer import load_local_tokenizer, load_tokenizer
    from fivetune.scores.analysis.slices import find_question_word
    from fivetune.tasks.classification import Classification

    for key in settings:
        if not key.startswith(("task.", "data.")):
            raise ConfigError(f"--{key}: not a setting of inspect. Allowed: --task.OPTION VALUE, --data.SETTING VALUE.")
    # A recipe names its data, task and tokenizer; files need --task.
    is_recipe = len(args.data) == 1 and args.data[0].endswith((".yaml", ".yml")) and args.task is None
    if args.task is None and not is_recipe:
        raise ConfigError("--task: is needed to read data: fivetune new DATA finds it. A recipe has its own.")
    table = {"model": {"path": args.tokenizer or TOKENIZER}, "task": {"name": args.task}}
    config = load_config(args.data[0] if is_recipe else table, settings)
    task = config.task
    data = config.data
    if is_recipe:
        args.data = list(data.train)
        args.against = [*args.against, *data.eval]
        path = config.model.path
        if not args.tokenizer and path is not None and load_local_tokenizer(path) is not None:
            args.tokenizer = path
    absent_model = config.model.path if is_recipe and not args.tokenizer else None
    args.tokenizer = args.tokenizer or TOKENIZER
    for source in (*args.data, *args.against):
        check_source(source)
    tokenizer, _ = add_tokens(load_tokenizer(args.tokenizer, Path(), key="--tokenizer"), config.model.add_tokens)
    given = {"train": (args.data, data.max_train_examples), "eval": (args.against, data.max_eval_examples)}
    # The sets in full: leaks and duplicates are found between any two records.
    sets: dict[str, InspectedDataset] = {}
    for name, (sources, max_records) in given.items():
        if sources:
            sets[name] = read_dataset(
                sources, task, data.columns, header=data.header, max_records=max_records, on_progress=on_progress
            )
    limits = LengthLimits(data.max_input_tokens, data.max_target_tokens, data.overlong, data.window_overlap)

    def get_question_word(example: Any) -> list[str]:
        question = example.meta.get("question")
        return [find_question_word(str(question))] if question else []

    facts = inspect_datasets(
        sets,
        task,
        tokenizer,
        limits=limits,
        near_threshold=args.near,
        kinds={"question word": get_question_word},
        on_progress=on_progress,
    )
    recipe = ""
    if isinstance(task, Classification) and not is_recipe:  # a recipe that trains on the inspected data
        options = task.model_dump(mode="json", exclude_defaults=True)
        used = {"train": args.data, "eval_share": 0.1}
        if args.against:
            used = {"train": args.data, "eval": args.against}
        own = {"model": {"path": args.tokenizer}, "task": {"name": task.plugin_name(), **options}, "data": used}
        recipe = as_yaml(own).rstrip()
    return {
        "tokenizer": args.tokenizer,
        "is_default_tokenizer": args.tokenizer == TOKENIZER,
        "absent_model": absent_model,
        "limits": {"input": limits.max_input_tokens, "target": limits.max_target_tokens, "overlong": limits.overlong},
        **facts,
        "recipe": recipe,
    }
