"""Making the runs of a sweep, one process after the other.

In: a Sweep. Out: its directory, with

    sweep.json              what was asked, and what became of each run
    recipes/<run>.yaml      the resolved recipe of each run, which `fivetune train` takes as it is
    logs/<run>.log          what each process printed
    <run>/                  the run directories
    log.txt                 what the terminal showed

Finished runs are kept, interrupted ones go on where they stopped, failed ones begin anew.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fivetune import rundir
from fivetune.config import load_config
from fivetune.errors import ConfigError, DataError, Interrupted, NumericError, RunDirError
from fivetune.progress import Progress, duration
from fivetune.sweep.plan import Planned, Sweep
from fivetune.sweep.record import RECORD, new_record, owner_of, read_record, state_of
from fivetune.values import flat

RECIPES, LOGS, LOG = "recipes", "logs", "log.txt"
HOPELESS = {ConfigError.exit_code, DataError.exit_code, NumericError.exit_code}  # would fail again in the same way
TRAIN = (sys.executable, "-m", "fivetune", "train")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_sweep(sweep: Sweep, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> Path:
    """Make all runs of a sweep that are not finished; returns its directory.

    A run that fails is tried again `sweep.retries` times, then its reason goes to sweep.json and the sweep goes on.

    Args:
        resume: go on with the sweep that is in the directory.
        overwrite: move a sweep that is there aside.

    Raises RunDirError if the directory is in use or holds something else, Interrupted after Ctrl-C or SIGTERM.
    """
    _refuse_or_move(sweep, resume=resume, overwrite=overwrite)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    owned = rundir.lock(sweep.folder)
    progress = Progress(sweep.folder / LOG, quiet=quiet)
    try:
        record = _recorded(sweep)
        _write_corpus(sweep.corpus)
        for run in sweep.runs:
            rundir.write_text(sweep.folder / RECIPES / f"{run.name}.yaml", run.config.as_yaml())
        with _stoppable():
            _make_all(sweep, record, progress)
    except KeyboardInterrupt as stopped:
        done = sum(state_of(sweep.folder / run.name) == "finished" for run in sweep.runs)
        raise Interrupted(
            f"{sweep.folder}: stopped with {done} of {len(sweep.runs)} runs finished. "
            f"Go on with: fivetune compare {sweep.path} --resume",
            signum=next(iter(stopped.args), signal.SIGINT),
        ) from None
    finally:
        progress.close()
        owned.close()
    return sweep.folder


def estimates(sweep: Sweep, *, overwrite: bool = False) -> dict[str, float | None]:
    """Seconds that each run will take, by its name: the median of the finished runs of its variant, else of all.

    None where no run of the sweep is finished; 0 for finished runs, unless all are made anew with `overwrite`.
    """
    known = read_record(sweep.folder)["runs"] if (sweep.folder / RECORD).is_file() else []
    finished = {run["name"] for run in known if state_of(sweep.folder / run["name"]) == "finished"}
    kept = set() if overwrite else finished
    return {run.name: 0.0 if run.name in kept else _expected(run.variant, known) for run in sweep.runs}


def _expected(variant: str, known: list[dict[str, Any]]) -> float | None:
    taken = [(run["variant"], run["seconds"]) for run in known if run["seconds"] and not run["failure"]]
    own = [seconds for name, seconds in taken if name == variant]
    some = own or [seconds for _, seconds in taken]
    return statistics.median(some) if some else None


# --- the directory ---


def _refuse_or_move(sweep: Sweep, *, resume: bool, overwrite: bool) -> None:
    """Make sure that the directory is free, or holds this sweep and is to be gone on with."""
    folder = sweep.folder
    if not folder.is_dir() or all(entry.name == rundir.LOCK for entry in folder.iterdir()):
        return
    if not (folder / RECORD).is_file():
        raise RunDirError(f"{folder}: is not empty and holds no sweep. Choose another `dir:`.")
    rundir.lock(folder).close()  # says so first if another sweep is at work there
    if overwrite:
        folder.rename(folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%dT%H%M%S')}"))
    elif not resume:
        done = sum(state_of(folder / run.name) == "finished" for run in sweep.runs)
        raise RunDirError(
            f"{folder}: holds a sweep already, {done} of {len(sweep.runs)} runs are finished. Add --resume to make the "
            f"others, --overwrite to move it aside, or compare what is there: fivetune compare {folder}"
        )


def _recorded(sweep: Sweep) -> dict[str, Any]:
    """The record of this sweep with what is known of its runs. Raises RunDirError if one is not as asked now."""
    record = new_record(sweep)
    before = read_record(sweep.folder)["runs"] if (sweep.folder / RECORD).is_file() else []
    known = {run["name"]: run for run in before}
    for run, entry in zip(sweep.runs, record["runs"], strict=True):
        entry |= {key: known[run.name][key] for key in ("attempts", "failure", "seconds") if run.name in known}
        state = state_of(sweep.folder / run.name)
        if state in ("running", "preparing"):
            raise RunDirError(f"{sweep.folder / run.name}: is still {state} in {owner_of(sweep.folder / run.name)}. "
                              "Wait until it has finished, or stop it, then try again.")  # fmt: skip
        if state != "open":
            _refuse_changed(sweep, run)
        if state == "finished" and entry["seconds"] is None:  # after the sweep itself was killed
            seconds = rundir.read_status(sweep.folder / run.name).get("seconds")
            entry |= {"attempts": max(1, entry["attempts"]), "failure": None, "seconds": seconds}
    rundir.write_json(sweep.folder / RECORD, record)
    return record


def _refuse_changed(sweep: Sweep, run: Planned) -> None:
    """A run that is there must have been made with the settings that are asked for now."""
    path = sweep.folder / RECIPES / f"{run.name}.yaml"
    if not path.is_file():
        return
    now, before = flat(run.config.as_dict()), flat(load_config(path).as_dict())
    changed = [key for key in now | before if now.get(key) != before.get(key) and not key.startswith("report.")]
    if changed:
        key = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RunDirError(
            f"{sweep.folder / run.name}: was made with {key} {before.get(key)!r}, not {now.get(key)!r}{more}. "
            "Take the change back, add --overwrite to make all runs anew, or choose another `dir:`."
        )


def _write_corpus(corpus: Mapping[str, Any] | None) -> None:
    """The generated reading corpus of the quickstart, unless its files are there."""
    if not corpus:
        return
    from fivetune.nano.reading import FIRMS, PEOPLE, SHIPS, write_reading_corpus

    folder = Path(corpus["dir"])
    if all((folder / name).is_file() for name in ("train.json", "dev.json")):
        return
    write_reading_corpus(
        folder, num_train=corpus["num_train"], num_eval=corpus["num_eval"], seed=corpus.get("seed", 7),
        domains=(SHIPS, FIRMS, PEOPLE), max_facts=corpus.get("max_facts", 4),
    )  # fmt: skip


# --- the runs ---


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal act as Ctrl-C does."""
    before = {number: signal.signal(number, _stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _make_all(sweep: Sweep, record: dict[str, Any], progress: Progress) -> None:
    for number, (run, entry) in enumerate(zip(sweep.runs, record["runs"], strict=True), start=1):
        folder = sweep.folder / run.name
        if state_of(folder) == "finished":
            continue
        told = f"{number}/{len(sweep.runs)}  {run.variant}, seed {run.seed}"
        progress.say(f"{told}: started")
        started = time.monotonic()
        entry["attempts"], entry["failure"] = _make(sweep, run, progress)
        taken = time.monotonic() - started
        in_one_go = entry["attempts"] == 1 and not rundir.read_status(folder).get("num_resumes")
        entry["seconds"] = taken if in_one_go else rundir.read_status(folder).get("seconds")
        rundir.write_json(sweep.folder / RECORD, record)
        became = f"failed: {entry['failure']}" if entry["failure"] else _result(folder)
        later = sum(_expected(other.variant, record["runs"]) or 0.0 for other in sweep.runs[number:]
                    if state_of(sweep.folder / other.name) != "finished")  # fmt: skip
        progress.say(f"{told}: {became}, in {duration(taken)}" + (f"; about {duration(later)} left" if later else ""))


def _make(sweep: Sweep, run: Planned, progress: Progress) -> tuple[int, str | None]:
    """Make one run, again if it fails; the number of attempts, and why the last one failed, None if it did not.

    An attempt to go on with an interrupted run costs no retry: it may be refused, and the run then begins anew.
    """
    folder = sweep.folder / run.name
    attempts, left, may_resume = 0, sweep.retries, True
    while True:
        attempts += 1
        flags = _flags(folder, may_resume=may_resume)
        code, reason = _train(sweep, run, flags, progress)
        if state_of(folder) == "finished":
            return attempts, None
        may_resume = "--resume" not in flags
        if may_resume:
            if code in HOPELESS or not left:
                return attempts, reason
            left -= 1
        progress.say(f"{run.name}: {reason}. It is tried again.", style="yellow")


def _flags(folder: Path, *, may_resume: bool) -> list[str]:
    """How `fivetune train` is to treat what is in a run's folder."""
    if not rundir.occupied(folder):
        return []
    status = rundir.read_status(folder)
    begun = status.get("state") == "interrupted" and status.get("begun")
    return ["--resume"] if may_resume and begun else ["--overwrite"]


def _train(sweep: Sweep, run: Planned, flags: list[str], progress: Progress) -> tuple[int, str]:
    """One process of `fivetune train`: its exit code, and why it did not finish."""
    recipe, log = sweep.folder / RECIPES / f"{run.name}.yaml", sweep.folder / LOGS / f"{run.name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        begins = file.tell()
        child = subprocess.Popen(
            [*TRAIN, str(recipe), "--quiet", *flags],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code = _wait(child, progress)
    return code, _reason(log.read_bytes()[begins:].decode("utf-8", "replace"), code)


def _wait(child: subprocess.Popen[bytes], progress: Progress) -> int:
    """The exit code of a process. Ctrl-C is passed on to it and its own children, as a terminal does."""
    try:
        return child.wait()
    except KeyboardInterrupt:
        progress.say("stopping: the run saves its state first; Ctrl-C once more stops it at once")
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait()
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        raise


def _reason(printed: str, code: int) -> str:
    """Why a process ended, from what it printed last.

    >>> _reason("step 1\\nfivetune: a.yaml:3: wrong value 1. Give 2.\\n", 2)
    'a.yaml:3: wrong value 1. Give 2'
    >>> _reason("step 1\\n", -9)
    'killed by SIGKILL; the system may have been out of memory'
    """
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + ("; the system may have been out of memory" if name == "SIGKILL" else "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    told = [line.removeprefix("fivetune: ") for line in lines if line.startswith("fivetune: ")]
    last = (told or lines or [f"ended with exit code {code}"])[-1]
    return last.rstrip(".")


def _result(folder: Path) -> str:
    """`finished, f1 80.10`: the best score of a run."""
    best = rundir.read_status(folder).get("best") or {}
    score = best.get("score")
    return f"finished, {best['metric']} {score:.2f}" if isinstance(score, int | float) else "finished"
