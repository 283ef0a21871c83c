"""Blocks of records become rows of token ids: what worker processes do, and a build without workers as well.

In: a RecordBlock, a stretch of a source. Out: ConvertedRows, the same whichever process converts.

Whether an id was used by an earlier block, and where a limit of examples ends the data, only the whole order shows:
`fivetune/data/store/build.py` asks for a second conversion of a block with duplicates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fivetune.data.examples import (
    ReadCounts,
    Source,
    choose_bad_record_handler,
    convert_records,
    describe_bad_record,
)
from fivetune.data.readers.records import BadRecord, Item, describe_duplicate, parse_item, select_required_columns
from fivetune.data.split import SplitResult, hash_text
from fivetune.data.store.encode import encode
from fivetune.data.store.windows import select_window_targets, split_into_windows
from fivetune.errors import DataError, RecordError
from fivetune.tasks import head_of
from fivetune.types import RawRecord, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1_000  # examples tokenised at once
MIN_ID_CHARS = 8  # shorter ids, such as numbers, are equal by chance
KINDS = ("inputs", "labels", "ids", "texts")
"""The ragged arrays of a shard."""

NO_DUPLICATES: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Consecutive records of one file.

    Args:
        stem: of the file, from which ids are made.
        first_number: number of the first item in its file, from 1.
        is_normalized: the items are records as `read_records` yields them.
    """

    stem: str
    first_number: int
    items: Sequence[Item]
    is_normalized: bool = False


FACT_DTYPES = {
    "whole_inputs": np.int32,  # tokens of the inputs before clipping
    "whole_labels": np.int32,
    "num_clipped": np.int32,
    "answer_clipped": np.uint8,
    "group_hashes": np.uint64,  # of the group's id; 0: the example is a group of its own
    "given_ids": np.uint64,  # hash of the question's id, if the source gave it and it is long; else 0
    "input_hashes": np.uint64,  # of the inputs' text, case and white space aside
}
"""Facts of each row that a build keeps in memory."""


def _make_arrays() -> dict[str, list[NDArray[Any]]]:
    lengths = [f"{kind}_lengths" for kind in KINDS]
    return {name: [] for name in (*KINDS, *lengths, *FACT_DTYPES)}


@dataclass(slots=True)
class ConvertedRows:
    """The rows of a block, column by column in pieces that follow one another, and the counts of its records.

    Args:
        record_hashes: of the ids of all records that could be read, duplicates included.
        arrays: values and lengths of KINDS, and FACT_DTYPES.
    """

    counts: ReadCounts
    record_hashes: NDArray[np.uint64]
    arrays: dict[str, list[NDArray[Any]]] = field(default_factory=_make_arrays)
    num_rows: int = 0
    num_bytes: int = 0

    def add(self, columns: Mapping[str, NDArray[Any]]) -> None:
        for name, array in columns.items():
            self.arrays[name].append(array)
        self.num_rows += len(columns["num_clipped"])
        self.num_bytes += sum(array.nbytes for array in columns.values())


def join_columns(blocks: Sequence[ConvertedRows]) -> dict[str, NDArray[Any]]:
    """Concatenate the columns of consecutive blocks, which have at least one row."""
    columns: dict[str, NDArray[Any]] = {}
    for name in blocks[0].arrays:
        pieces: list[NDArray[Any]] = []
        for rows in blocks:
            pieces += rows.arrays[name]
        columns[name] = np.concatenate(pieces)
    return columns


