"""An optuna study in a storage that several processes and nodes can share.

In: the recipe with its section `search`, the study's folder. Out: the next trial, the outcome of each, and a Search.
A lock on the folder serialises the operations that two processes must not do at once.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from fivetune.config import RunConfig
from fivetune.config.search import SearchDimension, SearchSection
from fivetune.distributed.processes.jobs import ProcessIdentity, identify_process, is_alive, stop_orphan
from fivetune.distributed.processes.nodes import MAX_CLOCK_DIFFERENCE_SECONDS
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.fleet.experiments.space import select_recipe_values
from fivetune.installation import require_package
from fivetune.rundir import lock_file
from fivetune.scores.metrics import is_maximized
from fivetune.types import Search, Trial
from fivetune.values import flatten_table

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

HEARTBEAT_SECONDS = 20.0
HEARTBEAT_TIMEOUT_SECONDS = 120.0  # without a heartbeat, after which a process of another node counts as dead
LOCK = ".study.lock"
MAX_ATTEMPTS = 3
FREE_KEYS = ("search.num_trials", "search.keep", "run.dir")  # may differ when a study is continued
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


class TrialOwner(BaseModel):
    """The process that runs a trial, recorded in the study's storage.

    Args:
        child: the training process that it started.
    """

    model_config = ConfigDict(frozen=True)

    host: str
    process: ProcessIdentity
    child: ProcessIdentity | None = None


class Heartbeat:
    """A thread that records, until its context ends, that the process of a trial works.

    It goes on while the process waits: for the lock of the folder, or for a stopped training to save.
    """

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial, self._is_over, self._error = trial, Event(), None
        self._thread = Thread(target=self._record_until_over, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _record_until_over(self) -> None:
        try:
            while not self._is_over.wait(HEARTBEAT_SECONDS):
                record_heartbeat(self._trial)
        except Exception as error:  # every database driver has its own
            self._error = error

    def check(self) -> None:
        """Raise the error that ended the thread: the storage failed, or another process has taken over the trial."""
        if self._error is not None:
            raise self._error


def record_heartbeat(trial: optuna.Trial) -> None:
    """Record the time, in seconds since 1970, at which the process of a trial works."""
    trial.set_user_attr("seen", time.time())


class Study:
    """A study on disk, opened or created.

    Raises ConfigError if the folder holds a study of another recipe, FiveTuneEnvironmentError if optuna is missing or
    the storage cannot be opened.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        task = config.task
        self.metric = config.eval.metric or task.main_metric
        self.higher_is_better = is_maximized(task.metrics, self.metric)
        folder.mkdir(parents=True, exist_ok=True)
        self._optuna = _import_optuna()
        with self._lock_folder():
            self._study = _load_or_create_study(config.search, folder, maximize=self.higher_is_better)
            if "recipe" not in self._study.user_attrs:  # a new study, whose first trial has the recipe's own values
                self._study.set_user_attr("recipe", _select_comparable(config))
                if settings := select_recipe_values(config):
                    self._study.enqueue_trial(settings)
        # Another recipe's scores would be compared with these.
        before = flatten_table(self._study.user_attrs["recipe"])
        now = flatten_table(_select_comparable(config))
        for key in sorted(before.keys() & now.keys()):
            if before[key] != now[key]:
                raise ConfigError(
                    f"{folder}: holds a study with {key} {before[key]!r}, now it is {now[key]!r}: scores "
                    "are not comparable. Use the recipe as it was, or give another --dir."
                )
        self._ranges = {key: self._build_distribution(one) for key, one in config.search.over.items()}

    def start_next_trial(self) -> optuna.Trial | None:
        """Start and return the next trial; None if all are taken. Trials of dead processes are retried first."""
        with self._lock_folder():
            self._retry_dead_trials()
            # A retry takes the place of the trial that it repeats.
            trials = self._study.get_trials(deepcopy=False)
            waiting = [one for one in trials if one.state.name == "WAITING"]
            counted = len(trials) - len(waiting) - len(self._map_retries(trials))
            if counted >= self.config.search.num_trials:
                return None
            section = self.config.search
            seed = (section.seed * 1_000_003 + len(trials)) % 2**31  # draws do not depend on the process
            if section.sampler == "tpe":
                sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=section.startup_trials)
            else:
                sampler = self._optuna.samplers.RandomSampler(seed=seed)
            self._study.sampler = sampler
            trial = self._study.ask(self._ranges)
            run = f"trial-{trial.number:03d}"
            before = trial.user_attrs.get("run")
            if before:  # a retry takes over the folder of the attempt before
                with suppress(FileNotFoundError):
                    (self.folder / before).rename(self.folder / run)
            trial.set_user_attr("run", run)
            self.record_owner(trial)
            record_heartbeat(trial)
            return trial

    def record_owner(self, trial: optuna.Trial, *, child_pid: int | None = None) -> None:
        """Record the process that runs the trial, and its training process."""
        owner = TrialOwner(
            host=socket.gethostname(),
            process=identify_process(os.getpid()),
            child=identify_process(child_pid) if child_pid else None,
        )
        trial.set_user_attr("owner", owner.model_dump(mode="json"))

    def finish(self, trial: optuna.Trial, *, score: float | None = None, seconds: float | None) -> None:
        """Record a trial as finished with its score, or as pruned without one; its time may be unknown."""
        trial.set_user_attr("seconds", seconds)
        self._study.tell(trial, score, state=None if score is not None else self._optuna.trial.TrialState.PRUNED)
        self._delete_checkpoints()

    def fail(self, trial: optuna.Trial, why: str, *, retry: bool, count_attempt: bool = True) -> None:
        """Record a trial as failed; `retry` enqueues its settings again, up to MAX_ATTEMPTS attempts."""
        trial.set_user_attr("why", why)
        with self._lock_folder():
            self._record_failure(trial, retry=retry, count_attempt=count_attempt)
        self._delete_checkpoints()

    def ignore_lost_trial(self) -> suppress:
        """Return a context that ends silently if another process has counted this one as dead and retries its trial."""
        return suppress(self._optuna.exceptions.UpdateFinishedTrialError)

    @contextmanager
    def translate_storage_errors(self) -> Generator[None]:
        """Convert errors of the database into a FiveTuneEnvironmentError that names search.storage."""
        try:
            yield
        except self._optuna.exceptions.StorageInternalError as error:
            cause = str(error.__cause__ or error).strip().splitlines()[0]
            raise FiveTuneEnvironmentError(
                f"search.storage {self.config.search.storage}: failed: {cause}. Finished trials are kept: repair it, "
                "then start the same command again."
            ) from error

    def build_search(self) -> Search:
        """Build the Search of all trials so far. A retried trial has no folder: its retry has taken it over."""
        trials = self._study.get_trials(deepcopy=False)
        retried = self._map_retries(trials)
        shown = tuple(self._build_trial(one, retried_as=retried.get(one.number)) for one in trials)
        best: Trial | None = None
        best_value = -math.inf
        for one in shown:
            if one.state == "finished" and one.score is not None:
                value = one.score if self.higher_is_better else -one.score
                if value > best_value:  # of equal scores the first trial is the best
                    best, best_value = one, value
        logarithmic = [key for key, searched in self.config.search.over.items() if searched.log]
        return Search(
            self.folder.name,
            self.metric,
            self.higher_is_better,
            shown,
            best,
            self._compute_importances(shown),
            tuple(logarithmic),
            bool(select_recipe_values(self.config)),
            str(self.folder),
        )

    def _build_trial(self, one: FrozenTrial, *, retried_as: int | None) -> Trial:
        attributes = one.user_attrs
        why = attributes.get("why", "")
        run = attributes.get("run", "")
        if retried_as is not None:
            cause = (why or "its process died").rstrip(".")
            why, run = f"{cause}; retried as trial {retried_as}", ""
        curve = tuple(sorted((int(step), score) for step, score in attributes.get("curve", ())))
        score = None
        if one.state.name == "COMPLETE":
            score = one.value
        elif curve:
            scores = [value for _, value in curve]
            score = max(scores) if self.higher_is_better else min(scores)
        return Trial(
            number=one.number,
            state=STATES[one.state.name],
            settings=dict(one.params),
            score=score,
            curve=curve,
            seconds=attributes.get("seconds"),
            why=why,
            run=run,
        )

    def _build_distribution(self, one: SearchDimension) -> BaseDistribution:
        kinds = self._optuna.distributions
        if one.choices:
            return kinds.CategoricalDistribution(one.choices)
        assert one.low is not None and one.high is not None
        if isinstance(one.low, int):
            return kinds.IntDistribution(one.low, int(one.high), log=one.log, step=int(one.step or 1))
        return kinds.FloatDistribution(one.low, one.high, log=one.log, step=one.step)

    def _retry_dead_trials(self) -> None:
        for trial in self._study.get_trials(deepcopy=False):
            attributes = trial.user_attrs
            owner = TrialOwner.model_validate(attributes["owner"]) if "owner" in attributes else None
            if trial.state.name == "RUNNING" and not _is_active(owner, attributes.get("seen", 0.0)):
                if owner and owner.child and owner.host == socket.gethostname():
                    stop_orphan(owner.child)
                self._record_failure(trial, retry=True, count_attempt=True)

    def _record_failure(self, trial: optuna.Trial | FrozenTrial, *, retry: bool, count_attempt: bool) -> None:
        num_attempts = trial.user_attrs.get("num_attempts", 0) + count_attempt
        self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        if retry and num_attempts < MAX_ATTEMPTS:
            attributes = {"retry_of": trial.number, "num_attempts": num_attempts}
            if "run" in trial.user_attrs:
                attributes["run"] = trial.user_attrs["run"]
            self._study.enqueue_trial(dict(trial.params), user_attrs=attributes)

    def _map_retries(self, trials: Sequence[FrozenTrial]) -> dict[int, int]:
        """Map the numbers of retried trials to the numbers of their retries."""
        return {one.user_attrs["retry_of"]: one.number for one in trials if "retry_of" in one.user_attrs}

    def _delete_checkpoints(self) -> None:
        """Delete the weights of all ended trials but the best."""
        if self.config.search.keep == "all":
            return
        with self._lock_folder():
            # Trials that run or wait may resume from their checkpoints.
            trials = self._study.get_trials(deepcopy=False)
            best = self.build_search().best
            needed = {one.user_attrs.get("run") for one in trials if one.state.name in ("RUNNING", "WAITING")}
            for one in trials:
                run = one.user_attrs.get("run")
                if run and run not in needed and (best is None or run != best.run):
                    for folder in ("checkpoints", "model"):
                        shutil.rmtree(self.folder / run / folder, ignore_errors=True)
                    (self.folder / run / "best").unlink(missing_ok=True)

    def _compute_importances(self, trials: Sequence[Trial]) -> dict[str, float]:
        """Compute each setting's importance for the score (PED-ANOVA, Watanabe et al. 2023); {} if unknown."""
        scores = [one.score for one in trials if one.state == "finished"]
        if len(scores) < 4 or len(set(scores)) < 2:
            return {}
        try:
            return dict(self._optuna.importance.get_param_importances(self._study))
        except (ValueError, RuntimeError):  # a setting with a single value
            return {}

    @contextmanager
    def _lock_folder(self) -> Generator[None]:
        path = self.folder / LOCK
        with ExitStack() as stack:
            try:
                lock_file(stack.enter_context(path.open("a")), wait=True)
            except OSError as error:  # a folder that cannot be written, or a network file system without locks
                raise FiveTuneEnvironmentError(
                    f"{path}: cannot be locked: {error.strerror}. Processes share a study by this lock. Choose another "
                    "--dir, on a file system with locks."
                ) from None
            yield


