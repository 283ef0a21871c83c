"""Reader of run directories: files to typed records.

In: a folder. Out: a Run; damaged files raise RunDirError.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import yaml

from fivetune.errors import RunDirError
from fivetune.rundir.abstention_file import read_abstention
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.config_file import find_config_change
from fivetune.rundir.damage import Damage
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
    PLAN,
    STATUS,
    STEPS,
    TELEMETRY_FILES,
    TRACE,
    build_sibling_path,
    find_model_folder,
)
from fivetune.rundir.parse import name_json_type, parse_line, parse_record
from fivetune.rundir.plan import Plan
from fivetune.rundir.range_test import RangeTest
from fivetune.rundir.record_checksums import describe_change, find_changes
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
Whole = TypeVar("Whole", bound=Prediction | TraceSummary | RangeTest | Plan)

# libyaml reads a config.yaml in an eighth of the time, which a list of hundreds of runs needs.
YamlLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
REWRITTEN = (STATUS, MACHINE, DATA, PLAN)
FIND_LR = "find-lr.json"  # <run>.find-lr.json, next to the run directory
TORN = "no whole JSON value"
# Of a step, a time stamp or a value that is drawn: larger ones overflow when they are formatted.
LARGEST_PLAUSIBLE = 1e15


def read_jsonl(
    path: Path, *, required: str | None = None, is_growing: bool = True, damage: Damage | None = None
) -> list[JsonTable]:
    """Read the objects of a JSONL file; a missing file counts as empty.

    Args:
        required: key that each object must have, with a finite number in the plausible range.
        is_growing: a partial last line, which may be in the middle of being written, is dropped and is no damage.
        damage: receives a sentence for each damaged line, which is then omitted.

    Raises RunDirError for a damaged line if `damage` is None.
    """
    records: list[JsonTable] = []
    for number, line in _read_lines(path, is_growing=is_growing):
        record, reason = _parse_table(line, required)
        if record is not None:
            records.append(record)
        else:
            _leave_out(path, number, reason, damage)
    return records


def _read_lines(path: Path, *, is_growing: bool) -> list[tuple[int, bytes]]:
    """Read the lines of a file that are not blank, each with its number."""
    if not path.is_file():
        return []
    lines = _read_bytes(path).split(b"\n")
    # The partial line of a process that writes or was killed has a start and no line end.
    if is_growing and lines[-1].startswith(b"{") and _parse_table(lines[-1])[1] == TORN:
        lines.pop()
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _leave_out(path: Path, number: int, reason: str, damage: Damage | None) -> None:
    """Add a sentence on a damaged line. Raises RunDirError instead if `damage` is None."""
    if damage is None:
        raise RunDirError(f"{path}:{number}: damaged line ({reason}). Delete that line.")
    damage.add(f"{path}:{number}", f"damaged line ({reason}). It is left out.")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from None


def _parse_table(line: bytes, required: str | None = None) -> tuple[JsonTable | None, str]:
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
    damage = Damage()
    if changed := find_config_change(folder):
        damage.append(changed)
    status = read_status(folder, damage)
    machine = read_machine(folder, damage)
    data = read_data(folder, damage)
    is_active = status.state in ("preparing", "running")
    steps = read_steps(folder, damage)
    evals = read_evals(folder, is_growing=is_active, damage=damage)

    # A resume drops later evaluations: the best one of an active run may be made again.
    best = status.best
    if best and not is_active:
        best_eval = find_chosen_eval(evals, best)
        if best_eval is None or best.metric not in best_eval.scores:
            damage.add(
                folder / EVALS,
                f"lacks the evaluation that status.json names as the best: {best.metric} {best.score:.2f} at step "
                f"{best.step:,}. Scores are those of other evaluations.",
            )
    # The status of a killed or active run lacks its last step.
    if status.state == "finished":
        missing = describe_missing_steps([one.step for one in steps], status.step)
        if missing:
            damage.add(folder / STEPS, missing)

    telemetry = read_telemetry(folder, damage)
    plan = read_plan(folder, damage)
    trace = _read_table(TraceSummary, folder / TRACE, damage)
    range_test = _read_table(RangeTest, build_sibling_path(folder, FIND_LR), damage)
    # After all files are read: of a file with known damage a different checksum says nothing new.
    listed = read_checksums(folder, damage)
    damage += find_changes(folder, listed, known=damage)
    model = find_model_folder(folder)
    temperature = 1.0
    abstention = None
    try:
        temperature = read_temperature(model)
        abstention = read_abstention(model)
    except RunDirError as error:
        damage.append(str(error))
    return Run(
        name=folder.resolve().name,
        config=read_run_config(folder),
        machine=machine,
        status=_complete_status(status, [one.step for one in steps], telemetry),
        data=data,
        steps=steps,
        evals=evals,
        predictions=PredictionFiles(folder, evals, listed, damage),
        damage=damage,
        telemetry=telemetry,
        trace=trace,
        plan=plan,
        range_test=range_test,
        temperature=temperature,
        abstention=abstention,
        has_model=model.is_dir(),
    )


def _complete_status(status: RunStatus, steps: Sequence[int], telemetry: Sequence[TelemetryRecord]) -> RunStatus:
    """Fill in what a killed or active process has not written: the last step, and the time until the last record."""
    seconds = status.seconds
    if seconds is None:
        seconds = sum(status.seconds_by_phase.values()) or None  # until the last checkpoint
        # After a resume the time since the start includes the pause.
        if status.started and telemetry and not status.num_resumes:
            with suppress(ValueError):  # a damaged date
                started = datetime.strptime(status.started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
                seconds = max(telemetry[-1].seconds - started, 0.0)
    return replace(status, step=max([status.step, *steps]), seconds=seconds)


def read_checksums(folder: Path, damage: Damage) -> JsonTable:
    """Read the checksums of the records of a finished run; {} without any, or if they are damaged."""
    return read_json(folder / CHECKSUMS, damage)


def read_steps(folder: Path, damage: Damage) -> list[StepRecord]:
    """Read steps.jsonl of a run directory."""
    return _read_records(StepRecord, [folder / STEPS], "step", damage)


def describe_missing_steps(steps: Iterable[int], last: int) -> str:
    """Describe how many of the steps 1 to `last` have no record; "" if all have one."""
    missing = last - len({step for step in steps if 0 < step <= last})
    if not missing:
        return ""
    return f"{missing:,} of {last:,} steps are missing: curves, times and verdicts are of the others."


def read_evals(folder: str | Path, *, is_growing: bool = True, damage: Damage | None = None) -> list[EvalRecord]:
    """Read evals.jsonl of a run directory. Raises RunDirError for a damaged line if `damage` is None.

    Args:
        is_growing: a process may write the file now (`read_jsonl`).
    """
    return _read_records(EvalRecord, [Path(folder) / EVALS], "step", damage, is_growing=is_growing)


def read_telemetry(folder: Path, damage: Damage) -> list[TelemetryRecord]:
    """Read the telemetry of all processes of a run, in order of time."""
    records = _read_records(TelemetryRecord, sorted(folder.glob(TELEMETRY_FILES)), "seconds", damage)
    return sorted(records, key=lambda record: (record.seconds, record.rank))


def _read_records(
    kind: type[Line], paths: Sequence[Path], required: str, damage: Damage | None, *, is_growing: bool = True
) -> list[Line]:
    """Read the records of JSONL files; all their damaged lines give one sentence, all their invalid values another."""
    lines = None if damage is None else Damage()
    invalid: Counter[str] = Counter()
    records: list[Line] = []
    num_incomplete = 0
    for path in paths:
        for number, line in _read_lines(path, is_growing=is_growing):
            record = parse_line(kind, line)
            # Nearly all lines are whole; a damaged line is parsed again, value by value.
            if record is None or abs(getattr(record, required)) > LARGEST_PLAUSIBLE:
                table, reason = _parse_table(line, required)
                if table is None:
                    _leave_out(path, number, reason, lines)
                    continue
                lost: list[str] = []
                record = parse_record(kind, table, invalid=lost)
                invalid.update(lost)
                num_incomplete += record is None and not lost  # a needed value is missing, or null
            if record is not None:
                records.append(record)
    if damage is None:
        return records
    # A sentence for each kind of damage, not for each line: a file may have 100,000 damaged lines.
    damage.add_lines(lines or ())
    if num_incomplete:
        damage.add(paths[0], f"damaged: lines that lack needed values are left out: {num_incomplete:,}.")
    if invalid:
        listed = ", ".join(f"{name} (lines: {number:,})" for name, number in invalid.most_common(5))
        damage.add(
            paths[0], f"damaged: values that are no finite number, or of the wrong type, are left out: {listed}."
        )
    return records


def read_status(folder: str | Path, damage: Damage | None = None) -> RunStatus:
    """Read status.json of a run directory; an unfinished state becomes "interrupted" if the run's process is gone.

    Raises RunDirError for a damaged file if `damage` is None.
    """
    status = _read_record(RunStatus, Path(folder) / STATUS, damage)
    if status.state in ("preparing", "running"):
        owner = _find_dead_owner(Path(folder))
        if owner:
            return replace(status, state="interrupted", why=f"killed ({owner} is gone)")
    return status


def read_machine(folder: str | Path, damage: Damage | None = None) -> MachineRecord:
    """Read machine.json of a run directory. Raises RunDirError for a damaged file if `damage` is None."""
    return _read_record(MachineRecord, Path(folder) / MACHINE, damage)


def read_data(folder: str | Path, damage: Damage | None = None) -> DataSummary:
    """Read data.json of a run directory. Raises RunDirError for a damaged file if `damage` is None."""
    return _read_record(DataSummary, Path(folder) / DATA, damage)


def read_plan(folder: str | Path, damage: Damage | None = None) -> Plan | None:
    """Read plan.json of a run directory; None if the run ended before it was written.

    Args:
        damage: receives a sentence if the file is damaged, which then counts as missing; only a resume needs it.

    Raises RunDirError for a damaged file if `damage` is None.
    """
    path = Path(folder) / PLAN
    table = read_json(path, damage)
    if not table:
        return None
    plan, reason = _parse_whole(Plan, table)
    if plan is None:
        text = f"{path}: damaged: {reason}. {_get_advice(PLAN)}"
        if damage is None:
            raise RunDirError(text)
        damage.append(text)
    return plan


def _read_record(kind: type[T], path: Path, damage: Damage | None) -> T:
    """Read a JSON file as a record; values of the wrong type, and an unknown state, are left out and named."""
    table = read_json(path, damage)
    lost: list[str] = []
    record = parse_record(kind, table, invalid=lost) or kind()
    flaws: list[str] = []
    if lost:
        flaws.append(f"values of the wrong type are left out: {', '.join(lost)}")
    if table and isinstance(record, RunStatus) and record.state not in STATES:
        if "state" not in lost:  # a state of the wrong type is named already
            flaws.append(f"'state' is {table.get('state')!r}, none of {', '.join(STATES)}, and counts as unknown")
        record = replace(record, state="")
    if flaws and damage is not None:
        damage.add(path, f"damaged: {'; '.join(flaws)}.")
    return record


def _read_table(kind: type[Whole], path: Path, damage: Damage) -> JsonTable:
    """Read a JSON file as the table of a record; {} if the file is missing, or has any damage, which is named.

    Such a file is used as a whole or not at all, because its values belong together: times and their shares, rates and
    their losses.
    """
    if not os.path.isfile(path):  # the run's name with a suffix may be too long for pathlib
        return {}
    notes = Damage()
    table = read_json(path, notes)
    if not notes:
        record, reason = _parse_whole(kind, table)
        if record is not None:
            return {**table, **record.as_dict()}
        notes.add(path, f"damaged: {reason}. Restore the file.")
    damage.append(f"{notes[0]} It is left out.")
    return {}


def find_range_test_flaw(table: Mapping[str, JsonValue]) -> str:
    """Find why the result of `fivetune find-lr` is damaged; "" if it can be drawn."""
    return _parse_whole(RangeTest, {**table})[1]


def _parse_whole(kind: type[Whole], table: JsonTable) -> tuple[Whole | None, str]:
    """Build a record from a JSON object without any damage; return it, or None and the reason."""
    lost: list[str] = []
    record = parse_record(kind, table, invalid=lost)
    if lost:
        return None, f"of the wrong type: {', '.join(lost[:5])}"
    if record is None:
        missing: list[str] = []
        for one in fields(kind):
            if one.default is MISSING and one.default_factory is MISSING and one.name not in table:
                missing.append(one.name)
        return None, f"it has no {', '.join(missing) or 'values'}"  # all are there, one is null
    # The values are whole; a second pass finds the ones that overflow when they are drawn.
    parse_record(kind, table, invalid=lost, largest=LARGEST_PLAUSIBLE)
    if lost:
        return None, f"above {LARGEST_PLAUSIBLE:g}: {', '.join(lost[:5])}"
    if isinstance(record, RangeTest | Plan) and (flaw := record.find_flaw()):
        return None, flaw
    return record, ""


class PredictionFiles(Mapping[str, list[Prediction]]):
    """The predictions of a run by name (`eval-300`): a name for each file and for each evaluation.

    A file is read once, on the first access. Damaged lines are omitted, a missing file gives [].

    Args:
        folder: the run directory.
        listed: checksums of the files, by their names in the run directory.
        damage: receives a sentence about each damaged or missing file when it is read.
    """

    def __init__(
        self, folder: Path, evals: Iterable[EvalRecord], listed: Mapping[str, JsonValue], damage: Damage
    ) -> None:
        # Only what the folder lists is opened: the name of a split in a damaged evals.jsonl may be any text.
        self._paths = {path.stem: path for path in sorted((folder / "predictions").glob("*.jsonl"))}
        self._sizes = {f"{record.split}-{record.step}": record.num_examples for record in evals}
        self._folder = folder
        self._listed = listed
        self._damage = damage
        self._records: dict[str, list[Prediction]] = {}

    def __getitem__(self, name: str) -> list[Prediction]:
        if name not in self._records:
            self._records[name] = self._read(name)
        return self._records[name]

    def _read(self, name: str) -> list[Prediction]:
        expected = self._sizes.get(name)
        if path := self._paths.get(name):
            found = Damage()
            records = _read_predictions(path, expected, found)
            if not found:
                changed = describe_change(self._folder, f"predictions/{path.name}", self._listed)
                found += [changed] if changed else []
            self._damage += found
            return records
        if expected is None:
            raise KeyError(name)
        path = self._folder / "predictions" / f"{name}.jsonl"
        self._damage.add(path, f"missing: the evaluation made {expected:,} predictions. Restore the file.")
        return []

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._paths, *self._sizes)))

    def __len__(self) -> int:
        return len(self._paths.keys() | self._sizes.keys())


def _read_predictions(path: Path, expected: int | None, damage: Damage) -> list[Prediction]:
    """Read the undamaged lines of a file of predictions.

    Unlike files that are appended to, it is written as a whole, so a partial last line is damage.
    """
    if path.is_symlink() or path.parent.is_symlink():
        damage.add(path, "not read: a link, which may lead out of the run. Copy the files that it stands for.")
        return []
    records: list[Prediction] = []
    lines = Damage()
    try:
        for number, line in _read_lines(path, is_growing=False):
            record = parse_line(Prediction, line, largest=LARGEST_PLAUSIBLE)
            if record is None:
                table, reason = _parse_table(line)
                if table is not None:
                    record, reason = _parse_whole(Prediction, table)
                if record is None:
                    _leave_out(path, number, reason, lines)
                    continue
            records.append(record)
    except RunDirError as error:  # it cannot be read
        damage.append(str(error))
        return []
    damage.add_lines(lines)
    if not lines and expected is not None and len(records) < expected:
        damage.add(path, f"damaged: it has {len(records):,} of {expected:,} predictions. Restore the file.")
    return records


def refuse_foreign(folder: Path) -> None:
    """Raise RunDirError unless `folder` is a run directory of a format that this version reads."""
    if not folder.is_dir():
        raise RunDirError(f"{folder}: no such directory. Give the run.dir of a run (runs/<name>).")
    if not (folder / CONFIG).is_file():
        raise RunDirError(f"{folder}: not a run directory (it has no {CONFIG}). Give the run.dir of a run.")
    version = read_json(folder / MACHINE, Damage()).get("format_version")
    if type(version) is int and version > FORMAT_VERSION:  # `read_run` and a resume report a damaged file
        raise RunDirError(f"{folder}: written in format {version}, this version reads up to {FORMAT_VERSION}. Upgrade.")


def read_run_config(folder: str | Path) -> JsonTable:
    """Read config.yaml of a run directory. Raises RunDirError if it is damaged."""
    path = Path(folder) / CONFIG
    try:
        config: JsonValue = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunDirError(f"{path}: damaged: {' '.join(str(error).split())}. Restore the file.") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise RunDirError(f"{path}: damaged: {type(error).__name__}. Restore the file.") from None
    if not isinstance(config, dict):
        raise RunDirError(f"{path}: damaged: it is not a table of settings. Restore the file.")
    return config


def read_json(path: Path, damage: Damage | None = None) -> JsonTable:
    """Read a JSON object of a run directory, none of which is ever empty; {} if the file is missing.

    Raises RunDirError for any other content if `damage` is None.
    """
    if not path.is_file():
        return {}
    place = str(path)
    try:
        found: JsonValue = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        reason = f"damaged: {error.msg}"
    except UnicodeDecodeError:
        reason = "damaged: it is not UTF-8"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists thousands of levels deep
        reason = f"damaged: {error}"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    else:
        if isinstance(found, dict) and found:
            return found
        held = "no values" if found == {} else f"{name_json_type(found)} instead of an object"
        reason = f"damaged: it holds {held}"
    text = f"{place}: {reason}. {_get_advice(path.name)}"
    if damage is None:
        raise RunDirError(text)
    damage.append(text)
    return {}


def _get_advice(name: str) -> str:
    """Return the advice for a damaged file; a file that a resume rewrites can be deleted."""
    return "Delete the file: a resume writes it again." if name in REWRITTEN else "Restore the file."


def _find_dead_owner(path: Path) -> str | None:
    """Return the last owner of a lock that is now free; None if the lock is held or there is no lock file.

    A copy of a live run has the lock file but not the lock, so it counts as killed.
    """
    try:
        # A shared lock, which a run that starts now waits out (`writer._take_lock`).
        with open_regular(path / LOCK) as file:
            if not lock_file(file, shared=True):
                return None
            return file.read().decode(errors="replace").strip() or "its process"
    except OSError:
        return None
