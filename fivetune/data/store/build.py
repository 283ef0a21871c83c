"""Build prepared data: shards of token ids, and an index that is written last.

In: a Source, a tokenizer and a target, a local folder or a URL. Out: these files in the target:

    shard-00000.safetensors ...   values and offsets of inputs, labels, ids and texts of consecutive rows
    rows.safetensors              facts of every row: lengths, group, clipped tokens
    index.json                    settings, counts, size and CRC-32 of the files above, and its own

The files are the same for every number of processes. An interrupted build continues after the last shard that was
written; progress-*.npz, one per shard, are deleted at the end.

Several jobs build into one target: each converts stretches of STRETCH records in turn, its files have its name
(shard-2-of-8-00000.safetensors), and the last job writes the index, in the order of the source.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from fivetune.data.examples import ReadCounts, Source, describe_empty_store
from fivetune.data.guard import ChangedSourceError, SourceGuard
from fivetune.data.shard import WHOLE, Shard
from fivetune.data.storage import get_object, is_url, join_location, list_objects, put_file, put_object
from fivetune.data.store.arrays import find_fault, write_arrays
from fivetune.data.store.blocks import BlockReader, SeenIds
from fivetune.data.store.convert import (
    FACT_DTYPES,
    KINDS,
    ConvertedRows,
    Converter,
    GroupNumbers,
    RecordBlock,
    join_columns,
)
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.partial import PROGRESS, load_progress, name_progress, remove_files, save_progress
from fivetune.data.store.ragged import compute_offsets
from fivetune.data.store.worker import ConverterPool
from fivetune.errors import DataError
from fivetune.rundir.progress import ProgressCallback
from fivetune.types import JsonTable

FORMAT, FORMAT_VERSION = "fivetune prepared data", 2
WITHOUT_CHECKSUM = 1  # the format version of an index that is otherwise the same
INDEX, ROWS = "index.json", "rows.safetensors"
BLOCK = 1_000  # records converted at once
STRETCH = 10_000  # consecutive records that one of several jobs converts
SHARD_ROWS, SHARD_BYTES = 50_000, 32 * 2**20  # a shard ends with the block that reaches one of them
NUM_BINS = 30


def is_index(content: object) -> TypeGuard[JsonTable]:
    """Return whether the content of a JSON file is the index of prepared data, of any format version."""
    return isinstance(content, dict) and cast(JsonTable, content).get("format") == FORMAT


def find_index_fault(index: JsonTable) -> str | None:
    """Describe why an index cannot be used: its version, or content that is not what was written; None if it can."""
    version = index.get("format_version")
    if version not in (FORMAT_VERSION, WITHOUT_CHECKSUM):
        return f"is of format {version}, this version of FiveTune reads up to {FORMAT_VERSION}"
    if version == FORMAT_VERSION and index.get("crc32") != _compute_index_crc32(index):
        return "is damaged: its checksum differs"
    return None


def _compute_index_crc32(index: JsonTable) -> int:
    content = {name: value for name, value in index.items() if name != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


Columns = dict[str, NDArray[Any]]


def name_shard(number: int, prefix: str = "") -> str:
    """Return the name of a shard's file.

    Args:
        prefix: of the files of a job, where several jobs build.
    """
    return f"shard-{prefix}{number:05d}.safetensors"


def name_end(job: Shard) -> str:
    """Return the name of the file with the counts of a job that has built all of its shards."""
    return f"{PROGRESS}{job.name}-end.json"


def make_prefix(job: Shard) -> str:
    """Make the prefix of a job's files; "" for a single job."""
    return f"{job.name}-" if job.count > 1 else ""


@dataclass(slots=True)
class _State:
    """What a build knows of the rows so far, of finished shards also after a restart.

    Args:
        num_items: records taken from the source.
        num_usable: of these, with an id of their own.
        prefix: of the names of the files.
        facts: columns of each finished shard, by FACT_DTYPES and the names in rows.safetensors.
    """

    counts: ReadCounts = field(default_factory=ReadCounts)
    prefix: str = ""
    num_items: int = 0
    num_usable: int = 0
    shards: list[JsonTable] = field(default_factory=list[JsonTable])
    facts: list[Columns] = field(default_factory=list[Columns])
    seen: SeenIds = field(default_factory=SeenIds)
    groups: GroupNumbers = field(default_factory=GroupNumbers)

    def continue_after(self, facts: JsonTable, columns: Columns) -> None:
        """Add a shard of an interrupted build."""
        self.counts = ReadCounts.from_dict(facts["counts"], facts["left_out"])
        self.num_items = facts["num_items"]
        self.num_usable = facts["num_usable"]
        self.shards.append(facts["shard"])
        self.seen.find_and_add(columns.pop("record_hashes"))
        for key, number in zip(columns["group_hashes"].tolist(), columns["groups"].tolist(), strict=True):
            if key:  # 0: a group of its own
                self.groups.known[key] = number
        self.groups.count = max(self.groups.count, int(columns["groups"].max(initial=-1)) + 1)
        self.facts.append(columns)


