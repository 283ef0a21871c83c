"""Which forward a run trains with, and why: flat tokens, the padded rectangle, or rectangles of a few fixed sizes.

In: a model, a device, what was asked for. Out: a Forward, which turns a Batch into nats; said aloud and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fivetune.data.batch import pad
from fivetune.errors import ConfigError
from fivetune.model.flat import flat_nats, supports_flat
from fivetune.model.forward import label_nats
from fivetune.model.heap import keep_heap
from fivetune.types import Batch

Kind = Literal["flat", "padded", "buckets"]
STATIC_DEVICES = ("mps", "xla")  # devices that compile every new shape
NUM_TRIALS = 3


@dataclass(frozen=True, slots=True)
class Forward:
    """How nats are computed.

    Args:
        kind: flat computes real tokens only; padded a rectangle as large as the longest example; buckets a rectangle
            with one of a few fixed sizes, for devices that compile every new shape.
        why: a sentence for the log and machine.json.
        recompute: keep only the inputs of every block, and compute it again in the backward pass.
    """

    kind: Kind
    why: str
    recompute: bool = False

    def nats(self, model: Any, batch: Batch, *, device: str) -> tuple[Tensor, int]:
        """-log p of every scored label, 0 elsewhere, in the shape that the kind has; and the positions computed."""
        if self.kind == "flat":
            return flat_nats(model, batch, recompute=self.recompute), batch.num_input_tokens + batch.num_target_tokens
        sizes = SIZES if self.kind == "buckets" else None
        padded = pad(batch, pad_id=model.config.pad_token_id, sizes=sizes).to(device)
        return label_nats(model, padded), padded.num_positions

    def prepare(self, model: Any) -> None:
        """Switch on what the model itself has to do."""
        if self.recompute and self.kind != "flat":
            renamed = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.2x on
            (renamed or model.gradient_checkpointing_enable)()
        if self.kind == "flat":
            keep_heap()


SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Lengths of the rectangles of `buckets`, in tokens; longer ones are rounded up to the next 1,024."""


def choose_forward(
    asked: str, model: Any, device: str, sample: Sequence[Batch], *, autocast: Any, recompute: bool = False
) -> Forward:
    """The forward of a run: as asked for, else what the device is known or measured to do best.

    Args:
        asked: auto, flat, padded or buckets.
        sample: batches to measure on, where the device has to be measured.

    Raises ConfigError where what was asked for cannot run.
    """
    obstacle = supports_flat(model)
    if asked != "auto":
        if asked == "flat" and obstacle:
            raise ConfigError(f"train.forward: flat cannot run this model: {obstacle}. Use auto or padded.")
        return Forward(asked, "asked for", recompute)  # type: ignore[arg-type]
    kind = device.partition(":")[0]
    if kind in STATIC_DEVICES:
        return Forward("buckets", f"{kind} compiles every new shape", recompute)
    if obstacle:
        return Forward("padded", f"flat tokens cannot run: {obstacle}", recompute)
    if kind == "cpu":
        return Forward("flat", "nothing is padded", recompute)
    flat, padded = (_seconds(Forward(name, ""), model, device, sample, autocast) for name in ("flat", "padded"))
    best, other = ("flat", "padded") if flat <= padded else ("padded", "flat")
    why = f"measured: {1000 * min(flat, padded):.1f} ms a batch, {other} {1000 * max(flat, padded):.1f} ms"
    return Forward(best, why, recompute)  # type: ignore[arg-type]


def _seconds(forward: Forward, model: Any, device: str, sample: Sequence[Batch], autocast: Any) -> float:
    """Time of a forward and backward pass over the sample, the best of a few; weights and seeds stay as they are."""
    devices = [torch.device(device)] if device.startswith("cuda") else []
    best = float("inf")
    with torch.random.fork_rng(devices=devices):
        for _ in range(NUM_TRIALS):
            started = time.perf_counter()
            for batch in sample:
                with autocast():
                    loss = forward.nats(model, batch, device=device)[0].sum()
                loss.backward()
                loss.item()
            best = min(best, time.perf_counter() - started)
    model.zero_grad(set_to_none=True)
    return best / len(sample)
