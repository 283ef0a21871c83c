"""Tiny real things for tests: a tokenizer, models of every family, SQuAD files, a recipe that trains in a second."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivetune.config import load_config
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import EvalRecord
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.setup import Setup, set_up
from reliability.workload import COLOURS as COLOURS
from reliability.workload import FAMILIES as FAMILIES
from reliability.workload import OWNERS as OWNERS
from reliability.workload import SHAPE as SHAPE
from reliability.workload import WORDS as WORDS
from reliability.workload import make_model as make_model
from reliability.workload import make_tokenizer as make_tokenizer
from reliability.workload import recipe as recipe
from reliability.workload import squad_file as squad_file

SHARED = Path(__file__).parents[2] / "shared"
NEEDS_SHARED = "the shared data folder is not beside the checkout"


def changed_config(folder: Path, **changes: Any) -> Path:
    """Edit config.json of a model folder; None takes a key out."""
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return folder


def changed_weights(folder: Path, *, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> Path:
    """Edit model.safetensors of a folder; `__` in a name stands for a dot."""
    path = folder / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})
    return folder


def release(*values: Any) -> Any:
    """A case of a parametrised test that is of the release tier."""
    return pytest.param(*values, marks=pytest.mark.release)


def has_release_tests(request: pytest.FixtureRequest) -> bool:
    """Whether tests of this file are selected that are of the release tier."""
    items = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("release") for item in items)


def ready(folder: Path, model: Path, **overrides: Any) -> Setup:
    """The set-up of `recipe`, as `fivetune train` makes it."""
    return set_up(load_config(recipe(folder, model, **overrides)))


def weights_of(run: Path) -> bytes:
    """The exported weights of a run, byte for byte."""
    return (run / "model" / "model.safetensors").read_bytes()


def signal_at(monkeypatch: pytest.MonkeyPatch, method: str, step: int, signum: int = signal.SIGTERM) -> None:
    """Once, when Progress.<method> gets the record of `step`, the process gets a signal."""
    whole, left = getattr(Progress, method), [signum]

    def told(self: Progress, record: Any, *rest: Any, **named: Any) -> None:
        if record.step == step and left:
            os.kill(os.getpid(), left.pop())
        whole(self, record, *rest, **named)

    monkeypatch.setattr(Progress, method, told)


def scored(
    monkeypatch: Any, f1: list[float] | dict[int, float], losses: list[float] | None = None, *, name: str = "f1"
) -> None:
    """Evaluations after the first step give these scores, by order or by step, and these losses."""
    whole, values, given = Evaluator.run, iter(f1), iter(losses or [])

    def run(self: Evaluator, *args: Any, **kwargs: Any) -> EvalRecord:
        record = whole(self, *args, **kwargs)
        if kwargs["step"] == 0:
            return record
        record.scores[name] = f1[record.step] if isinstance(f1, dict) else next(values)
        return replace(record, loss=next(given)) if losses else record

    monkeypatch.setattr(Evaluator, "run", run)
