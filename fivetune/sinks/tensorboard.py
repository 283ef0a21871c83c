"""TensorBoard: event files in <run>/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivetune.plugins import Options
from fivetune.sinks import eval_values, need, step_values
from fivetune.types import EvalRecord, StepRecord


class TensorBoard(Options):
    """Writes scalars with torch's SummaryWriter."""

    def open(self, folder: Path, config: dict[str, Any], *, first_step: int = 1) -> Writer:
        need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        return Writer(SummaryWriter(str(folder / "tensorboard"), purge_step=first_step))


class Writer:
    """One run's event file."""

    def __init__(self, events: Any) -> None:
        self._events = events

    def step(self, record: StepRecord) -> None:
        for name, value in step_values(record).items():
            self._events.add_scalar(name, value, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        for name, value in eval_values(record).items():
            self._events.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._events.close()
