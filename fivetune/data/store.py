"""Tokenised data on disk: flat memory-mapped arrays with offsets, cached under a fingerprint.

In: sources, a task, a tokenizer. Out: a TokenStore, whose memory use does not grow with the data.
A store is built in a staging folder and renamed, so that a cached one is whole; a damaged one is built again. A build
that was stopped goes on after the last shard that was complete.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from fivetune.data.encode import Limits, encode
from fivetune.data.partial import PROGRESS, forget_progress, load_progress, own, save_progress
from fivetune.data.ragged import Ragged, RaggedWriter
from fivetune.data.records import BadRecord, read_records, refuse_duplicate_ids, source_files
from fivetune.data.windows import window_targets, windows
from fivetune.errors import DataError, EnvironmentProblem
from fivetune.rundir import fsync_folder
from fivetune.tasks import Task, head_of
from fivetune.types import RawRecord, TextExample, TokenExample

ENCODING_VERSION = 2  # raise it when the same input would be encoded differently
LAYOUT_VERSION = 5  # raise it when a store has other files, or its summary other keys
CHUNK = 1_000  # examples tokenised at once; a fast tokenizer spreads them over all cores
SHARD = 50  # chunks after which a build that is stopped can go on
FACTS = "facts.npy"  # [3, num_examples] int32: group, clipped input tokens, whether the answer was clipped
MAX_SKIPS_KEPT = 50  # skipped records that are named; all are counted
NUM_BINS = 30

Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Source:
    """What a store is made from, apart from the tokenizer."""

    paths: tuple[str, ...]
    task: Task
    limits: Limits
    columns: dict[str, str] = field(default_factory=dict)
    on_bad_record: str = "fail"
    max_examples: int | None = None
    for_training: bool = False
    labelled: bool = True


class DamagedStore(EnvironmentProblem):
    """A folder that is no whole store."""


class TokenStore:
    """Examples in token ids and in words.

    `inputs[i]`, `labels[i]` are the ids of example i; `text(i)` gives its words; `summary` counts what was
    read, kept, skipped and cut (the content of data.json). `groups[i]` numbers the question that example i belongs to,
    in order of first appearance; `num_clipped[i]` tokens of its inputs were cut, with them the answer if
    `answer_clipped[i]`. Raises DamagedStore if the folder is not a whole store.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
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
            raise DamagedStore(f"{folder}: damaged tokenised data: {error}. Delete that folder.") from None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_groups(self) -> int:
        """Number of questions: of examples, unless several share one."""
        return self.summary["num_groups"]

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

    Raises DataError for a source that is wrong or leaves no example, EnvironmentProblem for a cache that cannot be
    written.
    """
    fingerprint = fingerprint_of(source, tokenizer)
    folder = cache / _key(fingerprint, source.task, tokenizer)
    store = _whole_store(folder)
    if store is None:
        _build(folder, source, tokenizer, fingerprint, progress)
        store = TokenStore(folder)
    bad = store.summary["first_bad"]
    if bad and source.on_bad_record == "fail":  # built while data.on_bad_record was skip
        raise DataError(_refusal(bad["where"], bad["reason"]))
    return store


def _whole_store(folder: Path) -> TokenStore | None:
    """The cached store; None if there is none, or only a damaged one, which is removed."""
    if not folder.is_dir():
        return None
    try:
        return TokenStore(folder)
    except DamagedStore:
        with _told(folder.parent):
            shutil.rmtree(folder)
        return None


def _refusal(where: str, reason: str) -> str:
    advice = "" if "data.on_bad_record" in reason else " To leave such records out, set data.on_bad_record: skip."
    return f"{where}: {reason}{advice}"


def cache_folder(configured: str | None) -> Path:
    """Where tokenised data is kept: as configured, else $XDG_CACHE_HOME/fivetune or ~/.cache/fivetune."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(root) / "fivetune"