@dataclass(slots=True)
class GroupNumbers:
    """Numbers the groups of rows, in order of first appearance.

    >>> numbers = GroupNumbers()
    >>> numbers.assign(np.array([7, 0, 7], np.uint64)).tolist(), numbers.assign(np.array([0, 7], np.uint64)).tolist()
    ([0, 1, 0], [2, 0])
    """

    count: int = 0
    known: dict[int, int] = field(default_factory=dict[int, int])

    def assign(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the number of each row's group.

        Args:
            hashes: of the groups' ids; 0: the row is a group of its own.
        """
        if not hashes.any():  # most data: no loop in Python
            first = self.count
            self.count += len(hashes)
            return np.arange(first, self.count, dtype=np.int32)
        numbers: list[int] = []
        for key in hashes.tolist():
            number = self.known.setdefault(key, self.count) if key else self.count
            self.count = max(self.count, number + 1)
            numbers.append(number)
        return np.array(numbers, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts the blocks of a source.

    Args:
        divided: the evaluation side, for a source with a split.
    """

    source: Source
    tokenizer: PreTrainedTokenizerBase
    divided: SplitResult | None = None

    def convert(self, block: RecordBlock, duplicates: Mapping[int, int] = NO_DUPLICATES) -> ConvertedRows:
        """Return the rows of a block.

        Args:
            duplicates: positions in `record_hashes` of records that have the id of an earlier record, with the number
                of the earlier record; they count as bad records.

        Raises DataError for a bad record, unless the source skips them.
        """
        counts = ReadCounts()
        hashes: list[int] = []
        on_bad = choose_bad_record_handler(self.source, counts)

        def report(bad: BadRecord) -> None:
            if on_bad is not None:
                on_bad(bad)
            elif bad.skippable:
                raise DataError(describe_bad_record(bad.where, bad.reason))
            else:
                raise RecordError(bad.where, bad.reason, skippable=False)

        def read() -> Iterator[RawRecord]:
            for item in self._parse(block):
                if isinstance(item, BadRecord):
                    report(item)
                    continue
                position = len(hashes)  # of all records that can be read, duplicates included
                hashes.append(hash_text(str(item.fields["id"])))
                if position in duplicates:
                    report(describe_duplicate(item, duplicates[position]))
                else:
                    yield item

        examples = convert_records(read(), self.source, counts, self.divided, on_bad)
        rows = ConvertedRows(counts, np.empty(0, np.uint64))
        while chunk := list(islice(examples, CHUNK)):
            self._encode_chunk(chunk, rows)
        rows.record_hashes = np.array(hashes, dtype=np.uint64)
        return rows

    def _parse(self, block: RecordBlock) -> Iterator[RawRecord | BadRecord]:
        columns = self.source.columns
        required = select_required_columns(columns, require_columns=self.source.labelled)
        for number, item in enumerate(block.items, block.first_number):
            if block.is_normalized:
                yield cast("RawRecord | BadRecord", item)
            else:
                yield parse_item(item, columns, required, f"{block.stem}-{number}")

    def _encode_chunk(self, chunk: list[TextExample], rows: ConvertedRows) -> None:
        source = self.source
        counts = rows.counts
        counts.num_kept += len(chunk)
        if source.limits.overlong == "windows":
            chunk = split_into_windows(self.tokenizer, chunk, source.limits)
            counts.add_windows(chunk)
        # A row for each target that is learnt; an example may have several, or none.
        examples: list[TextExample] = []
        targets: list[str] = []
        for example in chunk:
            taught = select_window_targets(source.task, example) if source.for_training else (example.targets,)
            counts.num_not_learnt += not taught
            for target in taught:
                examples.append(example)
                targets.append(target)
        if not examples:
            return
        head = head_of(source.task)
        extractive = source.task.extractive
        encoded = list(
            encode(self.tokenizer, examples, targets, limits=source.limits, head=head, extractive=extractive)
        )

        # The ragged arrays, flat and with the length of each row.
        dtype = choose_dtype(self.tokenizer)
        inputs = [tokens.input_ids for tokens in encoded]
        labels = [tokens.labels for tokens in encoded]
        ids = [example.id.encode() for example in examples]
        texts = [_dump_text(example, target) for example, target in zip(examples, targets, strict=True)]
        columns: dict[str, NDArray[Any]] = {
            "inputs": _flatten(inputs, dtype),
            "labels": _flatten(labels, dtype),
            "ids": np.frombuffer(b"".join(ids), np.uint8),
            "texts": np.frombuffer(b"".join(texts), np.uint8),
        }
        for kind, kind_rows in zip(KINDS, (inputs, labels, ids, texts), strict=True):
            columns[f"{kind}_lengths"] = np.fromiter(map(len, kind_rows), np.int32, count=len(kind_rows))

        # The facts of each row, in the order of FACT_DTYPES.
        stems = {Path(path).name.partition(".")[0] for path in source.paths}
        facts: list[tuple[int, ...]] = []
        for example, tokens in zip(examples, encoded, strict=True):
            counts.add(tokens)
            row = (
                len(tokens.input_ids) + tokens.num_clipped_inputs,
                len(tokens.labels) + tokens.num_clipped_targets,
                tokens.num_clipped_inputs,
                tokens.answer_clipped,
                hash_text(example.group) if example.group else 0,
                _hash_given_id(example.id, stems),
                hash_text("".join(example.inputs.casefold().split())),
            )
            facts.append(row)
        for (name, kind), column in zip(FACT_DTYPES.items(), zip(*facts, strict=True), strict=True):
            columns[name] = np.array(column, kind)
        counts.num_unknown_tokens += int((columns["inputs"] == self.tokenizer.unk_token_id).sum())
        rows.add(columns)


def _hash_given_id(id: str, stems: Set[str]) -> int:
    """Return the hash of a question's id; 0 if the id is shorter than MIN_ID_CHARS or made from the record's place.

    Args:
        stems: stems of the source's files, with which ids made from a record's place begin.
    """
    own = re.sub(r"#\d+$", "", id).rpartition("/")[2]  # without the part of a mixture and the number of a window
    if len(own) < MIN_ID_CHARS or own.rpartition("-")[0] in stems:
        return 0
    return hash_text(own)


def choose_dtype(tokenizer: PreTrainedTokenizerBase) -> type[np.generic]:
    """Return the smallest type that holds every id of a tokenizer."""
    return np.uint16 if len(tokenizer) <= np.iinfo(np.uint16).max else np.uint32


def _dump_text(example: TextExample, target: str) -> bytes:
    text = {
        "id": example.id,
        "inputs": example.inputs,
        "targets": target,
        "references": example.references,
        "clippable": example.clippable,
        "meta": dict(example.meta),
        "group": example.group,
    }
    return json.dumps(text, ensure_ascii=False).encode()


def _flatten(rows: Sequence[Sequence[int]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, count=sum(map(len, rows)))
