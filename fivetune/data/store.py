"""Tokenised data on disk: flat memory-mapped arrays with offsets, cached under a fingerprint.

In: sources, a task, a tokenizer. Out: a TokenStore; of its arrays only the offsets, 8 bytes per row, are in memory.
A store is built in a staging folder and renamed when it is complete; a damaged one is rebuilt. An interrupted build
resumes after the last complete shard.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fivetune.data.encode import LengthLimits, encode
from fivetune.data.examples import ReadCounts, Source, describe_bad_record, describe_empty_store, iter_examples
from fivetune.data.partial import PROGRESS, load_progress, lock_build_folder, remove_progress, save_progress
from fivetune.data.ragged import Ragged, RaggedWriter
from fivetune.data.records import is_hub_name, list_source_files
from fivetune.data.split import SPLIT_VERSION, hash_text
from fivetune.data.windows import select_window_targets, split_into_windows
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.rundir import fsync_folder, replace_file
from fivetune.tasks import head_of
from fivetune.types import JsonTable, Task, TextExample, TokenExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODING_VERSION = 2  # increase when the same input would be encoded differently
LAYOUT_VERSION = 7  # increase when the files of a store or the keys of its summary change
CHUNK = 1_000  # examples tokenised at once; a fast tokenizer spreads them over all cores
SHARD = 50  # chunks between two saves of a build's progress
FACTS = "facts.npy"  # [3, num_examples] int32: group, clipped input tokens, whether the answer was clipped
NUM_BINS = 30
MIN_ID_CHARS = 8

BuildProgressCallback = Callable[[str, int], None]


class DamagedStoreError(FiveTuneEnvironmentError):
    """Raised for a folder that is not a complete store."""


class TokenStore:
    """Examples as token ids and as text.

    `inputs[i]` and `labels[i]` are the token ids of example i; `summary` holds the counts of data.json. `groups[i]` is
    the number of the question that example i belongs to, in order of first appearance; `num_clipped[i]` tokens of its
    inputs were clipped, and with them the answer if `answer_clipped[i]`. Raises DamagedStoreError if the folder is not
    a complete store.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.summary: JsonTable = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            dtype = getattr(np, self.summary["dtype"])
            self.inputs = Ragged(folder, "inputs", dtype)
            self.labels = Ragged(folder, "labels", dtype)
            self._ids = Ragged(folder, "ids", np.uint8)
            self._texts = Ragged(folder, "texts", np.uint8)
            facts = np.load(folder / FACTS, mmap_mode="r")
            self.groups, self.num_clipped, self.answer_clipped = facts
            counts = {len(rows) for rows in (self.inputs, self.labels, self._ids, self._texts, self.groups)}
            if counts != {self.summary["num_examples"]}:
                raise ValueError(f"{self.summary['num_examples']} examples, but {sorted(counts)} rows")
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedStoreError(f"{folder}: damaged tokenised data: {error}. Delete that folder.") from None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_groups(self) -> int:
        """Number of questions: the number of examples, unless several share one."""
        return self.summary["num_groups"]

    def get_id(self, row: int) -> str:
        return self._ids[row].tobytes().decode()

    def read_example(self, row: int) -> TextExample:
        """Return the text of example `row`."""
        table = json.loads(self._texts[row].tobytes())
        return TextExample(
            **{**table, "references": tuple(table["references"]), "clippable": tuple(table["clippable"])}
        )

    @property
    def fingerprint(self) -> str:
        return self.summary["fingerprint"]


def list_given_ids(store: TokenStore) -> frozenset[str]:
    """Return the question ids given by the source, of at least MIN_ID_CHARS characters.

    Shorter ids, such as numbers, are equal by chance. Ids made from a record's position are left out.
    """
    stems = {Path(path).name.partition(".")[0] for path in store.summary["source"]}
    found = (re.sub(r"#\d+$", "", store.get_id(row)).rpartition("/")[2] for row in range(len(store)))
    return frozenset(id for id in found if len(id) >= MIN_ID_CHARS and id.rpartition("-")[0] not in stems)