def fingerprint_of(source: Source, tokenizer: Any) -> str:
    """Hash of what a run is trained on: content, tokenizer, task and template, limits. Resuming asks for the same.

    What to do with bad records is not in it: a store is the same for both, unless it has some (see `prepare`).
    """
    digest = blake2b(digest_size=16)
    settings = {
        "version": ENCODING_VERSION,
        "task": [source.task.plugin_name(), source.task.version, source.task.model_dump(mode="json")],
        "limits": asdict(source.limits),
        "columns": source.columns,
        "rest": [source.max_examples, source.for_training, source.labelled],
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


def _key(fingerprint: str, task: Task, tokenizer: Any) -> str:
    """Name of a store in the cache: the fingerprint, and the code that makes token ids of the content.

    A task's file that was edited, or a tokenizer that splits or normalises in another way, builds anew.
    """
    digest = blake2b(f"{LAYOUT_VERSION} {fingerprint}".encode(), digest_size=16)
    digest.update(Path(inspect.getfile(type(task))).read_bytes())
    if tokenizer.is_fast:
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary and of how it treats a probe text."""
    probe = tokenizer('A probe: "It\'s 1,234.5 €", été <b>x</b>\n\t{a}  b', verbose=False)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return blake2b(json.dumps([probe, vocabulary]).encode(), digest_size=16).hexdigest()


def _build(folder: Path, source: Source, tokenizer: Any, fingerprint: str, progress: Progress) -> None:
    with _told(folder.parent):
        staging, lock = _stage(folder)
    try:
        summary = {"fingerprint": fingerprint, **_fill(staging, source, tokenizer, progress)}
        with _told(folder.parent):
            with (staging / "summary.json").open("w", encoding="utf-8") as file:
                json.dump(summary, file, ensure_ascii=False, indent=1)
                file.flush()
                os.fsync(file.fileno())
            forget_progress(staging)
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


def _stage(folder: Path) -> tuple[Path, IO[bytes]]:
    """The folder to build a store in, and its lock: that of a stopped build, unless another process works there."""
    staging = folder.with_name(f".{folder.name}.partial")
    staging.mkdir(parents=True, exist_ok=True)
    lock = own(staging)
    if lock is None:
        staging = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        lock = own(staging)
        assert lock is not None
    return staging, lock


@contextmanager
def _told(cache: Path) -> Iterator[None]:
    """Turn a failed write into an error that names the setting."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{cache}: cannot be written: {error.strerror}. Free space, or choose another data.cache_dir."
        ) from None


