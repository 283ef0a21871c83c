"""sweep.json: what a sweep's directory holds, so that it can be compared without the sweep file.

In: a Sweep, or such a directory. Out: its record as a plain table, and the Comparison of its runs.

    {"title": ..., "baseline": ..., "metric": ..., "varied": [...], "price_per_hour": null,
     "variants": {NAME: {SETTING: VALUE}},
     "runs": [{"name": ..., "variant": ..., "seed": 1, "attempts": 1, "failure": null, "seconds": 51.3}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fivetune import rundir
from fivetune.compare import compare
from fivetune.errors import RunDirError
from fivetune.sweep.plan import Sweep
from fivetune.types import Comparison, Run, Variant

RECORD = "sweep.json"


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder is the directory of a sweep."""
    return (Path(folder) / RECORD).is_file()


def new_record(sweep: Sweep) -> dict[str, Any]:
    """The record of a sweep of which nothing is made yet."""
    runs = [
        {"name": run.name, "variant": run.variant, "seed": run.seed, "attempts": 0, "failure": None, "seconds": None}
        for run in sweep.runs
    ]
    return {
        "title": sweep.title, "baseline": sweep.baseline, "metric": sweep.metric, "varied": list(sweep.varied),
        "price_per_hour": sweep.price_per_hour, "variants": dict(sweep.variants), "runs": runs,
    }  # fmt: skip


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a sweep's directory. Raises RunDirError if it has none, or a damaged one."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirError(f"{folder}: is no sweep's directory (it has no {RECORD}). Give a sweep file.") from None
    except json.JSONDecodeError as error:
        raise RunDirError(f"{path}:{error.lineno}: damaged: {error.msg}. Restore the file.") from None
    if not isinstance(record, dict) or not {"variants", "runs", "baseline", "metric"} <= record.keys():
        raise RunDirError(f"{path}: damaged: it holds no variants and runs. Restore the file.")
    return record


def state_of(folder: Path) -> str:
    """What became of a run: open (nothing is there), preparing, running, interrupted, failed or finished."""
    return str(rundir.read_status(folder).get("state", "open")) if (folder / rundir.CONFIG).is_file() else "open"


def owner_of(folder: Path) -> str:
    """Who is at work on a run, or was last: `process 12 on host`."""
    try:
        return (folder / rundir.LOCK).read_text().strip() or "another process"
    except OSError:
        return "another process"


def variants_of(folder: str | Path) -> tuple[Variant, ...]:
    """The variants of a sweep with their finished runs; the other runs are told as failures. Raises RunDirError."""
    folder = Path(folder)
    record = read_record(folder)
    return tuple(_variant(name, settings, folder, record) for name, settings in record["variants"].items())


def comparison_of(
    folder: str | Path,
    variants: Sequence[Variant] | None = None,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    price_per_hour: float | None = None,
) -> Comparison:
    """Compare what is finished of a sweep. Raises RunDirError.

    Args:
        variants: of `variants_of`, where they are read already.
        baseline, metric, price_per_hour: in the place of the sweep's own.
    """
    folder = Path(folder)
    record = read_record(folder)
    return compare(
        variants_of(folder) if variants is None else variants,
        title=record.get("title") or folder.name,
        baseline=baseline or record["baseline"],
        metric=metric or record["metric"],
        varied=record.get("varied", ()),
        price_per_hour=record.get("price_per_hour") if price_per_hour is None else price_per_hour,
    )


def _variant(name: str, settings: Mapping[str, Any], folder: Path, record: Mapping[str, Any]) -> Variant:
    runs: list[Run] = []
    failures: list[str] = []
    for run in record["runs"]:
        if run["variant"] != name:
            continue
        own = folder / run["name"]
        try:
            if state_of(own) == "finished":
                runs.append(rundir.read(own))
            else:
                failures.append(f"{run['name']}: {_why(own, run)}.")
        except RunDirError as damaged:
            failures.append(str(damaged))
    return Variant(name, dict(settings), tuple(runs), measures={}, failures=tuple(failures))


def _why(folder: Path, run: Mapping[str, Any]) -> str:
    """What became of a run that is not finished, without a full stop."""
    state = state_of(folder)
    if state in ("preparing", "running"):
        return f"still {state}, in {owner_of(folder)}"
    if state == "open" and not run["failure"]:
        return "not begun"
    why = run["failure"] or rundir.read_status(folder).get("why") or ""
    became = "interrupted" if state == "interrupted" and not run["failure"] else "failed"
    return f"{became}: {why}".strip().rstrip(".:")
