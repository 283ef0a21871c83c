"""Prepared data at any location: write it, check that it fits the run, and read its shards through a local cache.

In: the folder or URL that `fivetune prepare --output` wrote. Out: a TokenStore. The shards of a folder are read in
place; the shards of a URL are copied once per node: the first process that needs a shard copies it, others wait.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from fivetune.data.examples import Source, split_source
from fivetune.data.storage import (
    MissingObjectError,
    StorageError,
    fetch_file,
    get_object,
    has_object,
    is_url,
    join_location,
    list_objects,
    probe_location,
    put_object,
)
from fivetune.data.store.arrays import MISSING, find_fault
from fivetune.data.store.build import (
    INDEX,
    build_prepared_data,
    find_index_fault,
    is_index,
    join_jobs,
    list_open_jobs,
    name_end,
)
from fivetune.data.store.convert import Converter
from fivetune.data.store.partial import LOCK, PROGRESS, lock_build_folder
from fivetune.data.store.token_store import (
    ShardFolder,
    TokenStore,
    choose_num_processes,
    compute_tokenizer_fingerprint,
    describe_data,
    refuse_skipped_records,
    translate_disk_errors,
)
from fivetune.errors import ConfigError, DataError, FiveTuneEnvironmentError, format_size
from fivetune.rundir import lock_file
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.types import JsonTable
from fivetune.values import is_file_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_FETCHED_AT_ONCE = 4  # shards; one stream rarely fills a network
PREPARE_AGAIN = "Prepare the data again, to another folder"


def is_prepared(source: str) -> bool:
    """Return whether a source is prepared data: a folder with its index, or any URL."""
    if is_url(source):
        return True
    try:
        index = json.loads((Path(source).expanduser() / INDEX).read_bytes())
    except (OSError, ValueError):
        return False
    return is_index(index)


def read_prepared_index(location: str) -> JsonTable:
    """Read the index of prepared data. Raises DataError if there is none or FiveTune cannot read it, StorageError."""
    name = join_location(location, INDEX)
    try:
        index = json.loads(get_object(name))
    except MissingObjectError:
        if any(one.startswith(PROGRESS) for one in list_objects(location)):
            raise DataError(
                f"{location}: the preparation is not finished: {INDEX} is missing. Repeat the command that "
                "began it; it continues after the last shard."
            ) from None
        raise DataError(
            f"{location}: holds no prepared data: {INDEX} is missing. A URL must lead to a folder that fivetune "
            "prepare wrote. Run fivetune prepare RECIPE --output URL, and name URL/train or URL/eval."
        ) from None
    except ValueError as error:
        raise DataError(f"{name}: damaged: {error}. {PREPARE_AGAIN}.") from None
    if not is_index(index):
        raise DataError(f"{name}: not the index of prepared data. Name a folder that fivetune prepare wrote.")
    if fault := find_index_fault(index):
        raise DataError(f"{name}: {fault}. {PREPARE_AGAIN}, or use the version of FiveTune that wrote it.")
    for entry in (index["rows"], *index["shards"]):  # a copy is written under the name that the index gives
        if not is_file_name(entry["file"]):
            raise DataError(f"{name}: {entry['file']!r} is not the name of a file of this folder. {PREPARE_AGAIN}.")
    return index


def write_prepared(
    location: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_processes: int | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[JsonTable | None, bool]:
    """Write the data of a source, or of its shard, to a folder or URL; returns the index, and whether it was there.

    The index is None as long as shards are missing (`list_open_jobs`). Raises DataError if other data is there,
    ConfigError for a limit of records that shards cannot keep, FiveTuneEnvironmentError if another process writes
    there, or for the disk.
    """
    header, guard = describe_data(source, tokenizer)
    if has_object(join_location(location, INDEX)):
        index = read_prepared_index(location)
        if index["fingerprint"] != header["fingerprint"]:
            raise DataError(
                f"{location}: holds prepared data of other files or settings. Give another --output, or delete it."
            )
        return index, True
    job = source.shard
    if job.count > 1 and (source.max_examples or (source.split and source.split.max_records)):
        limit = f"data.max_{'train' if source.for_training or source.split else 'eval'}_examples"
        raise ConfigError(f"--shard {job}: {limit} counts the records of all shards. Set it to null, or omit --shard.")
    num = num_processes or choose_num_processes(source)
    with guard.explain_errors():
        converter = Converter(source, tokenizer, split_source(source))
    with ExitStack() as stack:
        if is_url(location):  # before hours of work: may this machine write there?
            probe_location(location)
        else:
            stack.enter_context(translate_disk_errors(Path(location), "--output"))
            Path(location).mkdir(parents=True, exist_ok=True)
            name = f"{LOCK}-{job.name}" if job.count > 1 else LOCK
            lock = lock_build_folder(Path(location), name)
            if lock is None:
                raise FiveTuneEnvironmentError(f"{location}: another process prepares data there. Wait for it.")
            stack.enter_context(lock)
            # Before the lock is free: another process could lock the file that is removed, and a third a new one.
            stack.callback((Path(location) / name).unlink, missing_ok=True)
        if not has_object(join_location(location, name_end(job))):
            build_prepared_data(location, converter, header, guard, num_processes=num, on_progress=on_progress, job=job)
    if job.count > 1:
        # Another job may join them meanwhile, and remove what tells that they are done, after the index is written.
        is_open = bool(list_open_jobs(location, job))
        if is_open and not has_object(join_location(location, INDEX)):
            return None, False
        try:
            if not is_open:
                join_jobs(location, source, header)
        except MissingObjectError:
            if not has_object(join_location(location, INDEX)):
                raise
    return read_prepared_index(location), False


def open_prepared(
    location: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path,
    window_shards: int | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> TokenStore:
    """Open prepared data, which must have been made with the settings of `source` and the same tokenizer.

    Args:
        cache: folder under which the shards of a URL are copied.
        window_shards: the most shards in the cache at once; None: all are copied now.

    Raises DataError for other settings, another tokenizer or format; StorageError, FiveTuneEnvironmentError.
    """
    index = read_prepared_index(location)
    refuse_other_tokenizer(location, index, tokenizer)
    refuse_other_settings(location, index, source)
    refuse_skipped_records(index["summary"], source.on_bad_record)
    if is_url(location):
        content = json.dumps(index, sort_keys=True).encode()
        folder = cache / f"prepared-{index['fingerprint'][:16]}-{zlib.crc32(content):08x}"
        shards = ShardCache(location, folder, index, is_window=window_shards is not None)
        shards.fetch_index()
        if window_shards is None:
            shards.fetch_all(on_progress)
        store = TokenStore(folder, shards)
        store.rebuilt = shards.describe_damage()
    else:
        folder = Path(location).expanduser()
        _refuse_damage(folder / index["rows"]["file"], index["rows"])
        store = TokenStore(folder, CheckedShardFolder(folder, index))
    store.summary["source"] = [location]
    store.window_shards = window_shards
    return store


def refuse_other_tokenizer(location: str, index: JsonTable, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the shards hold ids of another tokenizer."""
    if index["settings"]["tokenizer"] != compute_tokenizer_fingerprint(tokenizer):
        made = index["tokenizer"]
        raise DataError(
            f"{location}: its shards hold the ids of another tokenizer: {made['name']} with "
            f"{made['num_pieces']:,} pieces; the model's is {Path(str(tokenizer.name_or_path)).name} with "
            f"{len(tokenizer):,}. {PREPARE_AGAIN} with this model, or train the model that it was prepared for."
        )