class _Counts:
    """What was read, kept, skipped and cut, as data.json shows it."""

    OF_READING = ("num_read", "num_records_kept", "num_skipped", "num_skipped_bad", "skips", "first_bad")

    def __init__(self) -> None:
        self.num_read = self.num_records_kept = self.num_skipped = self.num_skipped_bad = 0
        self.num_kept = 0  # examples that the task made of the records kept
        self.num_cut_into_windows = self.num_windows = 0  # over-long ones of these, and what became of them
        self.num_not_learnt = 0  # examples, or windows of them, that give no target
        self.num_examples_clipped = self.num_clipped_input_tokens = 0
        self.num_clipped_targets = self.num_answers_lost = self.num_unknown_tokens = 0
        self.skips: list[dict[str, str]] = []
        self.first_bad: dict[str, str] | None = None

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be used."""
        self.num_skipped_bad += 1
        named = {"where": bad.where, "reason": bad.reason}
        self.first_bad = self.first_bad or named
        self._pass_over(named, is_news=True)

    def leave_out(self, where: str, reason: str) -> None:
        """Count a record of which the task makes no example on purpose; the first for a reason is named."""
        is_news = all(reason != skip["reason"] for skip in self.skips)
        self._pass_over({"where": where, "reason": reason}, is_news=is_news)

    def _pass_over(self, named: dict[str, str], *, is_news: bool) -> None:
        self.num_read += 1
        self.num_skipped += 1
        if is_news and len(self.skips) < MAX_SKIPS_KEPT:
            self.skips.append(named)

    @property
    def of_tokenising(self) -> dict[str, int]:
        """The counts that do not come from reading."""
        return {name: value for name, value in vars(self).items() if name not in self.OF_READING}

    def add_windows(self, examples: Sequence[TextExample]) -> None:
        """Count the windows among the examples, and the questions that were cut into them."""
        numbers = [example.meta["window"][0] for example in examples if "window" in example.meta]
        self.num_windows += len(numbers)
        self.num_cut_into_windows += numbers.count(1)

    def add(self, tokens: TokenExample, unknown: int | None) -> None:
        """Count what the limits and the vocabulary cost an example."""
        self.num_examples_clipped += tokens.num_clipped_inputs > 0
        self.num_clipped_input_tokens += tokens.num_clipped_inputs
        self.num_clipped_targets += tokens.num_clipped_targets > 0
        self.num_answers_lost += tokens.answer_clipped
        self.num_unknown_tokens += sum(token == unknown for token in tokens.input_ids)


def _hash(group: str) -> int:
    return int.from_bytes(blake2b(group.encode(), digest_size=8).digest(), "big")


def _column() -> array[int]:
    return array("i")


@dataclass(slots=True)
class _Rows:
    """What is kept of every row until the store is whole, 4 bytes each: full lengths in tokens, and FACTS."""

    input: array[int] = field(default_factory=_column)
    target: array[int] = field(default_factory=_column)
    group: array[int] = field(default_factory=_column)
    clipped: array[int] = field(default_factory=_column)
    lost: array[int] = field(default_factory=_column)
    num_groups: int = 0
    _named: dict[int, int] = field(default_factory=dict)  # 8-byte hash of a group's id -> its number

    def add(self, tokens: TokenExample, group: str) -> None:
        self.input.append(len(tokens.input_ids) + tokens.num_clipped_inputs)
        self.target.append(len(tokens.labels) + tokens.num_clipped_targets)
        self.clipped.append(tokens.num_clipped_inputs)
        self.lost.append(tokens.answer_clipped)
        number = self._named.setdefault(_hash(group), self.num_groups) if group else self.num_groups
        self.num_groups = max(self.num_groups, number + 1)
        self.group.append(number)

    def as_arrays(self) -> dict[str, Any]:
        """Everything, to go on from: `from_arrays` takes it."""
        return {
            "columns": np.array([self.input, self.target, self.group, self.clipped, self.lost], dtype=np.int32),
            "names": np.fromiter(self._named, np.uint64),
            "numbers": np.fromiter(self._named.values(), np.int32),
        }

    @classmethod
    def from_arrays(cls, columns: Any, names: Any, numbers: Any) -> _Rows:
        groups = int(columns[2].max(initial=-1)) + 1  # no row may be there yet
        named = dict(zip(names.tolist(), numbers.tolist(), strict=True))
        read, target, group, clipped, lost = (array("i", column.tobytes()) for column in columns)
        return cls(read, target, group, clipped, lost, groups, named)

    def save(self, folder: Path) -> None:
        with (folder / FACTS).open("wb") as file:
            np.save(file, np.array([self.group, self.clipped, self.lost], dtype=np.int32))
            file.flush()
            os.fsync(file.fileno())


class _Files:
    """The arrays of a store while they are written; what the disk refuses is raised as EnvironmentProblem."""

    def __init__(self, folder: Path, dtype: type[np.generic], num_rows: int) -> None:
        self._cache = folder.parent
        kinds = (("inputs", dtype), ("labels", dtype), ("ids", np.uint8), ("texts", np.uint8))
        with _told(self._cache):
            self._writers = [RaggedWriter(folder, name, kind, num_rows) for name, kind in kinds]

    def append(self, rows: Iterable[tuple[Sequence[int] | bytes, ...]]) -> None:
        with _told(self._cache):
            for row in rows:
                for writer, part in zip(self._writers, row, strict=True):
                    writer.append(part)

    def sync(self) -> None:
        with _told(self._cache):
            for writer in self._writers:
                writer.sync()

    def close(self) -> None:
        with _told(self._cache), ExitStack() as stack:  # all are closed, whatever one of them says
            for writer in self._writers:
                stack.callback(writer.close)


def _fill(folder: Path, source: Source, tokenizer: Any, progress: Progress) -> dict[str, Any]:
    dtype = np.uint16 if len(tokenizer) <= np.iinfo(np.uint16).max else np.uint32
    counts, kept, num_chunks, paths = _Counts(), _Rows(), 0, ", ".join(source.paths)
    if noted := load_progress(folder):
        facts, arrays = noted
        num_chunks, kept = facts["num_chunks"], _Rows.from_arrays(**arrays)
        vars(counts).update(facts["counts"])
    files, examples = _Files(folder, dtype, len(kept.input)), _examples(source, counts)
    try:
        # What is tokenised already is read again: reading counts records and finds what is wrong with them.
        for number, _ in enumerate(islice(examples, num_chunks * CHUNK), start=1):
            if number % CHUNK == 0:
                progress(f"going on with {paths}", number)
        while chunk := list(islice(examples, CHUNK)):
            _write_chunk(chunk, source, tokenizer, files, counts, kept)
            num_chunks += 1
            if num_chunks % SHARD == 0 and kept.input:
                files.sync()
                with _told(folder.parent):
                    facts = {"num_chunks": num_chunks, "counts": counts.of_tokenising}
                    save_progress(folder, facts, **kept.as_arrays())
            progress(f"tokenising {paths}", counts.num_kept)
        files.sync()
    finally:
        files.close()
    if not kept.input:
        raise DataError(_nothing_left(source, counts))
    with _told(folder.parent):
        kept.save(folder)
    return {**_lengths(folder, dtype, source.limits, kept), **vars(counts), "source": list(source.paths)}


def _nothing_left(source: Source, counts: _Counts) -> str:
    told = ""
    if counts.skips:
        first = counts.skips[0]
        told += f"The first: {first['where']}: {first['reason'].rstrip('.')}. "
    if counts.num_not_learnt:
        told += f"{counts.num_not_learnt} examples do not hold their answer: there is nothing to learn from them. "
    paths = ", ".join(source.paths)
    return f"{paths}: no example is left of {counts.num_read} records. {told}Check task.name and data.columns."


def _examples(source: Source, counts: _Counts) -> Iterator[TextExample]:
    """The task's examples, bad records raised or counted."""
    on_bad = counts.skip if source.on_bad_record == "skip" else None
    for record in islice(refuse_duplicate_ids(_records(source, on_bad), on_bad=on_bad), source.max_examples):
        try:
            converted = source.task.to_text(record, labelled=source.labelled)
        except DataError as error:
            if on_bad is None:
                raise
            counts.skip(BadRecord(record.where, str(error).removeprefix(f"{record.where}: ")))
            continue
        if not converted:
            counts.leave_out(record.where, f"left out by task {source.task.plugin_name()}")
        else:
            counts.num_read += 1
            counts.num_records_kept += 1
            yield from converted if isinstance(converted, tuple) else (converted,)


