"""What all sides of the training benchmark share: the Plan, the hyperparameters, and how a step is counted.

In: model folder, examples, batch size. Out: a Plan; the Work of some steps. benchmarks/sides.py holds FiveTune's side,
benchmarks/peers.py the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Work
from benchmarks.workloads import Examples
from fivetune.model.flops import count_train_flops

LR, MAX_GRAD_NORM = 1e-4, 1.0
PEERS = {
    "default": "Seq2SeqTrainer as users run it: random batches, dynamic padding",
    "tuned": "Seq2SeqTrainer with length grouping, best attention, fused AdamW, NaN filter off, workers",
    "compiled": "tuned, with torch_compile",
    "tuned-bf16": "tuned, with bf16=True on any device",
    "padded": "Seq2SeqTrainer over examples that are all padded to the longest length allowed",
    "plain": "a loop in the manner of nanoT5",
}

OWN: dict[str, dict[str, Any]] = {
    "fivetune": {},
    "fivetune-fp32": {"precision": "fp32"},
    "fivetune-launched": {"capture": "off"},
}
"""Sides of FiveTune itself, by their entries of the section train."""


@dataclass(frozen=True)
class Plan:
    """What all sides are given alike.

    Args:
        model: folder of the weights that all start from.
        batch_size: examples per optimizer step; nobody accumulates.
        folder: for what the sides write.
        adapter: name of the adapter that all train, with its default options; "" trains all weights.
        precision: auto (FiveTune's own choice; peers bf16 on a GPU, else fp32), or what all compute in: fp32, tf32.
        optimizer: adamw or adafactor.
        max_steps: of the run whose steps are measured; its order is planned at the start.
    """

    model: Path
    examples: Examples
    workload: str
    batch_size: int
    device: str
    folder: Path
    adapter: str = ""
    precision: str = "auto"
    optimizer: str = "adamw"
    max_steps: int = 2_000

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


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
    flops = count_train_flops(plan.config, source.numpy(), target.numpy())
    counts = {
        "examples": len(source),
        "tokens": int(source.sum() + target.sum()),
        "positions": sum(d.num_positions for d in done),
        "flops": flops.total,
        "nats": sum(float(d.loss) for d in done),
    }
    return Work(len(done), counts)
