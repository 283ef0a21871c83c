"""Runs in several processes of test_shared_study.py: `tune` on one study, with trainings that only evaluate."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fivetune.config import load_config
from fivetune.fleet.experiments import search
from fivetune.fleet.experiments.space import load_search
from fivetune.rundir import EVALS, STATUS, write_json
from fivetune.rundir.layout import PLAN
from fivetune.rundir.plan import Plan
from fivetune.rundir.records import EvalRecord
from fivetune.types import JsonTable

NUM_EVALS = 9


class SteadyTraining:
    """A training that evaluates each time it is looked at; its score grows to `optimizer.lr` times 1,000."""

    def __init__(self, words: list[str], log: Path) -> None:
        recipe = load_config(words[1])
        self.run, self.lr = Path(recipe.run.dir), recipe.optimizer.lr
        self.step, self.code_now = 0, None
        self.run.mkdir()
        write_json(self.run / PLAN, Plan(1, NUM_EVALS, 1, 1).as_dict())
        self.pid = os.getpid()

    @property
    def code(self) -> int | None:
        if self.code_now is None and self.step == NUM_EVALS:
            self.code_now = 0
        elif self.code_now is None:
            self.step += 1
            score = self.lr * 1000 * self.step / NUM_EVALS
            one = EvalRecord(self.step, "squad_v2", 1, "eval", 2, 0, {"f1": score}, 1.0, {}, 16, 1.0)
            with (self.run / EVALS).open("a") as file:
                file.write(json.dumps(one.as_dict()) + "\n")
            write_json(self.run / STATUS, {"best": {"step": self.step, "metric": "f1", "score": score}})
        return self.code_now

    def stop(self) -> None:
        self.code_now = 143

    def __enter__(self) -> SteadyTraining:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def build_recipe(storage: str, pruner: str, num_trials: int) -> JsonTable:
    """The recipe of the study that the processes share."""
    return {
        "run": {"dir": "runs/x"},
        "model": {"path": "m"},
        "task": "squad_v2",
        "data": {"train": "t", "eval": "e"},
        "search": {
            "over": {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
            "storage": storage,
            "pruner": pruner,
            "sampler": "random",
            "num_trials": num_trials,
        },
    }


def share_study(folder: str, storage: str, pruner: str, num_trials: int) -> None:
    search.Job = SteadyTraining
    search.POLL_SECONDS = 0.0
    config = load_search(build_recipe(storage, pruner, num_trials))
    search.tune(config, folder=Path(folder), write_line=lambda line: print(line, flush=True))
