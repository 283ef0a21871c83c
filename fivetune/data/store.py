"""Tokenised data on disk: flat memory-mapped arrays with offsets, cached under a fingerprint.

In: sources, a task, a tokenizer. Out: a TokenStore, whose memory use does not grow with the data.
A store is built in a staging folder and renamed, so that a cached one is always whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fivetune.data.encode import Limits, encode
from fivetune.data.ragged import Ragged, RaggedWriter
from fivetune.data.records import BadRecord, read_records, refuse_duplicate_ids, source_files
from fivetune.errors import DataError, EnvironmentProblem
from fivetune.rundir import write_json
from fivetune.types import RawRecord, TextExample

ENCODING_VERSION = 1  # raise it when the same input would be encoded differently
CHUNK = 1_000  # examples tokenised at once; a fast tokenizer spreads them over all cores
MAX_SKIPS_KEPT = 50  # skipped records that are named; all are counted
NUM_BINS = 30

Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Source:
    """What a store is made from, apart from the tokenizer."""

    paths: tuple[str, ...]
    task: Any
    limits: Limits
    columns: dict[str, str] = field(default_factory=dict)
    on_bad_record: str = "fail"
    max_examples: int | None = None
    for_training: bool = False
    labelled: bool = True


class TokenStore:
    """Examples in token ids and in words.

    `inputs[i]`, `labels[i]` are the ids of example i; `text(i)` gives its words; `summary` counts what was
    read, kept, skipped and cut (the content of data.json).
    """

    def __init__(self, folder: Path) -> None:
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        dtype = getattr(np, self.summary["dtype"])
        self.inputs = Ragged(folder, "inputs", dtype)
        self.labels = Ragged(folder, "labels", dtype)
        self._ids = Ragged(folder, "ids", np.uint8)
        self._texts = Ragged(folder, "texts", np.uint8)

    def __len__(self) -> int:
        return len(self.inputs)

    def id(self, row: int) -> str:
        return self._ids[row].tobytes().decode()

    def text(self, row: int) -> TextExample:
        """The words of example `row`."""
        table = json.loads(self._texts[row].tobytes())
        return TextExample(
            **{**table, "references": tuple(table["references"]), "clippable": tuple(table["clippable"])}
        )

    @property
    def fingerprint(self) -> str:
        return self.summary["fingerprint"]


def prepare(source: Source, tokenizer: Any, *, cache: Path, progress: Progress = lambda what, n: None) -> TokenStore:
    """The store of a source: from the cache if nothing that decides it has changed, else built now.

    Raises DataError for a source that is wrong or leaves no example.
    """
    fingerprint = fingerprint_of(source, tokenizer)
    folder = cache / fingerprint
    if not (folder / "summary.json").is_file():
        _build(folder, source, tokenizer, fingerprint, progress)
    return TokenStore(folder)


def cache_folder(configured: str | None) -> Path:
    """Where tokenised data is kept: as configured, else $XDG_CACHE_HOME/fivetune or ~/.cache/fivetune."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(root) / "fivetune"


