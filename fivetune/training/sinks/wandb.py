"""Weights & Biases: a run in the project WANDB_PROJECT; WANDB_MODE=offline keeps it local."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.training.sinks import Sink, build_eval_values, build_step_values
from fivetune.types import JsonTable


class WandB(Sink):
    """Logs with the wandb client; the API key comes from the environment, never from a recipe."""

    package = "wandb"

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> WandBWriter:
        client: Any = import_module(self.package)
        return WandBWriter(client.init(dir=str(folder), name=folder.resolve().name, config=config))


class WandBWriter:
    """One wandb run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, record: StepRecord) -> None:
        self._run.log(build_step_values(record), step=record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._run.log(build_eval_values(record), step=record.step)

    def close(self) -> None:
        self._run.finish()