def _is_active(owner: TrialOwner | None, seen: float) -> bool:
    """Check whether the process of a trial is alive; on another node, by `seen`, the time of its last heartbeat.

    Raises FiveTuneEnvironmentError if the clocks of the nodes differ.
    """
    if owner is None:
        return False
    if owner.host == socket.gethostname():
        return is_alive(owner.process)
    silent = time.time() - seen
    if silent < -MAX_CLOCK_DIFFERENCE_SECONDS:  # the node whose clock is behind finds it
        raise FiveTuneEnvironmentError(
            f"the clock of this node ({socket.gethostname()}) is at least {-silent:.0f} s behind that of {owner.host}, "
            f"which works on the same study; {MAX_CLOCK_DIFFERENCE_SECONDS:.0f} s are allowed. Processes judge each "
            "other by the times of their heartbeats. Set the clocks, for example with NTP."
        )
    return silent < HEARTBEAT_TIMEOUT_SECONDS


def _load_or_create_study(section: SearchSection, folder: Path, *, maximize: bool) -> optuna.Study:
    optuna = _import_optuna()
    storages, pruners = optuna.storages, optuna.pruners
    pruner = pruners.NopPruner()
    if section.pruner == "median":
        pruner = pruners.MedianPruner(n_startup_trials=section.startup_trials)
    elif section.pruner == "hyperband":
        pruner = pruners.HyperbandPruner()
    try:
        if section.storage == "journal":
            storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(folder / "study.journal")))
        elif section.storage == "sqlite":
            url = f"sqlite:///{folder.resolve()}/study.db"
            storage = storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        else:
            storage = storages.RDBStorage(section.storage)
        return optuna.create_study(
            study_name=folder.resolve().name,
            storage=storage,
            load_if_exists=True,
            direction="maximize" if maximize else "minimize",
            pruner=pruner,
        )
    except Exception as error:  # every database driver has its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FiveTuneEnvironmentError(
            f"search.storage {section.storage}: cannot be opened: {reason}. "
            "Fix the address or the driver, or use sqlite or journal."
        ) from error


def _import_optuna() -> ModuleType:
    require_package("fivetune tune", "optuna", "tune")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _select_comparable(config: RunConfig) -> dict[str, Any]:
    """Select the settings that must be equal for comparable scores, as JSON values."""
    table = config.as_redacted_dict()
    for key in FREE_KEYS:
        section, _, name = key.partition(".")
        table[section].pop(name)
    return table
