"""A campaign: rows of trials, run side by side, recorded one by one, counted into the scoreboard.

In: rows. Out: `reliability.json` with trials, failures and bounds of each row, and the table of docs/reliability.md. A
campaign that is interrupted goes on where it stopped: each trial's result stands in a line of the journal.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from fivetune.redaction import name_invisible
from fivetune.rundir import Damage, lock_file
from fivetune.rundir.lines import JsonlFile
from fivetune.rundir.reader import read_jsonl
from reliability.warm import adopt_orphans
from reliability.workload import Workload

ROOT = Path(__file__).parents[1]
CHANGED = "-changed"
PROGRESS_SECONDS = 60.0


@dataclass(frozen=True)
class Trial:
    """One injected fault: `run(folder)` gets an empty folder and raises AssertionError where a promise broke."""

    name: str
    run: Callable[[Path], None]


MakeTrials = Callable[[Workload, random.Random], Iterable[Trial]]


@dataclass(frozen=True)
class Row:
    """A row of the scoreboard: a fault, what is promised under it, and the trials that show it.

    `make_trials(workload, random)` yields trials; the first `num_trials` of them are run for each change and the first
    `num_release` for a release, all where that is None. `make_peer_trials` yields the same faults for transformers'
    Trainer; their failures are a figure beside ours, not a failure of the campaign. Its code does not change with ours:
    one of them is run for each change. `explain_absence` says why no trial can run here, "" if they can.
    """

    name: str
    fault: str
    promise: str
    make_trials: MakeTrials
    num_trials: int | None = None
    num_release: int | None = None
    make_peer_trials: MakeTrials | None = None
    explain_absence: Callable[[], str] = str


@dataclass
class Result:
    """What came of one trial; `failure` is empty where every promise held."""

    row: str
    trial: str
    seconds: float
    failure: str
    peer: bool = False


@dataclass
class Score:
    """A row's trials, its failures by name, and the bound of its failure rate at 95 % where none failed (3/N)."""

    name: str
    fault: str
    promise: str
    num_trials: int
    failures: dict[str, str]
    bound: float | None
    seconds: float
    peer: dict[str, Any] | None = None
    absent: str = ""


@dataclass
class Campaign:
    """Runs rows; `folder` keeps the workload and the journal, `jobs` trials run at a time, of whichever rows."""

    folder: Path
    release: bool = False
    seed: int = 0
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    tell: Callable[[str], None] = print

    def run(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Run what the journal does not have yet and return the scoreboard.

        Raises BlockingIOError if another campaign runs in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("ab") as lock:
            if not lock_file(lock):
                raise BlockingIOError(f"{self.folder}: another campaign runs there. Wait for it, or give --folder.")
            return self._run(rows)

    def _run(self, rows: Sequence[Row]) -> dict[str, Any]:
        code = describe_code()
        journal = Journal(self.folder / f"trials-{code}-{self.seed}.jsonl", self.tell)
        if code.endswith(CHANGED):  # the results may be those of other changes
            journal.clear()
        if journal.num_earlier:
            self.tell(
                f"{journal.path}: has {journal.num_earlier:,} trials of this commit and seed, which are not repeated"
            )
        start, begun_at = time.monotonic(), datetime.now(UTC)
        workload, scores = Workload(self.folder / "workload"), list[Score]()
        with ThreadPoolExecutor(self.jobs) as pool, closing(journal):
            try:
                begun = [self._begin_row(row, workload, journal, pool) for row in rows]
                for row, (ours, theirs) in zip(rows, begun, strict=True):
                    scores.append(_count(row, [one.result() for one in ours], [one.result() for one in theirs]))
                    self.tell(_describe(scores[-1]))
            except BaseException:
                journal.close()
                pool.shutdown(wait=False, cancel_futures=True)
                adopt_orphans()  # what a killed process has started
                ending = threading.Thread(target=pool.shutdown)
                ending.start()
                while ending.is_alive():
                    _kill_children()  # again and again: a trial may start another process
                    ending.join(0.1)
                raise
        return {
            "release": self.release,
            "seed": self.seed,
            "code": code,
            "begun": begun_at.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - start),
            "num_jobs": self.jobs,
            "num_earlier": journal.num_earlier,
            "machine": describe_machine(),
            "rows": [asdict(score) for score in scores],
        }

    def _begin_row(
        self, row: Row, workload: Workload, journal: Journal, pool: ThreadPoolExecutor
    ) -> tuple[list[Future[Result]], list[Future[Result]]]:
        """Set a row's trials up, here, and give them to the pool; those of FiveTune and of the peer."""

        def begin(make_trials: MakeTrials | None, num: int | None, *, peer: bool) -> list[Future[Result]]:
            if make_trials is None or row.explain_absence():
                return []
            limit = row.num_release if self.release else num
            try:
                trials = list(islice(make_trials(workload, random.Random(f"{self.seed} {row.name}")), limit))
                names = [trial.name for trial in trials]
                assert len(set(names)) == len(names), f"{row.name}: two trials have the same name"
                assert names or limit == 0, f"{row.name}: no trial"
            except Exception as error:  # a row that cannot be set up has shown nothing
                trials = [Trial(f"set-up of {row.name}", partial(_raise, error))]
            journal.num_expected += len(trials)
            return [pool.submit(journal.run_once, row.name, trial, peer=peer) for trial in trials]

        ours = begin(row.make_trials, row.num_trials, peer=False)
        return ours, begin(row.make_peer_trials, 1, peer=True)


