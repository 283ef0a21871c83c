"""Trim a model's vocabulary to the pieces that data use.

For one language mT5 becomes a third of its size.
In: a model folder, and the data that it will be trained on and used for. Out: a folder with model and tokenizer, that
FiveTune and plain transformers load. Before it is written it is proved that the segmentation of all the data is the
same, that the scores of all kept pieces are the same on a sample, and how many greedy answers to that sample are.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import add_flag, print_json, print_table, print_text, print_warning
from fivetune.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from fivetune.data.readers.texts import TextReader
    from fivetune.training.answers.trimmed import TrimProof

TAKES_SETTINGS = True
SAMPLE_SIZE = 32  # pairs of input and target whose logits and answers are compared
NUM_SHOWN = 20  # unknown characters
TRAINING_BYTES = 16  # of a parameter: weight, gradient, AdamW's two moments, in fp32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model folder, hub name, or t5-nano")
    parser.add_argument("--data", metavar="DATA", nargs="+", required=True, help="data files, folders or hub names")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument(
        "--task",
        help="task that reads the data: pieces of its inputs, with their template, and of its targets are kept; "
        "default: those of all texts of a record but its id",
    )
    parser.add_argument(
        "--text", metavar="TEXT", nargs="+", default=[], help="further texts whose pieces are kept, such as a prefix"
    )
    parser.add_argument(
        "--margin", metavar="N", type=int, default=1000, help="further pieces, those of the lowest ids; default: 1000"
    )
    parser.add_argument("--tokenizer", help="folder or hub name, if the model's folder has none")
    add_flag(parser, "--json", "print one JSON object instead of the table")
    parser.epilog = "Settings: --task.OPTION VALUE, --data.columns.question Frage"


def run(args: argparse.Namespace) -> int:
    from fivetune.rundir.progress import Progress

    if args.margin < 0:
        raise ConfigError(f"--margin {args.margin}: is not a number of pieces. Allowed: 0 or more. Try 1000.")
    if args.output.exists():
        raise ConfigError(f"--output {args.output}: exists. Give another folder, or delete that one.")
    staging = args.output.with_name(f".{args.output.name}.{os.getpid()}.trim")
    try:
        with Progress() as progress:
            facts = _trim(args, staging, progress.update)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for text in facts["warnings"]:
        print_warning(text)
    if args.json:
        print_json(facts)
    else:
        _print_facts(facts, args.output)
    return 0


def _trim(args: argparse.Namespace, staging: Path, on_progress: Callable[..., None]) -> dict[str, Any]:
    """Trim, prove, write; returns the facts that --json prints."""
    from fivetune.model import trim
    from fivetune.model.files import find_folder, read_model_config
    from fivetune.model.load import load_model_and_tokenizer
    from fivetune.model.save import replace_folder, save_model
    from fivetune.model.tokenizer import load_tokenizer
    from fivetune.training.answers.trimmed import compare_samples, compute_sample

    reader = _build_reader(args)
    folder = find_folder(args.model)
    tokenizer = load_tokenizer(args.tokenizer, folder, key="--tokenizer")
    trim.refuse_untrimmable(read_model_config(folder), tokenizer, args.model)
    generation = trim.read_generation_settings(folder)  # before transformers does, which raises errors of its own
    loaded = load_model_and_tokenizer(args.model, tokenizer=args.tokenizer, tokenizer_key="--tokenizer")
    model = loaded.model
    tokenizer = loaded.tokenizer
    # The kept pieces: used by the data, named in the configuration, and a margin.
    counts, characters, pairs = _count_ids(reader, args.text, tokenizer, model.config.vocab_size, on_progress)
    settings: Any = model.config
    config_ids = _list_config_ids([settings.to_dict(), generation], settings.vocab_size, args.model)
    kept = trim.choose_ids(tokenizer, counts, characters, config_ids=config_ids, margin=args.margin)
    if len(kept) == model.config.vocab_size:
        raise ConfigError(
            f"{args.model}: the data use {(counts > 0).sum():,} of {len(tokenizer):,} pieces; with --margin "
            f"{args.margin} none is left to drop. Give a smaller margin, or train the model as it is."
        )
    # The proof needs the whole model's figures: its tables are cut in place.
    before = _measure(model, len(tokenizer))
    on_progress("computing a sample with the whole model", 0, len(pairs))
    whole = compute_sample(model, tokenizer, pairs, kept=kept)
    # The new tokenizer must divide all texts as the old one before anything is written.
    with tempfile.TemporaryDirectory(prefix="fivetune-tokenizer-") as place:
        trimmed = trim.trim_tokenizer(tokenizer, kept, Path(place))
        texts = _report_texts(_iter_all_texts(reader, args.text), "comparing segmentations", on_progress)
        num_tokens = trim.verify_segmentation(tokenizer, trimmed, kept, texts)
        trim.trim_tables(model, kept)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        generation |= trim.replace_token_ids(generation, kept)
        save_model(model, trimmed, staging, generation=generation, card=_build_card(args, len(kept)))
    # Only what is read back from the disk is proved, with the memory of one model.
    del model, loaded
    on_progress("computing a sample with the trimmed model", 0, len(pairs))
    read_back = load_model_and_tokenizer(str(staging))
    proof = compare_samples(whole, compute_sample(read_back.model, read_back.tokenizer, pairs), kept)
    replace_folder(staging, args.output)
    unknown = trim.find_unknown_characters(tokenizer, characters)
    return {
        "output": str(args.output),
        "records": reader.num_read,
        "skipped": reader.num_skipped,
        "tokens": num_tokens,
        "used_pieces": int((counts > 0).sum()),
        "before": before,
        "after": _measure(read_back.model, len(trimmed)),
        "sample": {name: getattr(proof, name) for name in proof.__slots__},
        "warnings": _list_warnings(reader, proof, unknown, int(counts[tokenizer.unk_token_id])),
    }


def _list_config_ids(tables: Sequence[dict[str, Any]], num_rows: int, model: str) -> list[int]:
    """List the ids of tokens in config.json and generation_config.json, which are kept."""
    from fivetune.model.trim import list_token_ids

    kept: list[int] = []
    for table in tables:
        for name, ids in list_token_ids(table).items():
            for one in ids:
                if one >= num_rows:
                    raise ModelError(
                        f"{model}: {name} has the id {one}, and the table has {num_rows:,} rows. Correct config.json "
                        "or generation_config.json."
                    )
            kept += ids
    return kept


def _build_reader(args: argparse.Namespace) -> TextReader:
    """Check the data and the settings, and build their reader."""
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.data.readers.records import check_source
    from fivetune.data.readers.texts import TextReader

    settings = parse_overrides(args.settings)
    for key in settings:
        if not key.startswith(("data.columns.", "data.header")) and not (args.task and key.startswith("task.")):
            raise ConfigError(
                f"--{key}: not a setting of trim-vocab. Allowed: --data.columns.NAME COLUMN, --header NAMES, and with "
                "--task --task.OPTION VALUE."
            )
    for source in args.data:
        check_source(source)
    config = load_config({"model": {"path": args.model}, "task": {"name": args.task or "jsonl"}}, settings)
    return TextReader(tuple(args.data), config.task if args.task else None, config.data.columns, config.data.header)


def _count_ids(
    reader: TextReader, further: Sequence[str], tokenizer: Any, num_rows: int, on_progress: Callable[..., None]
) -> tuple[Any, set[str], list[tuple[str, str]]]:
    """Count the ids of all texts; returns also their characters, and a random sample of (input, target)."""
    import numpy as np

    from fivetune.model.trim import iter_ids

    characters: set[str] = set()
    pairs: list[tuple[str, str]] = []
    chance = random.Random(0)

    def read() -> Iterator[str]:
        for number, texts in enumerate(reader.read()):
            # A reservoir: each pair read so far is in the sample with the same chance.
            place = number if number < SAMPLE_SIZE else chance.randrange(number + 1)
            if place < SAMPLE_SIZE:
                pairs[place : place + 1] = [(texts[0], texts[min(1, len(texts) - 1)])]
            yield from texts
        yield from (*reader.label_words, *further)

    counts = np.zeros(num_rows, np.int64)
    for text, ids in iter_ids(tokenizer, _report_texts(read(), "counting pieces", on_progress)):
        np.add.at(counts, ids, 1)
        characters.update(text)
    return counts, characters, pairs


def _iter_all_texts(reader: TextReader, further: Sequence[str]) -> Iterator[str]:
    for texts in reader.read():
        yield from texts
    yield from (*reader.label_words, *further)


def _report_texts(texts: Iterator[str], what: str, on_progress: Callable[..., None]) -> Iterator[str]:
    """Yield the texts and report their number."""
    for number, text in enumerate(texts, 1):
        if number % 1_000 == 0:
            on_progress(what, number)
        yield text


def _measure(model: Any, num_pieces: int) -> dict[str, int]:
    from fivetune.model.load import count_parameters

    count = count_parameters(model)
    return {
        "pieces": num_pieces,
        "rows": model.config.vocab_size,
        "parameters": count,
        "weight_bytes": 4 * count,
        "training_bytes": TRAINING_BYTES * count,
    }


def _build_card(args: argparse.Namespace, num_rows: int) -> str:
    sources = ", ".join(args.data)
    return (
        f"# {args.output.name}\n\n{args.model} with a vocabulary of {num_rows:,} pieces: those that {sources} use"
        f"{f' as task {args.task}' if args.task else ''}, and a margin of {args.margin:,}. Written by `fivetune "
        "trim-vocab`; all other weights are unchanged.\n"
    )


def _list_warnings(reader: TextReader, proof: TrimProof, unknown: Sequence[str], num_unknown: int) -> list[str]:
    found: list[str] = []
    if reader.num_skipped:
        found.append(f"{reader.num_skipped:,} of {reader.num_read:,} records cannot be used: {reader.first_bad}")
    if num_unknown:
        shown = " ".join(unknown[:NUM_SHOWN]) + (" ..." if len(unknown) > NUM_SHOWN else "")
        found.append(
            f"the tokenizer does not know {len(unknown):,} characters of the data: {shown} ({num_unknown:,} unknown "
            "tokens, before and after). Choose a model whose vocabulary covers the language."
        )
    if proof.num_dropped:
        found.append(
            f"{proof.num_dropped} of {proof.num_pairs} answers of the whole model contain a piece that is dropped, "
            "because the data do not have it: usual before the model is trained. A larger --margin keeps more pieces."
        )
    num_ties = proof.num_pairs - proof.num_restricted
    if num_ties:
        found.append(
            f"{num_ties} of {proof.num_pairs} answers differ although the scores are equal: ties of two pieces."
        )
    return found


def _print_facts(facts: dict[str, Any], output: Path) -> None:
    from fivetune.errors import format_size

    before = facts["before"]
    after = facts["after"]
    sample = facts["sample"]
    titles = {"pieces": "pieces", "rows": "rows of the tables", "parameters": "parameters"}
    sizes = {"weight_bytes": "weights in fp32", "training_bytes": "weights, gradients, AdamW in fp32"}
    rows = [(title, f"{before[key]:,}", f"{after[key]:,}") for key, title in titles.items()]
    rows += [(title, format_size(before[key]), format_size(after[key])) for key, title in sizes.items()]
    print_table(("", "before", "after"), rows)
    print(f"data    {facts['records']:,} records, {facts['tokens']:,} tokens of {facts['used_pieces']:,} pieces")
    print(f"proved  the same segmentation of all {facts['tokens']:,} tokens")
    print(
        f"        the same scores of all kept pieces on {sample['num_pairs']} examples; largest difference "
        f"{sample['logit_error']:.1g} of the largest score"
    )
    num = sample["num_pairs"]
    dropped = sample["num_dropped"]
    equal = f"{sample['num_restricted']} of {num} greedy answers"
    print(f"        {equal} are those of the whole model without the dropped pieces")
    why = f"; {dropped} of its answers contain a dropped piece" if dropped else ""
    print(f"answers {sample['num_equal']} of {num} are those of the whole model with all its pieces{why}")
    print_text(f"model   {output}")
