"""A search whose worker or training is killed, whose lock is held, or whose trials diverge or run out of memory."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import yaml

from fivetune.types import Search
from fivetune.types import Trial as SearchTrial
from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess, check_success, wait_until
from reliability.workload import Workload

BAD_LR = 0.002  # the trial with it diverges, or finds no memory
NUM_TRIALS = 3
LOCK = ".study.lock"
NUM_ATTEMPTS = 3  # of a trial that fails otherwise than by its numbers


def tune_warm(recipe: str, folder: str, fault: str) -> int:
    """`fivetune tune RECIPE` whose trainings are forks of this process."""
    from fivetune.cli import main
    from fivetune.distributed.processes.jobs import Job, find_exit_reason
    from fivetune.fleet.experiments import search

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
    """A recipe whose own rate, which is tried first, is BAD_LR, and that searches in a range around it."""
    recipe = workload.write_recipe(folder, train__num_steps=6, eval__every_steps=6, optimizer__lr=BAD_LR)
    table = yaml.safe_load(recipe.read_text())
    over = {"optimizer.lr": {"low": BAD_LR / 2, "high": 1.5 * BAD_LR}}
    table["search"] = {"over": over, "num_trials": NUM_TRIALS}
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


def kill_worker(num_finished: int) -> Callable[[Workload, Path, float], None]:
    """The search and its training are killed, after some trials have finished; the same command goes on."""

    def run(workload: Workload, folder: Path, pause: float) -> None:
        recipe, study = write_search(workload, folder), folder / "study"
        for part in (1, 0.5, 0.25):
            with start_search(recipe, folder) as process:
                wait_until(partial(has_finished, process, study, num_finished), 120, every=0.01)
                time.sleep(part * pause)
                is_running = process.code is None
                process.kill_tree()
            if is_running:
                break
            shutil.rmtree(study)
        else:
            raise AssertionError(f"no kill hit; the last one was {part * pause:.2f} s after the trials")
        kept = [one for one in read_trials(folder, folder / "killed") if one.state == "finished"]
        assert len(kept) >= num_finished, f"{len(kept)} trials are recorded as finished, of {num_finished}"
        check_success(start_search(recipe, folder).finish())
        check_study(folder, ["finished"] * NUM_TRIALS, may_lose_one=True)
        now = {one.number: one for one in read_trials(folder, folder / "gone-on")}
        for one in kept:
            assert now.get(one.number) == one, f"a finished trial was {one}, and is {now.get(one.number)}"

    return run


def has_finished(process: WarmProcess, study: Path, num: int) -> bool:
    """Whether a search has recorded so many trials as finished, so that it has begun the next one, or has ended."""
    return num == 0 or process.code is not None or (study / f"trial-{num:03d}.yaml").exists()


def read_trials(folder: Path, copy: Path) -> Sequence[SearchTrial]:
    """The trials on record, read from a copy of the study, which thus stays as it is; none without a storage."""
    shutil.copytree(folder / "study", copy / "study", symlinks=True)
    return open_search(folder / "recipe.yaml", copy / "study").trials if list(copy.glob("study/study.*")) else ()


def open_search(recipe: Path, study: Path) -> Search:
    """A study's search so far."""
    from fivetune.fleet.experiments.space import load_search
    from fivetune.fleet.experiments.study import Study

    return Study(load_search(recipe), study).build_search()


def kill_training(workload: Workload, folder: Path, pause: float) -> None:
    """A training is killed, as the system does where memory ends; the search tries it again."""
    recipe = write_search(workload, folder)
    with start_search(recipe, folder) as process:
        search = psutil.Process(process.pid)
        wait_until(lambda: bool(search.children()), 60, every=0.01, explain=lambda: "no training was started")
        search.children()[0].kill()
        done = process.wait()
    check_success(done)
    check_study(folder, ["failed", *["finished"] * NUM_TRIALS], "killed by SIGKILL")


def hold_lock(workload: Workload, folder: Path, pause: float) -> None:
    """Another process holds the lock of the study, for longer than a search takes to write into a free one."""
    recipe, study = write_search(workload, folder), folder / "study"
    begun = time.monotonic()
    with start_search(recipe, folder) as process:
        wait_until(lambda: study.exists() and set(os.listdir(study)) > {LOCK}, 60, every=0.01)
        process.kill_tree()
    pause += 2 * (time.monotonic() - begun)
    shutil.rmtree(study)
    study.mkdir()
    with (study / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with start_search(recipe, folder) as process:
            time.sleep(pause)
            assert process.code is None, f"the search ended: {process.wait().stderr[-600:]}"
            assert os.listdir(study) == [LOCK], f"the search did not wait for the lock: {os.listdir(study)}"
            fcntl.flock(file, fcntl.LOCK_UN)
            done = process.wait()
    check_success(done)
    check_study(folder, ["finished"] * NUM_TRIALS)


def fail_a_trial(fault: str, states: list[str], reason: str) -> Callable[[Workload, Path, float], None]:
    """One of the trials fails in each attempt; the others finish, and the reason is kept."""

    def run(workload: Workload, folder: Path, pause: float) -> None:
        recipe = write_search(workload, folder)
        check_success(start_search(recipe, folder, fault).finish())
        check_study(folder, states, reason)

    return run


def check_study(folder: Path, states: list[str], reason: str = "", *, may_lose_one: bool = False) -> None:
    """The study's trials are in these states; one that did not finish says why.

    Args:
        may_lose_one: a further trial was in progress when the search was killed, and has been repeated.
    """
    found = open_search(folder / "recipe.yaml", folder / "study")
    told = [(one.state, one.why) for one in found.trials]
    lost = [one for one in found.trials if may_lose_one and one.why.startswith("its process died; retried as trial")]
    assert len(lost) <= 1, f"{told}"
    assert sorted(one.state for one in found.trials if one not in lost) == sorted(states), f"{told}"
    assert all(reason in one.why for one in found.trials if one.state != "finished"), f"{told}"
    assert found.best is not None, "no trial is the best"


FAULTS: dict[str, Callable[[Workload, Path, float], None]] = {
    "worker killed": kill_worker(num_finished=0),
    "worker killed beside finished trials": kill_worker(num_finished=1),
    "training killed": kill_training,
    "lock held": hold_lock,
    "NaN": fail_a_trial("NaN", ["finished", "finished", "pruned"], "loss nan"),
    "out of memory": fail_a_trial("out of memory", ["finished", "finished", *["failed"] * NUM_ATTEMPTS], "memory"),
}
ROWS = [
    Row("R34", "a search is killed, its training is killed, its lock is held, a trial gives NaN or finds no memory",
        "the search goes on and keeps finished trials; a failed trial says why",
        disturb_search, 6, 24),
]  # fmt: skip
