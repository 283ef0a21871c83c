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

from fivetune.data.batch import halves, pad
from fivetune.errors import ConfigError
from fivetune.model.attention import kernel_obstacle
from fivetune.model.dispatch import use_fused
from fivetune.model.flat import flat_nats, supports_flat
from fivetune.model.forward import label_nats
from fivetune.model.memory import is_out_of_memory
from fivetune.model.precision import product_dtype
from fivetune.types import Batch, Mark, unmarked

Kind = Literal["flat", "padded", "buckets"]
Parts = Literal["torch", "triton"]
STATIC_DEVICES = ("mps", "xla")  # devices that compile every new shape
NUM_TRIALS = 3
NUM_COMPARED = 4  # examples
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.1}
"""How far own kernels may be from transformers' gradients, of each norm: rounding is far below, mistakes far above."""


@dataclass(frozen=True, slots=True)
class Forward:
    """How nats are computed.

    Args:
        kind: flat computes real tokens only; padded a rectangle as large as the longest example; buckets a rectangle
            with one of a few fixed sizes, for devices that compile every new shape.
        why: a sentence for the log and machine.json.
        recompute: keep only the inputs of every block, and compute it again in the backward pass.
        parts: what computes norms, dropout and activations of flat tokens.
    """

    kind: Kind
    why: str
    recompute: bool = False
    parts: Parts = "torch"

    def __str__(self) -> str:
        return f"{self.kind} ({self.parts} norms and activations)" if self.kind == "flat" else self.kind

    def nats(self, model: Any, batch: Batch, *, device: str, mark: Mark = unmarked) -> tuple[Tensor, int]:
        """-log p of every scored label, 0 elsewhere, in the shape that the kind has; and the positions computed.

        Args:
            mark: told what begins: host, copy, forward.
        """
        if self.kind == "flat":
            nats = flat_nats(model, batch, recompute=self.recompute, mark=mark)
            return nats, batch.num_input_tokens + batch.num_target_tokens
        sizes = SIZES if self.kind == "buckets" else None
        mark("host")
        padded = pad(batch, pad_id=model.config.pad_token_id, sizes=sizes)
        if device != "cpu":
            mark("copy")
            padded = padded.to(device)
        mark("forward")
        return label_nats(model, padded), padded.num_positions

    def prepare(self, model: Any) -> None:
        """Switch on, or off, what the model and the layers themselves have to do."""
        use_fused(self.parts == "triton")
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
    autocast: Any, recompute: bool = False, begun: Forward | None = None,
) -> Forward:  # fmt: skip
    """The forward of a run: as it began or as asked for, else what the device is known or measured to do best.

    Args:
        asked: auto, flat, padded or buckets.
        sample: batches to measure on, where the device has to be measured.
        begun: what a resumed run began with; another one would round otherwise.

    Raises ConfigError where that cannot run.
    """
    obstacle = supports_flat(model) or _device_obstacle(model, device, autocast)
    wanted, kind = begun.kind if begun else asked, device.partition(":")[0]
    if wanted == "flat" and obstacle and asked == "flat":
        raise ConfigError(f"train.forward: flat cannot run this model: {obstacle}. Use auto or padded.")
    if wanted == "flat" and obstacle:
        return Forward("padded", f"the run began with flat tokens, which cannot run now: {obstacle}", recompute)
    if kind == "cuda" and not obstacle and wanted in ("auto", "flat"):
        parts = (begun.parts,) if begun else ("triton", "torch")
        ours = [Forward("flat", "", recompute, part) for part in parts]
        found = fastest(ours, Forward("padded", "", recompute), model, device, sample, autocast, wanted=wanted)
        if asked == "flat" and found.kind != "flat":
            raise ConfigError(f"train.forward: flat does not run here: {found.why}. Use auto or padded.")
        return found
    if wanted != "auto":
        return Forward(wanted, "as the run began" if begun else "asked for", recompute)  # type: ignore[arg-type]
    if kind in STATIC_DEVICES:
        return Forward("buckets", f"{kind} compiles every new shape", recompute)
    if obstacle:
        return Forward("padded", f"flat tokens cannot run: {obstacle}", recompute)
    return Forward("flat", "nothing is padded", recompute)


def fastest(
    ours: Sequence[Forward], theirs: Forward, model: Any, device: str, sample: Sequence[Batch], autocast: Any, *,
    wanted: str,
) -> Forward:  # fmt: skip
    """The fastest forward that runs here and gives the gradient of `theirs`; what became of each stands in `why`.

    Args:
        ours: forwards with own kernels. theirs: transformers' own.
        wanted: flat leaves `theirs` only where none of `ours` can be used.
    """
    results = {forward: _tried(forward, theirs, model, device, sample, autocast) for forward in (*ours, theirs)}
    said = "; ".join(f"{forward} {_said(result)}" for forward, result in results.items())
    usable = [f for f in ours if isinstance(results[f], float)]
    if wanted != "flat" and isinstance(results[theirs], float):
        usable.append(theirs)
    best = min(usable, key=lambda forward: float(results[forward]), default=theirs)
    return replace(best, why=f"measured: {said}")


def _said(result: float | str) -> str:
    if isinstance(result, str):
        return f"is not used: {result}"
    return "has no memory" if result == math.inf else f"{1000 * result:.1f} ms a batch"


def _tried(
    forward: Forward, theirs: Forward, model: Any, device: str, sample: Sequence[Batch], autocast: Any
) -> float | str:
    """Seconds of a batch, or why a forward must not be used."""
    try:
        if forward != theirs and (reason := _disagreement(forward, theirs, model, device, sample[0], autocast)):
            return reason
        return _seconds(forward, model, device, sample, autocast)
    except Exception as error:  # a kernel that does not compile or does not run on this device
        return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _disagreement(
    forward: Forward, theirs: Forward, model: Any, device: str, batch: Batch, autocast: Any
) -> str:  # fmt: skip
    """Where two forwards give different losses or gradients of a few examples, without dropout; empty if nowhere."""
    while len(batch.ids) > NUM_COMPARED:
        batch = halves(batch)[0]
    ours, reference = (_norms(each, model, device, batch, autocast) for each in (forward, theirs))
    with autocast():
        tolerance = TOLERANCES[product_dtype(torch.device(device))]
    least = tolerance * 1e-3 * reference["all gradients"]  # of weights that hardly matter
    for name, value in reference.items():
        if not abs(ours[name] - value) <= tolerance * value + least:
            return f"{name}: {ours[name]:.6g} instead of {value:.6g}"
    return ""


def _norms(forward: Forward, model: Any, device: str, batch: Batch, autocast: Any) -> dict[str, float]:
    """The loss in nats, and the norm of each gradient and of all together; all stays as it was."""
    was_training = model.training
    forward.prepare(model)
    model.eval()
    try:
        with autocast():
            loss = forward.nats(model, batch, device=device)[0].sum()
        loss.backward()
        norms = {n: p.grad.float().norm().item() for n, p in model.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return {"the loss": loss.item(), **norms, "all gradients": math.hypot(*norms.values())}


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
