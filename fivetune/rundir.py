"""The run directory: the only bridge between training and analysis.

    config.yaml      resolved, re-runnable as is          machine.json   device, versions, commit
    data.json        counts, lengths, what was lost       status.json    running, finished, failed: why
    steps.jsonl      one StepRecord a line                evals.jsonl    one EvalRecord a line
    telemetry.jsonl   one TelemetryRecord a line; telemetry-<rank>.jsonl of the other processes
    predictions/<split>-<step>.jsonl                      log.txt        what the terminal showed
    checkpoints/<step>/, best -> checkpoints/<step>       model/         loads with from_pretrained
    report.html                                           trace/         what `fivetune profile` wrote

Every whole file is written to a temporary name, fsynced and renamed; JSONL files are appended line by
line, and a torn last line is dropped on reading. One process owns a directory, by a lock on `.lock`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from fivetune.errors import RunDirError
from fivetune.types import Run

FORMAT_VERSION = 1
LOCK = ".lock"
OWN_SPLITS = ("subset", "eval")  # of a run's own evaluations: some of data.eval, all of it
STEPS, EVALS, STATUS, MACHINE, DATA, CONFIG = (
    "steps.jsonl", "evals.jsonl", "status.json", "machine.json", "data.json", "config.yaml",
)  # fmt: skip
TELEMETRY, TELEMETRY_OF_RANK = "telemetry.jsonl", "telemetry-{rank}.jsonl"
FINDERS = ("find-lr", "find-batch")  # their results stand beside the run: <run>.find-lr.json
TRACE_FOLDER, TRACE = "trace", "trace/summary.json"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            staging.unlink()
        raise RunDirError(
            f"{path}: cannot be written: {error.strerror}. Free space or choose another run.dir."
        ) from None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def fsync_folder(folder: Path) -> None:
    """Make a rename inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSONL file; a torn last line is dropped, a missing file is an empty one."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                records.append(json.loads(line))
        except json.JSONDecodeError:
            if any(rest.strip() for rest in lines[number:]):
                raise RunDirError(
                    f"{path}:{number}: damaged line in the middle of the file. Delete that line."
                ) from None
    return records


def read(folder: str | Path) -> Run:
    """Read a run directory back. Raises RunDirError if it is none."""
    folder = Path(folder)
    refuse_foreign(folder)
    status = read_status(folder)
    return Run(
        name=folder.resolve().name,
        config=read_config(folder),
        machine=read_machine(folder),
        status=status,
        data=read_data(folder),
        steps=read_jsonl(folder / STEPS),
        evals=read_jsonl(folder / EVALS),
        predictions=PredictionFiles(folder / "predictions"),
        warnings=list(status.get("warnings", [])),
        telemetry=read_telemetry(folder),
        trace=_read_json(folder / TRACE),
        found={name: result for name in FINDERS if (result := _read_json(beside(folder, f"{name}.json")))},
    )


def beside(folder: str | Path, name: str) -> Path:
    """A file that belongs to a run but is there before it: runs/squad.find-lr.json of runs/squad."""
    folder = Path(folder).resolve()
    return folder.with_name(f"{folder.name}.{name}")


def read_telemetry(folder: Path) -> list[dict[str, Any]]:
    """The telemetry of all processes of a run, in the order of time."""
    lines = [line for path in sorted(folder.glob("telemetry*.jsonl")) for line in read_jsonl(path)]
    return sorted(lines, key=lambda line: (line["seconds"], line.get("rank", 0)))


def read_status(folder: str | Path) -> dict[str, Any]:
    """status.json of a run directory; {} if there is none. What a killed process left running is "interrupted"."""
    status = _read_json(Path(folder) / STATUS)
    owner = _dead_owner(Path(folder)) if status.get("state") in ("preparing", "running") else None
    return {**status, "state": "interrupted", "why": f"killed ({owner} is gone)"} if owner else status


def read_machine(folder: str | Path) -> dict[str, Any]:
    """machine.json of a run directory; {} if there is none."""
    return _read_json(Path(folder) / MACHINE)


def read_data(folder: str | Path) -> dict[str, Any]:
    """data.json of a run directory; {} if there is none."""
    return _read_json(Path(folder) / DATA)