def fingerprint_of(source: Source, tokenizer: Any) -> str:
    """Hash of everything that decides the store: content, tokenizer, task and template, limits, code."""
    digest = blake2b(digest_size=16)
    settings = {
        "version": ENCODING_VERSION,
        "task": [source.task.plugin_name(), source.task.version, source.task.model_dump(mode="json")],
        "limits": [source.limits.max_input_tokens, source.limits.max_target_tokens, source.limits.overlong],
        "columns": source.columns,
        "rest": [source.on_bad_record, source.max_examples, source.for_training, source.labelled],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "paths": list(source.paths),
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for path in source.paths:
        for file in source_files(path):
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary and of how it treats a probe text."""
    probe = tokenizer('A probe: "It\'s 1,234.5 €", été <b>x</b>\n\t{a}  b', verbose=False)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return blake2b(json.dumps([probe, vocabulary]).encode(), digest_size=16).hexdigest()


def _build(folder: Path, source: Source, tokenizer: Any, fingerprint: str, progress: Progress) -> None:
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder.parent}: cannot be written: {error.strerror}. Choose another data.cache_dir."
        ) from None
    try:
        summary = _fill(staging, source, tokenizer, progress)
        write_json(staging / "summary.json", {"fingerprint": fingerprint, **summary})
        if not folder.exists():
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Counts:
    """What was read, kept, skipped and cut, as data.json shows it."""

    def __init__(self) -> None:
        self.num_read = self.num_kept = self.num_skipped = 0
        self.num_examples_clipped = self.num_clipped_input_tokens = 0
        self.num_clipped_targets = self.num_answers_lost = self.num_unknown_tokens = 0
        self.skips: list[dict[str, str]] = []

    def skip(self, bad: BadRecord) -> None:
        self.num_read += 1
        self.num_skipped += 1
        if len(self.skips) < MAX_SKIPS_KEPT:
            self.skips.append({"where": bad.where, "reason": bad.reason})


def _fill(folder: Path, source: Source, tokenizer: Any, progress: Progress) -> dict[str, Any]:
    dtype = np.uint16 if len(tokenizer) <= np.iinfo(np.uint16).max else np.uint32
    writers = [
        RaggedWriter(folder, name, kind)
        for name, kind in (("inputs", dtype), ("labels", dtype), ("ids", np.uint8), ("texts", np.uint8))
    ]
    counts = _Counts()
    examples = _examples(source, counts)
    try:
        while chunk := list(islice(examples, CHUNK)):
            _write_chunk(chunk, source, tokenizer, writers, counts)
            progress(f"tokenising {', '.join(source.paths)}", counts.num_kept)
    finally:
        for writer in writers:
            writer.close()
    if not counts.num_kept:
        raise DataError(f"{', '.join(source.paths)}: no example is left of {counts.num_read} records. "
                        "Check task.name and data.columns.")  # fmt: skip
    return {**_lengths(folder, dtype, source.limits), **vars(counts), "source": list(source.paths)}


def _examples(source: Source, counts: _Counts) -> Iterator[TextExample]:
    """The task's examples, bad records raised or counted."""
    on_bad = counts.skip if source.on_bad_record == "skip" else None
    for record in islice(refuse_duplicate_ids(_records(source, on_bad), on_bad=on_bad), source.max_examples):
        try:
            example = source.task.to_text(record, labelled=source.labelled)
        except DataError as error:
            if on_bad is None:
                raise
            counts.skip(BadRecord(record.where, str(error).removeprefix(f"{record.where}: ")))
            continue
        if example is None:
            counts.skip(BadRecord(record.where, f"left out by task {source.task.plugin_name()}"))
        else:
            counts.num_read += 1
            yield example


def _records(source: Source, on_bad: Callable[[BadRecord], None] | None) -> Iterable[RawRecord]:
    for path in source.paths:
        yield from read_records(path, columns=source.columns, on_bad=on_bad)


def _write_chunk(
    chunk: list[TextExample], source: Source, tokenizer: Any, writers: list[RaggedWriter], counts: _Counts
) -> None:
    counts.num_kept += len(chunk)
    if source.for_training:
        pairs = [(example, target) for example in chunk for target in source.task.train_targets(example)]
    else:
        pairs = [(example, example.targets) for example in chunk]
    encoded = encode(tokenizer, [e for e, _ in pairs], [t for _, t in pairs], limits=source.limits)
    unknown = tokenizer.unk_token_id
    for (example, target), tokens in zip(pairs, encoded, strict=True):
        text = {"id": example.id, "inputs": example.inputs, "targets": target, "references": example.references,
                "clippable": example.clippable, "meta": dict(example.meta)}  # fmt: skip
        rows = (tokens.input_ids, tokens.labels, example.id.encode(), json.dumps(text, ensure_ascii=False).encode())
        for writer, row in zip(writers, rows, strict=True):
            writer.append(row)
        counts.num_examples_clipped += tokens.num_clipped_inputs > 0
        counts.num_clipped_input_tokens += tokens.num_clipped_inputs
        counts.num_clipped_targets += tokens.num_clipped_targets > 0
        counts.num_answers_lost += tokens.answer_clipped
        counts.num_unknown_tokens += list(tokens.input_ids).count(unknown)


def _lengths(folder: Path, dtype: type[np.generic], limits: Limits) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": np.dtype(dtype).name}
    for name, key, limit in (
        ("inputs", "input", limits.max_input_tokens),
        ("labels", "target", limits.max_target_tokens),
    ):
        lengths = Ragged(folder, name, dtype).lengths
        counts, edges = np.histogram(lengths, bins=NUM_BINS, range=(0, max(int(lengths.max()), NUM_BINS)))
        facts[f"num_{key}_tokens"] = int(lengths.sum())
        facts[f"{key}_p99"] = int(np.quantile(lengths, 0.99, method="higher"))
        facts[f"max_{key}_tokens"] = limit
        facts[f"longest_{key}"] = int(lengths.max())
        facts[f"{key}_lengths"] = {"edges": [float(e) for e in edges], "counts": [int(c) for c in counts]}
    facts["num_examples"] = len(lengths)
    return facts
