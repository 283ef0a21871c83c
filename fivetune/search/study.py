"""The study that trials are drawn from: optuna's, in a storage that several processes and nodes share.

In: the recipe with its section `search`, the study's folder. Out: the next trial, what became of each, and a Search.
Whatever several processes could do at once is done under a lock on the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fivetune.config import RunConfig
from fivetune.config_search import SearchSection
from fivetune.errors import ConfigError, EnvironmentProblem
from fivetune.metrics import higher_is_better
from fivetune.search.child import end_orphan, identity, is_alive
from fivetune.search.space import grid, own_settings
from fivetune.types import Search, Trial

SECONDS_ALIVE = 120.0  # after its last sign a process of another node counts as dead
MAX_ATTEMPTS = 3
FREE_KEYS = ("search.num_trials", "search.keep", "run.dir")  # may differ when a study goes on
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


class Study:
    """A study on disk, opened or begun.

    Raises ConfigError if the folder holds a study of another recipe, EnvironmentProblem without optuna or where the
    storage cannot be opened.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.metric = config.eval.metric or config.task.main_metric
        self.higher_is_better = higher_is_better(config.task.metrics, self.metric)
        folder.mkdir(parents=True, exist_ok=True)
        self._optuna = _optuna()
        with self._alone():
            self._study = _opened(config.search, folder, maximize=self.higher_is_better)
            if "recipe" not in self._study.user_attrs:
                self._begin()
        self._refuse_another_recipe()
        self._ranges = {key: self._distribution(searched) for key, searched in config.search.over.items()}

    def next(self) -> Any | None:
        """The next trial, begun; None if all are taken. Trials whose process died are drawn again first."""
        with self._alone():
            self._retry_dead()
            trials = self._study.get_trials(deepcopy=False)
            waiting = [one for one in trials if one.state.name == "WAITING"]
            counted = len(trials) - len(waiting) - len(self._retried(trials))
            if counted >= self.config.search.num_trials or (self.config.search.sampler == "grid" and not waiting):
                return None
            self._study.sampler = self._sampler(len(trials))
            trial = self._study.ask(self._ranges)
            self._give_folder(trial)
            self.sign(trial)
            return trial

    def _give_folder(self, trial: Any) -> None:
        """A folder with the trial's number; of a trial that is drawn again with what its first attempt left."""
        before, run = trial.user_attrs.get("run"), f"trial-{trial.number:03d}"
        if before:
            with suppress(FileNotFoundError):
                (self.folder / before).rename(self.folder / run)
        trial.set_user_attr("run", run)

    def sign(self, trial: Any, *, child: int | None = None) -> None:
        """Leave a sign of life: who works on the trial, with which process, and when it was last seen."""
        known = trial.user_attrs.get("owner", {})
        trial.set_user_attr("owner", {
            **known, "host": socket.gethostname(), "process": identity(os.getpid()), "seen": time.time(),
            **({"child": identity(child)} if child else {}),
        })  # fmt: skip

    def finish(self, trial: Any, *, score: float | None = None, seconds: float) -> None:
        """A trial with a score counts as finished, one without as pruned."""
        trial.set_user_attr("seconds", seconds)
        self._study.tell(trial, score, state=None if score is not None else self._optuna.trial.TrialState.PRUNED)
        self._clear()

    def fail(self, trial: Any, why: str, *, again: bool, attempt: bool = True) -> None:
        """A trial that gave no score; `again` draws it once more, unless it had its attempts."""
        trial.set_user_attr("why", why)
        with self._alone():
            self._fail(trial.number, trial.params, trial.user_attrs, again=again, attempt=attempt)
        self._clear()

    def search(self) -> Search:
        """All trials as they stand. One that was drawn again has no folder: its successor has it."""
        trials = self._study.get_trials(deepcopy=False)
        retried = self._retried(trials)
        shown = tuple(self._told(one, drawn_again=retried.get(one.number)) for one in trials)
        sign = 1 if self.higher_is_better else -1
        scored = [
            (sign * one.score, -one.number, one) for one in shown if one.state == "finished" and one.score is not None
        ]
        best = max(scored)[2] if scored else None
        return Search(self.folder.name, self.metric, self.higher_is_better, shown, best, self._importances(shown))

    def _told(self, one: Any, *, drawn_again: int | None) -> Trial:
        attributes = one.user_attrs
        why, run = attributes.get("why", ""), attributes.get("run", "")
        if drawn_again is not None:
            why, run = f"{(why or 'its process died').rstrip('.')}; drawn again as trial {drawn_again}", ""
        curve = tuple(sorted((int(step), score) for step, score in attributes.get("curve", ())))
        scores = [score for _, score in curve]
        so_far = (max if self.higher_is_better else min)(scores) if scores else None
        return Trial(
            number=one.number, state=STATES[one.state.name], settings=dict(one.params),
            score=one.value if one.state.name == "COMPLETE" else so_far, curve=curve,
            seconds=attributes.get("seconds"), why=why, run=run,
        )  # fmt: skip

    def _begin(self) -> None:
        """A new study: what it is a study of, and the trials that are known beforehand."""
        self._study.set_user_attr("recipe", _comparable(self.config))
        first = grid(self.config) if self.config.search.sampler == "grid" else [own_settings(self.config)]
        for settings in filter(None, first):
            self._study.enqueue_trial(settings)

    def _refuse_another_recipe(self) -> None:
        before, now = _flat(self._study.user_attrs["recipe"]), _flat(_comparable(self.config))
        for key in sorted(before.keys() & now.keys()):
            if before[key] != now[key]:
                raise ConfigError(
                    f"{self.folder}: holds a study with {key} {before[key]!r}, now it is {now[key]!r}: scores would "
                    "not compare. Go on with the recipe as it was, or give another --dir."
                )

    def _distribution(self, searched: Any) -> Any:
        kinds = self._optuna.distributions
        if searched.choices:
            return kinds.CategoricalDistribution(searched.choices)
        if isinstance(searched.low, int):
            return kinds.IntDistribution(searched.low, searched.high, log=searched.log, step=searched.step or 1)
        return kinds.FloatDistribution(searched.low, searched.high, log=searched.log, step=searched.step)

    def _sampler(self, num_trials: int) -> Any:
        """A sampler that depends on the seed and on how many trials there are, not on who asks."""
        section, samplers = self.config.search, self._optuna.samplers
        seed = (section.seed * 1_000_003 + num_trials) % 2**31
        if section.sampler == "tpe":
            return samplers.TPESampler(seed=seed, n_startup_trials=section.startup_trials)
        return samplers.RandomSampler(seed=seed)

    def _retry_dead(self) -> None:
        for one in self._study.get_trials(deepcopy=False):
            if one.state.name == "RUNNING" and not _is_owned(one.user_attrs.get("owner")):
                end_orphan((one.user_attrs.get("owner") or {}).get("child"))
                self._fail(one.number, one.params, one.user_attrs, again=True, attempt=True)

    def _fail(
        self, number: int, settings: Mapping[str, Any], attributes: Mapping[str, Any], *, again: bool, attempt: bool
    ) -> None:
        num_attempts = attributes.get("num_attempts", 0) + attempt
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        if again and num_attempts < MAX_ATTEMPTS:
            marks = {"retry_of": number, "num_attempts": num_attempts, "run": attributes.get("run")}
            self._study.enqueue_trial(dict(settings), user_attrs={k: v for k, v in marks.items() if v is not None})

    def _retried(self, trials: list[Any]) -> dict[int, int]:
        """The trials that were drawn again, each with the number that it has now."""
        return {one.user_attrs["retry_of"]: one.number for one in trials if "retry_of" in one.user_attrs}

    def _clear(self) -> None:
        """Remove the weights of all trials that are over, but the best one's."""
        if self.config.search.keep == "all":
            return
        with self._alone():
            trials = self._study.get_trials(deepcopy=False)
            best = self.search().best
            needed = {one.user_attrs.get("run") for one in trials if one.state.name in ("RUNNING", "WAITING")}
            for one in trials:
                run = one.user_attrs.get("run")
                if run and run not in needed and (best is None or run != best.run):
                    for folder in ("checkpoints", "model"):
                        shutil.rmtree(self.folder / run / folder, ignore_errors=True)
                    (self.folder / run / "best").unlink(missing_ok=True)

    def _importances(self, trials: tuple[Trial, ...]) -> dict[str, float]:
        """How much of the score's spread each setting explains (PED-ANOVA, Watanabe et al. 2023); {} if unknown."""
        scores = [one.score for one in trials if one.state == "finished"]
        if len(scores) < 4 or len(set(scores)) < 2:
            return {}
        try:
            return dict(self._optuna.importance.get_param_importances(self._study))
        except (ValueError, RuntimeError):  # a setting that had one value only
            return {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / ".study.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_owned(owner: dict[str, Any] | None) -> bool:
    """Whether somebody still works on a trial."""
    if owner is None:
        return False
    if owner["host"] == socket.gethostname():
        return is_alive(owner["process"])
    return time.time() - owner["seen"] < SECONDS_ALIVE


def _opened(section: SearchSection, folder: Path, *, maximize: bool) -> Any:
    optuna = _optuna()
    pruners = {
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=section.startup_trials),
        "hyperband": optuna.pruners.HyperbandPruner,
        "none": optuna.pruners.NopPruner,
    }
    try:
        return optuna.create_study(
            study_name=folder.resolve().name, storage=_storage(section.storage, folder), load_if_exists=True,
            direction="maximize" if maximize else "minimize", pruner=pruners[section.pruner](),
        )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # of the database's driver, whichever it is
        told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentProblem(f"search.storage {section.storage}: cannot be opened: {told}. "
                                 "Mend the address or the driver, or take sqlite or journal.") from error  # fmt: skip


def _storage(name: str, folder: Path) -> Any:
    optuna = _optuna()
    if name == "journal":
        backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
        return optuna.storages.JournalStorage(backend)
    if name == "sqlite":
        url = f"sqlite:///{folder.resolve()}/study.db"
        return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
    return optuna.storages.RDBStorage(name)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise EnvironmentProblem(
            "fivetune tune: optuna is not installed. Install it: pip install 'fivetune[tune]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _comparable(config: RunConfig) -> dict[str, Any]:
    """What makes the trials of a study comparable, as JSON gives it back."""
    table = json.loads(json.dumps(config.as_dict()))
    for key in FREE_KEYS:
        section, _, name = key.partition(".")
        table[section].pop(name)
    return table


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in table.items()
        for name, value in (values.items() if isinstance(values, Mapping) else {"": values}.items())
    }
