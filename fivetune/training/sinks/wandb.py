"""Weights & Biases: a run in the project WANDB_PROJECT; WANDB_MODE=offline keeps it local."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from fivetune.training.sinks import Sink, Writer
from fivetune.types import JsonTable


class WandB(Sink):
    """Logs with the wandb client; the API key comes from the environment, never from a recipe."""

    package = "wandb"

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> WandBWriter:
        client: Any = import_module(self.package)
        return WandBWriter(client.init(dir=str(folder), name=folder.resolve().name, config=config))


class WandBWriter(Writer):
    """One wandb run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
