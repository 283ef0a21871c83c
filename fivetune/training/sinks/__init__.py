"""Trackers that receive every record in addition to the run directory, one per file; imported only if a run uses them.

A sink's file holds one options class with `open(folder, config, first_step=n)`, which returns a writer with
`step(record)`, `evaluation(record)`, `close()`. `first_step` is the next step of the run: records at or after it that
were logged before a resume must be discarded. Value names follow the trackers' convention: train/loss, eval/f1.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.plugins import Options, load_plugin
from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.types import JsonTable


class SinkContract(Protocol):
    """Interface of the options class in every file of this folder; `open` returns a writer."""

    def open(self, folder: Path, config: JsonTable, *, first_step: int = ...) -> Any: ...


class Writer:
    """Base of the writers here, which log the values of a record at its step."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Log values by name."""
        raise NotImplementedError

    def step(self, record: StepRecord) -> None:
        self.log(build_step_values(record), record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self.log(build_eval_values(record), record.step)


class Sink(Options):
    """Base of the trackers here: `package` is the one that they import."""

    package: ClassVar[str]


def refuse_missing_sinks(names: Iterable[str]) -> None:
    """Load the sinks of a run before any of its work. Raises FiveTuneEnvironmentError for one without its package."""
    for name in names:
        package = getattr(load_plugin("sinks", name), "package", None)
        if package and find_spec(package) is None:
            raise FiveTuneEnvironmentError(
                f"report.sinks: {name} needs the package {package}, which is not installed. Install it: "
                f"pip install {package}; or leave {name} out of report.sinks."
            )


def build_step_values(record: StepRecord) -> dict[str, float]:
    """The values logged for a step."""
    values = {
        "train/loss": record.loss,
        "train/learning_rate": record.lr,
        "train/grad_norm": record.grad_norm,
        "train/padding_fraction": record.padding_fraction,
        "train/tokens_per_second": (record.num_input_tokens + record.num_target_tokens) / record.step_seconds,
    }
    return {name: value for name, value in values.items() if value is not None}


def build_eval_values(record: EvalRecord) -> dict[str, float]:
    """The values logged for an evaluation."""
    values = {f"{record.split}/{name}": value for name, value in record.scores.items()}
    if record.loss is not None:
        values[f"{record.split}/loss"] = record.loss
    return values
