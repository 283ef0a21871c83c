"""sweep.json: the record of a sweep's directory, so that its runs can be compared without the sweep file.

In: a Sweep, or such a directory. Out: its SweepRecord, and the Comparison of its finished runs.

    {"title": ..., "baseline": ..., "metric": ..., "varied": [...], "price_per_hour": null,
     "variants": {NAME: {SETTING: VALUE}},
     "runs": [{"name": ..., "variant": ..., "seed": 1, "attempts": 1, "failure": null, "seconds": 51.3}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fivetune import rundir
from fivetune.errors import RunDirError
from fivetune.fleet.experiments.sweep import Sweep
from fivetune.reading.compare import compare
from fivetune.reading.compare.records import Comparison, Variant
from fivetune.redaction import redact_json
from fivetune.rundir.records import Run

RECORD = "sweep.json"


class RunRecord(BaseModel):
    """Outcome of one run of a sweep.

    Args:
        failure: why the last attempt failed; None if it did not.
        seconds: duration of the whole run; None before it has finished.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    variant: str
    seed: int
    attempts: int = 0
    failure: str | None = None
    seconds: float | None = None


class SweepRecord(BaseModel):
    """A sweep without its recipes: variants with their varied settings, and the state of each run."""

    title: str
    baseline: str
    metric: str
    varied: tuple[str, ...]
    price_per_hour: float | None
    variants: dict[str, dict[str, Any]]
    runs: list[RunRecord]

    def write(self, folder: Path) -> None:
        rundir.write_json(folder / RECORD, redact_json(self.model_dump(mode="json")))


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder is the directory of a sweep."""
    return (Path(folder) / RECORD).is_file()


def make_sweep_record(sweep: Sweep) -> SweepRecord:
    """Make the record of a sweep before its first run."""
    return SweepRecord(
        title=sweep.title,
        baseline=sweep.baseline,
        metric=sweep.metric,
        varied=sweep.varied,
        price_per_hour=sweep.price_per_hour,
        variants={name: dict(settings) for name, settings in sweep.variants.items()},
        runs=[RunRecord(name=run.name, variant=run.variant, seed=run.seed) for run in sweep.runs],
    )


def read_record(folder: Path) -> SweepRecord:
    """Read the record of a sweep's directory. Raises RunDirError if it is missing or damaged."""
    path = folder / RECORD
    try:
        return SweepRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise RunDirError(f"{folder}: not a sweep's directory (it has no {RECORD}). Give a sweep file.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunDirError(f"{path}: damaged: {where and f'{where}: '}{first['msg']}. Restore the file.") from None


def read_run_records(folder: Path) -> dict[str, RunRecord]:
    """Read the recorded runs of a sweep's directory by name; {} if it has no record."""
    return {run.name: run for run in read_record(folder).runs} if is_sweep(folder) else {}


def read_run_state(folder: Path) -> str:
    """Read the state of a run: open (not started), preparing, running, interrupted, failed or finished."""
    has_begun = (folder / rundir.CONFIG).is_file()
    return (rundir.read_status(folder).state if has_begun else "") or "open"


def read_run_owner(folder: Path) -> str:
    """Read the process that trains or last trained a run: `process 12 on host`."""
    try:
        return (folder / rundir.LOCK).read_text().strip() or "another process"
    except OSError:
        return "another process"


def read_sweep_variants(folder: str | Path) -> tuple[Variant, ...]:
    """Read the variants of a sweep with their finished runs; other runs count as failures. Raises RunDirError."""
    folder = Path(folder)
    record = read_record(folder)
    return tuple(_read_variant(name, settings, folder, record) for name, settings in record.variants.items())


def compare_sweep(
    folder: str | Path,
    variants: Sequence[Variant] | None = None,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    price_per_hour: float | None = None,
) -> Comparison:
    """Compare the finished runs of a sweep. Raises RunDirError.

    Args:
        variants: result of `read_sweep_variants`; None reads it.
        baseline, metric, price_per_hour: values in place of the sweep's.
    """
    folder = Path(folder)
    record = read_record(folder)
    return compare(
        read_sweep_variants(folder) if variants is None else variants,
        title=record.title or folder.name,
        baseline=baseline or record.baseline,
        metric=metric or record.metric,
        varied=record.varied,
        price_per_hour=record.price_per_hour if price_per_hour is None else price_per_hour,
    )


def _read_variant(name: str, settings: Mapping[str, Any], folder: Path, record: SweepRecord) -> Variant:
    runs: list[Run] = []
    failures: list[str] = []
    for run in record.runs:
        if run.variant != name:
            continue
        own = folder / run.name
        try:
            if read_run_state(own) == "finished":
                runs.append(rundir.read_run(own))
            else:
                failures.append(f"{run.name}: {_describe_failure(own, run)}.")
        except RunDirError as damaged:
            failures.append(str(damaged))
    return Variant(name, dict(settings), tuple(runs), measures={}, failures=tuple(failures))


def _describe_failure(folder: Path, run: RunRecord) -> str:
    """Describe why a run is not finished, without a full stop."""
    # What a run is doing wins over the failure of an attempt before.
    state = read_run_state(folder)
    if state in ("preparing", "running"):
        return f"still {state}, in {read_run_owner(folder)}"
    if state == "open" and not run.failure:
        return "not started"
    why = run.failure or rundir.read_status(folder).why
    outcome = "interrupted" if state == "interrupted" and not run.failure else "failed"
    return f"{outcome}: {why}".strip().rstrip(".:")
