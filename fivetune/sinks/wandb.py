"""Weights & Biases: a run in the project WANDB_PROJECT; WANDB_MODE=offline keeps it local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivetune.plugins import Options
from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.sinks import build_eval_values, build_step_values, import_optional
from fivetune.types import JsonTable


class WandB(Options):
    """Logs with the wandb client; the API key comes from the environment, never from a recipe."""

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> WandBWriter:
        client = import_optional("wandb")
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
