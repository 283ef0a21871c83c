"""Training of a sweep's runs, one process after the other.

In: a Sweep. Out: its directory, with

    sweep.json              variants, settings and the state of each run
    recipes/<run>.yaml      the resolved recipe of each run, for `fivetune train`
    logs/<run>.log          the output of each process
    <run>/                  the run directories
    log.txt                 the progress lines of the terminal

Finished runs are kept, interrupted ones are resumed, failed ones start over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import IO

from fivetune import rundir
from fivetune.config import load_config
from fivetune.distributed.processes.jobs import PERMANENT_ERROR_CODES, Job
from fivetune.distributed.processes.signals import report_interrupts
from fivetune.errors import RunDirError
from fivetune.fleet.experiments.record import (
    RunRecord,
    SweepRecord,
    is_sweep,
    make_sweep_record,
    read_run_owner,
    read_run_records,
    read_run_state,
)
from fivetune.fleet.experiments.sweep import CorpusSection, PlannedRun, Sweep
from fivetune.rundir.progress import Progress, format_time_span
from fivetune.values import flatten_table

RECIPES, LOGS, LOG = "recipes", "logs", "log.txt"


def run_sweep(sweep: Sweep, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> Path:
    """Train all runs of a sweep that are not finished; returns its directory.

    A run that fails is retried `sweep.retries` times; then its error goes to sweep.json and the sweep continues.

    Args:
        resume: continue the sweep in the directory.
        overwrite: move the sweep in the directory aside.

    Raises RunDirError if the directory is in use or holds something else, InterruptedRunError after a signal.
    """
    with (
        _take_folder(sweep, resume=resume, overwrite=overwrite),
        closing(Progress(sweep.folder / LOG, quiet=quiet)) as progress,
    ):
        record = _write_inputs(sweep)
        with report_interrupts(
            lambda name: (
                f"{sweep.folder}: stopped with {_count_finished(sweep)} of {len(sweep.runs)} runs finished. "
                f"Resume with: fivetune compare {sweep.path} --resume"
            )
        ):
            _run_all(sweep, record, progress)
    return sweep.folder


def refuse_wrong_start(sweep: Sweep, *, resume: bool, overwrite: bool) -> None:
    """Raise RunDirError if a sweep's directory is in use or holds something else; write nothing."""
    folder = sweep.folder
    if not rundir.find_conflict(folder):
        return
    if not is_sweep(folder):
        raise RunDirError(f"{folder}: is not empty and holds no sweep. Choose another folder.")
    rundir.lock_folder(folder).close()  # report a running sweep before any other error
    if not (resume or overwrite):
        raise RunDirError(
            f"{folder}: holds a sweep already, {_count_finished(sweep)} of {len(sweep.runs)} runs are finished. "
            "Add --resume to train the others, --overwrite to move it aside, or compare the finished runs: "
            f"fivetune compare {folder}"
        )


def write_sweep(sweep: Sweep, *, resume: bool = False, overwrite: bool = False) -> None:
    """Write a sweep's directory for a cluster to train. Raises RunDirError as `run_sweep` does."""
    with _take_folder(sweep, resume=resume, overwrite=overwrite):
        _write_inputs(sweep)


def list_unfinished(sweep: Sweep) -> list[tuple[PlannedRun, list[str]]]:
    """List the runs of a sweep that are not finished, each with the flags by which `fivetune train` continues it."""
    found: list[tuple[PlannedRun, list[str]]] = []
    for run in sweep.runs:
        folder = sweep.folder / run.name
        if read_run_state(folder) != "finished":
            found.append((run, _choose_train_flags(folder, may_resume=True)))
    return found


def estimate_seconds(sweep: Sweep, *, overwrite: bool = False) -> dict[str, float | None]:
    """Estimate the seconds of each run by name: the median of the finished runs of its variant, else of all.

    None if no run of the sweep has finished; 0 for finished runs, unless `overwrite` repeats all.
    """
    known = read_run_records(sweep.folder)
    found: dict[str, float | None] = {}
    for run in sweep.runs:
        is_kept = run.name in known and not overwrite and read_run_state(sweep.folder / run.name) == "finished"
        found[run.name] = 0.0 if is_kept else _estimate_run_seconds(run.variant, known.values())
    return found


def _estimate_run_seconds(variant: str, known: Iterable[RunRecord]) -> float | None:
    taken = [(run.variant, run.seconds) for run in known if run.seconds and not run.failure]
    own = [seconds for name, seconds in taken if name == variant]
    some = own or [seconds for _, seconds in taken]
    return statistics.median(some) if some else None


def _count_finished(sweep: Sweep) -> int:
    return sum(read_run_state(sweep.folder / run.name) == "finished" for run in sweep.runs)


# --- the directory ---