class PredictionFiles(Mapping[str, list[dict[str, Any]]]):
    """The predictions of a run by name (`eval-300`), each file read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._paths = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self._paths[name])

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def own_evals(evals: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run's evaluations on its own data, one per step, in order.

    What was evaluated on other files is left out; where a step has both, the whole set beats the subset; of a step
    that was done again after a resume, the last one counts.

    >>> own_evals([{"step": 3, "split": "eval"}, {"step": 3, "split": "subset"}, {"step": 3, "split": "other"}])
    [{'step': 3, 'split': 'eval'}]
    """
    by_step: dict[int, dict[str, Any]] = {}
    for split in OWN_SPLITS:
        by_step |= {e["step"]: e for e in evals if e.get("split") == split and isinstance(e.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def best_eval(evals: Sequence[dict[str, Any]], best: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The run's own evaluation at the step of `best` ({"step": ...}, as in status.json); None if there is none."""
    return next((record for record in own_evals(evals) if best and record["step"] == best.get("step")), None)


def refuse_foreign(folder: Path) -> None:
    """Raise RunDirError unless `folder` is a run directory of a format that this version reads."""
    if not folder.is_dir():
        raise RunDirError(f"{folder}: no such directory. Give the run.dir of a run (runs/<name>).")
    if not (folder / CONFIG).is_file():
        raise RunDirError(f"{folder}: not a run directory (it has no {CONFIG}). Give the run.dir of a run.")
    version = _read_json(folder / MACHINE).get("format_version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise RunDirError(f"{folder}: written in format {version}, this version reads up to {FORMAT_VERSION}. Upgrade.")


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.yaml of a run directory. Raises RunDirError if it is damaged."""
    path = Path(folder) / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunDirError(f"{path}: damaged: {' '.join(str(error).split())}. Restore the file.") from None
    if not isinstance(config, dict):
        raise RunDirError(f"{path}: damaged: it is not a table of settings. Restore the file.")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunDirError(f"{path}:{error.lineno}:{error.colno}: damaged: {error.msg}. Restore the file.") from None


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def _told_if_full(path: Path) -> Iterator[None]:
    """Turn a failed write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"{path}: cannot be written: {error.strerror}. Free space and resume; the checkpoints are whole."
        ) from None


class RunDir:
    """A run directory that this process writes, locked until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._files: dict[str, IO[str]] = {}
        self._status: dict[str, Any] = {}
        self._aside: Path | None = None  # the run that was here before
        self._lock = lock(path)

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False) -> RunDir:
        """Start a new run. A directory with anything in it is refused; `overwrite` moves a run aside, nothing else."""
        path = Path(path)
        if reason := occupied(path):
            is_run = (path / CONFIG).is_file()
            if is_run:
                lock(path).close()  # says so first if another process writes there
            if not (overwrite and is_run):
                raise RunDirError(reason)
            return cls._in_place_of(path)
        return cls(_made(path))

    @classmethod
    def _in_place_of(cls, path: Path) -> RunDir:
        """Move the run that is in `path` aside; `discard` brings it back."""
        aside = path.rename(path.with_name(f"{path.name}.before-{time.strftime('%Y%m%dT%H%M%S')}"))
        run = cls(_made(path))
        run._aside = aside
        return run

    @classmethod
    def resume(cls, path: str | Path) -> RunDir:
        """Go on with a run. Raises RunDirError if there is none."""
        refuse_foreign(Path(path))
        run = cls(Path(path))
        run._status = _read_json(run.path / STATUS)
        run.warnings = list(run._status.get("warnings", []))
        return run

    def write(self, name: str, content: Any) -> None:
        """Write a whole file of the run: a text as it is, anything else as JSON."""
        (write_text if isinstance(content, str) else write_json)(self.path / name, content)

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Append one record to a JSONL file of the run and flush it."""
        with _told_if_full(self.path / name):
            if name not in self._files:
                self._files[name] = (self.path / name).open("a", encoding="utf-8")
            self._files[name].write(_line(record))
            self._files[name].flush()

    def keep_until(self, step: int) -> None:
        """Drop what was recorded after `step`: the run goes on from there."""
        for name in (STEPS, EVALS):
            kept = [r for r in read_jsonl(self.path / name) if r["step"] <= step]
            self.close_file(name)
            write_text(self.path / name, "".join(map(_line, kept)))

    def new_predictions(self, split: str, step: int, lines: Iterable[dict[str, Any]]) -> Path:
        """Stream the predictions of one evaluation; the file has its name only once it is whole."""
        path = self.path / "predictions" / f"{split}-{step}.jsonl"
        staging = path.with_suffix(".tmp")
        with _told_if_full(path):
            path.parent.mkdir(exist_ok=True)
            with staging.open("w", encoding="utf-8") as file:
                for line in lines:
                    file.write(_line(line))
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        return path

    def status(self, **changes: Any) -> None:
        """Update status.json."""
        self._status = {**self._status, **changes, "warnings": self.warnings}
        write_json(self.path / STATUS, self._status)

    def facts(self) -> dict[str, Any]:
        """The status as it is now."""
        return self._status

    def past(self, key: str, default: Any) -> Any:
        """A value of the status as it is now."""
        return self._status.get(key, default)

    def warn(self, message: str) -> bool:
        """Keep a warning for the report; True if it is new."""
        if message in self.warnings:
            return False
        self.warnings.append(message)
        return True

    def discard(self) -> None:
        """Remove a directory that `create` made, when nothing came of the run; one that was moved aside comes back.

        A trace that was in it stays.
        """
        self.close()
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.is_dir() and entry.name != TRACE_FOLDER:
                    shutil.rmtree(entry, ignore_errors=True)
                elif not entry.is_dir():
                    entry.unlink()
            self.path.rmdir()
        if self._aside:
            self._aside.rename(self.path)

    def close_file(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for name in list(self._files):
            self.close_file(name)
        self._lock.close()


class Bystander(RunDir):
    """A run directory that another process of the same run writes: what this one would write is dropped.

    Args:
        status: as the writing process has it.
    """

    def __init__(self, path: Path, status: dict[str, Any]) -> None:
        self.path = path
        self.warnings = list(status.get("warnings", []))
        self._status = status

    def write(self, name: str, content: Any) -> None:
        """The writing process does."""

    def append(self, name: str, record: dict[str, Any]) -> None:
        """The writing process does."""

    def keep_until(self, step: int) -> None:
        """The writing process does."""

    def new_predictions(self, split: str, step: int, lines: Iterable[dict[str, Any]]) -> Path:
        for _ in lines:
            pass
        return self.path

    def status(self, **changes: Any) -> None:
        self._status = {**self._status, **changes}

    def discard(self) -> None:
        """The writing process does."""

    def close(self) -> None:
        """Nothing is open."""


def _made(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be written: {error.strerror}. Choose another run.dir.") from None
    return path


def occupied(path: Path) -> str | None:
    """Why `create` would refuse a directory for what is in it; None if it is free."""
    try:
        free = not path.is_dir() or all(entry.name in (LOCK, TRACE_FOLDER) for entry in path.iterdir())
    except OSError as error:
        raise RunDirError(f"{path}: cannot be used: {error.strerror}. Choose another run.dir.") from None
    return None if free else _occupied(path)


def _occupied(path: Path) -> str:
    if (path / CONFIG).is_file():
        return (
            f"{path}: holds a run already. Add --resume to go on, --overwrite to move it aside, "
            "or choose another run.dir."
        )
    return f"{path}: is not empty and not a run directory. Choose another run.dir."


def lock(path: Path) -> IO[str]:
    """Own the directory, or raise RunDirError naming the owner. The system frees the lock when a process dies."""
    import fcntl

    try:
        file = (path / LOCK).open("a+")
    except OSError as error:
        raise RunDirError(f"{path}: cannot be written: {error.strerror}. Choose another run.dir.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise RunDirError(f"{path}: in use by {owner}. Wait for it, or choose another run.dir.") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _dead_owner(path: Path) -> str | None:
    """Who locked the directory last, if it is not locked any more; None if it is, or never was (as in a copy)."""
    import fcntl

    try:
        with (path / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return file.read().strip() or "its process"
    except OSError:
        return None
