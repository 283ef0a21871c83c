"""The gradients of a step: summed over its micro-batches and over the ranks, in smaller parts if memory runs out.

In: the micro-batches of all ranks. Out: gradients in the parameters, and their sums. A retry gives the same gradients
as the smaller size from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fivetune.data.store.batch import split_batch
from fivetune.errors import is_out_of_memory
from fivetune.training.state.snapshot import get_random_states, set_random_states
from fivetune.training.step.learner import GradientEngine, Learner, StepInputs
from fivetune.training.strategies import build_minimal_batch
from fivetune.types import Batch


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the ranks have summed.

    Args:
        loss: [] fp32 on the device, mean loss per token (nats).
        positions: [] fp32 on the device, positions computed.
        batch_size: examples per forward pass with which memory sufficed.
        signum: signal that a rank has received; 0 if none.
    """

    loss: Tensor
    positions: Tensor
    batch_size: int
    signum: int


def accumulate_over_ranks(engine: GradientEngine, learner: Learner, inputs: StepInputs) -> StepSums:
    """Accumulate the gradients of the micro-batches and sum them over the ranks, in halves while memory runs out.

    Gradients and random states are reset before a retry. The ranks retry together, with the size of the smallest.
    """
    batches = inputs.batches
    batch_size = inputs.batch_size
    before = get_random_states()  # a retry draws the dropout masks of a first attempt
    while True:
        batches = _split_batches(batches, batch_size)
        # Each pass of a sharded model gathers weights from all ranks, which therefore run the same number of passes.
        if learner.strategy.sharded and learner.world.data_size > 1:
            missing = learner.world.all_reduce_max(len(batches)) - len(batches)
            batches = batches + [build_minimal_batch(batches[0])] * missing

        sums = None
        failed = None
        too_many = 0
        try:
            sums = engine.accumulate(learner, batches, inputs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = error.with_traceback(None)  # whose frames hold activations
            too_many = max(len(batch.ids) for batch in batches)
            engine.clear_gradients(learner)  # makes room for sending zeros

        # A rank that failed takes part too: the others wait for it, and learn that it failed.
        sums, too_many, signum = _sum_over_ranks(learner, inputs, sums, too_many)
        if not too_many:
            return StepSums(sums[0], sums[1], batch_size, signum)
        if too_many == 1:
            raise failed or MemoryError("another rank ran out of memory with one example.")

        # Half of the size that failed, rounded up.
        batch_size = -(-too_many // 2)
        engine.clear_gradients(learner)
        set_random_states(before)


def _split_batches(batches: list[Batch], size: int) -> list[Batch]:
    """Halve micro-batches until none has more than `size` examples."""
    while any(len(batch.ids) > size for batch in batches):
        halved: list[Batch] = []
        for batch in batches:
            halved.extend(split_batch(batch) if len(batch.ids) > size else (batch,))
        batches = halved
    return batches


def _sum_over_ranks(
    learner: Learner, inputs: StepInputs, sums: Tensor | None, too_many: int
) -> tuple[Tensor, int, int]:
    """Sum the gradients and `sums` over the ranks, and agree on what stops the step or the run.

    Args:
        sums: [2]; None if this rank ran out of memory.
        too_many: examples of this rank's batch that did; 0 if none.

    Returns: the sums, and the largest `too_many` and signal of all ranks.
    """
    world = learner.world
    device = learner.compute.device
    signum = inputs.get_signum()
    if sums is None:
        sums = torch.zeros(2, device=device)
    if world.size == 1:
        return sums, too_many, signum
    if not learner.strategy.sharded:  # sharded gradients are reduced in the backward pass
        inputs.timer("exchange")
    learner.strategy.reduce_gradients(learner.model, world)
    # The ranks that share a copy of the model have computed the same loss: only the first of them counts it.
    if world.model_rank:
        sums = torch.zeros_like(sums)
    # On accelerators the flags take the way over the hosts, which do not wait for the device.
    if device != "cpu":
        world.all_reduce_sum(sums)
        too_many, signum = world.all_reduce_maxima([too_many, signum])
        return sums, too_many, signum
    # On CPUs one message carries all: the sums, and two flags in the place of each rank.
    message = torch.zeros(2 + 2 * world.size)
    message[:2] = sums
    message[2 + 2 * world.rank :][:2] = torch.tensor([too_many, signum])
    world.all_reduce_sum(message)
    flags = message[2:].view(world.size, 2).amax(0).tolist()
    return message[:2], int(flags[0]), int(flags[1])
