"""Writer of a run directory: whole files atomically, JSONL files line by line, under a lock.

In: records and tables. Out: files that stay whole after a kill or a power cut.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import psutil

from fivetune.errors import RunDirError
from fivetune.redaction import redact_json
from fivetune.rundir.config_file import find_config_change, stamp_config
from fivetune.rundir.damage import Damage
from fivetune.rundir.files import advise_on_space, lock_file, replace_file, write_json, write_text
from fivetune.rundir.layout import (
    ACTIVITY,
    CHECKSUMS,
    CONFIG,
    DATA,
    EVALS,
    LOCK,
    LOG,
    MACHINE,
    STATUS,
    STEPS,
    TELEMETRY_FILES,
    TRACE_FOLDER,
)
from fivetune.rundir.lines import JsonlFile, format_json_line, open_for_append
from fivetune.rundir.reader import (
    describe_missing_steps,
    read_checksums,
    read_data,
    read_evals,
    read_json,
    read_jsonl,
    read_machine,
    read_status,
    read_steps,
    refuse_foreign,
)
from fivetune.rundir.record_checksums import (
    compute_record_checksum,
    compute_record_checksums,
    describe_change,
    find_changes,
)
from fivetune.rundir.records import RunStatus, RunWarning
from fivetune.types import JsonTable

PROBE = ".probe"
LOCK_TRIES = 20


@contextmanager
def _translate_disk_errors(path: Path) -> Generator[None]:
    """Convert OSErrors of a write to RunDirError."""
    try:
        yield
    except OSError as error:
        can_resume = any((path.parent / "checkpoints").glob("[0-9]*"))
        raise RunDirError(
            f"{path}: cannot be written: {error.strerror}. {advise_on_space(path.parent)}"
            f"{' Then resume from the last checkpoint.' if can_resume else ''}"
        ) from None


class RunDir:
    """A run directory that this process writes, locked until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status = RunStatus()
        self.warnings: list[RunWarning] = []
        self._files: dict[str, JsonlFile] = {}
        self._aside: Path | None = None  # previous run of this directory, renamed by `overwrite`
        self.set_aside: dict[str, str] = {}  # a sentence for each damaged file that a resume renamed, by its name
        self.damage = Damage()  # `set_aside`, and a sentence for each file that a resume uses in part
        self._made: list[Path] = []  # parent folders that did not exist before
        self._lock = lock_folder(path)
        self._identity = path.stat()

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False) -> RunDir:
        """Start a new run in an empty directory. `overwrite` moves an existing run aside; other content is refused."""
        path = Path(path)
        if reason := find_conflict(path):
            is_run = (path / CONFIG).is_file()
            if is_run:
                lock_folder(path).close()  # a run in progress is the first error
            if not (overwrite and is_run):
                raise RunDirError(reason)
            return cls._replace_run(path)
        missing = [parent for parent in path.parents if not parent.exists()]
        run = cls(_make_folder(path))
        run._made = missing
        for leftover in (*_list_leftovers(path), *path.glob(TELEMETRY_FILES)):
            _remove(leftover)
        return run

    @classmethod
    def _replace_run(cls, path: Path) -> RunDir:
        """Move the run in `path` aside; `discard` restores it."""
        if not path.is_absolute() and Path.cwd().is_relative_to(path.resolve()):  # the path would name the moved run
            raise RunDirError(
                f"{path}: is the working directory or above it, and --overwrite moves it aside. Change to the "
                "directory above the run and give the run's name."
            )
        aside = path.rename(path.with_name(f"{path.name}.before-{time.strftime('%Y%m%dT%H%M%S')}"))
        run = cls(_make_folder(path))
        run._aside = aside
        return run

    @classmethod
    def resume(cls, path: str | Path, *, repair: bool = True) -> RunDir:
        """Open a run to continue it. Raises RunDirError if there is none.

        Leftovers of killed processes are removed; damaged files that a resume does not need are set aside.

        Args:
            repair: set aside damaged JSON files; False for a caller that only reads these and config.yaml, and has
                reported their damage.
        """
        path = Path(path)
        refuse_foreign(path)
        run = cls(path)
        try:
            run._restore(repair=repair)
        except BaseException:  # a traceback that a notebook keeps would hold the lock
            run.close()
            raise
        return run

    def _restore(self, *, repair: bool) -> None:
        """Read the state of an earlier process, see `resume`."""
        path = self.path
        for leftover in _list_leftovers(path):
            _remove(leftover)

        # Set aside what would be in the way: what is no file cannot be appended to, damaged JSON is written anew.
        for file in (path / LOG, *path.glob(TELEMETRY_FILES)):
            if file.is_symlink() or (file.exists() and not file.is_file()):
                self._set_aside(file.name, ": is not a regular file")
        if repair:
            for name in (STATUS, MACHINE, DATA):
                try:
                    read_json(path / name)
                except RunDirError as error:
                    self._set_aside(name, str(error).removeprefix(f"{path / name}").partition(". ")[0])
        self.damage += self.set_aside.values()

        # What is damaged in part is used in part, with a warning.
        found = self.damage if repair else Damage()  # without a repair the caller has reported it
        status = read_status(path, found)
        read_machine(path, found)
        read_data(path, found)
        if status.state in ("preparing", "running"):  # this process has the lock: the run's own is gone
            status = replace(status, state="interrupted", why="killed")
        self.status = status
        self.warnings = list(status.warnings)
        listed = read_checksums(path, self.damage)
        if changed := find_config_change(path) or describe_change(path, CONFIG, listed):
            found.append(changed)
        self.damage += find_changes(path, listed, known=[*self.damage, *found])
        for message in self.damage:
            self.add_warning(message)

    def _set_aside(self, name: str, reason: str) -> None:
        """Rename a damaged file that a resume does not need, and add a warning."""
        path = self.path / name
        try:
            path.rename(path.with_name(f"{name}.damaged"))
        except OSError as error:
            raise RunDirError(f"{path}{reason}, and cannot be renamed: {error.strerror}. Remove it.") from None
        self.set_aside[name] = f"{path}{reason}. Set aside as {name}.damaged; the run does not need it."

    def write(self, name: str, content: Any) -> None:
        """Write a whole file of the run as JSON; secrets are hidden."""
        self._begin_change()
        write_json(self.path / name, redact_json(content))

    def write_config(self, text: str) -> None:
        """Write config.yaml.

        Args:
            text: the settings with secrets hidden (`RunConfig.as_redacted_yaml`).
        """
        self._begin_change()
        write_text(self.path / CONFIG, stamp_config(text))

    def append(self, name: str, record: JsonTable) -> None:
        """Append one record to a JSONL file of the run; a partial last line is truncated first."""
        self.refuse_moved()
        with _translate_disk_errors(self.path / name):
            self._files.setdefault(name, JsonlFile(self.path / name)).append(record)

    def truncate_after(self, step: int) -> list[str]:
        """Drop the records after `step`, from which the run continues, and damaged lines.

        Returns sentences on damaged lines and values, on missing steps, and on the loss of all steps.
        """
        self._begin_change()
        notes = Damage()
        read_steps(self.path, notes)
        read_evals(self.path, is_growing=False, damage=notes)
        for name in (STEPS, EVALS):
            records = read_jsonl(self.path / name, required="step", damage=Damage())
            if name == STEPS and records and not step:
                notes.append(f"no checkpoint is left of {len(records):,} steps: the run begins again at step 0")
            self.close_file(name)
            kept = [record for record in records if record["step"] <= step]
            write_text(self.path / name, "".join(map(format_json_line, kept)))
            if name == STEPS:
                missing = describe_missing_steps([record["step"] for record in kept], step)
                notes += [f"{STEPS}: {missing}"] if missing else []
        return notes

    def write_predictions(self, split: str, step: int, lines: Iterable[JsonTable]) -> Path:
        """Stream the predictions of one evaluation to a file that gets its name when it is complete."""
        path = self.path / "predictions" / f"{split}-{step}.jsonl"
        if path.parent.is_symlink():
            raise RunDirError(f"{path.parent}: is a link, which leads out of the run directory. Make it a folder.")
        self.refuse_moved()
        name = f"{path.parent.name}/{path.name}"
        listed = read_checksums(self.path, Damage())
        with _translate_disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            with replace_file(path) as file:
                file.writelines(format_json_line(line).encode() for line in lines)
                if listed.pop(name, None):  # a kill before the new checksum leaves no false one
                    write_json(self.path / CHECKSUMS, listed)
        if listed:  # an evaluation of a finished run
            with _translate_disk_errors(path):
                checksum = compute_record_checksum(path)
            write_json(self.path / CHECKSUMS, {**listed, name: checksum})
        return path

    def write_checksums(self, warn: Callable[[str], object]) -> None:
        """Write the checksums of the records of a finished run; `warn` gets a sentence if the disk refuses them."""
        try:
            self.refuse_moved()
            with _translate_disk_errors(self.path / CHECKSUMS):
                checksums = compute_record_checksums(self.path)
            write_json(self.path / CHECKSUMS, checksums)
        except RunDirError as error:
            warn(f"{error} Changes of the run's records will not be noticed.")

    def _begin_change(self) -> None:
        """Remove the checksums of a run that goes on: they are of its records as they were."""
        self.refuse_moved()
        path = self.path / CHECKSUMS
        if path.exists():
            with _translate_disk_errors(path):
                path.unlink()

    def update_status(self, **changes: Any) -> None:
        """Update status.json with values of `RunStatus`, and with the warnings so far."""
        self._begin_change()
        self.status = replace(self.status, **changes, warnings=tuple(self.warnings))
        write_json(self.path / STATUS, redact_json(asdict(self.status)))

    def _is_in_place(self) -> bool:
        """Whether the path is still the directory that this process has locked."""
        try:
            return os.path.samestat(self._identity, self.path.stat())
        except OSError:
            return False

    def refuse_moved(self) -> None:
        """Raise RunDirError if the directory was renamed: a run must not continue in a new one of the old name."""
        if not self._is_in_place():
            raise RunDirError(
                f"{self.path}: was renamed, moved or removed while its run writes to it. Resume the run where it is "
                "now: fivetune train NEW_NAME --resume"
            )

    def add_warning(self, message: str, kind: str = "") -> bool:
        """Keep a warning for the report; return True if it is new. Rules and pages select by its `kind`."""
        if any(warning.message == message for warning in self.warnings):
            return False
        self.warnings.append(RunWarning(message, kind))
        return True

    def discard(self) -> None:
        """Undo `create` for a run without results: remove the directory and restore a run that was moved aside.

        An existing trace is kept.
        """
        self.close()
        if not self._is_in_place():
            return
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.is_dir() and entry.name != TRACE_FOLDER:
                    shutil.rmtree(entry, ignore_errors=True)
                elif not entry.is_dir():
                    entry.unlink()
            self.path.rmdir()
            for parent in self._made:
                parent.rmdir()
        if self._aside:
            with suppress(OSError):  # a trace is kept in its place; the error that ended the run must be reported
                self._aside.rename(self.path)

    def close_file(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for name in list(self._files):
            self.close_file(name)
        self._lock.close()


class NullRunDir(RunDir):
    """The run directory of ranks above 0, which do not write it: every write is a no-op.

    Args:
        status: the status of rank 0.
    """

    def __init__(self, path: Path, status: RunStatus) -> None:
        self.path = path
        self.status = status
        self.warnings = list(status.warnings)
        self.set_aside = {}
        self.damage = Damage()

    def write(self, name: str, content: Any) -> None:
        """No-op: only rank 0 writes."""

    def write_config(self, text: str) -> None:
        """No-op: only rank 0 writes."""

    def append(self, name: str, record: JsonTable) -> None:
        """No-op: only rank 0 writes."""

    def refuse_moved(self) -> None:
        """No-op: only rank 0 writes."""

    def truncate_after(self, step: int) -> list[str]:
        """No-op: only rank 0 writes."""
        return []

    def write_predictions(self, split: str, step: int, lines: Iterable[JsonTable]) -> Path:
        for _ in lines:
            pass
        return self.path

    def write_checksums(self, warn: Callable[[str], object]) -> None:
        """No-op: only rank 0 writes."""

    def update_status(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def discard(self) -> None:
        """No-op: only rank 0 writes."""

    def close(self) -> None:
        """No-op: nothing is open."""


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / PROBE
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be written: {error.strerror}. Choose another run.dir.") from None
    return path


def _is_leftover(entry: Path) -> bool:
    """Whether an entry of a run directory is an unfinished file or folder of a killed process."""
    name = entry.name
    if name == PROBE or name.startswith(".best.") or name in (".model.old", ".adapter.old"):
        return True
    if not (name.startswith(".") and name.endswith(".tmp")):
        return False
    # Only the report is written without the lock, so another live process may be writing it.
    owner = name.removesuffix(".tmp").rpartition(".")[2]
    return not (name.startswith(".report.html.") and owner.isdecimal() and psutil.pid_exists(int(owner)))


def _list_leftovers(path: Path) -> list[Path]:
    predictions = (path / "predictions").glob("*.tmp")
    return [*(entry for entry in path.iterdir() if _is_leftover(entry)), *predictions]


def _remove(path: Path) -> None:
    """Remove a leftover; ignore failures, because leftovers are harmless."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def lock_folder(path: Path) -> IO[bytes]:
    """Lock the directory for this process. Raises RunDirError naming the owner if another process holds the lock."""
    try:
        file = open_for_append(path / LOCK)
    except OSError as error:
        raise RunDirError(f"{path / LOCK}: cannot be written: {error.strerror}. Choose another run.dir.") from None
    try:
        if owner := _take_lock(file):
            raise RunDirError(f"{path}: in use by {owner}. Wait for it, or choose another run.dir.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:  # a network file system without locks, a full disk
        file.close()
        raise RunDirError(f"{path / LOCK}: cannot be locked: {error.strerror}. Choose another run.dir.") from None
    except BaseException:
        file.close()
        raise
    return file


def _take_lock(file: IO[bytes]) -> str:
    """Lock a file that names its owner; returns the owner if another process has the lock, else "".

    A named owner that is gone does not hold the lock: its successor has not named itself yet, or a reader asks whether
    the lock is free (`read_status`). Both take a moment, for which this waits.
    """
    owner = ""
    for _ in range(LOCK_TRIES):
        if lock_file(file):
            return ""
        file.seek(0)
        owner = (file.read() or b"").decode(errors="replace").strip()
        named = re.fullmatch(r"process ([0-9]{1,9}) on (.+)", owner)
        if named and (named[2] != socket.gethostname() or psutil.pid_exists(int(named[1]))):
            break
        time.sleep(0.01)
    return owner or "another process"


def find_conflict(path: Path) -> str | None:
    """Return why `create` refuses a directory because of its content; None if it accepts it.

    Leftovers of a process that was killed before its first whole file are accepted: lock, probe, empty log, telemetry,
    unfinished files.
    """
    try:
        if not path.is_dir() or all(_is_free(entry) for entry in path.iterdir()):
            return None
        is_run = (path / CONFIG).is_file()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be used: {error.strerror}. Choose another run.dir.") from None
    if is_run:
        return (
            f"{path}: holds a run already. Add --resume to continue it, --overwrite to move it aside, "
            "or choose another run.dir."
        )
    return f"{path}: is not empty and not a run directory. Choose another run.dir."


def _is_free(entry: Path) -> bool:
    """Whether an entry may be in the directory of a new run. Raises OSError."""
    has_lock = (entry.parent / LOCK).is_file()  # a log or telemetry in a folder without a lock is another tool's
    if entry.name == LOG:
        if not entry.is_file() or entry.is_symlink():
            return False
        return has_lock or entry.stat().st_size == 0
    if entry.match(TELEMETRY_FILES) or entry.name == ACTIVITY:  # like the log, written before the config
        return has_lock
    return entry.name in (LOCK, TRACE_FOLDER) or _is_leftover(entry)