class Journal:
    """The results of a campaign, a line each in a file that a later campaign of the same code reads."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self._file, self._tell = path, JsonlFile(path), tell
        self._lock = threading.Lock()
        damage = Damage()
        results = [Result(**one) for one in read_jsonl(path, damage=damage)]
        for sentence in damage:
            tell(sentence)
        self._known = {(one.row, one.trial, one.peer): one for one in results}
        self.num_earlier = len(self._known)
        """Trials of an interrupted campaign, which this one takes over."""
        self.num_expected = self._num_done = 0
        self._told = time.monotonic()
        self._is_closed = False

    def close(self) -> None:
        """Stop recording: an interrupted campaign kills the processes of trials, which then fail."""
        with self._lock:
            self._is_closed = True
            self._file.close()

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
        self._known.clear()
        self.num_earlier = 0

    def run_once(self, row: str, trial: Trial, *, peer: bool) -> Result:
        """Run a trial whose result is not known yet; says now and then how far the campaign is."""
        result = self._known.get((row, trial.name, peer))
        is_new = result is None
        result = result or run_trial(row, trial, peer=peer)
        with self._lock:
            if is_new and not self._is_closed:
                self._file.append(asdict(result))
            self._num_done += 1
            if time.monotonic() - self._told > PROGRESS_SECONDS:
                self._told = time.monotonic()
                self._tell(f"{self._num_done:,} of {self.num_expected:,} trials")
        return result


def run_trial(row: str, trial: Trial, *, peer: bool = False) -> Result:
    """Run a trial in a new folder, which is deleted when nothing failed."""
    folder = Path(tempfile.mkdtemp(prefix=f"{row}-"))
    start, failure = time.monotonic(), ""
    try:
        trial.run(folder)
    except Exception as error:  # a trial that cannot run has shown nothing
        frames = traceback.extract_tb(error.__traceback__)
        where = [one for one in frames if not one.name.startswith("check_")][-1]  # who asked for the check
        failure = f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {error}; files: {folder}"
        failure = name_invisible(failure)  # a lone surrogate could not be recorded
    if not failure:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(row, trial.name, round(time.monotonic() - start, 2), failure, peer)


def describe_code() -> str:
    """The commit, with CHANGED where files of the checkout differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", f"--dirty={CHANGED}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def derive_seed(code: str) -> int:
    """A seed for each commit, so that each change meets other faults.

    >>> derive_seed("00000000001f-changed")
    31
    """
    return int(code.removesuffix(CHANGED), 16) % 2**20


def describe_machine() -> dict[str, Any]:
    """Processor, cores, system and the versions that numbers depend on."""
    names = [line.split(":")[1].strip() for line in _read_lines("/proc/cpuinfo") if line.startswith("model name")]
    packages = ("fivetune", "torch", "transformers", "accelerate", "numpy", "safetensors", "pydantic")
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def _read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _kill_children() -> None:
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            one.kill()


def _raise(error: Exception, folder: Path) -> None:
    raise error


def _count(row: Row, ours: list[Result], theirs: list[Result]) -> Score:
    failures = {one.trial: one.failure for one in ours if one.failure}
    return Score(
        name=row.name,
        fault=row.fault,
        promise=row.promise,
        num_trials=len(ours),
        failures=failures,
        bound=None if failures or len(ours) <= 3 else 3 / len(ours),
        seconds=round(sum(one.seconds for one in ours), 1),
        peer={"num_trials": len(theirs), "num_failures": sum(one.failure != "" for one in theirs)} if theirs else None,
        absent=row.explain_absence(),
    )


def _describe(score: Score) -> str:
    peer = f"; Trainer {score.peer['num_failures']} of {score.peer['num_trials']} failed" if score.peer else ""
    held = score.num_trials - len(score.failures)
    if not score.num_trials:
        return f"{score.name:4} not run: {score.absent or 'in a release only'}  {score.fault}"
    lines = [f"{score.name:4} {held} of {score.num_trials} held  {score.fault}  ({score.seconds:,.0f} s{peer})"]
    return "\n".join(lines + [f"     FAILED {name}: {why}" for name, why in score.failures.items()])
