"""Reader of run directories: files to typed records.

In: a folder. Out: a Run; damaged files raise RunDirError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fivetune.errors import RunDirError
from fivetune.rundir.files import lock_file
from fivetune.rundir.layout import (
    CONFIG,
    DATA,
    EVALS,
    FINDERS,
    FORMAT_VERSION,
    LOCK,
    MACHINE,
    STATUS,
    STEPS,
    TRACE,
    build_sibling_path,
)
from fivetune.rundir.parse import parse_record, parse_records
from fivetune.rundir.plan import read_plan
from fivetune.rundir.records import (
    DataSummary,
    EvalRecord,
    MachineRecord,
    Prediction,
    Run,
    RunStatus,
    StepRecord,
    TelemetryRecord,
)
from fivetune.values import as_finite_number

REWRITTEN = (STATUS, MACHINE, DATA)
TORN = "no whole JSON value"
LARGEST_PLAUSIBLE = 1e15  # of a step or a time stamp; larger values overflow when they are formatted


def read_jsonl(
    path: Path, *, required: str | None = None, on_damage: Callable[[str], Any] | None = None
) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; a partial last line is dropped, a missing file counts as empty.

    Args:
        required: key that each object must have, with a finite number in the plausible range.
        on_damage: called with a sentence for each damaged line, which is then omitted.

    Raises RunDirError for a damaged line if `on_damage` is None.
    """
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunDirError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record, reason = _parse_line(line, required)
        if record is not None:
            records.append(record)
        elif number < len(lines) or reason != TORN:  # the partial line of a killed process has no line end
            text = f"{path}:{number}: damaged line{f' ({reason})' if reason != TORN else ' in the middle of the file'}."
            if on_damage is None:
                raise RunDirError(f"{text} Delete that line.")
            on_damage(f"{text} It is left out.")
    return records


def _parse_line(line: bytes, required: str | None) -> tuple[dict[str, Any] | None, str]:
    """Parse the object of a line; return it, or None and the reason why the line is invalid."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return None, TORN
    if not isinstance(record, dict):
        return None, f"{type(record).__name__} instead of an object"
    if required is not None:
        value = as_finite_number(record.get(required))
        if value is None or abs(value) > LARGEST_PLAUSIBLE:
            return None, f"{required!r} is {record.get(required)!r}"
    return record, ""


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Raises RunDirError for any other folder."""
    folder = Path(folder)
    refuse_foreign(folder)
    status = read_status(folder)
    notes: list[str] = []
    telemetry = read_telemetry(folder, on_damage=notes.append)
    if len(notes) > 1:
        notes = [f"{notes[0]} {len(notes) - 1} more damaged telemetry lines are left out."]
    plan = read_plan(folder, on_damage=notes.append)
    return Run(
        name=folder.resolve().name,
        config=read_run_config(folder),
        machine=read_machine(folder),
        status=status,
        data=read_data(folder),
        steps=parse_records(StepRecord, read_jsonl(folder / STEPS, required="step")),
        evals=read_evals(folder),
        predictions=PredictionFiles(folder / "predictions"),
        warnings=[*(warning.message for warning in status.warnings), *notes],
        telemetry=telemetry,
        trace=read_json(folder / TRACE),
        plan=plan,
        found={name: result for name in FINDERS if (result := read_json(build_sibling_path(folder, f"{name}.json")))},
    )


def read_evals(folder: str | Path) -> list[EvalRecord]:
    """Read evals.jsonl of a run directory. Raises RunDirError for a damaged line."""
    return parse_records(EvalRecord, read_jsonl(Path(folder) / EVALS, required="step"))


def read_telemetry(folder: Path, *, on_damage: Callable[[str], Any] | None = None) -> list[TelemetryRecord]:
    """Read the telemetry of all processes of a run, in order of time; damaged lines go to `on_damage`."""
    report = on_damage or (lambda text: None)
    paths = sorted(folder.glob("telemetry*.jsonl"))
    lines = [line for path in paths for line in read_jsonl(path, required="seconds", on_damage=report)]
    return sorted(parse_records(TelemetryRecord, lines), key=lambda record: (record.seconds, record.rank))


