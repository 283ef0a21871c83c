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
from fivetune.data.readers.records import BadRecord, Item, parse_item, select_required_columns
from fivetune.data.readers.source_files import quote_value
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


def _make_arrays() -> dict[str, list[NDArray[Any]]]:
    return {name: [] for name in (*KINDS, *(f"{name}_lengths" for name in KINDS), *FACT_DTYPES)}


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
        if not hashes.any():
            first, self.count = self.count, self.count + len(hashes)
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
            duplicates: positions in `record_hashes` of records whose id an earlier record has, with that one's number;
                they count as bad records.

        Raises DataError for a bad record, unless the source skips them.
        """
        counts, hashes = ReadCounts(), list[int]()
        on_bad = choose_bad_record_handler(self.source, counts)

        def report(bad: BadRecord) -> None:
            if on_bad is None:
                error = RecordError(bad.where, bad.reason, skippable=bad.skippable)
                raise DataError(describe_bad_record(bad.where, bad.reason)) if bad.skippable else error
            on_bad(bad)

        def read() -> Iterator[RawRecord]:
            for item in self._parse(block):
                if isinstance(item, BadRecord):
                    report(item)
                    continue
                position = len(hashes)
                hashes.append(hash_text(str(item.fields["id"])))
                if position in duplicates:
                    report(_describe_duplicate(item, duplicates[position]))
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
        source, counts = self.source, rows.counts
        counts.num_kept += len(chunk)
        if source.limits.overlong == "windows":
            chunk = split_into_windows(self.tokenizer, chunk, source.limits)
            counts.add_windows(chunk)
        taught = [select_window_targets(source.task, e) if source.for_training else (e.targets,) for e in chunk]
        counts.num_not_learnt += sum(not targets for targets in taught)
        pairs = [(example, target) for example, targets in zip(chunk, taught, strict=True) for target in targets]
        if not pairs:
            return
        encoded = list(
            encode(
                self.tokenizer,
                [example for example, _ in pairs],
                [target for _, target in pairs],
                limits=source.limits,
                head=head_of(source.task),
                extractive=source.task.extractive,
            )
        )
        for tokens in encoded:
            counts.add(tokens)
        texts = [_dump_text(example, target) for example, target in pairs]
        ids = [example.id.encode() for example, _ in pairs]
        dtype = choose_dtype(self.tokenizer)
        inputs = _flatten([tokens.input_ids for tokens in encoded], dtype)
        counts.num_unknown_tokens += int((inputs == self.tokenizer.unk_token_id).sum())
        stems = {Path(path).name.partition(".")[0] for path in source.paths}
        facts: list[tuple[int, ...]] = [
            (
                len(tokens.input_ids) + tokens.num_clipped_inputs,
                len(tokens.labels) + tokens.num_clipped_targets,
                tokens.num_clipped_inputs,
                tokens.answer_clipped,
                hash_text(example.group) if example.group else 0,
                _hash_given_id(example.id, stems),
                hash_text("".join(example.inputs.casefold().split())),
            )
            for (example, _), tokens in zip(pairs, encoded, strict=True)
        ]
        rows.add(
            {
                "inputs": inputs,
                "labels": _flatten([tokens.labels for tokens in encoded], dtype),
                "ids": np.frombuffer(b"".join(ids), np.uint8),
                "texts": np.frombuffer(b"".join(texts), np.uint8),
                "inputs_lengths": _measure([tokens.input_ids for tokens in encoded]),
                "labels_lengths": _measure([tokens.labels for tokens in encoded]),
                "ids_lengths": _measure(ids),
                "texts_lengths": _measure(texts),
                **{
                    name: np.array(column, dtype)
                    for (name, dtype), column in zip(FACT_DTYPES.items(), zip(*facts, strict=True), strict=True)
                },
            }
        )


def _hash_given_id(id: str, stems: Set[str]) -> int:
    """Return the hash of a question's id; 0 for one of less than MIN_ID_CHARS characters or made from its place.

    Args:
        stems: of the source's files, with which ids made from a record's place begin.
    """
    own = re.sub(r"#\d+$", "", id).rpartition("/")[2]
    return hash_text(own) if len(own) >= MIN_ID_CHARS and own.rpartition("-")[0] not in stems else 0


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


def _measure(rows: Sequence[Sequence[int] | bytes]) -> NDArray[np.int32]:
    return np.fromiter(map(len, rows), np.int32, count=len(rows))


def _describe_duplicate(record: RawRecord, earlier: int) -> BadRecord:
    return BadRecord(
        record.where,
        f"the id {quote_value(record.fields['id'])} is already used by record {earlier}. Ids must be unique. "
        "Rename one.",
    )
