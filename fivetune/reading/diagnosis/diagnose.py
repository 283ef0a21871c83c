"""The diagnosis of a run or of a log of utilisation, complete.

In: a run directory, finished or in progress, or a CSV log of another tool. Out: a Diagnosis.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fivetune.errors import ConfigError, RunDirError
from fivetune.reading.diagnosis import faults, speed
from fivetune.reading.diagnosis.logs import read_log
from fivetune.reading.diagnosis.rules import find_verdicts, list_missing_data
from fivetune.reading.diagnosis.stats import RunStats, collect_log_stats, collect_run_stats
from fivetune.rundir import read_run
from fivetune.rundir.records import TelemetryRecord
from fivetune.types import JsonTable, Verdict


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits or invalidates a run, as `fivetune.diagnose` returns it.

    Args:
        source: the run directory or log.
        stats: the figures that the rules read.
        telemetry: the samples of the devices.
        verdicts: the findings, most important first; each with `rule`, `message`, `advice`, `change` (settings) and
            `gain`, how many times as fast the run would be.
        note: a sentence on devices that no verdict explains; "" without one.
        not_judged: data that is missing -> the rules that need it.
    """

    source: Path
    stats: RunStats
    telemetry: Sequence[TelemetryRecord]
    verdicts: tuple[Verdict, ...]
    note: str
    not_judged: Mapping[str, tuple[str, ...]]

    def describe_time(self) -> str:
        """Describe in words what the time of the run was used for."""
        return speed.describe_time_use(self.stats)

    def as_dict(self) -> JsonTable:
        """Return the JSON object that `fivetune diagnose --json` prints."""
        return {
            "source": str(self.source),
            "verdicts": list(map(asdict, self.verdicts)),
            "time": None if self.verdicts else self.describe_time(),
            "notes": [self.note] if self.note else [],
            "not_judged": {data: list(rules) for data, rules in self.not_judged.items()},
        }


def diagnose(
    source: str | Path, *, devices: int | None = None, on_damage: Callable[[str], object] = warnings.warn
) -> Diagnosis:
    """Find what limits or invalidates a run, and what to change.

    Args:
        source: run directory, finished or in progress, or a CSV log of utilisation of another tool.
        devices: number of devices that were requested, if the recipe does not contain it.
        on_damage: called with a sentence for each damaged file of the run, or for the unreadable rows of a log.

    Returns the Diagnosis. Raises RunDirError if the source is neither a run nor a log, DataError for another file.

    >>> found = diagnose("runs/tickets")
    >>> all(verdict.advice for verdict in found.verdicts), found.stats.state
    (True, 'finished')
    """
    if devices is not None and devices < 1:
        raise ConfigError(f"--devices: {devices} is not a number of devices. Give 1 or more.")
    source = Path(source)
    if source.is_dir():
        run = read_run(source)
        for text in run.damage:
            on_damage(text)
        telemetry = run.telemetry
        stats = collect_run_stats(run, devices_requested=devices)
    elif source.is_file():
        telemetry = read_log(source, warn=on_damage)
        stats = collect_log_stats(telemetry, devices_requested=devices)
    else:
        raise RunDirError(f"{source}: no such run or log. Give the run.dir of a run (runs/<name>), or a CSV file.")
    verdicts = find_verdicts(stats)
    idle = faults.describe_idle_devices(stats) or ""
    return Diagnosis(source, stats, telemetry, verdicts, idle, list_missing_data(stats, verdicts))
