"""TensorBoard: event files in <run>/tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.training.sinks import Sink, Writer
from fivetune.types import JsonTable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Sink):
    """Writes scalars with torch's SummaryWriter."""

    package = "tensorboard"

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> TensorBoardWriter:
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardWriter(SummaryWriter(str(folder / "tensorboard"), purge_step=first_step))


class TensorBoardWriter(Writer):
    """One run's event file."""

    def __init__(self, events: SummaryWriter) -> None:
        self._events = events

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()