def read_status(folder: str | Path) -> RunStatus:
    """Read status.json of a run directory; an unfinished state becomes "interrupted" if the run's process is gone."""
    status = parse_record(RunStatus, read_json(Path(folder) / STATUS)) or RunStatus()
    owner = _find_dead_owner(Path(folder)) if status.state in ("preparing", "running") else None
    return replace(status, state="interrupted", why=f"killed ({owner} is gone)") if owner else status


def read_machine(folder: str | Path) -> MachineRecord:
    """Read machine.json of a run directory."""
    return parse_record(MachineRecord, read_json(Path(folder) / MACHINE)) or MachineRecord()


def read_data(folder: str | Path) -> DataSummary:
    """Read data.json of a run directory."""
    return parse_record(DataSummary, read_json(Path(folder) / DATA)) or DataSummary()


class PredictionFiles(Mapping[str, list[Prediction]]):
    """The predictions of a run by name (`eval-300`); each file is read on access."""

    def __init__(self, folder: Path) -> None:
        self._paths = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}

    def __getitem__(self, name: str) -> list[Prediction]:
        return parse_records(Prediction, read_jsonl(self._paths[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def refuse_foreign(folder: Path) -> None:
    """Raise RunDirError unless `folder` is a run directory of a format that this version reads."""
    if not folder.is_dir():
        raise RunDirError(f"{folder}: no such directory. Give the run.dir of a run (runs/<name>).")
    if not (folder / CONFIG).is_file():
        raise RunDirError(f"{folder}: not a run directory (it has no {CONFIG}). Give the run.dir of a run.")
    version = read_json(folder / MACHINE).get("format_version", FORMAT_VERSION)
    if type(version) is not int:
        raise RunDirError(f"{folder / MACHINE}: damaged: format_version is {version!r}. {_get_advice(MACHINE)}")
    if version > FORMAT_VERSION:
        raise RunDirError(f"{folder}: written in format {version}, this version reads up to {FORMAT_VERSION}. Upgrade.")


def read_run_config(folder: str | Path) -> dict[str, Any]:
    """Read config.yaml of a run directory. Raises RunDirError if it is damaged."""
    path = Path(folder) / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunDirError(f"{path}: damaged: {' '.join(str(error).split())}. Restore the file.") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise RunDirError(f"{path}: damaged: {type(error).__name__}. Restore the file.") from None
    if not isinstance(config, dict):
        raise RunDirError(f"{path}: damaged: it is not a table of settings. Restore the file.")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a run directory; {} if the file is missing. Raises RunDirError for any other content."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason, place = f"damaged: {error.msg}", f"{path}:{error.lineno}:{error.colno}"
    except UnicodeDecodeError:
        reason, place = "damaged: it is not UTF-8", str(path)
    except (ValueError, RecursionError) as error:
        reason, place = f"damaged: {error}", str(path)
    except OSError as error:
        reason, place = f"cannot be read: {error.strerror}", str(path)
    else:
        if isinstance(found, dict):
            return found
        reason, place = f"damaged: it holds a {type(found).__name__} instead of an object", str(path)
    raise RunDirError(f"{place}: {reason}. {_get_advice(path.name)}")


def _get_advice(name: str) -> str:
    """Return the advice for a damaged file; one that a resume rewrites can be deleted."""
    return "Delete the file: a resume writes it again." if name in REWRITTEN else "Restore the file."


def _find_dead_owner(path: Path) -> str | None:
    """Return the last owner of a lock that is now free; None if the lock is held or there is no lock file.

    A copy of a live run has the lock file but not the lock, so it counts as killed.
    """
    try:
        with (path / LOCK).open() as file:
            return (file.read().strip() or "its process") if lock_file(file, shared=True) else None
    except OSError:
        return None