def refuse_other_settings(location: str, index: JsonTable, source: Source) -> None:
    """Raise DataError if the data was prepared with other settings than `source` has, naming the first."""
    settings = index["settings"]
    name, version, options = settings["task"]
    max_examples, for_training, labelled = settings["rest"]
    split = "train" if source.for_training else "eval"
    if (for_training, labelled) != (source.for_training, source.labelled):
        kind = "training" if for_training else "evaluation"
        raise DataError(
            f"{location}: was prepared as {kind} data, and is given as data.{split}. Name the folder {split} that "
            "fivetune prepare wrote beside it."
        )
    # Setting, its value in the prepared data, its value in this run.
    task = source.task
    pairs = [("task.name", name, task.plugin_name()), ("the version of the task", version, type(task).version)]
    own = task.model_dump(mode="json")
    for key in sorted({*options, *own}):
        pairs.append((f"task.{key}", options.get(key), own.get(key)))
    for key, value in settings["limits"].items():
        pairs.append((f"data.{key}", value, getattr(source.limits, key)))
    pairs.append((f"data.max_{split}_examples", max_examples, source.max_examples))
    for key, prepared, wanted in pairs:
        if prepared != wanted:
            raise DataError(
                f"{location}: was prepared with {key} {_format_value(prepared)}, this run has {_format_value(wanted)}. "
                f"Set it to {_format_value(prepared)}, or prepare the data again, to another folder."
            )


def _format_value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class CheckedShardFolder(ShardFolder):
    """The shards in a folder that this machine did not build: each is compared with its checksum when it is opened."""

    def __init__(self, folder: Path, index: JsonTable) -> None:
        super().__init__(folder, index)
        self._checked: set[int] = set()

    def locate(self, number: int) -> Path:
        path = super().locate(number)
        if number not in self._checked:
            _refuse_damage(path, self._index["shards"][number])
            self._checked.add(number)
        return path


def _refuse_damage(path: Path, entry: JsonTable) -> None:
    if fault := find_fault(path, entry):
        raise DataError(f"{path}: {fault}. {PREPARE_AGAIN}, or copy this one again.")


