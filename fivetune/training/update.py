"""One optimizer step: from a group of micro-batches to new weights, or to an error before any weight has changed.

In: a Setup and the step's micro-batches. Out: an Update. What is computed does not depend on how the group was cut, on
how many processes share it, or on whether the host waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivetune.data.batch import halves, pad
from fivetune.errors import NumericError
from fivetune.model.forward import first_bad_module, label_nats
from fivetune.model.memory import is_out_of_memory
from fivetune.training import checkpoint
from fivetune.training.setup import Setup
from fivetune.types import Batch, Mark, unmarked


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did.

    Args:
        values: [3] fp32 on the host: mean nats per token, gradient norm before clipping, positions computed. Where the
            host did not wait for the step, they are there once the device has done it.
    """

    values: Tensor

    @property
    def loss(self) -> float:
        return self.values[0].item()

    @property
    def grad_norm(self) -> float:
        return self.values[1].item()

    @property
    def num_positions(self) -> int:
        return int(self.values[2])


def halting(setup: Setup) -> Tensor | None:
    """The flag `Training.halted`, where the device itself can leave the weights alone; None where it cannot.

    An optimizer that can is one with `found_inf`, as torch's fused ones are for loss scaling; over a divided model they
    do not take it. On a CPU, looking at a value costs nothing, and with loss scaling an overflow is no error.
    """
    able = getattr(setup.optimizer, "_step_supports_amp_scaling", False) and not setup.config.strategy.sharded
    if setup.graphed is not None:
        return setup.graphed.halted
    waits = not setup.place.device.startswith("cuda") or setup.scaler.is_enabled()
    return torch.zeros((), device=setup.place.device) if able and not waits else None


def update_weights(
    setup: Setup, group: list[Batch], *,
    lr: float | None, step: int, scored: int | None = None, mark: Mark = unmarked, halted: Tensor | None = None,
) -> Update:  # fmt: skip
    """One optimizer step over the micro-batches of a group, and of those that the other processes have.

    loss = sum of nats of all scored tokens / number of scored tokens of the whole group, so that any way of
    cutting the group into micro-batches, and among processes, gives the same gradient (the mean of means does not).
    Where memory runs out on the way to the gradient, `setup.batch_size` is halved and the step begins again.

    Args:
        scored: tokens in the micro-batches of all processes; if None, each process has the same group.
        mark: told which phase begins.
        halted: see Training; with it the host does not wait for the device, and who reads the values has to look
            whether they are finite.

    Raises NumericError before the weights are touched, unless `halted` is given.
    """
    strategy, world = setup.config.strategy, setup.world
    scored = scored or world.size * sum(batch.num_target_tokens for batch in group)
    if setup.graphed is not None:
        return _replayed(setup, group, lr, mark)
    sums = _fitting(setup, group, lambda parts: _gradients(setup, parts, scored, mark))
    if world.size > 1:
        if not strategy.sharded:  # else it is a part of forward and backward
            mark("exchange")
        strategy.exchange(setup.model, world)
        world.add_up(sums)
    mark("optimizer")
    setup.scaler.unscale_(setup.optimizer)
    norm = strategy.clip(setup.model, setup.config.train.max_grad_norm)
    values = torch.stack([sums[0], norm, sums[1]])
    if halted is None:
        values = values.cpu()
        refuse_not_finite(setup, group, step, *values[:2].tolist())
    else:
        setup.optimizer.found_inf = halted.logical_or_(~values.isfinite().all())  # type: ignore[attr-defined]
        values = values.to("cpu", non_blocking=True)
    if lr is not None:
        for param_group in setup.optimizer.param_groups:
            param_group["lr"] = lr
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    setup.optimizer.zero_grad(set_to_none=True)
    mark("host")
    return Update(values)


