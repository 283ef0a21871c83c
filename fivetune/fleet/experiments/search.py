"""Search: runs the trials of a study, each in its own process, with settings drawn by a sampler.

In: a recipe with a section `search`. Out: a Search; `best.yaml` and a page in the study's folder. The same command
continues a study, and several processes can share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune import rundir
from fivetune.config import RunConfig
from fivetune.distributed.processes.jobs import PERMANENT_ERROR_CODES, Job
from fivetune.distributed.processes.signals import report_interrupts
from fivetune.errors import ConfigError, IncompleteError, NumericError
from fivetune.fleet.experiments.space import build_trial_config, load_search
from fivetune.fleet.experiments.study import Heartbeat, Study
from fivetune.reading.report.live import find_first_verdict
from fivetune.reading.report.page.parts import Page
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.page.wording import format_setting
from fivetune.reading.report.run.build import write_report
from fivetune.reading.report.search import build_search_page
from fivetune.rundir.figures import find_chosen_eval, select_evals_by_step
from fivetune.rundir.reader import read_json, read_plan
from fivetune.types import Search

if TYPE_CHECKING:
    import optuna

POLL_SECONDS = 0.5
MAX_FAILED_TRIALS = 3  # a search ends if its first trials all fail
OVER = ("finished", "pruned", "failed")


def tune(
    recipe: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    write_line: Callable[[str], object] = print,
) -> Search:
    """Run trials until the study has `search.num_trials`; several processes may do so at once.

    Args:
        recipe: YAML file, name of a shipped recipe, or nested dict, with a section `search`.
        overrides: dotted settings that override the recipe: {"search.num_trials": 40}.
        folder: folder of the study, which is created or continued; default: run.dir of the recipe with -search.
        write_line: receives a line per trial.

    Returns the Search: `found.best.settings`, `found.trials`; `found.folder` holds best.yaml, which `train` takes, and
    search.html. Raises ConfigError for settings that cannot be searched, before any trial runs, InterruptedRunError
    after a signal (the same call continues), IncompleteError if no trial has a score.

    >>> over = {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}
    >>> found = tune({"base": "tickets.yaml", "search": {"over": over}}, folder="search")  # doctest: +SKIP
    >>> found.best.settings, found.best.score  # doctest: +SKIP
    ({'optimizer.lr': 0.0031}, 97.5)
    """
    config = recipe if isinstance(recipe, RunConfig) else load_search(recipe, overrides)
    folder = Path(folder or f"{config.run.dir}-search")
    write_line(f"{config.search.num_trials} trials in {folder}; look at them with: fivetune watch {folder}")
    study = Study(config, folder)
    with study.translate_storage_errors():
        try:
            with report_interrupts(lambda name: f"stopped; {folder} keeps the study. Resume with the same command."):
                while (trial := study.start_next_trial()) is not None:
                    with study.ignore_lost_trial(), Heartbeat(trial) as heartbeat:
                        _run_trial(study, trial, heartbeat)
                    found = study.build_search()
                    write_line(_format_trial(found, trial.number))
                    # Settings that no trial survives are a mistake, not a search space.
                    # A retried trial has no folder and does not count.
                    over = [one for one in found.trials if one.state in OVER and one.run]
                    if len(over) >= MAX_FAILED_TRIALS and {one.state for one in over} == {"failed"}:
                        why = f"all of {len(over)} trials failed, the last one: {over[-1].why}"
                        raise IncompleteError(f"{folder}: {why}")
        finally:
            found = study.build_search()
            _write_results(found, config, folder)
    if found.best is None and not any(one.state == "running" for one in found.trials):
        raise IncompleteError(f"{folder}: no trial has a score.")
    return found


def _run_trial(study: Study, trial: optuna.Trial, heartbeat: Heartbeat) -> None:
    """Train one trial and record its outcome; after a signal the study retries it."""
    run = study.folder / trial.user_attrs["run"]
    started = time.monotonic()
    try:
        is_resumed = rundir.read_status(run).begun
        with _start_trial(study, trial, run) as job:
            study.record_owner(trial, child_pid=job.pid)
            pruned = _watch_trial(study, trial, heartbeat, job, run)
    except ConfigError as error:  # each setting is valid, their combination is not
        return study.fail(trial, str(error), retry=False)
    except BaseException:
        with study.ignore_lost_trial():
            study.fail(trial, "stopped before it was finished", retry=True, count_attempt=False)
        raise
    # A run that was resumed has spent time in other processes.
    seconds: float | None = time.monotonic() - started
    if is_resumed:  # this process has seen the last part only; unknown if the run did not finish
        seconds = rundir.read_status(run, rundir.Damage()).seconds
    # The outcome: pruned, scored, diverged, or failed and perhaps tried again.
    if pruned:
        why = f"pruned after evaluation {len(trial.user_attrs['curve'])}"
        trial.set_user_attr("why", why)
        # The run's process has ended, so that nothing else writes its status; it may have finished just before.
        (run / rundir.CHECKSUMS).unlink(missing_ok=True)
        rundir.write_json(run / rundir.STATUS, {**read_json(run / rundir.STATUS), "state": "pruned", "why": why})
        if (run / "report.html").is_file():  # the stopped process has called the run interrupted
            write_report(run)
        study.finish(trial, seconds=seconds)
    elif job.code in (0, IncompleteError.exit_code):
        study.finish(trial, score=read_best_score(run, study.metric), seconds=seconds)
    elif job.code == NumericError.exit_code:  # a pruned trial: the sampler learns to avoid its settings
        trial.set_user_attr("why", job.read_error())
        study.finish(trial, seconds=seconds)
    else:
        study.fail(trial, job.read_error(), retry=job.code not in PERMANENT_ERROR_CODES)


def _start_trial(study: Study, trial: optuna.Trial, run: Path) -> Job:
    """Start the training of a trial, or resume it if an earlier attempt has begun."""
    # A checkpoint of the attempt before saves its steps.
    if rundir.read_status(run).begun:
        words = ["train", str(run), "--resume", "--quiet"]
    else:
        recipe = run.with_suffix(".yaml")
        rundir.write_text(recipe, build_trial_config(study.config, trial.params, run).as_redacted_yaml())
        words = ["train", str(recipe), "--overwrite", "--quiet"]
        if trial.number:  # the first trial has checked the machine and the data
            words.append("--no-preflight")
    return Job(words, run.with_suffix(".log"))


def _watch_trial(study: Study, trial: optuna.Trial, heartbeat: Heartbeat, job: Job, run: Path) -> bool:
    """Report each evaluation to the study until the training ends; stop it and return True if it is pruned."""
    num_reported = 0
    while True:
        running = job.code is None
        scores: list[tuple[int, float]] = []  # of the run's own evaluations after step 0
        for one in select_evals_by_step(rundir.read_evals(run)):
            if one.step > 0 and study.metric in one.scores:
                scores.append((one.step, one.scores[study.metric]))
        for number, (_, score) in enumerate(scores[num_reported:], start=num_reported + 1):
            trial.report(score, number)
        if len(scores) > num_reported:
            num_reported = len(scores)
            trial.set_user_attr("curve", scores)
            plan = read_plan(run)
            is_last = plan is not None and scores[-1][0] == plan.num_steps
            if running and not is_last and trial.should_prune():
                job.stop()
                return True
        if not running:
            return False
        heartbeat.check()
        time.sleep(POLL_SECONDS)


def read_best_score(folder: Path, metric: str) -> float | None:
    """Read the score of the best evaluation of a run, on all examples once the run has finished."""
    best = rundir.read_status(folder).best
    if best is None:
        return None
    chosen = find_chosen_eval(rundir.read_evals(folder), best)
    return chosen.scores.get(metric) if chosen else None


def _format_trial(found: Search, number: int) -> str:
    """Format one trial as a line.

    >>> from fivetune.types import Trial
    >>> lost = Trial(3, "failed", {}, None, why="its process died; retried as trial 4")
    >>> _format_trial(Search("s", "f1", True, (lost,), None), 3)
    'trial 3: failed: its process died; retried as trial 4'
    """
    one = next(one for one in found.trials if one.number == number)
    settings = "  ".join(f"{key} {format_setting(key, value)}" for key, value in one.settings.items())
    if one.state == "failed":
        return f"trial {number}: failed: {one.why}  {settings}".rstrip()
    line = f"trial {number}: no score" if one.score is None else f"trial {number}: {found.metric} {one.score:.2f}"
    if one.state == "pruned":
        line += ", pruned"
    if found.best:
        line += f"  (best {found.best.score:.2f}, trial {found.best.number})"
    return f"{line}  {settings}"


def _write_results(found: Search, config: RunConfig, folder: Path) -> None:
    """Write the page, and best.yaml if there is a best trial."""
    if found.best is not None:
        recipe = build_trial_config(config, found.best.settings, f"{config.run.dir}-best").as_redacted_yaml()
        title = f"# Trial {found.best.number} of {folder.name}: {found.metric} {found.best.score:.2f}, the best so far."
        rundir.write_text(folder / "best.yaml", f"{title}\n{recipe}")
    rundir.write_text(folder / "search.html", render_html(build_study_page(found, folder)))


def build_study_page(found: Search, folder: Path) -> Page:
    """Build the page of a study in its folder, with the doubt about its best run if there is one."""
    doubt = ""
    if found.best and found.best.run:
        verdict, is_bad = find_first_verdict(folder / found.best.run)
        doubt = verdict if is_bad else ""
    return build_search_page(found, recipe=str(folder / "best.yaml"), doubt=doubt)
