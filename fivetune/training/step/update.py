"""One optimizer step: updates the weights with a group of micro-batches, or raises before any weight changes.

In: a Learner and the step's micro-batches. Out: an Update. The result does not depend on how the group is split, on
how many processes share it, or on whether the host waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fivetune.data.store.batch import pad, split_batch
from fivetune.distributed.pipeline import find_stage
from fivetune.errors import NumericError, is_out_of_memory
from fivetune.model.flat import compute_flat_losses, find_nonfinite_block
from fivetune.model.forward import compute_padded_losses, find_nonfinite_module
from fivetune.training.state.snapshot import get_random_states, set_random_states
from fivetune.training.step.learner import Learner, set_lr
from fivetune.training.strategies import build_minimal_batch
from fivetune.types import Batch, PhaseTimer, ignore_phase

MIN_LOSS_SCALE = 1.0  # at which the gradients in fp16 are those of the loss; torch begins with 65,536 and halves it


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer step.

    Args:
        values: [3] fp32 on the host: mean loss per token (nats), gradient norm before clipping, positions computed.
            If the host did not wait for the step, they are valid once the device has finished it.
        batch_size: examples per forward pass; less than requested if memory ran out.
        signum: signal that a rank received until its gradients were summed; 0 if none. Equal on all ranks.
    """

    values: Tensor
    batch_size: int
    signum: int = 0

    @property
    def loss(self) -> float:
        return self.values[0].item()

    @property
    def grad_norm(self) -> float:
        return self.values[1].item()

    @property
    def num_positions(self) -> int:
        return int(self.values[2])


def make_nonfinite_flag(learner: Learner) -> Tensor | None:
    """[] fp32 on the device, set to 1 at the first non-finite step; from then on no update is applied.

    None if each step is checked on the host before it changes the weights: on a CPU, where reading a value is free;
    with loss scaling, where an overflow is not an error; with optimizers that do not support `found_inf`, the tensor
    by which torch's fused optimizers skip a step; and with sharded models, for which they do not support it either.
    """
    device = learner.compute.device  # cpu with TPU chips, whose steps check themselves
    able = getattr(learner.optimizer, "_step_supports_amp_scaling", False) and not learner.strategy.sharded
    waits = not device.startswith("cuda") or learner.scaler.is_enabled()
    return torch.zeros((), device=device) if able and not waits else None


def train_step(
    learner: Learner,
    group: list[Batch],
    *,
    lr: float | None,
    step: int,
    batch_size: int | None = None,
    num_scored_tokens: int | None = None,
    timer: PhaseTimer = ignore_phase,
    nonfinite_flag: Tensor | None = None,
    get_signum: Callable[[], int] = lambda: 0,
) -> Update:
    """Run one optimizer step over the micro-batches of this rank's group and of the other ranks' groups.

    loss = sum of the losses of all scored tokens / number of scored tokens of all ranks: any split of the group gives
    the same gradient (a mean of means does not). If memory runs out, micro-batches are halved and the step is retried.

    Args:
        batch_size: most examples per forward pass; default: those of the group's largest batch.
        num_scored_tokens: on all ranks; default: world.data_size times the target tokens of this group.
        nonfinite_flag: lets the host run ahead of the device; the reader of the values must call `refuse_nonfinite`.
            Without it a NumericError is raised before the weights change.
        get_signum: returns the signal that this rank has received, 0 if none.
    """
    model, strategy, world = learner.model, learner.strategy, learner.world
    batch_size = batch_size or max(len(batch.ids) for batch in group)
    num_scored_tokens = num_scored_tokens or world.data_size * sum(batch.num_target_tokens for batch in group)
    if learner.chips is not None:
        return Update(_run_on_chips(learner, group, step, lr, batch_size, num_scored_tokens), batch_size, get_signum())

    accumulate = partial(_accumulate_gradients, learner, num_scored_tokens=num_scored_tokens, timer=timer)
    sums, batch_size, signum = _run_with_oom_retry(
        learner, group, batch_size, accumulate, timer=timer, get_signum=get_signum
    )
    timer("optimizer")
    learner.scaler.unscale_(learner.optimizer)  # before clipping: max_grad_norm bounds the true gradient
    if clip_and_step := getattr(learner.optimizer, "clip_and_step", None):
        set_lr(learner.optimizer, lr)
        values = torch.stack([sums[0], clip_and_step(sums[0], nonfinite_flag), sums[1]])
        values = _check_values(learner, group, step, values, nonfinite_flag)
    else:
        norm = strategy.clip(model, learner.max_grad_norm)
        values = torch.stack([sums[0], norm, sums[1]])
        values = _check_values(learner, group, step, values, nonfinite_flag)
        _apply_gradients(learner, lr, nonfinite_flag)
    timer("host")
    return Update(values, batch_size, signum)


