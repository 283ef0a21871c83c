"""Say what limits or spoils a run, what to change and what that gains (no torch).

In: a run directory, finished or under way, or a CSV log of utilisation that another tool wrote. Out: the verdicts, what
matters most first, and what could not be judged. --verify trains a few dozen steps with and without the first change.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fivetune.commands import print_json
from fivetune.errors import ConfigError, RunDirError
from fivetune.rundir import read
from fivetune.telemetry import faults, limits
from fivetune.telemetry.evidence import Evidence, of_log, of_run
from fivetune.telemetry.logs import read_log
from fivetune.telemetry.trial import Trial, can_try, try_out
from fivetune.telemetry.verdict import diagnose, unjudged
from fivetune.types import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CSV", type=Path, help="run directory, or a CSV log of utilisation")
    parser.add_argument("--devices", metavar="N", type=int, help="how many devices were asked for")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="measure the first change that has a predicted gain, in short runs of a few dozen steps",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices: {args.devices} devices cannot be asked for. Give 1 or more.")
    evidence = evidence_of(args.source, devices_asked=args.devices)
    verdicts = diagnose(evidence)
    if args.verify and not args.source.is_dir():
        raise ConfigError(f"--verify: {args.source} is a log; there is no recipe to run again. Give a run directory.")
    if not args.json:
        print(*lines(str(args.source), evidence, verdicts), sep="\n", flush=True)
    trial = _verified(args.source, evidence, verdicts) if args.verify else None
    if args.json:
        print_json(as_table(str(args.source), evidence, verdicts, trial))
    elif trial:
        print(*trial_lines(trial), sep="\n")
    return 0


def evidence_of(source: Path, *, devices_asked: int | None) -> Evidence:
    """The evidence of a run directory or of a log. Raises RunDirError if it is neither."""
    if source.is_dir():
        return of_run(read(source), devices_asked=devices_asked)
    if not source.is_file():
        raise RunDirError(f"{source}: no such run or log. Give the run.dir of a run (runs/<name>), or a CSV file.")
    return of_log(read_log(source), devices_asked=devices_asked)


def lines(name: str, evidence: Evidence, verdicts: tuple[Verdict, ...]) -> list[str]:
    """What the terminal shows: every verdict with its evidence, change and gain, then what is not known."""
    shown = [f"{name}: {evidence.state}" if evidence.state else name]
    for number, verdict in enumerate(verdicts, start=1):
        shown += ["", f"{number}. {verdict.rule} (confidence {verdict.confidence:.2f})", f"   {verdict.says}"]
        shown += [f"   {verdict.advice}"]
        if verdict.change:
            shown.append(f"   change:    {settings(verdict.change)}")
        if verdict.gain is not None:
            shown.append(f"   predicted: {verdict.gain:.2f} times as fast")
    if not verdicts:
        shown += ["nothing to mend was found in the records", f"time: {limits.state(evidence)}"]
    if note := faults.idle_note(evidence):
        shown += ["", f"note: {note}"]
    missing = [f"   {words}: {', '.join(rules)}" for words, rules in unjudged(evidence).items()]
    return [*shown, *(["", "not judged, because the records do not tell", *missing] if missing else [])]


def settings(change: Mapping[str, Any]) -> str:
    """A change as flags of `fivetune train`.

    >>> settings({"strategy.name": "ddp", "report.sinks": []})
    '--strategy.name ddp --report.sinks []'
    """
    return " ".join(f"--{key} {value if isinstance(value, str) else json.dumps(value)}"
                    for key, value in change.items())  # fmt: skip


def trial_lines(trial: Trial) -> list[str]:
    """Predicted beside measured."""
    return [
        "",
        f"tried out {settings(trial.change)}: {trial.num_steps} steps with and without it, "
        f"{trial.num_rounds} times each, in turn",
        f"   predicted {trial.predicted:.2f} times as fast, measured {trial.measured:.2f} "
        f"({trial.low:.2f} to {trial.high:.2f})",
    ]


def as_table(name: str, evidence: Evidence, verdicts: tuple[Verdict, ...], trial: Trial | None) -> dict[str, Any]:
    """What --json prints."""
    return {
        "source": name,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "time": None if verdicts else limits.state(evidence),
        "notes": [note for note in (faults.idle_note(evidence),) if note],
        "not_judged": {words: list(rules) for words, rules in unjudged(evidence).items()},
        "verified": asdict(trial) if trial else None,
    }


def _verified(folder: Path, evidence: Evidence, verdicts: tuple[Verdict, ...]) -> Trial | None:
    """Try the first change out that can be; progress and reasons go to standard error."""
    verdict = next(filter(can_try, verdicts), None)
    if verdict is None:
        print("--verify: no verdict has both a setting to change and a gain to predict", file=sys.stderr)
        return None
    started = time.monotonic()
    trial = try_out(folder, evidence, verdict, say=lambda words: print(f"  {words} ...", file=sys.stderr, flush=True))
    print(f"  measured in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return trial
