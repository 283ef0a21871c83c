"""What all sides of the training benchmark are given, what each step of theirs is counted as, and FiveTune's side.

In: a Plan (model folder, examples, batch size). Out: sides for benchmarks/harness.py; an optimizer step is a unit.
The peers are in benchmarks/peers.py, which is imported only where one of them runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Work
from benchmarks.workloads import Examples
from fivetune.config import load_config
from fivetune.data.stream import TrainingStream
from fivetune.model.flops import train_flops
from fivetune.progress import Progress
from fivetune.rundir import TELEMETRY, RunDir
from fivetune.telemetry.meter import Meter
from fivetune.telemetry.sampler import Sampler
from fivetune.training.capture import choose_capture
from fivetune.training.checkpoint import Progression
from fivetune.training.loop import Training, train_step, write_steps
from fivetune.training.setup import Setup, set_up
from fivetune.training.signals import StopRequest
from fivetune.training.update import halting
from fivetune.types import StepRecord

LR, MAX_GRAD_NORM, MAX_STEPS = 1e-4, 1.0, 100_000
PEERS = {
    "default": "Seq2SeqTrainer as users run it: random batches, dynamic padding",
    "tuned": "Seq2SeqTrainer with length grouping, best attention, fused AdamW, NaN filter off, workers",
    "compiled": "tuned, with torch_compile",
    "padded": "Seq2SeqTrainer over examples that are all padded to the longest length allowed",
    "plain": "a loop in the manner of nanoT5",
}


@dataclass(frozen=True)
class Plan:
    """What all sides are given alike.

    Args:
        model: folder of the weights that all start from.
        batch_size: examples per optimizer step; nobody accumulates.
        folder: for what the sides write.
    """

    model: Path
    examples: Examples
    workload: str
    batch_size: int
    device: str
    folder: Path

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def own_setup(plan: Plan) -> Setup:
    """The product's own set-up of a plan; only the tokens come from memory."""
    lines = plan.folder / "lines.jsonl"
    lines.write_text(json.dumps({"id": "1", "inputs": "a b c", "targets": "d"}) + "\n")
    setup = set_up(load_config({
        "run": {"dir": str(plan.folder / "run")},
        "model": {"path": str(plan.model)},
        "task": {"name": "jsonl"},
        "data": {"train": str(lines), "cache_dir": str(plan.folder / "cache")},
        "optimizer": {"name": "adamw", "lr": LR},
        "train": {"num_steps": MAX_STEPS, "batch_size": plan.batch_size, "max_grad_norm": MAX_GRAD_NORM,
                  "num_threads": torch.get_num_threads()},
        "eval": {"every_steps": MAX_STEPS},
        "device": plan.device,
    }))  # fmt: skip
    examples: Any = plan.examples
    setup.stream = TrainingStream(examples, setup.stream.order)
    choose_capture(setup)
    return setup


class FiveTune:
    """The product's own set-up and loop, with its records and telemetry."""

    name = "fivetune"

    def __init__(self, plan: Plan) -> None:
        setup = own_setup(plan)
        self.model = setup.plain
        self._plan = plan
        self._run = RunDir.create(tempfile.mkdtemp(prefix="run-", dir=plan.folder))
        self._sampler = Sampler(self._run.path / TELEMETRY, every_seconds=setup.config.telemetry.every_seconds)
        self._training = Training(
            setup, self._run, Progress(quiet=True), Progression(), StopRequest(), Meter.of(plan.device), self._sampler,
            halted=halting(setup), sinks=[self],
        )  # fmt: skip
        self._groups = setup.stream.groups(0, MAX_STEPS)
        self._records: list[StepRecord] = []
        self._sampler.start()

    def step(self, record: StepRecord) -> None:
        """What the loop tells its trackers."""
        self._records.append(record)

    def work(self, num_units: int) -> Work:
        self._records.clear()
        for _ in range(num_units):
            train_step(self._training, self._groups)
        write_steps(self._training, wait=True)
        return counted(self._plan, [self._done(record) for record in self._records])

    def _done(self, record: StepRecord) -> Done:
        source, target = map(torch.from_numpy, self._training.setup.stream.lengths(record.step - 1))
        return Done(
            source, target, round(int(source.sum() + target.sum()) / (1 - record.padding_fraction)), record.loss
        )

    def close(self) -> None:
        self._groups.close()  # type: ignore[attr-defined]
        self._sampler.stop()
        self._run.close()


@dataclass(frozen=True, slots=True)
class Done:
    """One optimizer step: lengths of its examples without padding [B], positions computed, loss."""

    source: Tensor
    target: Tensor
    num_positions: int
    loss: Any


def counted(plan: Plan, done: Sequence[Done]) -> Work:
    """What was in these steps."""
    source, target = (torch.cat(parts).cpu() for parts in ([d.source for d in done], [d.target for d in done]))
    flops = train_flops(plan.config, source.numpy(), target.numpy())
    counts = {
        "examples": len(source), "tokens": int(source.sum() + target.sum()),
        "positions": sum(d.num_positions for d in done), "flops": flops.total,
        "nats": sum(float(d.loss) for d in done),
    }  # fmt: skip
    return Work(len(done), counts)


def make_side(name: str, plan: Plan, *, attention: str | None = None) -> Any:
    """FiveTune or the peer of that name; `attention` is for the tuned ones. Raises KeyError for an unknown name."""
    if name == FiveTune.name:
        return FiveTune(plan)
    from benchmarks.peers import make_peer

    return make_peer(name, plan, attention=attention)