def _accumulate_gradients(
    learner: Learner, micro_batches: list[Batch], *, num_scored_tokens: int, timer: PhaseTimer
) -> Tensor:
    """Add the gradients of micro-batches to the parameters. Returns: [2], sums of loss and of computed positions."""
    if learner.graphs is not None:
        timer("forward")  # one launch contains all phases
        return learner.graphs.accumulate_gradients(micro_batches, num_scored_tokens=num_scored_tokens)
    model, compute = learner.model.train(), learner.compute
    positions = torch.zeros((), device=compute.device)

    def compute_loss(batch: Batch) -> Tensor:
        timer("host")
        with compute.make_autocast():
            losses, num_positions = learner.forward.compute_losses(model, batch, device=compute.device, timer=timer)
            positions.add_(num_positions)
            weight = 0 if batch.is_filler else 1  # another rank trains on a filler's example
            return weight * losses.sum() / num_scored_tokens

    def backward(loss: Tensor) -> None:
        timer("backward")
        learner.scaler.scale(loss).backward()

    total = learner.strategy.accumulate_gradients(
        model, learner.world, micro_batches, compute_loss, backward, learner.forward.count_rows, timer
    )
    return torch.stack([total, positions])


def _check_values(
    learner: Learner, group: list[Batch], step: int, values: Tensor, nonfinite_flag: Tensor | None
) -> Tensor:
    """Raise NumericError for a non-finite step, or set the flag without waiting. Returns: the values, on the host."""
    if nonfinite_flag is None:
        values = values.cpu()
        refuse_nonfinite(learner, group, step, *values[:2].tolist())
        return values
    nonfinite_flag.logical_or_(~values.isfinite().all())
    return values.to("cpu", non_blocking=True)


def _apply_gradients(learner: Learner, lr: float | None, nonfinite_flag: Tensor | None) -> None:
    """Update the weights; with a flag, only if all steps so far are finite."""
    optimizer, scaler = learner.optimizer, learner.scaler
    if nonfinite_flag is not None:
        optimizer.found_inf = nonfinite_flag  # type: ignore[attr-defined]
    set_lr(optimizer, lr)
    scaler.step(optimizer)
    scaler.update()
    _clear_gradients(learner)


def _clear_gradients(learner: Learner) -> None:
    """Clear the gradients; those that graphs write to stay where they are."""
    if learner.graphs is not None:
        learner.graphs.clear_gradients()
    else:
        learner.optimizer.zero_grad(set_to_none=True)


def refuse_nonfinite(learner: Learner, group: list[Batch], step: int, loss: float, norm: float) -> None:
    """Raise NumericError unless loss and norm are finite.

    With loss scaling an overflow of the norm is no error, as long as a smaller scale can help: one at MIN_LOSS_SCALE
    would be skipped for ever.
    """
    fp16_overflow = learner.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(norm)
    fp16_overflow = fp16_overflow and learner.scaler.get_scale() > MIN_LOSS_SCALE
    if not (math.isfinite(loss) and (math.isfinite(norm) or fp16_overflow)):
        learner.fetch()
        raise NumericError(_explain_nonfinite(learner, group, step, loss, norm), step=step)


def _run_on_chips(
    learner: Learner, group: list[Batch], step: int, lr: float | None, batch_size: int, num_scored_tokens: int
) -> Tensor:
    """Run the step on TPU chips; returns `Update.values`. One program has all phases: its time counts as the host's."""
    assert learner.chips is not None
    set_lr(learner.optimizer, lr)
    values = learner.chips.update(group, learner.optimizer, batch_size=batch_size, num_scored_tokens=num_scored_tokens)
    refuse_nonfinite(learner, group, step, *values[:2].tolist())
    return values


