"""Search: a study of many trainings, each in a process of its own, on settings that a sampler draws.

In: a recipe with a section `search`. Out: a Search, `best.yaml` and a page in the study's folder, which another call
of the same command goes on with, also at the same time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fivetune.config import RunConfig
from fivetune.errors import ConfigError, DataError, Incomplete, Interrupted, NumericError
from fivetune.report.render import render
from fivetune.report.search import search_page
from fivetune.report.wording import setting
from fivetune.rundir import STATUS, read_status, write_json, write_text
from fivetune.search.child import Child, best_score, scores_so_far
from fivetune.search.space import trial_config
from fivetune.search.study import Study
from fivetune.types import Search

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_SIGNS = 20.0
HOPELESS = 3  # trials that all failed, after which the search ends
NO_SCORE = (ConfigError.exit_code, DataError.exit_code)  # the same again would end the same


def tune(config: RunConfig, *, folder: Path, say: Callable[[str], None]) -> Search:
    """Run trials until the study has all that it wants; several processes may do so at once.

    Args:
        config: of `space.load_search`.
        folder: of the study; it is begun there, or goes on.
        say: takes a line per trial.

    Raises Interrupted after a signal (the study goes on with the same command), Incomplete if no trial gave a score.
    """
    study = Study(config, folder)
    try:
        with _signals_interrupt():
            while (trial := study.next()) is not None:
                _run(study, trial)
                say(_line(study.search(), trial.number))
                _refuse_hopeless(study.search(), folder)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"stopped; {folder} keeps the study. Go on with the same command.", signum=stop.args[0] if stop.args else 2
        ) from None
    finally:
        found = study.search()
        _write(found, config, folder)
    if found.best is None and not any(one.state == "running" for one in found.trials):
        raise Incomplete(f"{folder}: no trial gave a score.")
    return found


def _run(study: Study, trial: Any) -> None:
    """One trial from start to end, whatever that is; a signal hands it back to the study."""
    run = study.folder / trial.user_attrs["run"]
    started, child = time.monotonic(), None
    try:
        child = _start(study, trial, run)
        study.sign(trial, child=child.process.pid)
        pruned = _follow(study, trial, child, run)
    except ConfigError as error:  # each setting is right, together they are not
        return study.fail(trial, str(error), again=False)
    except BaseException:
        if child:
            child.stop()
        study.fail(trial, "stopped before it was finished", again=True, attempt=False)
        raise
    seconds = time.monotonic() - started
    if pruned:
        why = f"pruned after evaluation {len(trial.user_attrs['curve'])}"
        trial.set_user_attr("why", why)
        write_json(run / STATUS, {**read_status(run), "state": "pruned", "why": why})  # its process is gone
        study.finish(trial, seconds=seconds)
    elif child.code in (0, Incomplete.exit_code):
        study.finish(trial, score=best_score(run, study.metric), seconds=seconds)
    elif child.code == NumericError.exit_code:  # a bad place to be, and the sampler should know
        trial.set_user_attr("why", child.last_words())
        study.finish(trial, seconds=seconds)
    else:
        study.fail(trial, child.last_words(), again=child.code not in NO_SCORE)


def _start(study: Study, trial: Any, run: Path) -> Child:
    """Start the training of a trial, or go on with it where one that died left its checkpoints."""
    if read_status(run).get("begun"):
        words = ["train", str(run), "--resume", "--quiet"]
    else:
        recipe = run.with_suffix(".yaml")
        write_text(recipe, trial_config(study.config, trial.params, run).as_yaml())
        words = ["train", str(recipe), "--overwrite", "--quiet", *(["--no-preflight"] if trial.number else [])]
    return Child(words, run.with_suffix(".log"))


def _follow(study: Study, trial: Any, child: Child, run: Path) -> bool:
    """Tell the study each evaluation as it comes; True if the trial was stopped because others are better."""
    told, signed = 0, time.monotonic()
    while True:
        running = child.code is None
        scores = scores_so_far(run, study.metric)
        for number, (_, score) in enumerate(scores[told:], start=told + 1):
            trial.report(score, number)
        if len(scores) > told:
            told = len(scores)
            trial.set_user_attr("curve", scores)
            is_last = scores[-1][0] == read_status(run).get("num_steps")
            if running and not is_last and trial.should_prune():
                child.stop()
                return True
        if not running:
            return False
        if time.monotonic() - signed > SECONDS_BETWEEN_SIGNS:
            signed = time.monotonic()
            study.sign(trial)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _line(found: Search, number: int) -> str:
    """One trial in a line.

    >>> from fivetune.types import Trial
    >>> lost = Trial(3, "failed", {}, None, why="its process died; drawn again as trial 4")
    >>> _line(Search("s", "f1", True, (lost,), None), 3)
    'trial 3: failed: its process died; drawn again as trial 4'
    """
    one = next(one for one in found.trials if one.number == number)
    settings = "  ".join(f"{key} {setting(key, value)}" for key, value in one.settings.items())
    if one.state == "failed":
        return f"trial {number}: failed: {one.why}  {settings}".rstrip()
    best = f"  (best {found.best.score:.2f}, trial {found.best.number})" if found.best else ""
    score = "no score" if one.score is None else f"{found.metric} {one.score:.2f}"
    return f"trial {number}: {score}{', pruned' if one.state == 'pruned' else ''}{best}  {settings}"


def _refuse_hopeless(found: Search, folder: Path) -> None:
    over = [one for one in found.trials if one.state in ("finished", "pruned", "failed") and one.run]
    if len(over) >= HOPELESS and all(one.state == "failed" for one in over):
        raise Incomplete(f"{folder}: all of {len(over)} trials failed, the last one: {over[-1].why}")


def _write(found: Search, config: RunConfig, folder: Path) -> None:
    """best.yaml, once there is a best trial, and the page."""
    if found.best is not None:
        recipe = trial_config(config, found.best.settings, f"{config.run.dir}-best").as_yaml()
        title = f"# Trial {found.best.number} of {folder.name}: {found.metric} {found.best.score:.2f}, the best so far."
        write_text(folder / "best.yaml", f"{title}\n{recipe}")
    write_text(folder / "search.html", render(search_page(found)))


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM ends a search as Ctrl-C does, also where a shell started it with Ctrl-C ignored."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt(signum)

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