def _records(source: Source, on_bad: Callable[[BadRecord], None] | None) -> Iterable[RawRecord]:
    for path in source.paths:
        yield from read_records(path, columns=source.columns, on_bad=on_bad)


def _write_chunk(
    chunk: list[TextExample], source: Source, tokenizer: Any, files: _Files, counts: _Counts, kept: _Rows
) -> None:
    counts.num_kept += len(chunk)
    if source.limits.overlong == "windows":
        chunk = windows(tokenizer, chunk, source.limits)
        counts.add_windows(chunk)
    taught = [window_targets(source.task, e) if source.for_training else (e.targets,) for e in chunk]
    counts.num_not_learnt += sum(not targets for targets in taught)
    pairs = [(example, target) for example, targets in zip(chunk, taught, strict=True) for target in targets]
    if not pairs:
        return
    examples, targets = [e for e, _ in pairs], [t for _, t in pairs]
    task = source.task
    encoded = encode(tokenizer, examples, targets, limits=source.limits, head=head_of(task), extractive=task.extractive)
    rows = []
    for (example, target), tokens in zip(pairs, encoded, strict=True):
        text = {"id": example.id, "inputs": example.inputs, "targets": target, "references": example.references,
                "clippable": example.clippable, "meta": dict(example.meta), "group": example.group}  # fmt: skip
        words = json.dumps(text, ensure_ascii=False).encode()
        rows.append((tokens.input_ids, tokens.labels, example.id.encode(), words))
        counts.add(tokens, tokenizer.unk_token_id)
        kept.add(tokens, example.group)
    files.append(rows)


def _lengths(folder: Path, dtype: type[np.generic], limits: Limits, kept: _Rows) -> dict[str, Any]:
    """Sums and p99 of the lengths as kept (p99 sets the generation cap); histogram and longest as before clipping."""
    facts: dict[str, Any] = {"dtype": np.dtype(dtype).name}
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
