"""Tokenised data on disk: flat memory-mapped arrays with offsets, cached under a fingerprint.

In: sources, a task, a tokenizer. Out: a TokenStore, whose memory use does not grow with the data.
A store is built in a staging folder and renamed, so that a cached one is whole; a damaged one is built again. A build
that was stopped goes on after the last shard that was complete.
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
from fivetune.data.split import hash_text
from fivetune.data.windows import select_window_targets, split_into_windows
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.rundir import fsync_folder
from fivetune.tasks import Task, head_of
from fivetune.types import JsonTable, TextExample, TokenExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODING_VERSION = 2  # raise it when the same input would be encoded differently
LAYOUT_VERSION = 6  # raise it when a store has other files, or its summary other keys
CHUNK = 1_000  # examples tokenised at once; a fast tokenizer spreads them over all cores
SHARD = 50  # chunks after which a build that is stopped can go on
FACTS = "facts.npy"  # [3, num_examples] int32: group, clipped input tokens, whether the answer was clipped
NUM_BINS = 30
MIN_ID_CHARS = 8

BuildProgressCallback = Callable[[str, int], None]


class DamagedStoreError(FiveTuneEnvironmentError):
    """A folder that is no whole store."""


class TokenStore:
    """Examples in token ids and in words.

    `inputs[i]`, `labels[i]` are the ids of example i; `text(i)` gives its words; `summary` counts what was
    read, kept, skipped and cut (the content of data.json). `groups[i]` numbers the question that example i belongs to,
    in order of first appearance; `num_clipped[i]` tokens of its inputs were cut, with them the answer if
    `answer_clipped[i]`. Raises DamagedStoreError if the folder is not a whole store.
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
        """Number of questions: of examples, unless several share one."""
        return self.summary["num_groups"]

    def get_id(self, row: int) -> str:
        return self._ids[row].tobytes().decode()

    def read_example(self, row: int) -> TextExample:
        """The words of example `row`."""
        table = json.loads(self._texts[row].tobytes())
        return TextExample(
            **{**table, "references": tuple(table["references"]), "clippable": tuple(table["clippable"])}
        )

    @property
    def fingerprint(self) -> str:
        return self.summary["fingerprint"]


def list_given_ids(store: TokenStore) -> frozenset[str]:
    """The ids that the source gave its questions, of at least MIN_ID_CHARS characters: shorter ones, such as numbers,
    are alike by chance. Ids made from a record's place are left out."""
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
    """The store of a source: from the cache if nothing that decides it has changed, else built now.

    Raises DataError for a source that is wrong or leaves no example, FiveTuneEnvironmentError for a read-only cache.
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
    """The cached store; None if there is none, or only a damaged one, which is removed."""
    if not folder.is_dir():
        return None
    try:
        return TokenStore(folder)
    except DamagedStoreError:
        with _translate_disk_errors(folder.parent):
            shutil.rmtree(folder)
        return None


def get_cache_folder(configured: str | None) -> Path:
    """Where tokenised data is kept: as configured, else $XDG_CACHE_HOME/fivetune or ~/.cache/fivetune."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(root) / "fivetune"


def compute_fingerprint(source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what a run is trained on: content, tokenizer, task and template, limits. Resuming asks for the same.

    What to do with bad records is not in it: a store is the same for both, unless it has some (see
    `load_or_build_store`).
    """
    digest = blake2b(digest_size=16)
    settings = {
        "version": ENCODING_VERSION,
        "task": [source.task.plugin_name(), source.task.version, source.task.model_dump(mode="json")],
        "limits": asdict(source.limits),
        "columns": source.columns,
        "rest": [source.max_examples, source.for_training, source.labelled],
        "tokenizer": compute_tokenizer_fingerprint(tokenizer),
        "names": [path if is_hub_name(path) else Path(path).name for path in source.paths],  # they make the ids
    }
    if source.split:
        settings["split"] = asdict(source.split)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for path in source.paths:
        for file in list_source_files(path):
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _compute_cache_key(fingerprint: str, task: Task, tokenizer: PreTrainedTokenizerBase) -> str:
    """Name of a store in the cache: the fingerprint, and the code that makes token ids of the content.

    A task's file that was edited, or a tokenizer that splits or normalises in another way, rebuilds the store.
    """
    digest = blake2b(f"{LAYOUT_VERSION} {fingerprint}".encode(), digest_size=16)
    digest.update(Path(inspect.getfile(type(task))).read_bytes())
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer
        digest.update(backend.to_str().encode())
    return digest.hexdigest()


def compute_tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's vocabulary and of how it treats a probe text."""
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
            with (staging / "summary.json").open("w", encoding="utf-8") as file:
                json.dump(summary, file, ensure_ascii=False, indent=1)
                file.flush()
                os.fsync(file.fileno())
            remove_progress(staging)
            fsync_folder(staging)
            if not folder.exists():
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
    shutil.rmtree(staging, ignore_errors=True)


def _make_staging_folder(folder: Path) -> tuple[Path, IO[bytes]]:
    """The folder to build a store in, and its lock: that of a stopped build, unless another process works there."""
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
    """Turn a failed write into an error that names the setting."""
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
    """What is kept of every row until the store is whole, 4 bytes each: full lengths in tokens, and FACTS."""

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
        """Everything, to go on from: `from_arrays` takes it."""
        return {
            "columns": np.array([self.input, self.target, self.group, self.clipped, self.lost], dtype=np.int32),
            "names": np.fromiter(self._named, np.uint64),
            "numbers": np.fromiter(self._named.values(), np.int32),
        }

    @classmethod
    def from_arrays(
        cls, columns: NDArray[np.int32], names: NDArray[np.uint64], numbers: NDArray[np.int32]
    ) -> _RowFacts:
        groups = int(columns[2].max(initial=-1)) + 1  # no row may be there yet
        named = dict(zip(names.tolist(), numbers.tolist(), strict=True))
        read, target, group, clipped, lost = (array("i", column.tobytes()) for column in columns)
        return cls(read, target, group, clipped, lost, groups, named)

    def save(self, folder: Path) -> None:
        with (folder / FACTS).open("wb") as file:
            np.save(file, np.array([self.group, self.clipped, self.lost], dtype=np.int32))
            file.flush()
            os.fsync(file.fileno())


class _StoreWriter:
    """The arrays of a store while they are written; what the disk refuses is raised as FiveTuneEnvironmentError."""

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
        # What is tokenised already is read again: reading counts records and finds what is wrong with them.
        for number, _ in enumerate(islice(examples, num_chunks * CHUNK), start=1):
            if number % CHUNK == 0:
                on_progress(f"going on with {paths}", number)
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
    """Sums and p99 of the lengths as kept (p99 sets the generation cap); histogram and longest as before clipping."""
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
