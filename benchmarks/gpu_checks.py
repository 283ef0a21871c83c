"""What the stages of `benchmarks.gpu_day` share: their findings, clocks, plans, steps, and a CPU that acts as a GPU.

In: the device, cuda or cpu. Out: Findings of a stage, a JSON line each; a Plan of benchmarks/train.py; the steps of a
set-up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.plan import LR, Plan
from benchmarks.sides import own_setup
from benchmarks.workloads import MODELS, WORKLOADS, Examples, Law, share_model, write_examples
from fivetune.model.cuda import dispatch, tiles
from fivetune.training.autotune import graphs
from fivetune.training.setup import Setup
from fivetune.training.step.graphs import GraphEngine
from fivetune.training.step.learner import Update
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.training.step.update import train_step

SMALL_TILES = {"norm": (2, 0), "pointwise": (0, 64), "optimizer": (4, 4096), "rows": (4, 64)}
SMALL_MODEL = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 1, "vocab_size": 4096}


@dataclass(slots=True)
class Findings:
    """What a stage found, told at once: a stage that is killed has told what it knew.

    Args:
        tell: receives a JSON object, {"check": [name, found, allowed]} or {"facts": {name: value}}.
    """

    tell: Callable[[dict[str, Any]], None]

    def check(self, name: str, found: float, allowed: float = 0.0) -> None:
        """Tell what was found and the most that is allowed; NaN is never allowed."""
        self.tell({"check": [name, float(found), allowed]})

    def require(self, name: str, holds: bool) -> None:
        self.check(name, float(not holds))

    def note(self, name: str, value: Any) -> None:
        """Tell a figure without a limit."""
        self.tell({"facts": {name: value}})


@contextmanager
def act_as_cuda() -> Iterator[None]:
    """The CPU counts as a device of kernels and graphs: a graph calls its function; models, texts, tiles are small."""
    small = {key: tiles.Tile(*SMALL_TILES.get(key[0], (32, 32)), warps=1) for key in tiles.TILES}
    with (
        patch.dict(tiles.TILES, small),
        patch.dict(MODELS, {"t5-tiny": {**MODELS["t5-tiny"], **SMALL_MODEL}}),
        patch.dict(WORKLOADS, {"translation": (Law(8, 3, 12), Law(4, 1, 6))}),
        patch.object(dispatch, "DEVICES", ("cuda", "cpu")),
        patch.object(graphs, "MAX_GRAPHS", 1),
        patch.object(graphs, "supports_graphs", lambda device: True),
        patch.object(graphs, "make_graph_recorder", lambda: lambda function: function),
    ):
        yield


def measure_seconds(run: Callable[[], Any], device: str) -> float:
    """Seconds of a call; on a GPU until the device has finished."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def prepare_plan(device: str, *, model: str = "t5-small", batch_size: int = 16, num_steps: int = 60) -> Iterator[Plan]:
    """A plan of benchmarks/train.py in a temporary folder; on a CPU of a tiny model and a few short examples."""
    if device == "cpu":
        model, batch_size, num_steps = "t5-tiny", 1, 2
    with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as name:
        folder = Path(name)
        workload = "translation" if device == "cpu" else "squad"
        write_examples(folder, workload, num_steps * batch_size, vocab_size=MODELS[model]["vocab_size"])
        yield Plan(share_model(model), Examples(folder), workload, batch_size, device, folder)


def set_up_graphs(plan: Plan, **options: Any) -> Setup:
    """A set-up with CUDA graphs, without the trial in another process. Raises ConfigError where they cannot run."""
    with patch.object(graphs, "_try_elsewhere", lambda setup: ""):
        return own_setup(plan, capture="on", **options)


class Steps:
    """The optimizer steps of a set-up, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.flag = setup, make_nonfinite_flag(setup.learner)
        self.groups = setup.data.stream.iter_micro_batches(0, setup.plan.num_steps)
        self.taken = 0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.groups.close()  # type: ignore[attr-defined]

    def run(self, num: int = 1) -> list[Update]:
        """The updates of some steps, whose values are valid once the device has finished."""
        found = []
        for _ in range(num):
            self.taken += 1
            group = next(self.groups)
            found.append(train_step(self.setup.learner, group, lr=LR, step=self.taken, nonfinite_flag=self.flag))
        return found

    def finish(self, num: int = 1) -> list[Update]:
        """Likewise, finished."""
        found = self.run(num)
        wait(self.setup.learner.compute.device)
        return found

    def count_calls(self) -> tuple[int, int]:
        """Micro-batches that graphs replayed, and that were launched."""
        engine = self.setup.learner.engine
        if not isinstance(engine, GraphEngine):
            return 0, self.taken
        return engine.graphs.steps.num_replayed, engine.graphs.steps.num_launched