def load_or_build_store(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path,
    on_progress: BuildProgressCallback = lambda what, n: None,
) -> TokenStore:
    """Load the store of a source from the cache, or build it if its data, settings, task or tokenizer changed.

    Raises DataError for bad data or a source without examples, FiveTuneEnvironmentError for a read-only cache.
    """
    fingerprint = compute_fingerprint(source, tokenizer)
    folder = cache / _compute_cache_key(fingerprint, source.task, tokenizer)
    store = _load_cached_store(folder)
    if store is None:
        _build_store(folder, source, tokenizer, fingerprint, on_progress)
        store = TokenStore(folder)
    store.summary["source"] = list(source.paths)  # the cached store may have been built from a copy elsewhere
    bad = store.summary["first_bad"]
    if bad and source.on_bad_record == "fail":  # built while data.on_bad_record was skip
        raise DataError(describe_bad_record(bad["where"], bad["reason"]))
    return store


def _load_cached_store(folder: Path) -> TokenStore | None:
    """Return the cached store, None if there is none; a damaged one is deleted."""
    if not folder.is_dir():
        return None
    try:
        return TokenStore(folder)
    except DamagedStoreError:
        with _translate_disk_errors(folder.parent):
            shutil.rmtree(folder)
        return None


def get_cache_folder(configured: str | None) -> Path:
    """Return the cache of tokenised data: the configured one, else $XDG_CACHE_HOME/fivetune or ~/.cache/fivetune."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(root) / "fivetune"


def compute_fingerprint(source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of a run's data: content, tokenizer, task and template, limits. Resuming requires the same.

    `on_bad_record` is not part of it: without bad records the store is the same for both values, and
    `load_or_build_store` refuses a store with bad records for "fail".
    """
    digest = blake2b(digest_size=16)
    settings = {
        "version": ENCODING_VERSION,
        "task": [source.task.plugin_name(), source.task.version, source.task.model_dump(mode="json")],
        "limits": asdict(source.limits),
        "columns": source.columns,
        "rest": [source.max_examples, source.for_training, source.labelled],
        "tokenizer": compute_tokenizer_fingerprint(tokenizer),
        "names": [path if is_hub_name(path) else Path(path).name for path in source.paths],  # ids are made from them
    }
    if source.split:
        settings["split"] = {**asdict(source.split), "version": SPLIT_VERSION}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for path in source.paths:
        for file in list_source_files(path):
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _compute_cache_key(fingerprint: str, task: Task, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a store's name in the cache: a hash of the fingerprint, the task's code and the tokenizer's pipeline.

    Editing a task's file, or a tokenizer with another splitting or normalisation, rebuilds the store.
    """
    digest = blake2b(f"{LAYOUT_VERSION} {fingerprint}".encode(), digest_size=16)
    digest.update(Path(inspect.getfile(type(task))).read_bytes())
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer
        digest.update(backend.to_str().encode())
    return digest.hexdigest()


def compute_tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of a tokenizer's vocabulary and of its ids for a probe text."""
    probe = tokenizer('A probe: "It\'s 1,234.5 €", été <b>x</b>\n\t{a}  b', verbose=False)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return blake2b(json.dumps([probe, vocabulary]).encode(), digest_size=16).hexdigest()


def _build_store(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
    on_progress: BuildProgressCallback,
) -> None:
    with _translate_disk_errors(folder.parent):
        staging, lock = _make_staging_folder(folder)
    try:
        summary = {"fingerprint": fingerprint, **_write_examples(staging, source, tokenizer, on_progress)}
        with _translate_disk_errors(folder.parent):
            with replace_file(staging / "summary.json") as file:
                file.write(json.dumps(summary, ensure_ascii=False, indent=1).encode())
            remove_progress(staging)
            fsync_folder(staging)
            if folder.exists():
                shutil.rmtree(staging, ignore_errors=True)
            else:  # from the rename on, a folder of the name `staging` is that of another process
                staging.rename(folder)
                fsync_folder(folder.parent)
    except KeyboardInterrupt:
        if not (staging / PROGRESS).is_file():
            shutil.rmtree(staging, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.close()


def _make_staging_folder(folder: Path) -> tuple[Path, IO[bytes]]:
    """Lock the staging folder, perhaps of an interrupted build; a new one if another process builds this store."""
    staging = folder.with_name(f".{folder.name}.partial")
    staging.mkdir(parents=True, exist_ok=True)
    lock = lock_build_folder(staging)
    if lock is None:
        staging = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        lock = lock_build_folder(staging)
        assert lock is not None
    return staging, lock


@contextmanager
def _translate_disk_errors(cache: Path) -> Iterator[None]:
    """Convert a failed write into a FiveTuneEnvironmentError that names data.cache_dir."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "Free space, or choose another data.cache_dir" if is_full else "Choose another data.cache_dir"
        raise FiveTuneEnvironmentError(f"{cache}: cannot be written: {error.strerror}. {advice}.") from None


def _make_column() -> array[int]:
    return array("i")


@dataclass(slots=True)
class _RowFacts:
    """Columns over all rows while a store is built, 4 bytes per value: lengths before clipping, and FACTS."""

    input: array[int] = field(default_factory=_make_column)
    target: array[int] = field(default_factory=_make_column)
    group: array[int] = field(default_factory=_make_column)
    clipped: array[int] = field(default_factory=_make_column)
    lost: array[int] = field(default_factory=_make_column)
    num_groups: int = 0
    _named: dict[int, int] = field(default_factory=dict)  # 8-byte hash of a group's id -> its number

    def add(self, tokens: TokenExample, group: str) -> None:
        self.input.append(len(tokens.input_ids) + tokens.num_clipped_inputs)
        self.target.append(len(tokens.labels) + tokens.num_clipped_targets)
        self.clipped.append(tokens.num_clipped_inputs)
        self.lost.append(tokens.answer_clipped)
        number = self._named.setdefault(hash_text(group), self.num_groups) if group else self.num_groups
        self.num_groups = max(self.num_groups, number + 1)
        self.group.append(number)

    def as_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the complete state, from which `from_arrays` resumes."""
        return {
            "columns": np.array([self.input, self.target, self.group, self.clipped, self.lost], dtype=np.int32),
            "names": np.fromiter(self._named, np.uint64),
            "numbers": np.fromiter(self._named.values(), np.int32),
        }

    @classmethod
    def from_arrays(
        cls, columns: NDArray[np.int32], names: NDArray[np.uint64], numbers: NDArray[np.int32]
    ) -> _RowFacts:
        groups = int(columns[2].max(initial=-1)) + 1  # there may be no row yet
        named = dict(zip(names.tolist(), numbers.tolist(), strict=True))
        read, target, group, clipped, lost = (array("i", column.tobytes()) for column in columns)
        return cls(read, target, group, clipped, lost, groups, named)

    def save(self, folder: Path) -> None:
        with replace_file(folder / FACTS) as file:
            np.save(file, np.array([self.group, self.clipped, self.lost], dtype=np.int32))


class _StoreWriter:
    """Writes the arrays of a store; raises FiveTuneEnvironmentError for disk errors."""

    def __init__(self, folder: Path, dtype: type[np.generic], num_rows: int) -> None:
        self._cache = folder.parent
        kinds = (("inputs", dtype), ("labels", dtype), ("ids", np.uint8), ("texts", np.uint8))
        with _translate_disk_errors(self._cache):
            self._writers = [RaggedWriter(folder, name, kind, num_rows) for name, kind in kinds]

    def append(self, rows: Iterable[tuple[Sequence[int] | bytes, ...]]) -> None:
        with _translate_disk_errors(self._cache):
            for row in rows:
                for writer, part in zip(self._writers, row, strict=True):
                    writer.append(part)

    def sync(self) -> None:
        with _translate_disk_errors(self._cache):
            for writer in self._writers:
                writer.sync()

    def close(self) -> None:
        with _translate_disk_errors(self._cache), ExitStack() as stack:  # all are closed, even if one fails
            for writer in self._writers:
                stack.callback(writer.close)


def _write_examples(
    folder: Path, source: Source, tokenizer: PreTrainedTokenizerBase, on_progress: BuildProgressCallback
) -> JsonTable:
    dtype = np.uint16 if len(tokenizer) <= np.iinfo(np.uint16).max else np.uint32
    counts, kept, num_chunks, paths = ReadCounts(), _RowFacts(), 0, ", ".join(source.paths)
    if noted := load_progress(folder):
        facts, arrays = noted
        num_chunks, kept = facts["num_chunks"], _RowFacts.from_arrays(**arrays)
        vars(counts).update(facts["counts"])
    files, examples = _StoreWriter(folder, dtype, len(kept.input)), iter_examples(source, counts)
    try:
        # Records that are tokenised already are read again, because reading counts records and reports bad ones.
        for number, _ in enumerate(islice(examples, num_chunks * CHUNK), start=1):
            if number % CHUNK == 0:
                on_progress(f"resuming {paths}", number)
        while chunk := list(islice(examples, CHUNK)):
            _write_chunk(chunk, source, tokenizer, files, counts, kept)
            num_chunks += 1
            if num_chunks % SHARD == 0 and kept.input:
                files.sync()
                with _translate_disk_errors(folder.parent):
                    facts = {"num_chunks": num_chunks, "counts": counts.of_tokenising}
                    save_progress(folder, facts, **kept.as_arrays())
            on_progress(f"tokenising {paths}", counts.num_kept)
        files.sync()
    finally:
        files.close()
    if not kept.input:
        raise DataError(describe_empty_store(source, counts))
    with _translate_disk_errors(folder.parent):
        kept.save(folder)
    return {**_summarise_lengths(folder, dtype, source.limits, kept), **vars(counts), "source": list(source.paths)}


def _write_chunk(
    chunk: list[TextExample],
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    files: _StoreWriter,
    counts: ReadCounts,
    kept: _RowFacts,
) -> None:
    counts.num_kept += len(chunk)
    if source.limits.overlong == "windows":
        chunk = split_into_windows(tokenizer, chunk, source.limits)
        counts.add_windows(chunk)
    taught = [select_window_targets(source.task, e) if source.for_training else (e.targets,) for e in chunk]
    counts.num_not_learnt += sum(not targets for targets in taught)
    pairs = [(example, target) for example, targets in zip(chunk, taught, strict=True) for target in targets]
    if not pairs:
        return
    examples, targets = [e for e, _ in pairs], [t for _, t in pairs]
    task = source.task
    encoded = encode(tokenizer, examples, targets, limits=source.limits, head=head_of(task), extractive=task.extractive)

    def convert_rows() -> Iterator[tuple[Sequence[int] | bytes, ...]]:
        for (example, target), tokens in zip(pairs, encoded, strict=True):
            text = {
                "id": example.id,
                "inputs": example.inputs,
                "targets": target,
                "references": example.references,
                "clippable": example.clippable,
                "meta": dict(example.meta),
                "group": example.group,
            }
            counts.add(tokens, cast("int | None", tokenizer.unk_token_id))
            kept.add(tokens, example.group)
            yield tokens.input_ids, tokens.labels, example.id.encode(), json.dumps(text, ensure_ascii=False).encode()

    files.append(convert_rows())


def _summarise_lengths(folder: Path, dtype: type[np.generic], limits: LengthLimits, kept: _RowFacts) -> JsonTable:
    """Return sum and p99 of clipped lengths (p99 sets the generation cap), histogram and maximum before clipping."""
    facts: JsonTable = {"dtype": np.dtype(dtype).name}
    for name, key, limit, before in (
        ("inputs", "input", limits.max_input_tokens, np.asarray(kept.input)),
        ("labels", "target", limits.max_target_tokens, np.asarray(kept.target)),
    ):
        lengths = Ragged(folder, name, dtype).lengths
        counts, edges = np.histogram(before, bins=NUM_BINS, range=(0, max(int(before.max()), NUM_BINS)))
        facts[f"num_{key}_tokens"] = int(lengths.sum())
        facts[f"{key}_p99"] = int(np.quantile(lengths, 0.99, method="higher"))
        facts[f"max_{key}_tokens"] = limit
        facts[f"longest_{key}"] = int(before.max())
        facts[f"{key}_lengths"] = {"edges": [float(e) for e in edges], "counts": [int(c) for c in counts]}
    facts |= {"num_examples": len(lengths), "num_groups": kept.num_groups}
    return facts
