"""TensorBoard: event files in <run>/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.plugins import Options
from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.sinks import build_eval_values, build_step_values, import_optional

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
from fivetune.types import JsonTable


class TensorBoard(Options):
    """Writes scalars with torch's SummaryWriter."""

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> TensorBoardWriter:
        import_optional("tensorboard")
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
