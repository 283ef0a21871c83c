"""Which forward a run trains with, and why: flat tokens, the padded rectangle, or rectangles of a few fixed sizes.

In: a model, a device, what was asked for. Out: a Forward, which turns a Batch into nats; said aloud and recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fivetune.data.batch import pad
from fivetune.errors import ConfigError
from fivetune.model.attention import kernel_obstacle
from fivetune.model.flat import flat_nats, supports_flat
from fivetune.model.forward import label_nats
from fivetune.model.memory import is_out_of_memory
from fivetune.model.precision import product_dtype
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
        """Switch on, or off, what the model itself has to do."""
        switch = "enable" if self.recompute and self.kind != "flat" else "disable"
        renamed = getattr(model, f"activation_checkpointing_{switch}", None)  # its name from transformers 5.2x on
        (renamed or getattr(model, f"gradient_checkpointing_{switch}"))()

    def attention(self, model: Any, device: str) -> str | None:
        """What computes attention: the own kernel (triton), the own blocks, or an implementation of transformers."""
        if self.kind == "flat":
            return "triton" if device.startswith("cuda") else "blocks"
        return getattr(model.config, "_attn_implementation", None)


SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Lengths of the rectangles of `buckets`, in tokens; longer ones are rounded up to the next 1,024."""


def choose_forward(
    asked: str, model: Any, device: str, sample: Sequence[Batch], *,
    autocast: Any, recompute: bool = False, begun: str | None = None,
) -> Forward:  # fmt: skip
    """The forward of a run: as it began or as asked for, else what the device is known or measured to do best.

    Args:
        asked: auto, flat, padded or buckets.
        sample: batches to measure on, where the device has to be measured.
        begun: the kind that a resumed run began with; another one would round otherwise.

    Raises ConfigError where that cannot run.
    """
    obstacle = supports_flat(model) or _device_obstacle(model, device, autocast)
    wanted = begun or asked
    if wanted != "auto":
        if wanted == "flat" and obstacle:
            raise ConfigError(f"train.forward: flat cannot run this model: {obstacle}. Use auto or padded.")
        return Forward(wanted, "as the run began" if begun else "asked for", recompute)  # type: ignore[arg-type]
    kind = device.partition(":")[0]
    if kind in STATIC_DEVICES:
        return Forward("buckets", f"{kind} compiles every new shape", recompute)
    if obstacle:
        return Forward("padded", f"flat tokens cannot run: {obstacle}", recompute)
    if kind == "cpu":
        return Forward("flat", "nothing is padded", recompute)
    flat, padded = (Forward(name, "", recompute) for name in ("flat", "padded"))
    times = {forward: _seconds(forward, model, device, sample, autocast) for forward in (flat, padded)}
    best, other = sorted((flat, padded), key=times.__getitem__)
    said = {f: "no memory" if times[f] == math.inf else f"{1000 * times[f]:.1f} ms a batch" for f in times}
    why = f"measured: {said[best]} with {best.attention(model, device)} attention, {other.kind} {said[other]}"
    return replace(best, why=why)


def _device_obstacle(model: Any, device: str, autocast: Any) -> str:
    """Why the device cannot run `flat_nats`; empty if it can."""
    if not device.startswith("cuda"):
        return ""
    with autocast():
        return kernel_obstacle(model.config.d_kv, product_dtype(torch.device(device)))


def _seconds(forward: Forward, model: Any, device: str, sample: Sequence[Batch], autocast: Any) -> float:
    """Time of a training pass over a batch, the best of a few, inf without memory; all stays as it was."""
    devices = [torch.device(device)] if device.startswith("cuda") else []
    best, was_training = math.inf, model.training
    forward.prepare(model)
    model.train()
    try:
        with torch.random.fork_rng(devices=devices):
            for _ in range(NUM_TRIALS):
                started = time.perf_counter()
                for batch in sample:
                    with autocast():
                        loss = forward.nats(model, batch, device=device)[0].sum()
                    loss.backward()
                    loss.item()
                best = min(best, time.perf_counter() - started)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return math.inf
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return best / len(sample)
