"""Trackers that get every record besides the run directory, one per file; imported only when asked for.

A sink's file holds one options class with `open(folder, config, first_step=n)`, which gives a writer with
`step(record)`, `evaluation(record)`, `close()`. Step n comes next: what was told of it and of later ones before the
run was resumed is void. Names follow the field's habit: train/loss, eval/f1.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fivetune.errors import EnvironmentProblem
from fivetune.types import EvalRecord, StepRecord


def need(package: str, extra: str) -> Any:
    """Import an optional package. Raises EnvironmentProblem saying how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise EnvironmentProblem(
            f"report.sinks: {extra} needs a package that is not installed. Install it: pip install 'fivetune[{extra}]'."
        ) from None


def step_values(record: StepRecord) -> dict[str, float]:
    """What a tracker is told of a step."""
    values = {
        "train/loss": record.loss,
        "train/learning_rate": record.lr,
        "train/grad_norm": record.grad_norm,
        "train/padding_fraction": record.padding_fraction,
        "train/tokens_per_second": (record.num_input_tokens + record.num_target_tokens) / record.step_seconds,
    }
    return {name: value for name, value in values.items() if value is not None}


def eval_values(record: EvalRecord) -> dict[str, float]:
    """What a tracker is told of an evaluation."""
    values = {f"{record.split}/{name}": value for name, value in record.scores.items()}
    return values if record.loss is None else {**values, f"{record.split}/loss": record.loss}
