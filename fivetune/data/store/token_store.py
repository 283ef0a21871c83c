"""Prepared data as rows of token ids: shards on disk, read row by row, cached under a fingerprint.

In: sources, a task, a tokenizer; or a folder that `data/store/build.py` wrote. Out: a TokenStore, which has the facts
of all rows in memory. A store in the cache is built in a staging folder and renamed when it is complete; a store of
an earlier process is compared with its checksums, and set aside and built again if it is damaged. An interrupted
build continues after the last complete shard.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivetune.data.examples import Source, describe_bad_record, split_source
from fivetune.data.guard import SourceGuard
from fivetune.data.readers.records import is_hub_name, list_source_files
from fivetune.data.store.arrays import ArrayFile, DamagedStoreError, build_lost_error, find_fault, read_arrays
from fivetune.data.store.build import (
    INDEX,
    NUM_BINS,
    build_prepared_data,
    find_index_fault,
    is_index,
    name_progress,
)
from fivetune.data.store.convert import KINDS, Converter, choose_dtype
from fivetune.data.store.partial import LOCK, lock_build_folder
from fivetune.data.store.ragged import FileRagged, Ragged, ShardedRagged, find_part
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.rundir import fsync_folder
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.types import JsonTable, Task, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NUM_BINS", "DamagedStoreError", "TokenStore", "load_or_build_store"]

ENCODING_VERSION = 4  # increase when the same input would be encoded, or the same records split, differently
LAYOUT_VERSION = 10  # increase when the files of a store or the keys of its summary change
MAX_OPEN_SHARDS = 64  # of one store; each takes a file handle
MEMORY_BYTES = 64 * 2**20  # of a store's shards, up to which they are kept in memory: reading them row by row is slower
NUM_CHECKED_AT_ONCE = 4  # files; zlib and the disk leave Python's lock free
LARGE_BYTES = 32 * 2**20  # of a source's files, from which on several processes convert them


class Shards(Protocol):
    """Where the shards of a store are."""

    def locate(self, number: int) -> Path:
        """Return the local file of a shard, which is complete."""
        ...

    def keep(self, current: frozenset[int], following: frozenset[int]) -> None:
        """Make shards ready that are read now and next; a cache deletes all other shards."""
        ...


class ShardFolder:
    """The shards in a folder, read in place."""

    def __init__(self, folder: Path, index: JsonTable) -> None:
        self._folder = folder
        self._index = index

    def locate(self, number: int) -> Path:
        return self._folder / self._index["shards"][number]["file"]

    def keep(self, current: frozenset[int], following: frozenset[int]) -> None:
        pass


class TokenStore:
    """Examples as token ids and as text.

    `inputs[i]` and `labels[i]` are the token ids of example i; `summary` holds the counts of data.json. `groups[i]` is
    the number of the question that example i belongs to, in order of first appearance; `num_clipped[i]` tokens of its
    inputs were clipped, and with them the answer if `answer_clipped[i]`. `given_ids[i]` is the hash of the id that the
    source gave its question, 0 for none and for ids of a few characters, which are equal by chance; `input_hashes[i]`
    is the hash of its inputs, case and white space aside, None in data that an earlier version prepared. `shard_ends`
    has the number of rows up to the end of each shard; `window_shards` the most shards on the disk at once, None for
    all. `is_new`: this process built the store, and `rebuilt` is a sentence about the damage for which it did.

    Args:
        folder: holds index.json and rows.safetensors.
        shards: where the shards are; default: in the folder.

    Raises DamagedStoreError if a file is missing or has another size than the index says; the content of shards is
    compared by `verify`, or by `shards`.
    """

    is_new: bool = False
    rebuilt: str = ""

    def __init__(self, folder: Path, shards: Shards | None = None) -> None:
        try:
            index = read_index(folder)
            self.index = index
            self.summary: JsonTable = index["summary"]
            self.shard_ends = np.cumsum([entry["num_rows"] for entry in index["shards"]], dtype=np.int64)
            facts = read_arrays(folder / index["rows"]["file"], index["rows"])
            self.groups = facts["groups"]
            self.num_clipped = facts["num_clipped"]
            self.answer_clipped = facts["answer_clipped"]
            self.given_ids = facts["given_ids"]
            self.input_hashes = facts.get("input_hashes")
            if shards is None:  # others may not be here yet, and are compared when they are opened
                for entry in index["shards"]:
                    if fault := find_fault(folder / entry["file"], entry, whole=False):
                        raise ValueError(f"{entry['file']} {fault}")
            if {len(rows) for rows in facts.values()} != {self.summary["num_examples"]}:
                raise ValueError(f"{self.summary['num_examples']} examples, but {len(self.groups)} rows")
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedStoreError(f"{folder}: damaged tokenised data: {error}. Delete that folder.") from None
        self.folder = folder
        self.shards: Shards = shards or ShardFolder(folder, index)
        self.window_shards: int | None = None
        self._in_memory = sum(entry["size"] for entry in index["shards"]) <= MEMORY_BYTES
        self._open: OrderedDict[int, dict[str, Ragged | FileRagged]] = OrderedDict()
        self._lock = Lock()
        self.inputs = ShardedRagged(self.shard_ends, lambda n: self._open_shard(n)["inputs"], facts["input_lengths"])
        self.labels = ShardedRagged(self.shard_ends, lambda n: self._open_shard(n)["labels"], facts["label_lengths"])

    def __len__(self) -> int:
        return len(self.groups)

    def verify(self, on_progress: ProgressCallback) -> None:
        """Compare every shard with its checksum: each is read once. Raises DamagedStoreError."""
        entries: Sequence[JsonTable] = self.index["shards"]
        with ThreadPoolExecutor(NUM_CHECKED_AT_ONCE, thread_name_prefix="check") as threads:
            pending = [threads.submit(find_fault, self.folder / entry["file"], entry) for entry in entries]
            for done, (entry, found) in enumerate(zip(entries, pending, strict=True), start=1):
                if fault := found.result():
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise DamagedStoreError(f"{self.folder / entry['file']}: {fault}. Delete that folder.")
                on_progress("checking the tokenised data", done, len(entries))

    def _open_shard(self, number: int) -> dict[str, Ragged | FileRagged]:
        """Return the ragged arrays of a shard; of the shards read last, MAX_OPEN_SHARDS stay open."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
            try:
                try:
                    found = self._read_shard(number)
                except FileNotFoundError:  # another process of the node deleted it, because it is behind its window
                    found = self._read_shard(number)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise build_lost_error(self.folder / self.index["shards"][number]["file"], str(reason)) from None
            self._open[number] = found
            while len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            return found

    def _read_shard(self, number: int) -> dict[str, Ragged | FileRagged]:
        path = self.shards.locate(number)
        if self._in_memory:
            arrays = read_arrays(path)
            return {kind: Ragged(arrays[f"{kind}.values"], arrays[f"{kind}.offsets"]) for kind in KINDS}
        file = ArrayFile(path)
        return {kind: FileRagged(file, kind) for kind in KINDS}

    def iter_windows(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield the rows in pieces, each of few shards if not all are on the disk; as many pieces on every rank."""
        if self.window_shards is None:
            yield rows
            return
        together = max(1, self.window_shards // 2)  # as many are copied while these are read
        shards = range(len(self.shard_ends))
        groups = np.searchsorted(self.shard_ends, rows, side="right") // together
        for group in range(-(-len(shards) // together)):
            near = rows[groups == group]
            if len(near):
                following = frozenset(shards[(group + 1) * together : (group + 2) * together])
                self.shards.keep(frozenset(shards[group * together : (group + 1) * together]), following)
            yield near

    def count_near_rows(self) -> int:
        """Return the number of rows, from the first on, that are or may be on the disk at once."""
        if self.window_shards is None:
            return len(self)
        return int(self.shard_ends[min(max(1, self.window_shards // 2), len(self.shard_ends)) - 1])

    def _read_bytes(self, kind: str, row: int) -> bytes:
        number = find_part(self.shard_ends, row)
        first = int(self.shard_ends[number - 1]) if number else 0
        return self._open_shard(number)[kind][row - first].tobytes()

    @property
    def num_groups(self) -> int:
        """Number of questions: the number of examples, unless several share one."""
        return self.summary["num_groups"]

    def get_id(self, row: int) -> str:
        return self._read_bytes("ids", row).decode()

    def read_example(self, row: int) -> TextExample:
        """Return the text of example `row`."""
        table = json.loads(self._read_bytes("texts", row))
        for name in ("references", "clippable"):
            table[name] = tuple(table[name])
        return TextExample(**table)

    @property
    def fingerprint(self) -> str:
        return self.summary["fingerprint"]


def read_index(folder: Path) -> JsonTable:
    """Read index.json of prepared data. Raises ValueError for another file or a later format, OSError."""
    index = json.loads((folder / INDEX).read_bytes())
    if not is_index(index):
        raise ValueError(f"{INDEX} is not that of prepared data")
    if fault := find_index_fault(index):
        raise ValueError(f"{INDEX} {fault}")
    return index


def load_or_build_store(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path,
    cache_setting: str = "data.cache_dir",
    num_processes: int | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> TokenStore:
    """Load the store of a source from the cache, or build it if its data, settings, task or tokenizer changed.

    Args:
        cache_setting: the setting that an error names for a cache that cannot be written.
        num_processes: processes that convert records; None: one per core if the source has LARGE_BYTES, else one.

    A damaged store is set aside and built again; its `rebuilt` has the sentence. Raises DataError for bad data, for a
    source without examples or that changes meanwhile, FiveTuneEnvironmentError for a read-only cache.
    """
    header, guard = describe_data(source, tokenizer)
    folder = cache / _compute_cache_key(header["fingerprint"], source.task, tokenizer)
    store, damage = _load_cached_store(folder, cache_setting, on_progress)
    if store is None:
        num = num_processes or choose_num_processes(source)
        with translate_disk_errors(cache, cache_setting), guard.explain_errors():
            _build_store(folder, source, tokenizer, header, guard, num, on_progress)
        store = TokenStore(folder)
        store.is_new = True
        store.rebuilt = damage
    store.summary["source"] = list(source.paths)  # the cached store may have been built from a copy elsewhere
    refuse_skipped_records(store.summary, source.on_bad_record)
    return store


def refuse_skipped_records(summary: JsonTable, on_bad_record: str) -> None:
    """Raise DataError if the data was built while data.on_bad_record was skip, and now it is fail."""
    bad = summary["first_bad"]
    if bad and on_bad_record == "fail":
        raise DataError(describe_bad_record(bad["where"], bad["reason"]))


def choose_num_processes(source: Source) -> int:
    """Return the number of processes that convert a source: one per core if it is large."""
    num_bytes = 0
    for path in source.paths:
        num_bytes += sum(file.stat().st_size for file in list_source_files(path))
    if num_bytes < LARGE_BYTES:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_cached_store(
    folder: Path, cache_setting: str, on_progress: ProgressCallback
) -> tuple[TokenStore | None, str]:
    """Return the cached store, None if there is none; a damaged store is set aside, with a sentence."""
    if not folder.is_dir():
        return None, ""
    state = folder.stat()
    try:
        store = TokenStore(folder)
        store.verify(on_progress)
        return store, ""
    except DamagedStoreError as error:
        aside = folder.with_name(f"{folder.name}.damaged")
        with translate_disk_errors(folder.parent, cache_setting), suppress(FileNotFoundError):
            if os.path.samestat(state, folder.stat()):  # another process may have replaced it meanwhile
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        damage = str(error).removesuffix(" Delete that folder.")
        return None, f"{damage} It is set aside as {aside.name}, and the data are tokenised again."


def get_cache_folder(configured: str | None) -> Path:
    """Return the cache of tokenised data: the configured one, else $XDG_CACHE_HOME/fivetune or ~/.cache/fivetune."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(root) / "fivetune"


def describe_data(source: Source, tokenizer: PreTrainedTokenizerBase) -> tuple[JsonTable, SourceGuard]:
    """Return the settings, the tokenizer and the fingerprint of prepared data: the header of its index; and its guard.

    The fingerprint is the hash of content, tokenizer, task and template, limits; resuming requires the same.
    `on_bad_record` is not part of it: without bad records the store is the same for both values, and
    `load_or_build_store` refuses a store with bad records for "fail".
    """
    names = [path if is_hub_name(path) else Path(path).name for path in source.paths]  # ids are made from them
    settings: JsonTable = {
        "version": ENCODING_VERSION,
        "task": [source.task.plugin_name(), source.task.version, source.task.model_dump(mode="json")],
        "limits": asdict(source.limits),
        "columns": source.columns,
        "rest": [source.max_examples, source.for_training, source.labelled],
        "tokenizer": compute_tokenizer_fingerprint(tokenizer),
        "names": names,
    }
    if source.header:
        settings["header"] = list(source.header)
    if source.split:
        settings["split"] = asdict(source.split)
    guard = SourceGuard.take(source.paths, json.dumps(settings, sort_keys=True))
    return {
        "fingerprint": guard.fingerprint,
        "settings": settings,
        "tokenizer": {"num_pieces": len(tokenizer), "name": Path(str(tokenizer.name_or_path)).name},
        "dtype": np.dtype(choose_dtype(tokenizer)).name,
    }, guard


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
    header: JsonTable,
    guard: SourceGuard,
    num_processes: int,
    on_progress: ProgressCallback,
) -> None:
    staging, lock = _make_staging_folder(folder)
    try:
        converter = Converter(source, tokenizer, split_source(source))
        build_prepared_data(
            str(staging), converter, header, guard, num_processes=num_processes, on_progress=on_progress
        )
        fsync_folder(staging)
        try:
            staging.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(staging, ignore_errors=True)  # another process was first, with the same data
            return
    except (KeyboardInterrupt, FiveTuneEnvironmentError):  # the next attempt continues
        if not (staging / name_progress(0)).is_file():
            shutil.rmtree(staging, ignore_errors=True)
        raise
    except BaseException:  # a full disk as well
        shutil.rmtree(staging, ignore_errors=True)
        raise
    else:  # from the rename on, a folder of the name `staging` is another process's
        (folder / LOCK).unlink(missing_ok=True)  # not before: another process would lock a folder that is moved
        fsync_folder(folder.parent)
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
def translate_disk_errors(cache: Path, setting: str = "data.cache_dir") -> Generator[None]:
    """Convert a failed write into a FiveTuneEnvironmentError that names the setting of the folder."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = f"Free space, or choose another {setting}" if is_full else f"Choose another {setting}"
        if cache.is_relative_to(get_cache_folder(None)):
            advice += ", or an XDG_CACHE_HOME or HOME that can be written"
        raise FiveTuneEnvironmentError(f"{cache}: cannot be written: {error.strerror}. {advice}.") from None
