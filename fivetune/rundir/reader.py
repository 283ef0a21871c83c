"""Reader of run directories: files to typed records.

In: a folder. Out: a Run; damaged files raise RunDirError.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar, cast

import yaml

from fivetune.errors import RunDirError
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.config_file import find_config_change
from fivetune.rundir.figures import find_chosen_eval
from fivetune.rundir.files import lock_file, open_regular
from fivetune.rundir.layout import (
    CHECKSUMS,
    CONFIG,
    DATA,
    EVALS,
    FORMAT_VERSION,
    LOCK,
    MACHINE,
    STATUS,
    STEPS,
    TELEMETRY_FILES,
    TRACE,
    build_sibling_path,
    find_model_folder,
)
from fivetune.rundir.parse import name_json_type, parse_record
from fivetune.rundir.plan import read_plan
from fivetune.rundir.range_test import RangeTest
from fivetune.rundir.record_checksums import PREDICTION_FILES, describe_change, find_changed_records
from fivetune.rundir.records import (
    STATES,
    DataSummary,
    EvalRecord,
    MachineRecord,
    Prediction,
    Run,
    RunStatus,
    StepRecord,
    TelemetryRecord,
)
from fivetune.rundir.trace import TraceSummary
from fivetune.types import JsonTable, JsonValue
from fivetune.values import as_finite_number

T = TypeVar("T", RunStatus, MachineRecord, DataSummary)
Line = TypeVar("Line", StepRecord, EvalRecord, TelemetryRecord)
# A record that is used without any damage or not at all.
Whole = TypeVar("Whole", bound=Prediction | TraceSummary | RangeTest)

REWRITTEN = (STATUS, MACHINE, DATA)
FIND_LR = "find-lr.json"  # <run>.find-lr.json, next to the run directory
TORN = "no whole JSON value"
OnDamage = Callable[[str], object]  # receives a sentence for each damaged file or line, which then counts as missing
LARGEST_PLAUSIBLE = 1e15  # of a step or a time stamp; larger values overflow when they are formatted


def read_jsonl(
    path: Path, *, required: str | None = None, is_growing: bool = True, on_damage: OnDamage | None = None
) -> list[JsonTable]:
    """Read the objects of a JSONL file; a missing file counts as empty.

    Args:
        required: key that each object must have, with a finite number in the plausible range.
        is_growing: a partial last line, which may be in the middle of being written, is dropped and is no damage.
        on_damage: called with a sentence for each damaged line, which is then omitted.

    Raises RunDirError for a damaged line if `on_damage` is None.
    """
    if not path.is_file():
        return []
    lines = _read_bytes(path).split(b"\n")
    records: list[JsonTable] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record, reason = _parse_line(line, required)
        if record is not None:
            records.append(record)
        # The partial line of a process that writes or was killed has a start and no line end.
        elif not is_growing or number < len(lines) or reason != TORN or not line.startswith(b"{"):
            text = f"{path}:{number}: damaged line ({reason})."
            if on_damage is None:
                raise RunDirError(f"{text} Delete that line.")
            on_damage(f"{text} It is left out.")
    return records


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from None


def _parse_line(line: bytes, required: str | None = None) -> tuple[JsonTable | None, str]:
    """Parse the object of a line; return it, or None and the reason why the line is invalid."""
    try:
        record: JsonValue = json.loads(line.decode())
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return None, TORN
    if not isinstance(record, dict):
        return None, f"{name_json_type(record)} instead of an object"
    if required is not None:
        value = as_finite_number(record.get(required))
        if value is None or abs(value) > LARGEST_PLAUSIBLE:
            return None, f"{required!r} is {record.get(required)!r}"
    return record, ""


def read_run(folder: str | Path) -> Run:
    """Read a run directory. Damage of files other than config.yaml is listed in `damage` and `warnings` of the run.

    A file of predictions is read on access, once; then a sentence about its damage or loss is added to both lists.

    Args:
        folder: the run directory.

    Returns the Run. Raises RunDirError for any other folder.

    >>> read_run("runs/tickets")
    Run('tickets', finished, step 40 of 40)
    """
    folder = Path(folder)
    refuse_foreign(folder)
    damage = [changed] if (changed := find_config_change(folder)) else []
    status = read_status(folder, on_damage=damage.append)
    machine, data = read_machine(folder, on_damage=damage.append), read_data(folder, on_damage=damage.append)
    is_active = status.state in ("preparing", "running")
    steps = read_steps(folder, on_damage=damage.append)
    evals = read_evals(folder, is_growing=is_active, on_damage=damage.append)
    best = None if is_active else status.best  # a resume drops later evaluations
    best_eval = find_chosen_eval(evals, best) if best else None
    if best and (best_eval is None or best.metric not in best_eval.scores):
        damage.append(
            f"{folder / EVALS}: lacks the evaluation that status.json names as the best: {best.metric} "
            f"{best.score:.2f} at step {best.step:,}. Scores are those of other evaluations."
        )
    if status.state == "finished" and (missing := describe_missing_steps([one.step for one in steps], status.step)):
        damage.append(f"{folder / STEPS}: {missing}")
    telemetry, plan = read_telemetry(folder, on_damage=damage.append), read_plan(folder, on_damage=damage.append)
    status = _complete_status(status, steps, telemetry)
    trace = _read_table(TraceSummary, folder / TRACE, damage.append)
    range_test = _read_table(RangeTest, build_sibling_path(folder, FIND_LR), damage.append)
    damage += find_changes(folder, listed := read_checksums(folder, on_damage=damage.append), known=damage)
    warnings = [*dict.fromkeys([*(one.message for one in status.warnings), *damage])]  # a resume recorded what it met

    def add_damage(text: str) -> None:
        damage.append(text)
        warnings.append(text)

    temperature = 1.0
    try:
        temperature = read_temperature(find_model_folder(folder))
    except RunDirError as error:
        add_damage(str(error))

    return Run(
        name=folder.resolve().name,
        config=read_run_config(folder),
        machine=machine,
        status=status,
        data=data,
        steps=steps,
        evals=evals,
        predictions=PredictionFiles(
            folder / "predictions",
            sizes={f"{record.split}-{record.step}": record.num_examples for record in evals},
            listed=listed,
            on_damage=add_damage,
        ),
        warnings=warnings,
        damage=damage,
        telemetry=telemetry,
        trace=trace,
        plan=plan,
        range_test=range_test,
        temperature=temperature,
        has_model=find_model_folder(folder).is_dir(),
    )


def _complete_status(status: RunStatus, steps: Sequence[StepRecord], telemetry: Sequence[TelemetryRecord]) -> RunStatus:
    """Fill in what a killed or active process has not written: the last step, and the time until the last record."""
    seconds = status.seconds
    if seconds is None:
        seconds = sum(status.seconds_by_phase.values()) or None  # until the last checkpoint
    if status.seconds is None and status.started and telemetry and not status.num_resumes:
        with suppress(ValueError):  # a damaged date
            started = datetime.strptime(status.started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
            seconds = max(telemetry[-1].seconds - started, 0.0)
    return replace(status, step=max([status.step, *(one.step for one in steps)]), seconds=seconds)


def read_checksums(folder: Path, *, on_damage: OnDamage = lambda text: None) -> JsonTable:
    """Read the checksums of the records of a finished run; {} without any, or if they are damaged."""
    return read_json(folder / CHECKSUMS, on_damage=on_damage)


def find_changes(folder: Path, listed: Mapping[str, JsonValue], *, known: Sequence[str]) -> list[str]:
    """Find the records of a finished run that differ from their checksums; a sentence for each.

    Args:
        listed: the checksums (`read_checksums`).
        known: sentences about damage, each of which begins with the path of its file; these files are left out.
    """
    changes = find_changed_records(folder, listed)
    return [text for name, text in changes if not any(one.startswith(f"{folder / name}:") for one in known)]


def read_steps(folder: Path, *, on_damage: OnDamage) -> list[StepRecord]:
    """Read steps.jsonl of a run directory."""
    return _read_records(StepRecord, [folder / STEPS], "step", on_damage)


def describe_missing_steps(steps: Iterable[int], last: int) -> str:
    """Describe how many of the steps 1 to `last` have no record; "" if all have one."""
    missing = last - len({step for step in steps if 0 < step <= last})
    return (
        f"{missing:,} of {last:,} steps are missing: curves, times and verdicts are of the others." if missing else ""
    )


def read_evals(folder: str | Path, *, is_growing: bool = True, on_damage: OnDamage | None = None) -> list[EvalRecord]:
    """Read evals.jsonl of a run directory. Raises RunDirError for a damaged line if `on_damage` is None.

    Args:
        is_growing: a process may write the file now (`read_jsonl`).
    """
    return _read_records(EvalRecord, [Path(folder) / EVALS], "step", on_damage, is_growing=is_growing)


def read_telemetry(folder: Path, *, on_damage: OnDamage = lambda text: None) -> list[TelemetryRecord]:
    """Read the telemetry of all processes of a run, in order of time."""
    records = _read_records(TelemetryRecord, sorted(folder.glob(TELEMETRY_FILES)), "seconds", on_damage)
    return sorted(records, key=lambda record: (record.seconds, record.rank))


def _read_records(
    kind: type[Line],
    paths: Sequence[Path],
    required: str,
    on_damage: OnDamage | None,
    *,
    is_growing: bool = True,
) -> list[Line]:
    """Read the records of JSONL files; all their damaged lines give one sentence, all their invalid values another."""
    notes: list[str] = []
    report = notes.append if on_damage else None
    lines = [
        line for path in paths for line in read_jsonl(path, required=required, is_growing=is_growing, on_damage=report)
    ]
    if notes and on_damage:
        on_damage(notes[0] + (f" Damaged lines in all: {len(notes):,}." if notes[1:] else ""))
    invalid: Counter[str] = Counter()
    records: list[Line] = []
    num_incomplete = 0
    for line in lines:
        num_invalid = invalid.total()
        if record := parse_record(kind, line, on_invalid=lambda name: invalid.update([name])):
            records.append(record)
        elif invalid.total() == num_invalid:  # a needed value is missing, or null
            num_incomplete += 1
    if num_incomplete and on_damage:
        on_damage(f"{paths[0]}: damaged: lines that lack needed values are left out: {num_incomplete:,}.")
    if invalid and on_damage:
        listed = ", ".join(f"{name} (lines: {number:,})" for name, number in invalid.most_common(5))
        on_damage(
            f"{paths[0]}: damaged: values that are no finite number, or of the wrong type, are left out: {listed}."
        )
    return records


def read_status(folder: str | Path, *, on_damage: OnDamage | None = None) -> RunStatus:
    """Read status.json of a run directory; an unfinished state becomes "interrupted" if the run's process is gone.

    Raises RunDirError for a damaged file if `on_damage` is None.
    """
    status = _read_record(RunStatus, Path(folder) / STATUS, on_damage)
    owner = _find_dead_owner(Path(folder)) if status.state in ("preparing", "running") else None
    return replace(status, state="interrupted", why=f"killed ({owner} is gone)") if owner else status


def read_machine(folder: str | Path, *, on_damage: OnDamage | None = None) -> MachineRecord:
    """Read machine.json of a run directory. Raises RunDirError for a damaged file if `on_damage` is None."""
    return _read_record(MachineRecord, Path(folder) / MACHINE, on_damage)


def read_data(folder: str | Path, *, on_damage: OnDamage | None = None) -> DataSummary:
    """Read data.json of a run directory. Raises RunDirError for a damaged file if `on_damage` is None."""
    return _read_record(DataSummary, Path(folder) / DATA, on_damage)


def _read_record(kind: type[T], path: Path, on_damage: OnDamage | None) -> T:
    """Read a JSON file as a record; values of the wrong type, and an unknown state, are named to `on_damage`."""
    table = read_json(path, on_damage=on_damage)
    invalid: list[str] = []
    record = parse_record(kind, table, on_invalid=invalid.append)
    flaws = [f"values of the wrong type are left out: {', '.join(invalid)}"] if invalid else []
    if table and isinstance(record, RunStatus) and record.state not in STATES:
        if "state" not in invalid:
            flaws.append(f"'state' is {table.get('state')!r}, none of {', '.join(STATES)}, and counts as unknown")
        record = replace(record, state="")
    if flaws and on_damage:
        on_damage(f"{path}: damaged: {'; '.join(flaws)}.")
    return kind() if record is None else record


def _read_table(kind: type[TraceSummary | RangeTest], path: Path, on_damage: OnDamage) -> JsonTable:
    """Read a JSON file as the table of a record; {} if the file is missing, or has any damage, which `on_damage` gets.

    Such a file is used as a whole or not at all, because its values belong together: times and their shares, rates and
    their losses.
    """
    if not os.path.isfile(path):  # a name beside the run may be too long for pathlib
        return {}
    notes: list[str] = []
    table = read_json(path, on_damage=notes.append)
    if not notes:
        record, reason = _parse_whole(kind, table)
        if record is not None and not isinstance(record, TraceSummary):
            reason = record.find_flaw()
        if record is not None and not reason:
            return {**table, **record.as_dict()}
        notes.append(f"{path}: damaged: {reason}. Restore the file.")
    on_damage(f"{notes[0]} It is left out.")
    return {}


def find_range_test_flaw(table: Mapping[str, JsonValue]) -> str | None:
    """Find why the result of `find-lr` is damaged; None if it can be drawn."""
    record, reason = _parse_whole(RangeTest, {**table})
    return reason if record is None else record.find_flaw()


def _parse_whole(kind: type[Whole], table: JsonTable) -> tuple[Whole | None, str | None]:
    """Build a record from a JSON object without any damage; return it, or None and the reason."""
    invalid: list[str] = []
    record = parse_record(kind, table, on_invalid=invalid.append)
    if invalid:
        return None, f"of the wrong type: {', '.join(invalid[:5])}"
    if record is None:
        return None, "values are missing"
    if not _are_plausible(record):
        return None, f"a number is not finite or above {LARGEST_PLAUSIBLE:g}"
    return record, None


def _are_plausible(value: object) -> bool:
    """Return whether all numbers in the fields of a record, however nested, can be formatted and drawn."""
    if is_dataclass(value):
        # The meta of a prediction holds columns of the data, which may be numbers of any size and tables of any depth.
        return all(_are_plausible(getattr(value, field.name)) for field in fields(value) if field.name != "meta")
    if isinstance(value, Mapping):
        return all(map(_are_plausible, cast("Mapping[str, object]", value).values()))
    if isinstance(value, tuple):
        return all(map(_are_plausible, cast("tuple[object, ...]", value)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return abs(value) <= LARGEST_PLAUSIBLE  # False for NaN


class PredictionFiles(Mapping[str, list[Prediction]]):
    """The predictions of a run by name (`eval-300`): those of its files and of its evaluations.

    A file is read once, on the first access. Damaged lines are left out, a missing file gives [].

    Args:
        sizes: number of predictions of each evaluation, by name.
        listed: checksums of the files, by their names in the run directory.
        on_damage: called with a sentence about each damaged or missing file when it is read.
    """

    def __init__(
        self, folder: Path, *, sizes: Mapping[str, int], listed: Mapping[str, JsonValue], on_damage: OnDamage
    ) -> None:
        # Only what the folder lists is opened: the name of a split in a damaged evals.jsonl may be any text.
        self._paths = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
        self._names = tuple(dict.fromkeys((*self._paths, *sizes)))
        self._folder, self._sizes, self._listed, self._on_damage = folder, sizes, listed, on_damage
        self._records: dict[str, list[Prediction]] = {}

    def __getitem__(self, name: str) -> list[Prediction]:
        if name not in self._records:
            if name in self._paths:
                records, damage = _read_predictions(self._paths[name], self._sizes.get(name))
                file = PREDICTION_FILES.replace("*", name)
                damage = damage or describe_change(self._folder.parent, file, self._listed)
            else:
                path, num = self._folder / f"{name}.jsonl", self._sizes[name]
                records, damage = [], f"{path}: missing: the evaluation made {num:,} predictions. Restore the file."
            self._records[name] = records
            if damage:
                self._on_damage(damage)
        return self._records[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read_predictions(path: Path, expected: int | None) -> tuple[list[Prediction], str]:
    """Read a file of predictions; return those of its undamaged lines, and a sentence about the damage or "".

    Unlike files that are appended to, it is written as a whole, so a partial last line is damage.
    """
    if path.is_symlink() or path.parent.is_symlink():
        return [], f"{path}: not read: a link, which may lead out of the run. Copy the files that it stands for."
    try:
        lines = _read_bytes(path).split(b"\n")
    except RunDirError as error:
        return [], str(error)
    records: list[Prediction] = []
    damaged: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        table, reason = _parse_line(line)
        record, flaw = (None, reason) if table is None else _parse_whole(Prediction, table)
        if record is None:
            damaged.append(f"{path}:{number}: damaged line ({flaw}). It is left out.")
        else:
            records.append(_convert_old_confidence(record))
    if damaged:
        return records, damaged[0] + (f" Damaged lines in all: {len(damaged):,}." if damaged[1:] else "")
    if expected is not None and len(records) < expected:
        return records, f"{path}: damaged: it has {len(records):,} of {expected:,} predictions. Restore the file."
    return records, ""


def _convert_old_confidence(line: Prediction) -> Prediction:
    """Return a line of an earlier version with the probability of its text; its confidence was the mean per token."""
    if line.logprob is None or line.confidence is None or line.left_label_set is not None or not line.num_tokens:
        return line
    per_token, whole = (math.exp(min(line.logprob / num, 0.0)) for num in (line.num_tokens, 1))
    is_old = math.isclose(line.confidence, per_token, rel_tol=1e-9) and not math.isclose(per_token, whole)
    return replace(line, confidence=whole) if is_old else line


def refuse_foreign(folder: Path) -> None:
    """Raise RunDirError unless `folder` is a run directory of a format that this version reads."""
    if not folder.is_dir():
        raise RunDirError(f"{folder}: no such directory. Give the run.dir of a run (runs/<name>).")
    if not (folder / CONFIG).is_file():
        raise RunDirError(f"{folder}: not a run directory (it has no {CONFIG}). Give the run.dir of a run.")
    version = read_json(folder / MACHINE, on_damage=lambda text: None).get("format_version")
    if type(version) is int and version > FORMAT_VERSION:  # `read_run` and a resume report a damaged file
        raise RunDirError(f"{folder}: written in format {version}, this version reads up to {FORMAT_VERSION}. Upgrade.")


def read_run_config(folder: str | Path) -> JsonTable:
    """Read config.yaml of a run directory. Raises RunDirError if it is damaged."""
    path = Path(folder) / CONFIG
    try:
        config: JsonValue = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunDirError(f"{path}: damaged: {' '.join(str(error).split())}. Restore the file.") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise RunDirError(f"{path}: damaged: {type(error).__name__}. Restore the file.") from None
    if not isinstance(config, dict):
        raise RunDirError(f"{path}: damaged: it is not a table of settings. Restore the file.")
    return config


def read_json(path: Path, *, on_damage: OnDamage | None = None) -> JsonTable:
    """Read a JSON object of a run directory, none of which is ever empty; {} if the file is missing.

    Raises RunDirError for any other content if `on_damage` is None.
    """
    if not path.is_file():
        return {}
    try:
        found: JsonValue = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason, place = f"damaged: {error.msg}", f"{path}:{error.lineno}:{error.colno}"
    except UnicodeDecodeError:
        reason, place = "damaged: it is not UTF-8", str(path)
    except (ValueError, RecursionError) as error:
        reason, place = f"damaged: {error}", str(path)
    except OSError as error:
        reason, place = f"cannot be read: {error.strerror}", str(path)
    else:
        if isinstance(found, dict) and found:
            return found
        held = "no values" if found == {} else f"{name_json_type(found)} instead of an object"
        reason, place = f"damaged: it holds {held}", str(path)
    text = f"{place}: {reason}. {_get_advice(path.name)}"
    if on_damage is None:
        raise RunDirError(text)
    on_damage(text)
    return {}


def _get_advice(name: str) -> str:
    """Return the advice for a damaged file; one that a resume rewrites can be deleted."""
    return "Delete the file: a resume writes it again." if name in REWRITTEN else "Restore the file."


def _find_dead_owner(path: Path) -> str | None:
    """Return the last owner of a lock that is now free; None if the lock is held or there is no lock file.

    A copy of a live run has the lock file but not the lock, so it counts as killed.
    """
    try:
        with open_regular(path / LOCK) as file:
            return (
                (file.read().decode(errors="replace").strip() or "its process")
                if lock_file(file, shared=True)
                else None
            )
    except OSError:
        return None