class ShardCache:
    """The shards of a URL, copied to a local folder that all processes of the node share.

    Args:
        is_window: delete the shards that `keep` does not name.
    """

    def __init__(self, location: str, folder: Path, index: JsonTable, *, is_window: bool) -> None:
        self._location = location
        self._folder = folder
        self._index = index
        self._is_window = is_window
        self._threads = ThreadPoolExecutor(NUM_FETCHED_AT_ONCE, thread_name_prefix="shards")
        self._fetching: dict[str, Future[None]] = {}  # file -> its copy, under way or done
        self._given_up: set[str] = set()  # files whose copies `keep` wants no more
        self._kept: tuple[frozenset[int], frozenset[int]] | None = None
        self._checked: set[str] = set()  # files that this process has compared with their checksums
        self._damaged: set[str] = set()
        self._lock = Lock()

    def fetch_index(self) -> None:
        """Copy what every reader needs: the index, and the facts of all rows."""
        with translate_disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            put_object(str(self._folder / INDEX), json.dumps(self._index, ensure_ascii=False, indent=1).encode())
        self._fetch(self._index["rows"])

    def fetch_all(self, on_progress: ProgressCallback) -> None:
        """Copy all shards. Raises FiveTuneEnvironmentError before the first if the disk is too small for them."""
        entries: list[JsonTable] = self._index["shards"]
        missing = [number for number, entry in enumerate(entries) if not self._has(entry)]
        needed = sum(entries[number]["size"] for number in missing)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise FiveTuneEnvironmentError(
                f"{self._folder}: the shards of {self._location} take {format_size(needed)}, {format_size(free)} are "
                "free. Choose another data.cache_dir, or read them through a window: data.window_shards: 8."
            )
        waiting = [self._begin(number) for number in missing]
        try:
            for done, future in enumerate(waiting, start=len(entries) - len(missing) + 1):
                future.result()
                on_progress(f"copying the shards of {self._location}", done, len(entries))
        finally:
            for future in waiting:  # after an error the process must not wait for the rest
                future.cancel()

    def locate(self, number: int) -> Path:
        entry = self._index["shards"][number]
        path = self._folder / entry["file"]
        while not self._has(entry):  # again if `keep` gives the shard up meanwhile
            self._begin(number).result()
        return path

    def keep(self, current: frozenset[int], following: frozenset[int]) -> None:
        if not self._is_window or self._kept == (current, following):
            return
        self._kept = current, following
        names = {self._index["shards"][number]["file"] for number in current | following}
        with self._lock:
            self._given_up = self._fetching.keys() - names
            for path in self._folder.glob("shard-*"):
                if path.name not in names:
                    path.unlink(missing_ok=True)  # a process that reads it keeps its pages
        for number in [*sorted(current), *sorted(following)]:
            if not self._has(self._index["shards"][number]):
                self._begin(number)

    def describe_damage(self) -> str:
        """Return a sentence about damaged copies, which were copied again; "" if there were none."""
        if not self._damaged:
            return ""
        return f"{self._folder}: damaged copies of {', '.join(sorted(self._damaged))} were copied again."

    def _has(self, entry: Mapping[str, Any]) -> bool:
        name = entry["file"]
        fault = find_fault(self._folder / name, entry, whole=name not in self._checked)
        if fault is None:
            self._checked.add(name)
        elif fault != MISSING:
            self._damaged.add(name)
        return fault is None

    def _begin(self, number: int) -> Future[None]:
        """Begin to copy a shard, unless that is under way."""
        entry = self._index["shards"][number]
        with self._lock:
            self._given_up.discard(entry["file"])
            found = self._fetching.get(entry["file"])
            if found is None or found.done():
                found = self._threads.submit(self._fetch, entry)
                self._fetching[entry["file"]] = found
            return found

    def _fetch(self, entry: JsonTable) -> None:
        def find_copy_fault(copy: Path) -> str | None:
            fault = find_fault(copy, entry)
            return fault and f"{fault}, also when it was copied again. {PREPARE_AGAIN}"

        name = entry["file"]
        with translate_disk_errors(self._folder), (self._folder / f".{name}.lock").open("ab") as lock:
            lock_file(lock, wait=True)
            if self._has(entry):  # another process of the node was first
                return
            url = join_location(self._location, name)
            try:
                fetch_file(url, self._folder / name, check=find_copy_fault, place=self._put_in_place)
            except MissingObjectError as error:
                raise StorageError(f"{error} {INDEX} lists it: {PREPARE_AGAIN}.") from None

    def _put_in_place(self, copy: Path, target: Path) -> None:
        """Put a whole copy in its place, unless `keep` gave it up meanwhile: the window has no room for it."""
        with self._lock:
            if target.name in self._given_up:
                del self._fetching[target.name]  # who needs it from now on begins anew
            else:
                copy.replace(target)