def _run_with_oom_retry(
    learner: Learner,
    group: list[Batch],
    batch_size: int,
    run: Callable[[list[Batch]], Tensor],
    *,
    timer: PhaseTimer,
    get_signum: Callable[[], int],
) -> tuple[Tensor, int, int]:
    """Run `run` on the group in micro-batches of `batch_size`, and sum over the ranks; on OOM halve that and retry.

    `run` must change nothing but gradients. Gradients and random states are reset before a retry, so that the result
    equals that of the smaller size from the start. Returns: the summed result, the batch size, and a signal or 0.
    """
    before = get_random_states()
    while True:
        while any(len(batch.ids) > batch_size for batch in group):
            group = [half for batch in group for half in _split_if_larger(batch, batch_size)]
        if learner.strategy.sharded and learner.world.data_size > 1:  # all ranks run the same number of passes
            missing = learner.world.all_reduce_max(len(group)) - len(group)
            group = [*group, *[build_minimal_batch(group[0])] * missing]
        result, failed, too_many = None, None, 0
        try:
            result = run(group)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed, too_many = error.with_traceback(None), max(len(batch.ids) for batch in group)
            _clear_gradients(learner)  # makes room for sending zeros
        result, too_many, signum = _sum_over_ranks(learner, result, too_many, get_signum(), timer)
        if not too_many:
            return result, batch_size, signum
        if too_many == 1:
            raise failed or MemoryError("another rank ran out of memory with one example.")
        batch_size = -(-too_many // 2)
        _clear_gradients(learner)
        set_random_states(before)


def _sum_over_ranks(
    learner: Learner, sums: Tensor | None, too_many: int, signum: int, timer: PhaseTimer
) -> tuple[Tensor, int, int]:
    """Sum the gradients and `sums` over the ranks, and agree on what stops the step or the run.

    Args:
        sums: [2]; None if this rank ran out of memory.
        too_many: examples of this rank's batch that did; 0 if none.
        signum: signal that this rank received; 0 if none.

    Returns: the sums, and the largest `too_many` and `signum` of all ranks.
    """
    world, device = learner.world, learner.compute.device
    sums = torch.zeros(2, device=device) if sums is None else sums
    if world.size == 1:
        return sums, too_many, signum
    if not learner.strategy.sharded:  # sharded gradients are reduced in the backward pass
        timer("exchange")
    learner.strategy.reduce_gradients(learner.model, world)
    if world.model_rank:  # the first rank of each copy of the model has computed the same
        sums = torch.zeros_like(sums)
    if device != "cpu":  # the flags take the way over the hosts, which do not wait for the device
        world.all_reduce_sum(sums)
        too_many, signum = world.all_reduce_maxima([too_many, signum])
        return sums, too_many, signum
    message = torch.zeros(2 + 2 * world.size)
    message[:2] = sums
    message[2 + 2 * world.rank :][:2] = torch.tensor([too_many, signum])
    world.all_reduce_sum(message)
    flags = message[2:].view(world.size, 2).amax(0).tolist()
    return message[:2], int(flags[0]), int(flags[1])


def _split_if_larger(batch: Batch, size: int) -> tuple[Batch, ...]:
    return split_batch(batch) if len(batch.ids) > size else (batch,)


def _explain_nonfinite(learner: Learner, group: list[Batch], step: int, loss: float, norm: float) -> str:
    """Name the micro-batch and the module of the first non-finite value."""
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    ids, place = _find_first_nonfinite(learner, group) or (group[0].ids, "the backward pass")
    listed = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    change = "a lower optimizer.lr or with schedule.warmup_steps"
    if learner.compute.precision == "fp16":
        change = "train.precision bf16 or fp32 (T5 overflows in fp16)"
    return (
        f"step {step}: {what}, first in {place}; examples {listed}. The weights were not changed. Look at "
        f"these examples, and start a new run (another run.dir) with {change}: --resume would repeat this step."
    )


def _find_first_nonfinite(learner: Learner, group: list[Batch]) -> tuple[tuple[str, ...], str] | None:
    """The examples and the module of the first non-finite value of a forward pass; None if all are finite.

    Collective: all ranks run the same number of passes, because sharded weights are gathered in each.
    """
    model = learner.model.eval()
    for batch in group:
        if find_stage(model):
            with torch.no_grad(), learner.compute.make_autocast():
                place = find_nonfinite_block(model, partial(compute_flat_losses, model, batch))
            found = (batch.ids, place) if place else None
            if first := next(filter(None, learner.world.gather(found)), None):  # of the first stage that has one
                return first
            continue
        padded = pad(batch, pad_id=model.config.pad_token_id).to(learner.compute.device)
        with torch.no_grad(), learner.compute.make_autocast():
            broken = not compute_padded_losses(model, padded).isfinite().all()
            if any(learner.world.gather(broken)):
                found = (batch.ids, find_nonfinite_module(model, padded)) if broken else None
                return next(filter(None, learner.world.gather(found)))
    return None
