"""The copy of a run at a URL (checkpoint.url): written while training continues, read on a machine without the run.

    checkpoints/<step>/...    as in the run directory; manifest.json is written last and makes the checkpoint whole
    config.yaml, steps.jsonl, ... and predictions/    records, at least as new as the newest whole checkpoint
    model/...                 at the end of the run; manifest.json last

In: a run directory, where a checkpoint is whole before its upload begins. Out: the copy; a run directory with its
newest whole checkpoint. An upload that fails is a warning: the run directory has everything.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Condition, Event, Thread

from fivetune.data.storage import (
    WRITE_TEST,
    DamagedObjectError,
    MissingObjectError,
    StorageError,
    delete_object,
    fetch_file,
    get_object,
    join_location,
    list_objects,
    probe_location,
    put_file,
    put_object,
)
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import RunDirError
from fivetune.model.save import replace_folder
from fivetune.rundir import CHECKSUMS, CONFIG, DATA, EVALS, LOG, MACHINE, STATUS, STEPS, find_conflict, lock_folder
from fivetune.rundir.checksums import MANIFEST, ManifestError, describe_difference, parse_manifest
from fivetune.rundir.files import replace_file
from fivetune.rundir.layout import PLAN, TELEMETRY_FILES
from fivetune.training.state.checkpoint import (
    TrainingState,
    find_newest_checkpoint,
    read_state,
    restore_replaced_checkpoints,
)
from fivetune.values import is_file_name

ADAPTER, CHECKPOINTS, MODEL, PREDICTIONS = "adapter", "checkpoints", "model", "predictions"
RECORDS = (CONFIG, MACHINE, PLAN, DATA, STATUS, STEPS, EVALS)  # config.yaml first: it makes a folder a run directory
POLL_SECONDS = 0.2


class UploadError(Exception):
    """A part of a checkpoint could not be uploaded by another rank, or the run ends before it was."""


def locate_copy(url: str, folder: str | Path) -> str:
    """Return the URL of a run's copy.

    >>> locate_copy("s3://bucket/runs/{run}/", "runs/squad")
    's3://bucket/runs/squad'
    """
    return url.replace("{run}", Path(folder).resolve().name).rstrip("/")


def open_copy(setting: str | None, folder: Path, world: World, *, resume: bool) -> tuple[str | None, list[str]]:
    """Check before the model is loaded that every rank may write to the URL; bring a resumed run up to date.

    Args:
        setting: checkpoint.url.

    Returns: the URL of the run's copy, and warnings about checkpoints there that are not whole.
    Raises StorageError, RunDirError if another run is there.
    """
    notes: list[str] = []
    if setting is None:
        return None, notes
    url = locate_copy(setting, folder)
    with world.run_rank_zero_first("checkpoint.url"):
        probe_location(url, f"{WRITE_TEST}-{world.rank}")
        if world.is_first and resume:
            notes = fetch_run(url, folder)
        elif world.is_first and (steps := list_copied_steps(url)):
            raise RunDirError(
                f"{url}: holds the checkpoint of step {max(steps)} of a run already. Add --resume to continue that "
                "run, or choose another checkpoint.url; {run} in it stands for the name of run.dir."
            )
    return url, notes


def list_copied_steps(url: str) -> dict[int, list[str]]:
    """List the checkpoints at a URL: step -> names of its files; those without a manifest are not whole."""
    found: dict[int, list[str]] = defaultdict(list)
    for name in list_objects(join_location(url, CHECKPOINTS)):
        step, _, file = name.partition("/")
        if re.fullmatch(r"[0-9]{1,18}", step, re.ASCII) and file:
            found[int(step)].append(file)
    return dict(found)


def fetch_run(url: str, folder: Path) -> list[str]:
    """Fetch the newest whole checkpoint at a URL, the best one, and the records, if the run directory has none as new.

    Returns: a sentence for each newer checkpoint that is not whole. Raises RunDirError, StorageError.
    """
    notes: list[str] = []
    if (reason := find_conflict(folder)) and not (folder / CONFIG).is_file():
        raise RunDirError(reason)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            # A killed run may have left a checkpoint under another name: it counts as the newest, too.
            checkpoints = folder / CHECKPOINTS
            restore_replaced_checkpoints(checkpoints)
            own = 0
            if checkpoints.is_dir() and (newest := find_newest_checkpoint(checkpoints, on_damage=notes.append)):
                own = int(newest.name)

            # Records first: they are at least as new as the checkpoint, and a resume drops the lines after its step.
            copied = list_copied_steps(url)
            newer = [step for step in copied if step > own]
            if any(MANIFEST in copied[step] for step in newer):
                _refuse_other_run(url, folder)
                _fetch_records(url, folder)

            # The newest one that is whole.
            for step in sorted(newer, reverse=True):
                place = join_location(url, CHECKPOINTS, str(step))
                try:
                    _fetch_checkpoint(place, checkpoints / str(step))
                except (MissingObjectError, DamagedObjectError) as error:
                    notes.append(f"{str(error).rstrip('.')}. Going back to the checkpoint before it.")
                    continue
                _fetch_best(url, checkpoints / str(step), notes)
                break
    except OSError as error:
        raise RunDirError(
            f"{folder}: the checkpoint of {url} cannot be written: {error.strerror or error}. Free disk space, or "
            "choose another run.dir."
        ) from None
    return notes


def _refuse_other_run(url: str, folder: Path) -> None:
    """Raise RunDirError if the run directory belongs to another run than the copy."""
    if not (folder / MACHINE).is_file():
        return
    with suppress(ValueError, KeyError, TypeError, MissingObjectError):  # damaged ones are reported where they are read
        theirs = json.loads(get_object(join_location(url, MACHINE)))["run_id"]
        ours = json.loads((folder / MACHINE).read_bytes())["run_id"]
        if theirs != ours:
            raise RunDirError(
                f"{url}: holds another run (id {theirs}) than {folder} (id {ours}). Choose the checkpoint.url of this "
                "run, or another run.dir."
            )


def _fetch_records(url: str, folder: Path) -> None:
    names = list_objects(join_location(url, PREDICTIONS))
    if outside := [name for name in names if not is_file_name(name)]:
        raise RunDirError(f"{join_location(url, PREDICTIONS)}: {outside[0]!r} is not the name of a file. Delete it.")
    (folder / CHECKSUMS).unlink(missing_ok=True)  # of the older records here
    predictions = [f"{PREDICTIONS}/{name}" for name in names]
    for name in (*RECORDS, *predictions):
        with suppress(MissingObjectError):
            fetch_file(join_location(url, name), folder / name)


def _fetch_checkpoint(place: str, target: Path) -> None:
    """Fetch a checkpoint, each file compared with its checksum.

    Raises MissingObjectError or DamagedObjectError if it is not whole, StorageError.
    """
    manifest = join_location(place, MANIFEST)
    try:
        content = get_object(manifest)
    except MissingObjectError:
        raise DamagedObjectError(f"{place}: {MANIFEST} is missing: its upload was not finished") from None
    try:
        files = parse_manifest(content).files
    except ManifestError as error:
        raise DamagedObjectError(f"{place}: {error}") from None
    # Under another name until every file is there.
    staging = target.with_name(f".staging-fetched-{target.name}")
    for name, checksum in files.items():
        fetch_file(join_location(place, name), staging / name, check=partial(describe_difference, listed=checksum))
    with replace_file(staging / MANIFEST) as file:
        file.write(content)
    for left in staging.iterdir():  # of an earlier, interrupted resume
        if left.name not in (*files, MANIFEST):
            left.unlink()
    replace_folder(staging, target)


def _fetch_best(url: str, newest: Path, notes: list[str]) -> None:
    """Fetch the checkpoints with the best evaluations, whose weights the run exports or averages at its end."""
    with suppress(ValueError):  # what is damaged is reported where the run resumes from it
        state, _ = read_state(newest)
        for number, one in enumerate((state.best, *state.runners_up)):
            if one is None or (target := newest.with_name(str(one.step))).is_dir():
                continue
            try:
                _fetch_checkpoint(join_location(url, CHECKPOINTS, str(one.step)), target)
            except (MissingObjectError, DamagedObjectError) as error:
                which = "one of the best evaluations" if number else "the best evaluation"
                notes.append(f"{str(error).rstrip('.')}. It is the checkpoint with {which} so far.")


class Uploader:
    """Copies whole checkpoints to a URL in a thread; of several that wait, the newest and the best ones.

    Rank 0 decides, and writes the manifest when all ranks have uploaded the files that they wrote.

    Args:
        url: URL of the run's copy; None: nothing is copied.
        keep: number of newest checkpoints kept at the URL, in addition to the best ones.
        start_step: where this part of the run begins.
    """

    def __init__(
        self, url: str | None, folder: Path, *, keep: int = 2, start_step: int = 0, world: World = SINGLE_PROCESS
    ) -> None:
        self.url = url
        self._folder = folder
        self._keep = keep
        self._world = world
        self._changed = Condition()
        self._wanted: dict[int, frozenset[int]] = {}  # step -> steps of the best evaluations at that time
        self._running: frozenset[int] = frozenset()
        self._newest: tuple[int, frozenset[int]] | None = None
        self._copied: set[int] | None = None  # whole at the URL, up to `start_step`; None: not listed yet
        self._start_step = start_step
        self._failed = False
        self._notes = list[str]()
        self._sent: dict[str, int] = {}  # records that do not change again, with their sizes
        self._num_jobs = 0
        self._stopped = Event()
        self._thread: Thread | None = None
        if url and not world.is_first:
            self._start(self._answer_rank_zero)

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = Thread(target=work, name="upload", daemon=True)
        self._thread.start()

    def submit(self, saved: TrainingState) -> None:
        """Begin to upload a checkpoint that is whole in the run directory. Returns at once; rank 0 calls it."""
        if self.url is None or not self._world.is_first:
            return
        best = saved.kept_steps
        with self._changed:
            self._newest = saved.step, best
            self._wanted = {saved.step: best}
            self._changed.notify_all()
        if self._thread is None:
            self._start(self._run)

    def get_held_steps(self) -> Collection[int]:
        """Return the checkpoints that must not be removed, because their upload waits or is under way."""
        with self._changed:
            return {*self._wanted, *self._running}.union(*self._wanted.values())

    def wait(self) -> None:
        """Wait until nothing is uploaded; what failed last is tried once more."""
        with self._changed:
            for is_repeated in (False, True):
                while self._wanted or self._running:
                    self._changed.wait(POLL_SECONDS)
                if self._failed and self._newest and not is_repeated:
                    step, best = self._newest
                    self._wanted = {step: best}
                    self._changed.notify_all()

    def finish(self, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Wait for the last checkpoint and report what failed. The other ranks wait without a time limit."""
        if self.url is None:
            return
        with self._world.run_rank_zero_first("uploads"):
            if self._wanted or self._running:
                log(f"waiting until the checkpoint is at {self.url}")
            self.wait()
            for message in self.take_notes():
                warn(message)

    def take_notes(self) -> list[str]:
        """Return the warnings since the last call."""
        with self._changed:
            notes = self._notes
            self._notes = []
        return notes

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread without waiting; what is not whole at the URL is not a checkpoint."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def upload_results(self, warn: Callable[[str], None]) -> str | None:
        """Upload model/, adapter/ and all records of a run that ends; returns why that failed, None if it did not."""
        failure = None
        if self.url is None:
            return failure
        with self._world.run_rank_zero_first("results"):
            try:
                if self._world.is_first:
                    self._upload_model()
            except Exception as error:
                failure = f"{error} The model and all records are in {self._folder}; copy them from there."
                warn(failure)
        return failure

    def _upload_model(self) -> None:
        assert self.url is not None
        model = self._folder / MODEL
        place = join_location(self.url, MODEL)
        delete_object(join_location(place, MANIFEST))
        # The manifest last: a reader takes the folder as whole when it is there.
        for path in sorted(model.iterdir(), key=lambda path: path.name == MANIFEST):
            put_file(path, join_location(place, path.name))
        for path in (self._folder / ADAPTER).glob("*"):
            put_file(path, join_location(self.url, ADAPTER, path.name))
        # Only at the end: these files grow with every second, and a resume does not need them.
        telemetry = [path.name for path in self._folder.glob(TELEMETRY_FILES)]
        self._upload_records([LOG, *telemetry])

    def upload_status(self, warn: Callable[[str], None]) -> None:
        """Upload status.json of a run that has ended; without it, the copy is of a run that has not."""
        if self.url and self._world.is_first:
            try:
                put_object(join_location(self.url, STATUS), (self._folder / STATUS).read_bytes())
            except (StorageError, OSError) as error:
                warn(f"{error} The copy is that of a run that has not ended; copy {self._folder / STATUS} to it.")

    def _run(self) -> None:
        """The thread of rank 0: upload what is wanted, until it is stopped."""
        while True:
            with self._changed:
                while not self._wanted and not self._stopped.is_set():
                    self._changed.wait()
                if self._stopped.is_set():
                    return
                # Taken and marked as running under one lock: the loop must not remove the checkpoint in between.
                ((newest, best),) = self._wanted.items()
                self._wanted = {}
                self._running = best | {newest}
            failure = ""
            try:
                self._upload_newest(newest, best)
            except Exception as error:  # the run goes on, and reports it
                failure = f"the checkpoint of step {newest} is not at {self.url}: {error or type(error).__name__}"
            with self._changed:
                self._running = frozenset()
                self._failed = bool(failure)
                if failure and not self._stopped.is_set():
                    self._notes.append(f"{failure.rstrip('.')}. The run continues; its own checkpoints are whole.")
                self._changed.notify_all()

    def _upload_newest(self, newest: int, best: frozenset[int]) -> None:
        assert self.url is not None
        # What an earlier part of the run has copied is there still; later steps there are repeated by this part.
        if self._copied is None:
            copied = list_copied_steps(self.url)
            self._copied = {step for step in copied if step <= self._start_step and MANIFEST in copied[step]}
        for step in sorted(best | {newest}):
            has_files = (self._folder / CHECKPOINTS / str(step)).is_dir()
            if step == newest or (step not in self._copied and has_files):
                self._upload_checkpoint(step)
                self._copied.add(step)
        self._remove_old(newest, best)

    def _upload_checkpoint(self, step: int) -> None:
        assert self.url is not None
        place = join_location(self.url, CHECKPOINTS, str(step))
        source = self._folder / CHECKPOINTS / str(step)
        names = read_file_names(source)
        # Of an upload before a resume: the files are replaced one by one, and must not look whole meanwhile.
        delete_object(join_location(place, MANIFEST))

        # Each rank uploads the files that it wrote: on another machine rank 0 may not have them.
        others = {_find_rank(name, self._world) for name in names} - {0}
        job = self._num_jobs
        self._num_jobs += 1
        if others:
            self._world.publish(f"upload-{job}", str(step))
        self._upload_own(step)
        for rank in sorted(others):
            self._wait_for_rank(job, rank)

        # Records before the manifest, which makes the checkpoint whole: they are at least as new.
        self._upload_records([])
        put_file(source / MANIFEST, join_location(place, MANIFEST))

    def _upload_own(self, step: int) -> None:
        assert self.url is not None
        source = self._folder / CHECKPOINTS / str(step)
        for name in read_file_names(source):
            if self._stopped.is_set():
                raise UploadError("the run has ended")
            if _find_rank(name, self._world) == self._world.rank:
                put_file(source / name, join_location(self.url, CHECKPOINTS, str(step), name))

    def _wait_for_rank(self, job: int, rank: int) -> None:
        timeout = self._world.timeout
        end = time.monotonic() + (timeout.total_seconds() if timeout else math.inf)
        while (answer := self._world.find_published(f"uploaded-{job}-{rank}")) is None:
            if self._stopped.wait(POLL_SECONDS):
                raise UploadError("the run has ended")
            if time.monotonic() > end:
                raise UploadError(f"process {rank} did not upload its files within launch.timeout_minutes")
        if answer:
            raise UploadError(f"process {rank}: {answer}")

    def _answer_rank_zero(self) -> None:
        """The thread of the other ranks: upload their files of every checkpoint that rank 0 names."""
        with suppress(RuntimeError):  # the connection of a run that has ended
            while not self._stopped.wait(POLL_SECONDS):
                if (step := self._world.find_published(f"upload-{self._num_jobs}")) is None:
                    continue
                answer = ""
                try:
                    self._upload_own(int(step))
                except Exception as error:
                    answer = str(error) or type(error).__name__
                self._world.publish(f"uploaded-{self._num_jobs}-{self._world.rank}", answer)
                self._num_jobs += 1

    def _upload_records(self, more: Sequence[str]) -> None:
        """Upload the records as they are now. Lines after a checkpoint's step are dropped by a resume."""
        assert self.url is not None
        for name in (*RECORDS, *more):
            with suppress(FileNotFoundError):
                put_object(join_location(self.url, name), (self._folder / name).read_bytes())
        for path in sorted((self._folder / PREDICTIONS).glob("*.jsonl")):
            name = f"{PREDICTIONS}/{path.name}"
            size = path.stat().st_size
            if self._sent.get(name) != size:
                put_file(path, join_location(self.url, name))
                self._sent[name] = size

    def _remove_old(self, newest: int, best: frozenset[int]) -> None:
        """Remove all checkpoints at the URL but the newest ones and the best ones, and the files of torn uploads.

        Steps after `newest` are of a time that a resume from an earlier checkpoint repeats.
        """
        assert self.url is not None
        copied = list_copied_steps(self.url)
        # A torn upload has no manifest, and its files are removed with the outdated ones.
        whole = [step for step in sorted(copied) if step <= newest and MANIFEST in copied[step]]
        for step in sorted(copied.keys() - {*whole[-self._keep :], *best}):
            # The manifest first: what is half removed is not a checkpoint.
            for name in sorted(copied[step], key=lambda name: name != MANIFEST):
                delete_object(join_location(self.url, CHECKPOINTS, str(step), name))


def read_file_names(checkpoint: Path) -> list[str]:
    """Read the names of a checkpoint's files from its manifest, without the manifest."""
    return sorted(parse_manifest((checkpoint / MANIFEST).read_bytes()).files)


def _find_rank(name: str, world: World) -> int:
    """Return the rank that uploads a file: the one that wrote it, else rank 0."""
    # A checkpoint of a resumed run may be of more ranks than there are now.
    found = re.fullmatch(r"__([0-9]+)_[0-9]+\.distcp", name, re.ASCII)
    if found and int(found[1]) < world.size:
        return int(found[1])
    return 0
