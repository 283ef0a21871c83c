"""TensorBoard: event files in <run>/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.training.sinks import Sink, build_eval_values, build_step_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
from fivetune.types import JsonTable


class TensorBoard(Sink):
    """Writes scalars with torch's SummaryWriter."""

    package = "tensorboard"

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> TensorBoardWriter:
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardWriter(SummaryWriter(str(folder / "tensorboard"), purge_step=first_step))


class TensorBoardWriter:
    """One run's event file."""

    def __init__(self, events: SummaryWriter) -> None:
        self._events = events

    def step(self, record: StepRecord) -> None:
        for name, value in build_step_values(record).items():
            self._events.add_scalar(name, value, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        for name, value in build_eval_values(record).items():
            self._events.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._events.close()
