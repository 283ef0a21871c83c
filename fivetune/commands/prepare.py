"""Tokenise the data of a recipe into the cache that its run reads.

In: a recipe. Out: one line each for data.train and data.eval: records, examples, tokens, time, then what is odd about
these data. Nothing is trained, and
only the tokenizer of the model is read. An interrupted build continues after the last complete 50,000 examples.
"""

from __future__ import annotations

import argparse
import shlex
import time
from typing import Any

from fivetune.commands import print_json

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, name of a shipped recipe, or a run directory")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "Any setting can follow: --data.train train.json --data.max_input_tokens 1024"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.data.store import get_cache_folder
    from fivetune.errors import ConfigError
    from fivetune.progress import Progress

    config = load_config(args.recipe, parse_overrides(args.settings))
    progress = Progress(quiet=args.quiet)
    progress.start()
    try:
        found = _prepare_splits(config, progress)
    finally:
        progress.close()
    if not found:
        raise ConfigError("data.train: no data is given. Add --data.train FILE or --data.eval FILE.")
    cache = get_cache_folder(config.data.cache_dir)
    for name, facts in found.items():
        print(_format_split(name, facts), *(f"warning: {note}" for note in facts["notes"]), sep="\n")
    print(f"cache   {cache}")
    print(f"The run reads it from there: {shlex.join(['fivetune', 'train', args.recipe, *args.settings])}")
    if args.json:
        print_json({"cache": str(cache), **found})
    return 0


def _prepare_splits(config: Any, progress: Any) -> dict[str, dict[str, Any]]:
    """Prepare "train" and "eval", as far as the recipe has them; returns the counts and seconds of each."""
    from fivetune.model.load import find_source
    from fivetune.model.tokenizer import load_tokenizer
    from fivetune.training.mixture import select_part
    from fivetune.training.preflight import iter_data_notes
    from fivetune.training.setup import prepare_split
    from fivetune.training.sources import check_sources, with_data_labels

    config, model = select_part(config), config.model
    check_sources(config)
    config = with_data_labels(config)
    source = find_source(model.path, config=model.config, init=model.init, revision=model.revision)
    tokenizer = load_tokenizer(model.tokenizer, source)
    found = {}
    for split in ("train", "eval"):
        tokenised: list[int] = []

        def report(what: str, done: int, total: int | None = None, seen: list[int] = tokenised) -> None:
            seen.append(done)
            progress.update(what, done, total)

        started = time.perf_counter()
        store = prepare_split(config, tokenizer, split, on_progress=report)
        if store is not None:
            names = ("num_read", "num_skipped", "num_examples", "num_input_tokens", "num_target_tokens")
            facts = {name: store.summary[name] for name in names}
            seconds, notes = time.perf_counter() - started, list(iter_data_notes(split, store.summary))
            if first := store.summary["first_bad"]:
                told = f"{first['where']}: {first['reason'].rstrip('.')}"
                notes.insert(
                    0, f"{split}: records that cannot be used: {store.summary['num_skipped_bad']:,}, first: {told}"
                )
            found[split] = {
                **facts,
                "notes": notes,
                "seconds": seconds,
                "was_there": not tokenised,
            }
    return found


def _format_split(split: str, facts: dict[str, Any]) -> str:
    from fivetune.progress import format_time_span

    tokens = facts["num_input_tokens"] + facts["num_target_tokens"]
    took = f"in {format_time_span(facts['seconds'])}, {facts['num_examples'] / facts['seconds']:,.0f} examples/s"
    return (
        f"{split:<6}  {facts['num_read']:,} records read, {facts['num_skipped']:,} skipped; "
        f"{facts['num_examples']:,} examples of {tokens:,} tokens {'were in the cache' if facts['was_there'] else took}"
    )