class _ShardWriter:
    """Gathers converted rows into shards, and writes them, to a URL while the next rows are converted.

    Args:
        header: settings and tokenizer for the index.
        guard: of the source, which must not have changed when a shard of its records is written.
    """

    def __init__(self, target: str, header: JsonTable, guard: SourceGuard, state: _State) -> None:
        self._target = target
        self._header = header
        self._guard = guard
        self._state = state
        self._waiting: list[ConvertedRows] = []
        self._groups: list[NDArray[np.int32]] = []
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="upload") if is_url(target) else None
        self._sending: Future[None] | None = None

    def add(self, rows: ConvertedRows) -> None:
        """Add the rows of the next block, and write a shard if it is full."""
        self._waiting.append(rows)
        for hashes in rows.arrays["group_hashes"]:
            self._groups.append(self._state.groups.assign(hashes))
        num_rows = sum(one.num_rows for one in self._waiting)
        num_bytes = sum(one.num_bytes for one in self._waiting)
        if num_rows >= SHARD_ROWS or num_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows since the last shard, if there are any."""
        if not any(one.num_rows for one in self._waiting):
            return
        self._guard.refuse_change()  # a killed build continues after this shard

        # The file has the ragged arrays; the facts of its rows stay in memory until the end.
        columns = join_columns(self._waiting)
        arrays: Columns = {}
        for kind in KINDS:
            arrays[f"{kind}.values"] = columns[kind]
            arrays[f"{kind}.offsets"] = compute_offsets(columns[f"{kind}_lengths"])
        facts: Columns = {name: columns[name] for name in FACT_DTYPES}
        facts["input_lengths"] = columns["inputs_lengths"]
        facts["label_lengths"] = columns["labels_lengths"]
        facts["groups"] = np.concatenate(self._groups)
        hashes = np.concatenate([one.record_hashes for one in self._waiting])
        self._waiting = []
        self._groups = []

        state = self._state
        number = len(state.shards)
        entry: JsonTable = {"file": name_shard(number, state.prefix), "num_rows": len(facts["groups"])}
        state.shards.append(entry)
        state.facts.append(facts)
        noted: JsonTable = {
            "fingerprint": self._header["fingerprint"],
            "num_items": state.num_items,
            "num_usable": state.num_usable,
            "counts": state.counts.as_dict(),
            "left_out": state.counts.left_out,
            "shard": entry,
        }
        noted = json.loads(json.dumps(noted))  # a copy: the counts go on while the shard is written

        def send() -> None:
            entry.update(_write_to(self._target, entry["file"], arrays))
            noted["shard"] = entry
            save_progress(self._target, name_progress(number, state.prefix), noted, {**facts, "record_hashes": hashes})

        self.wait()  # one shard is sent while the next is converted: memory holds two
        if self._sender is None:
            send()
        else:
            self._sending = self._sender.submit(send)

    def wait(self) -> None:
        """Wait until the last shard is written. Raises the errors of writing."""
        if self._sending is not None:
            self._sending.result()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()


def _write_to(target: str, name: str, arrays: Columns) -> JsonTable:
    """Write a file of arrays to a folder or URL; returns its size and checksum."""
    if not is_url(target):
        return write_arrays(Path(target, name), arrays)
    with tempfile.TemporaryDirectory(prefix="fivetune-shard-") as folder:
        path = Path(folder, name)
        entry = write_arrays(path, arrays)
        put_file(path, join_location(target, name))
    return entry


def build_prepared_data(
    target: str,
    converter: Converter,
    header: JsonTable,
    guard: SourceGuard,
    *,
    num_processes: int,
    on_progress: ProgressCallback,
    job: Shard = WHOLE,
) -> None:
    """Convert a source into shards, then write the index, or for one of several jobs the counts of its shards, which
    `join_jobs` needs. Raises DataError; OSError or StorageError of the target.

    Args:
        header: {"fingerprint", "settings", "tokenizer"}, copied into the index.
        guard: of the source, taken with the fingerprint; if the source changes until the end, all shards are removed.
        job: what this job converts, if others build into the target too.
    """
    prefix = make_prefix(job)
    state = _load_state(target, header["fingerprint"], prefix)
    try:
        with guard.explain_errors():
            _write_shards(target, converter, header, guard, state, num_processes, on_progress, job)
        guard.refuse_change(whole=True)
    except ChangedSourceError:
        remove_files(target, f"shard-{prefix}", f"{PROGRESS}{prefix}")
        raise
    if job.count == 1:
        _write_index(target, converter.source, header, state)
        return
    end: JsonTable = {
        "fingerprint": header["fingerprint"],
        "num_items": state.num_items,
        "num_usable": state.num_usable,
        "num_shards": len(state.shards),
        "counts": state.counts.as_dict(),
        "left_out": state.counts.left_out,
    }
    put_object(join_location(target, name_end(job)), json.dumps(end).encode())


def list_open_jobs(target: str, job: Shard) -> list[int]:
    """List the numbers, from 1, of the jobs that have not built all of their shards."""
    names = set(list_objects(target))
    return [one.number + 1 for one in job.list_all() if name_end(one) not in names]


def join_jobs(target: str, source: Source, header: JsonTable) -> None:
    """Write the index of the shards of all jobs: the same rows in the same order as of a single job.

    Raises DataError for jobs that read other data, and for an id that records of several jobs have.
    """
    job = source.shard
    state = _State()
    found: list[tuple[int, JsonTable, Columns]] = []
    num_ids = 0
    for one in job.list_all():
        end = json.loads(get_object(join_location(target, name_end(one))))
        prefix = make_prefix(one)
        advice = f"Delete shard-{prefix}* and {PROGRESS}{prefix}* there, and run the command of shard {one} again."
        if end["fingerprint"] != header["fingerprint"]:
            raise DataError(f"{target}: shard {one} was prepared from other data or settings. {advice}")
        counts = ReadCounts.from_dict(end["counts"], end["left_out"])
        state.counts.merge(counts)
        state.counts.split = counts.split
        hashes: list[NDArray[np.uint64]] = []
        for number in range(end["num_shards"]):
            noted = load_progress(target, name_progress(number, prefix))
            if noted is None:
                raise DataError(f"{target}: {name_progress(number, prefix)} is damaged. {advice}")
            facts, columns = noted
            stretch = (facts["num_items"] - 1) // job.stretch
            found.append((stretch * job.count + one.number, facts["shard"], columns))
            hashes.append(columns["record_hashes"])
        if hashes:
            num_ids += len(np.unique(np.concatenate(hashes)))
    if not found:
        raise DataError(describe_empty_store(source, state.counts))
    # Each job's shards are in order: sorting by the stretch of the source keeps that.
    found.sort(key=itemgetter(0))
    for _, entry, columns in found:
        hashes_of_shard = columns.pop("record_hashes")
        num_ids -= len(hashes_of_shard) - len(state.seen.find_and_add(hashes_of_shard))
        columns["groups"] = state.groups.assign(columns["group_hashes"])
        state.shards.append(entry)
        state.facts.append(columns)
    if num_ids:
        raise DataError(
            f"{', '.join(source.paths)}: {num_ids:,} records have the id of a record in another shard. Ids must be "
            "unique. Rename them, or prepare the data without --shard, which can leave them out."
        )
    _write_index(target, source, header, state)


def _write_shards(
    target: str,
    converter: Converter,
    header: JsonTable,
    guard: SourceGuard,
    state: _State,
    num_processes: int,
    on_progress: ProgressCallback,
    job: Shard,
) -> None:
    """Convert what the state lacks of a source."""
    source = converter.source
    named = ", ".join(source.paths)
    on_progress(f"resuming {named}" if state.shards else f"reading {named}", state.num_items)
    writer = _ShardWriter(target, header, guard, state)
    try:
        with closing(ConverterPool(converter, num_processes)) as pool:
            reader = BlockReader(source, state.num_items)
            pending: deque[tuple[RecordBlock, Future[ConvertedRows]]] = deque()
            while True:
                # Read ahead, so that no process waits for a block.
                while len(pending) < pool.num_ahead:
                    num_pending = sum(len(block.items) for block, _ in pending)
                    size = min(BLOCK, _count_room(source, state, num_pending))
                    if size < BLOCK and pending:  # how many may be read depends on how many of these are bad
                        break
                    block = reader.read(size) if size > 0 else None
                    if block is None:
                        break
                    pending.append((block, pool.begin(block)))
                if not pending:
                    break
                # The oldest block first: the rows have the order of the records, whichever process is done first.
                block, future = pending.popleft()
                rows = _exclude_duplicates(block, future.result(), converter, state)
                state.num_items += len(block.items)
                state.counts.merge(rows.counts)
                writer.add(rows)
                if job.count > 1 and state.num_items % job.stretch == 0:
                    writer.flush()  # a shard has consecutive records
                on_progress(f"tokenising {named}", state.counts.num_kept, reader.estimate_total(state.counts.num_kept))
        writer.flush()
        writer.wait()
    finally:
        writer.close()
    if not state.shards and job.count == 1:
        raise DataError(describe_empty_store(source, state.counts))
    if converter.divided and source.split:
        state.counts.split = converter.divided.as_dict(source.split)


def _load_state(target: str, fingerprint: str, prefix: str) -> _State:
    """Return the state after the last complete shard of an interrupted build of the same data.

    Args:
        prefix: of the names of the files.
    """
    state = _State(prefix=prefix)
    names = set(list_objects(target))
    while {name_progress(len(state.shards), prefix), name_shard(len(state.shards), prefix)} <= names:
        number = len(state.shards)
        found = load_progress(target, name_progress(number, prefix))
        if found is None:
            break
        facts, columns = found
        if not is_url(target) and find_fault(Path(target, name_shard(number, prefix)), facts["shard"]):
            break
        if facts["fingerprint"] != fingerprint:
            raise DataError(
                f"{target}: holds an unfinished preparation of other data or settings. Delete its files, or give "
                "another folder."
            )
        state.continue_after(facts, columns)
    return state


def _count_room(source: Source, state: _State, num_pending: int) -> int:
    """Return the number of records that may be read without passing a limit, whichever of the pending are used."""
    limit = source.split.max_records if source.split else source.max_examples
    room = BLOCK if limit is None else limit - state.num_usable - num_pending
    if source.split and source.max_examples is not None:
        room = min(room, source.max_examples - state.counts.num_records_kept - num_pending)
    return room


def _exclude_duplicates(block: RecordBlock, rows: ConvertedRows, converter: Converter, state: _State) -> ConvertedRows:
    """Return the rows of a block without records that have the id of an earlier record; these count as bad."""
    duplicates = {} if block.is_normalized else state.seen.find_and_add(rows.record_hashes)
    if duplicates:
        rows = converter.convert(block, duplicates)
    state.num_usable += len(rows.record_hashes) - len(duplicates)
    return rows


def _write_index(target: str, source: Source, header: JsonTable, state: _State) -> None:
    # The facts of all rows are one file, which a run has in memory.
    columns: Columns = {}
    for name in state.facts[0]:
        columns[name] = np.concatenate([facts[name] for facts in state.facts])
    kept = ("input_lengths", "label_lengths", "groups", "num_clipped", "answer_clipped", "given_ids", "input_hashes")
    summary = {
        "fingerprint": header["fingerprint"],
        "dtype": header["dtype"],
        **_summarise_lengths(columns, source.limits),
        "num_examples": len(columns["groups"]),
        "num_groups": state.groups.count,
        **state.counts.as_dict(),
        "source": list(source.paths),
    }
    index: JsonTable = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **header,
        "summary": summary,
        "rows": {"file": ROWS, **_write_to(target, ROWS, {name: columns[name] for name in kept})},
        "shards": state.shards,
    }
    index["crc32"] = _compute_index_crc32(index)
    # The index is last: a folder that has one is complete, and needs no progress.
    put_object(join_location(target, INDEX), json.dumps(index, ensure_ascii=False, indent=1).encode())
    remove_files(target, PROGRESS)


def _summarise_lengths(columns: Columns, limits: LengthLimits) -> JsonTable:
    """Return sum and p99 of clipped lengths (p99 sets the generation cap); histogram, p99, maximum before clipping."""
    facts: JsonTable = {}
    for key, lengths, before, limit in (
        ("input", columns["input_lengths"], columns["whole_inputs"], limits.max_input_tokens),
        ("target", columns["label_lengths"], columns["whole_labels"], limits.max_target_tokens),
    ):
        counts, edges = np.histogram(before, bins=NUM_BINS, range=(0, max(int(before.max()), NUM_BINS)))
        facts[f"num_{key}_tokens"] = int(lengths.sum(dtype=np.int64))
        facts[f"{key}_p99"] = int(np.quantile(lengths, 0.99, method="higher"))
        facts[f"whole_{key}_p99"] = int(np.quantile(before, 0.99, method="higher"))
        facts[f"max_{key}_tokens"] = limit
        facts[f"longest_{key}"] = int(before.max())
        facts[f"{key}_lengths"] = {"edges": edges.tolist(), "counts": counts.tolist()}
    return facts
