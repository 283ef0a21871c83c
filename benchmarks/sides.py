"""FiveTune's side of the training benchmark, and the choice of a side by name.

In: a Plan. Out: sides for benchmarks/harness.py; an optimizer step is a unit. benchmarks/peers.py, which imports
transformers' Trainer, is imported only where a peer runs.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import Work
from benchmarks.plan import LR, MAX_GRAD_NORM, OWN, Done, Plan, counted
from fivetune.config import load_config
from fivetune.data.store.stream import TrainingStream
from fivetune.machine.telemetry.meter import Meter
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.rundir import TELEMETRY, RunDir
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import StepRecord
from fivetune.training.autotune.graphs import decide_graphs
from fivetune.training.loop import run_step
from fivetune.training.setup import Setup, set_up
from fivetune.training.signals import StopRequest
from fivetune.training.state.checkpoint import TrainingState
from fivetune.training.step.graphs import GraphEngine
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.training.step_records import write_steps
from fivetune.training.training import Training


def own_setup(plan: Plan, *, dropout: float = 0.1, **train: str | int) -> Setup:
    """The product's own set-up of a plan, with other entries of the section train; only the tokens come from memory."""
    lines = plan.folder / "lines.jsonl"
    lines.write_text(json.dumps({"id": "1", "inputs": "a b c", "targets": "d"}) + "\n")
    setup = set_up(
        load_config(
            {
                "run": {"dir": str(plan.folder / "run")},
                "model": {"path": str(plan.model), "adapter": plan.adapter or None, "dropout": dropout},
                "task": {"name": "jsonl"},
                "data": {"train": str(lines), "cache_dir": str(plan.folder / "cache")},
                "optimizer": {"name": plan.optimizer, "lr": LR},
                "train": {
                    "num_steps": plan.max_steps,
                    "batch_size": plan.batch_size,
                    "max_grad_norm": MAX_GRAD_NORM,
                    "num_threads": torch.get_num_threads(),
                    "precision": plan.precision,
                    **train,
                },
                "eval": {"every_steps": plan.max_steps},
                "device": plan.device,
            }
        )
    )
    examples: Any = plan.examples
    stream = TrainingStream(examples, setup.data.stream.plan)
    setup = replace(setup, data=replace(setup.data, stream=stream))
    return replace(setup, learner=decide_graphs(setup)[0])


class FiveTune:
    """The product's own set-up and loop, with its records and telemetry."""

    def __init__(self, plan: Plan, name: str = "fivetune") -> None:
        self.name = name
        setup = own_setup(plan, **OWN[name])
        self.model = setup.learner.model
        self.precision = setup.learner.compute.precision
        self._plan = plan
        self._run = RunDir.create(tempfile.mkdtemp(prefix="run-", dir=plan.folder))
        self._sampler = Sampler(self._run.path / TELEMETRY, every_seconds=setup.config.telemetry.every_seconds)
        self._training = Training(
            setup,
            setup.plan,
            self._run,
            Progress(quiet=True),
            TrainingState(),
            StopRequest(),
            Meter.from_device(plan.device),
            self._sampler,
            nonfinite_flag=make_nonfinite_flag(setup.learner),
            sinks=[self],
        )
        self._groups = setup.data.stream.iter_micro_batches(0, plan.max_steps)
        self._records: list[StepRecord] = []
        self._sampler.start()

    def step(self, record: StepRecord) -> None:
        """What the loop tells its trackers."""
        self._records.append(record)

    def work(self, num_units: int) -> Work:
        self._records.clear()
        for _ in range(num_units):
            run_step(self._training, self._groups)
        write_steps(self._training, wait=True)
        return counted(self._plan, [self._done(record) for record in self._records])

    def _done(self, record: StepRecord) -> Done:
        source, target = map(torch.from_numpy, self._training.setup.data.stream.get_lengths(record.step - 1))
        return Done(
            source, target, round(int(source.sum() + target.sum()) / (1 - record.padding_fraction)), record.loss
        )

    def facts(self) -> dict[str, int]:
        """How many micro-batches CUDA graphs replayed and how many were launched; empty without graphs."""
        engine = self._training.setup.learner.engine
        if not isinstance(engine, GraphEngine):
            return {}
        return {"replayed": engine.graphs.steps.num_replayed, "launched": engine.graphs.steps.num_launched}

    def close(self) -> None:
        self._groups.close()  # type: ignore[attr-defined]
        self._sampler.stop()
        self._run.close()


def make_side(name: str, plan: Plan, *, attention: str | None = None) -> Any:
    """FiveTune or the peer of that name; `attention` is for the tuned ones. Raises KeyError for an unknown name."""
    if name in OWN:
        return FiveTune(plan, name)
    from benchmarks.peers import make_peer

    return make_peer(name, plan, attention=attention)