def refuse_not_finite(setup: Setup, group: list[Batch], step: int, loss: float, norm: float) -> None:
    """Raise NumericError unless both values are finite; a norm that loss scaling made too large is none of its."""
    fp16_overflow = setup.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(norm)
    if not (math.isfinite(loss) and (math.isfinite(norm) or fp16_overflow)):
        raise NumericError(_explain_not_finite(setup, group, step, loss, norm))


def _replayed(setup: Setup, group: list[Batch], lr: float | None, mark: Mark) -> Update:
    """The step by graphs. One launch holds all its phases: it is counted as forward."""
    assert lr is not None
    for param_group in setup.optimizer.param_groups:
        param_group["lr"] = lr
    mark("forward")
    values = _fitting(setup, group, lambda parts: setup.graphed.update(parts, lr=lr))
    mark("host")
    return Update(values)


def _fitting(setup: Setup, group: list[Batch], run: Callable[[list[Batch]], Tensor]) -> Tensor:
    """What `run` gives for a group, cut to `setup.batch_size`, which is halved until memory is enough everywhere.

    `run` is begun again with other parts, so it has changed nothing but gradients when memory runs out.
    """
    before = checkpoint.random_states()
    if setup.config.strategy.sharded and setup.world.size > 1:  # the others wait inside of theirs
        return run(group)
    while True:
        while any(len(batch.ids) > setup.batch_size for batch in group):
            group = [half for batch in group for half in _cut(batch, setup.batch_size)]
        sums, failed, too_many = None, None, 0
        try:
            sums = run(group)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed, too_many = error, max(len(batch.ids) for batch in group)
        too_many = setup.world.largest(too_many)
        if sums is not None and not too_many:
            return sums
        if too_many == 1:
            raise failed or MemoryError("another process has no room for one example.")
        setup.batch_size = -(-too_many // 2)
        setup.optimizer.zero_grad(set_to_none=True)
        if setup.graphed is not None:
            setup.graphed.forget()
        checkpoint.set_random_states(before)


def _cut(batch: Batch, size: int) -> tuple[Batch, ...]:
    return halves(batch) if len(batch.ids) > size else (batch,)


def _gradients(setup: Setup, group: list[Batch], scored: int, mark: Mark) -> Tensor:
    """Leave the gradient of this process's part of the loss in the parameters; [that part, positions computed]."""
    setup.model.train()
    sums = torch.zeros(2, device=setup.place.device)
    for batch in group:
        mark("host")
        with setup.place.autocast():
            each, positions = setup.forward.nats(setup.model, batch, device=setup.place.device, mark=mark)
            loss = each.sum() / scored
            if batch.is_lent:
                loss = 0 * loss
        mark("backward")
        setup.scaler.scale(loss).backward()
        sums[0] += loss.detach()
        sums[1] += positions
    return sums


def _explain_not_finite(setup: Setup, group: list[Batch], step: int, loss: float, norm: float) -> str:
    """Find the micro-batch and the module where the first value that is not finite comes from."""
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    with setup.whole() as plain:
        found = setup.world.gather(_first_not_finite(setup, plain, group))
    ids, place = next(filter(None, found), (group[0].ids, "the backward pass"))
    shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    advice = "T5 overflows in fp16: use train.precision bf16 or fp32." if setup.place.precision == "fp16" else (
        "Lower optimizer.lr or add schedule.warmup_steps; look at these examples.")  # fmt: skip
    return f"step {step}: {what}, first in {place}; examples {shown}. The weights were not touched. {advice}"


def _first_not_finite(setup: Setup, plain: Any, group: list[Batch]) -> tuple[tuple[str, ...], str] | None:
    """The examples and the module where the forward pass stops being finite; None where it does not."""
    plain.eval()
    for batch in group:
        padded = pad(batch, pad_id=plain.config.pad_token_id).to(setup.place.device)
        with torch.no_grad(), setup.place.autocast():
            if not label_nats(plain, padded).isfinite().all():
                return batch.ids, first_bad_module(plain, padded)
    return None
