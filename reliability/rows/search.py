"""A search whose worker or training is killed, whose lock is held, or whose trials diverge or run out of memory."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import yaml

from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess, check_success
from reliability.workload import Workload

LR, BAD_LR = 0.001, 0.002  # the trial with BAD_LR diverges, or finds no memory
NUM_TRIALS = 3
NUM_ATTEMPTS = 3  # of a trial that fails otherwise than by its numbers


def tune_warm(recipe: str, folder: str, fault: str) -> int:
    """`fivetune tune RECIPE` whose trainings are forks of this process."""
    from fivetune.cli import main
    from fivetune.experiments import search
    from fivetune.launch.jobs import Job, find_exit_reason

    class ForkedJob(Job):
        def __init__(self, words: list[str], log: Path) -> None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            self._log, self._log_start = log, log.stat().st_size
            context = multiprocessing.get_context("fork")
            self.forked = context.Process(target=_train, args=(words, str(log), fault))
            self.forked.start()

        @property
        def pid(self) -> int:
            return self.forked.pid or 0

        @property
        def code(self) -> int | None:
            return self.forked.exitcode

        def stop(self) -> None:
            if self.code is None:
                os.kill(self.pid, signal.SIGTERM)
                self.forked.join()

        def read_error(self) -> str:
            return find_exit_reason(self._log.read_text()[self._log_start :], self.code or 0)

    search.Job = ForkedJob
    search.POLL_SECONDS = 0.05
    return main(["tune", recipe, "--dir", folder, "--quiet"])


def _train(words: list[str], log: str, fault: str) -> None:
    from fivetune.cli import main
    from fivetune.training import loop

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    step: Callable[..., Any] = loop.run_step

    def fail(training: Any, groups: Any) -> Any:
        if training.setup.config.optimizer.lr == BAD_LR:
            spoil(training.setup.learner, fault)
        return step(training, groups)

    if fault:
        loop.run_step = fail
    sys.exit(main([*words, "--no-preflight"] if "--no-preflight" not in words else words))


def spoil(learner: Any, fault: str) -> None:
    """Weights that are not finite, or passes that find no memory, however small the micro-batch."""
    import torch

    from fivetune.training import loop

    if fault == "NaN":
        for parameter in learner.model.parameters():
            parameter.data.fill_(float("nan"))
        return

    def find_no_memory(*values: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    loop.train_step = find_no_memory


def write_search(workload: Workload, folder: Path) -> Path:
    """A recipe that searches among three rates, two of them right."""
    recipe = workload.write_recipe(folder, train__num_steps=6, eval__every_steps=6)
    table = yaml.safe_load(recipe.read_text())
    table["search"] = {
        "over": {"optimizer.lr": {"choices": [LR, BAD_LR, 3 * LR]}},
        "sampler": "grid",
        "num_trials": NUM_TRIALS,
    }
    recipe.write_text(yaml.safe_dump(table))
    return recipe


def disturb_search(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each fault in turn."""
    for number, kind in enumerate(cycle(random.sample(sorted(FAULTS), len(FAULTS)))):
        pause = random.uniform(0.5, 3)

        def run(folder: Path, kind: str = kind, pause: float = pause) -> None:
            FAULTS[kind](workload, folder, pause)

        yield Trial(f"{number} {kind} after {pause:.2f} s", run)


def start_search(recipe: Path, folder: Path, fault: str = "") -> WarmProcess:
    return WarmProcess(tune_warm, str(recipe), str(folder / "study"), fault)


def kill_worker(workload: Workload, folder: Path, pause: float) -> None:
    """The search and its training are killed; the same command goes on."""
    recipe = write_search(workload, folder)
    with start_search(recipe, folder) as process:
        time.sleep(pause)
        process.kill_tree()
    finish(recipe, folder)
    check_study(folder, ["finished"] * NUM_TRIALS, may_lose_one=True)


def kill_training(workload: Workload, folder: Path, pause: float) -> None:
    """A training is killed, as the system does where memory ends; the search tries it again."""
    recipe = write_search(workload, folder)
    with start_search(recipe, folder) as process:
        until = time.monotonic() + 60
        while not (trainings := psutil.Process(process.pid).children()):
            assert process.code is None and time.monotonic() < until, "no training was started"
            time.sleep(0.01)
        trainings[0].kill()
        done = process.wait()
    check_success(done)
    check_study(folder, ["failed", *["finished"] * NUM_TRIALS], "killed by SIGKILL")


def hold_lock(workload: Workload, folder: Path, pause: float) -> None:
    """Another process holds the lock of the study for a while."""
    recipe = write_search(workload, folder)
    (folder / "study").mkdir()
    with (folder / "study" / ".study.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with start_search(recipe, folder) as process:
            time.sleep(pause)
            assert process.code is None, "the search did not wait for the lock"
            fcntl.flock(file, fcntl.LOCK_UN)
            done = process.wait()
    check_success(done)
    check_study(folder, ["finished"] * NUM_TRIALS)


def fail_a_trial(fault: str, states: list[str], reason: str) -> Callable[[Workload, Path, float], None]:
    """One of the trials fails in each attempt; the others finish, and the reason is kept."""

    def run(workload: Workload, folder: Path, pause: float) -> None:
        recipe = write_search(workload, folder)
        finish(recipe, folder, fault)
        check_study(folder, states, reason)

    return run


def finish(recipe: Path, folder: Path, fault: str = "") -> None:
    with start_search(recipe, folder, fault) as process:
        done = process.wait()
    check_success(done)


def check_study(folder: Path, states: list[str], reason: str = "", *, may_lose_one: bool = False) -> None:
    """The study's trials are in these states; one that did not finish says why.

    Args:
        may_lose_one: a further trial was in progress when the search was killed, and has been repeated.
    """
    from fivetune.experiments.space import load_search
    from fivetune.experiments.study import Study

    found = Study(load_search(folder / "recipe.yaml"), folder / "study").build_search()
    told = [(one.state, one.why) for one in found.trials]
    lost = [one for one in found.trials if may_lose_one and one.why.startswith("its process died; retried as trial")]
    assert len(lost) <= 1, f"{told}"
    assert sorted(one.state for one in found.trials if one not in lost) == sorted(states), f"{told}"
    assert all(reason in one.why for one in found.trials if one.state != "finished"), f"{told}"
    assert found.best is not None, "no trial is the best"


FAULTS: dict[str, Callable[[Workload, Path, float], None]] = {
    "worker killed": kill_worker,
    "training killed": kill_training,
    "lock held": hold_lock,
    "NaN": fail_a_trial("NaN", ["finished", "finished", "pruned"], "loss nan"),
    "out of memory": fail_a_trial("out of memory", ["finished", "finished", *["failed"] * NUM_ATTEMPTS], "memory"),
}
ROWS = [
    Row("R34", "a search is killed, its training is killed, its lock is held, a trial gives NaN or finds no memory",
        "the search goes on and keeps what is finished; a trial that fails says why", disturb_search, 4, 20),
]  # fmt: skip
