"""Tokenise the data of a recipe, once for all runs.

Into the cache that its run reads, or for other machines into a folder or bucket.
In: a recipe. Out: one line each for data.train and data.eval: records, examples, tokens, time, then what is odd about
these data. Nothing is trained, and only the tokenizer of the model is read. An interrupted build continues after the
last complete shard, of 32 MB or 50,000 examples.
"""

from __future__ import annotations

import argparse
import re
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fivetune.commands import add_flag, format_open_shards, print_json, print_text

if TYPE_CHECKING:
    from fivetune.data.shard import Shard

TAKES_SETTINGS = True
COUNTS = ("num_read", "num_skipped", "num_examples", "num_input_tokens", "num_target_tokens")

Prepared = dict[str, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, name of a shipped recipe, or a run directory")
    parser.add_argument(
        "--output",
        help="folder or URL (s3://bucket/path, gs://, hf://) for shards and their index, from which any machine "
        "trains; default: the cache of this machine",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        default="1/1",
        help="with --output: tokenise the I-th of every N stretches of records; N such commands, on any machines, do "
        "all, and the last one writes the index; fivetune launch RECIPE --prepare PLACE starts them",
    )
    add_flag(parser, "--quiet", "print the result only")
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = "Any setting can follow: --data.train train.json --data.max_input_tokens 1024"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.data.shard import Shard
    from fivetune.data.store.token_store import get_cache_folder
    from fivetune.errors import ConfigError
    from fivetune.rundir.progress import Progress

    shard = Shard.parse(args.shard)
    if shard.count > 1 and args.output is None:
        raise ConfigError(f"--shard {shard}: several jobs share a folder or bucket. Add --output PLACE.")
    config = load_config(args.recipe, parse_overrides(args.settings))
    if args.output is not None:
        refuse_wrong_place("--output", args.output)
    with Progress(quiet=args.quiet) as progress:
        found = _prepare_splits(config, args.output, shard, progress)
    missing = {name: facts["missing"] for name, facts in found.items() if "missing" in facts}
    if missing:
        for name, numbers in missing.items():
            print_text(f"{name}: shard {shard} is written; {format_open_shards(numbers, shard.count)}")
        if args.json:
            print_json({"output": args.output, "missing_shards": missing})
        return 0
    if not found:
        raise ConfigError("data.train: no data is given. Add --data.train FILE or --data.eval FILE.")
    for name, facts in found.items():
        print_text("\n".join([_format_split(name, facts), *(f"warning: {note}" for note in facts["notes"])]))
    if args.output is None:
        place = str(get_cache_folder(config.data.cache_dir))
        print_text(f"cache   {place}")
        command = ["fivetune", "train", args.recipe, *args.settings]
    else:
        place = args.output
        print_text(f"output  {place}")
        settings: list[str] = []  # with which a run reads the written data
        for name, facts in found.items():
            part, _, split = name.rpartition(" ")
            settings += [f"--task.parts.{part}.{split}" if part else f"--data.{split}", facts["location"]]
        if config.data.eval_share is not None:  # the share is a set of its own now
            settings += ["--data.eval_share", "null"]
        command = ["fivetune", "train", args.recipe, *_drop_settings(args.settings, settings), *settings]
    print_text(f"The run reads it from there: {shlex.join(command)}")
    if args.json:
        print_json({"cache" if args.output is None else "output": place, **found})
    return 0


def refuse_wrong_place(option: str, place: str) -> None:
    """Raise ConfigError for a place that an option gives and that names no bucket or folder."""
    from fivetune.errors import ConfigError

    if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:/*|", place):
        raise ConfigError(f"{option} {place!r}: names no bucket or folder. Give s3://bucket/path, or a folder.")


def _prepare_splits(config: Any, output: str | None, shard: Shard, progress: Any) -> Prepared:
    """Prepare "train" and "eval", as far as the recipe has them; returns the counts and seconds of each, or the numbers
    of missing shards.
    """
    from fivetune.model.added_tokens import add_tokens
    from fivetune.model.load import find_source
    from fivetune.model.tokenizer import load_tokenizer
    from fivetune.training.mixture import select_part
    from fivetune.training.sources import check_sources, prepare_split, with_data_labels

    # As the run reads them: a mixture by its parts, labels from the data.
    config, model = select_part(config), config.model
    check_sources(config)
    config = with_data_labels(config)
    source = find_source(model.path, config=model.config, init=model.init, revision=model.revision)
    tokenizer, _ = add_tokens(load_tokenizer(model.tokenizer, source), model.add_tokens)
    if output is not None:
        return _write_splits(config, tokenizer, output, shard, progress)
    found: Prepared = {}
    for split in ("train", "eval"):
        started = time.perf_counter()
        store = prepare_split(config, tokenizer, split, on_progress=progress.update)
        if store is not None:
            seconds = time.perf_counter() - started
            found[split] = _describe_build(split, store.summary, seconds, was_there=not store.is_new)
            if store.rebuilt:
                found[split]["notes"].insert(0, store.rebuilt)
    return found


def _write_splits(config: Any, tokenizer: Any, output: str, shard: Shard, progress: Any) -> Prepared:
    """Write each split to a folder of its name below the output, splits of a mixture below the name of the part."""
    from fivetune.data.storage import join_location
    from fivetune.data.store.build import STRETCH, list_open_jobs
    from fivetune.data.store.prepared import is_prepared, write_prepared
    from fivetune.errors import ConfigError
    from fivetune.tasks.mixture import Mixture
    from fivetune.training.mixture import build_part_configs
    from fivetune.training.sources import describe_split

    # Each part of a mixture has a folder: a run names it as task.parts.NAME.train.
    parts = build_part_configs(config) if isinstance(config.task, Mixture) else {"": config}
    found: Prepared = {}
    for name, part in parts.items():
        for split in ("train", "eval"):
            source = describe_split(part, split)
            if source is None:
                continue
            for path in source.paths:
                if is_prepared(path):
                    raise ConfigError(f"data.{split}: {path} is prepared data already. Name the files it was made of.")
            location = join_location(output, *filter(None, (name, split)))
            started = time.perf_counter()
            title = f"{name} {split}".strip()
            source = replace(source, shard=replace(shard, stretch=STRETCH))
            index, was_there = write_prepared(
                location, source, tokenizer, num_processes=config.data.num_processes, on_progress=progress.update
            )
            if index is None:
                found[title] = {"missing": list_open_jobs(location, shard)}
                continue
            seconds = time.perf_counter() - started
            facts = _describe_build(title, index["summary"], seconds, was_there=was_there)
            facts["num_shards"] = len(index["shards"])
            facts["num_bytes"] = sum(entry["size"] for entry in index["shards"])
            facts["location"] = location
            found[title] = facts
    return found


def _describe_build(name: str, summary: dict[str, Any], seconds: float, *, was_there: bool) -> dict[str, Any]:
    """Return the counts of a build, what is odd about its data, and its seconds.

    Args:
        summary: summary of the store, as in data.json.
        was_there: nothing was tokenised.
    """
    from fivetune.training.checks.data_checks import iter_record_notes

    notes = [f"{name}: {note}" for note in iter_record_notes(summary)]
    return {**{key: summary[key] for key in COUNTS}, "notes": notes, "seconds": seconds, "was_there": was_there}


def _drop_settings(given: list[str], replaced: list[str]) -> list[str]:
    """Return the flags given on the command line without the replaced ones.

    >>> _drop_settings(["--data.train", "a.json", "--run.seed=1"], ["--data.train", "s3://b/train"])
    ['--run.seed=1']
    """
    kept: list[str] = []
    is_kept = True
    for word in given:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in replaced
        if is_kept:
            kept.append(word)
    return kept


def _format_split(split: str, facts: dict[str, Any]) -> str:
    from fivetune.errors import format_size
    from fivetune.rundir.progress import format_time_span

    tokens = facts["num_input_tokens"] + facts["num_target_tokens"]
    outcome = f"in {format_time_span(facts['seconds'])}, {facts['num_examples'] / facts['seconds']:,.0f} examples/s"
    if facts["was_there"]:
        outcome = "were there" if "location" in facts else "were in the cache"
    if "location" in facts:
        shards = "1 shard" if facts["num_shards"] == 1 else f"{facts['num_shards']:,} shards"
        outcome += f"; {shards} of {format_size(facts['num_bytes'])}"
    return (
        f"{split:<6}  {facts['num_read']:,} records read, {facts['num_skipped']:,} skipped; "
        f"{facts['num_examples']:,} examples of {tokens:,} tokens {outcome}"
    )