def _take_folder(sweep: Sweep, *, resume: bool, overwrite: bool) -> IO[bytes]:
    """Lock the directory, which is free or holds a sweep to resume; with `overwrite` that sweep is moved aside."""
    refuse_wrong_start(sweep, resume=resume, overwrite=overwrite)
    folder = sweep.folder
    if overwrite and rundir.find_conflict(folder):
        folder.rename(folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%dT%H%M%S')}"))
    folder.mkdir(parents=True, exist_ok=True)
    return rundir.lock_folder(folder)


def _update_record(sweep: Sweep) -> SweepRecord:
    """Write the record of this sweep with the known state of its runs. Raises RunDirError if one has other settings."""
    record, known = make_sweep_record(sweep), read_run_records(sweep.folder)
    for place, run in enumerate(sweep.runs):
        folder = sweep.folder / run.name
        entry = known.get(run.name, record.runs[place])
        state = read_run_state(folder)
        if state in ("running", "preparing"):
            raise RunDirError(
                f"{folder}: is still {state} in {read_run_owner(folder)}. "
                "Wait until it has finished, or stop it, then try again."
            )
        if state != "open":
            _check_settings_unchanged(sweep, run)
        if state == "finished" and entry.seconds is None:  # the sweep was killed, its run was not
            seconds = rundir.read_status(folder).seconds
            changes = {"attempts": max(1, entry.attempts), "failure": None, "seconds": seconds}
            entry = entry.model_copy(update=changes)
        record.runs[place] = entry.model_copy(update={"variant": run.variant, "seed": run.seed})
    record.write(sweep.folder)
    return record


def _check_settings_unchanged(sweep: Sweep, run: PlannedRun) -> None:
    """Raise RunDirError if a run in the directory was trained with other settings than the sweep file gives now."""
    path = sweep.folder / RECIPES / f"{run.name}.yaml"
    if not path.is_file():
        return
    now, before = (flatten_table(config.as_redacted_dict()) for config in (run.config, load_config(path)))
    changed = [key for key in now | before if now.get(key) != before.get(key) and not key.startswith("report.")]
    if changed:
        key = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RunDirError(
            f"{sweep.folder / run.name}: was trained with {key} {before.get(key)!r}, not {now.get(key)!r}{more}. "
            "Undo the change, add --overwrite to train all runs again, or choose another folder."
        )


def _write_inputs(sweep: Sweep) -> SweepRecord:
    """Write the record, the corpus and the recipes of a sweep."""
    record = _update_record(sweep)
    write_corpus(sweep.corpus)
    for run in sweep.runs:
        rundir.write_text(sweep.folder / RECIPES / f"{run.name}.yaml", run.config.as_redacted_yaml())
    return record


def write_corpus(corpus: CorpusSection | None) -> None:
    """Write the generated reading corpus of the quickstart, unless its files exist."""
    if corpus is None or all((Path(corpus.dir) / name).is_file() for name in ("train.json", "dev.json")):
        return
    from fivetune.data.corpus.reading import FIRMS, PEOPLE, SHIPS, write_reading_corpus

    write_reading_corpus(
        Path(corpus.dir),
        num_train=corpus.num_train,
        num_eval=corpus.num_eval,
        seed=corpus.seed,
        domains=(SHIPS, FIRMS, PEOPLE),
        max_facts=corpus.max_facts,
    )


# --- the runs ---


def _run_all(sweep: Sweep, record: SweepRecord, progress: Progress) -> None:
    for number, run in enumerate(sweep.runs, start=1):
        folder = sweep.folder / run.name
        if read_run_state(folder) == "finished":
            continue
        name = f"{number}/{len(sweep.runs)}  {run.variant}, seed {run.seed}"
        progress.log(f"{name}: started")
        started = time.monotonic()
        attempts, failure = _run_with_retries(sweep, run, progress)
        taken = time.monotonic() - started
        # The time of a resumed run is in its status; this process has seen a part.
        status = rundir.read_status(folder)
        seconds = taken if attempts == 1 and not status.num_resumes else status.seconds
        changes = {"attempts": attempts, "failure": failure, "seconds": seconds}
        record.runs[number - 1] = record.runs[number - 1].model_copy(update=changes)
        record.write(sweep.folder)
        outcome = f"failed: {failure}" if failure else "finished"
        if status.best and not failure:
            outcome += f", {status.best.metric} {status.best.score:.2f}"
        left = sum(
            _estimate_run_seconds(other.variant, record.runs) or 0.0
            for other in sweep.runs[number:]
            if read_run_state(sweep.folder / other.name) != "finished"
        )
        remaining = f"; about {format_time_span(left)} left" if left else ""
        progress.log(f"{name}: {outcome}, in {format_time_span(taken)}{remaining}")


def _run_with_retries(sweep: Sweep, run: PlannedRun, progress: Progress) -> tuple[int, str | None]:
    """Train one run, with retries. Returns: the number of attempts, and the error of the last one or None.

    Resuming an interrupted run does not count as a retry: if it is refused, the run starts over.
    """
    folder = sweep.folder / run.name
    attempts, left, may_resume = 0, sweep.retries, True
    while True:
        attempts += 1
        flags = _choose_train_flags(folder, may_resume=may_resume)
        words = ["train", str(sweep.folder / RECIPES / f"{run.name}.yaml"), "--quiet", *flags]
        with Job(words, sweep.folder / LOGS / f"{run.name}.log") as job:
            try:
                code, error = job.wait(), job.read_error()
            except KeyboardInterrupt:  # it has reached the training process too
                progress.log("stopping: the run saves its state first; a second Ctrl-C stops it at once")
                raise
        if read_run_state(folder) == "finished":
            return attempts, None
        # A resume that failed is followed by a fresh start, which is no retry.
        may_resume = "--resume" not in flags
        if may_resume:
            if code in PERMANENT_ERROR_CODES or not left:
                return attempts, error
            left -= 1
        progress.log(f"{run.name}: {error}. Retrying.", style="yellow")


def _choose_train_flags(folder: Path, *, may_resume: bool) -> list[str]:
    """Choose the flags by which `fivetune train` resumes or replaces the run in a folder."""
    if not rundir.find_conflict(folder):
        return []
    status = rundir.read_status(folder)
    can_resume = may_resume and status.state == "interrupted" and status.begun
    return ["--resume"] if can_resume else ["--overwrite"]
