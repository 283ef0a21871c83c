"""Trackers that receive every record in addition to the run directory, one per file; imported only if a run uses them.

A sink's file holds one options class with `open(folder, config, first_step=n)`, which returns a writer with
`step(record)`, `evaluation(record)`, `close()`. `first_step` is the next step of the run: records at or after it that
were logged before a resume must be discarded. Value names follow the trackers' convention: train/loss, eval/f1.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.rundir.records import EvalRecord, StepRecord


def import_optional(package: str) -> ModuleType:
    """Import a tracker's package, which has the sink's name. Raises FiveTuneEnvironmentError with the pip command."""
    try:
        return import_module(package)
    except ImportError:
        raise FiveTuneEnvironmentError(
            f"report.sinks: {package} needs a package that is not installed. Install it: pip install {package}"
        ) from None


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
    return values if record.loss is None else {**values, f"{record.split}/loss": record.loss}
