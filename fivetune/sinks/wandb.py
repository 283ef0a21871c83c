"""Weights & Biases: a run in the project that WANDB_PROJECT names; WANDB_MODE=offline keeps it local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivetune.plugins import Options
from fivetune.sinks import eval_values, need, step_values
from fivetune.types import EvalRecord, StepRecord


class WandB(Options):
    """Logs with the wandb client; the key comes from the environment, never from a recipe."""

    def open(self, folder: Path, config: dict[str, Any], *, first_step: int = 1) -> Writer:
        client = need("wandb", "wandb")
        return Writer(client.init(dir=str(folder), name=folder.resolve().name, config=config))


class Writer:
    """One wandb run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, record: StepRecord) -> None:
        self._run.log(step_values(record), step=record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._run.log(eval_values(record), step=record.step)

    def close(self) -> None:
        self._run.finish()
