"""Seconds of an optimizer step of one rank: operations, communication, waiting, and the optimizer's memory traffic.

In: a Workload, a Layout, a Machine. Out: a StepTime. Operations follow from `fivetune/model/flops.py` and an assumed
share of the device's peak. Communication that overlaps with computation counts only as far as it exceeds it:

    ddp            one all-reduce of all gradients (fp32), behind the backward pass of the last micro-batch
    fsdp           per micro-batch two all-gathers of the blocks' weights, one of the others; per step (with
                   reduce_once false per micro-batch) one reduce-scatter (fp32), with replicas an all-reduce of the
                   shards; behind the computation
    tensor         per encoder block two all-reduces of activations and two of gradients, per decoder block three and
                   four: nothing overlaps
    pipeline       per micro-batch and border the activations and their gradients, after the last micro-batch one
                   all-reduce of all gradients between copies: nothing overlaps; a stage waits for (p - 1) / m of its
                   computation (the bubble), and the slowest stage determines the rest

A rank's weights are those it holds: under tensor embeddings, norms and head whole, under pipeline those of its stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fivetune.distributed.pipeline import divide_costs
from fivetune.fleet.estimation.communication import (
    Fabric,
    compute_all_gather_seconds,
    compute_all_reduce_seconds,
    compute_send_seconds,
    make_group,
)
from fivetune.fleet.estimation.memory import list_stages
from fivetune.fleet.estimation.workload import BUCKET_BYTES, FP32, Layout, Workload

BACKWARD_SHARE = 2 / 3  # of the operations of a step


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and their connections.

    Args:
        memory_bytes: of a device.
        flops: operations per second that a device is assumed to achieve; None if unknown.
        bandwidth: of its memory, bytes per second.
    """

    memory_bytes: float
    flops: float | None
    bandwidth: float
    fabric: Fabric

    def can_fill_nodes(self, num_devices: int) -> bool:
        """Whether so many devices are part of one node, or whole nodes."""
        return num_devices <= self.fabric.devices_per_node or not num_devices % self.fabric.devices_per_node


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step by cause.

    Args:
        compute: matrix products, recomputed ones included. bubble: waiting for other stages.
        hidden: communication behind computation, which takes no time. exposed: the rest of it.
    """

    compute: float
    bubble: float
    hidden: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.exposed + self.optimizer


def estimate_step_time(work: Workload, layout: Layout, machine: Machine) -> StepTime | None:
    """Estimate the time of a step; None if the device's operations per second are unknown."""
    if machine.flops is None:
        return None
    num_micro_batches = layout.count_micro_batches(work)
    compute = _count_rank_flops(work, layout) / machine.flops
    bubble = compute * (layout.stages - 1) / num_micro_batches
    blocking = _compute_tensor_seconds(work, layout, machine) + _compute_pipeline_seconds(work, layout, machine)
    behind = _compute_reduction_seconds(work, layout, machine)
    window = compute * BACKWARD_SHARE / num_micro_batches if layout.stages == 1 else 0.0
    gathers = _compute_gather_seconds(work, layout, machine)
    if layout.shards > 1:
        behind, window = behind + gathers, compute
    exposed = max(0.0, behind - window)
    weights = _count_rank_weights(work, layout) / layout.shards
    traffic = weights * (3 * FP32 + 2 * work.state_bytes)  # weights are read and written, gradients read
    optimizer = traffic / machine.bandwidth
    if work.gathers_state and layout.shards > 1:  # each rank computes whole updates from gathered weights and gradients
        group = make_group(layout.shards, machine.fabric, stride=layout.heads)
        optimizer = optimizer * layout.shards
        blocking += compute_all_gather_seconds(2 * FP32 * weights * layout.shards, group, machine.fabric)
    return StepTime(compute, bubble, behind - exposed, blocking + exposed, optimizer)


def _count_rank_flops(work: Workload, layout: Layout) -> float:
    """Operations of the slowest rank in a step. Under tensor parallelism every rank computes the whole head."""
    examples = work.examples_per_step // layout.copies
    total, head = work.count_flops(examples), work.count_head_flops(examples)
    if layout.stages > 1:
        costs = work.list_block_flops()
        total *= max(sum(costs[part.start : part.stop]) for part in divide_costs(costs, layout.stages)) / sum(costs)
    else:
        total = head + (total - head) / layout.heads
    return total * (4 / 3 if work.recompute else 1)


def _count_rank_weights(work: Workload, layout: Layout) -> int:
    """Weights of the rank that has most, before they are sharded."""
    return max(sum(part.num_weights for part in parts) for parts in list_stages(work, layout))


def _compute_reduction_seconds(work: Workload, layout: Layout, machine: Machine) -> float:
    """Sums of gradients over the copies of the model, in a step."""
    if layout.copies == 1:
        return 0.0
    num_bytes = FP32 * _count_rank_weights(work, layout)
    stride = layout.heads * layout.stages
    shards = make_group(layout.shards, machine.fabric, stride=stride)
    replicas = make_group(layout.replicas, machine.fabric, stride=stride * layout.shards)
    groups = _count_blocks(work) + 1 if layout.shards > 1 else ceil(num_bytes / BUCKET_BYTES)
    num_reductions = 1 if layout.reduce_once or layout.shards == 1 else layout.count_micro_batches(work)
    return num_reductions * (
        compute_all_gather_seconds(num_bytes, shards, machine.fabric, num_calls=groups)
        + compute_all_reduce_seconds(num_bytes / layout.shards, replicas, machine.fabric, num_calls=groups)
    )


def _compute_gather_seconds(work: Workload, layout: Layout, machine: Machine) -> float:
    """All-gathers of weights that are sharded, in a step."""
    if layout.shards == 1:
        return 0.0
    (parts,) = list_stages(work, layout)
    blocks = sum(part.num_weights for part in parts if part.is_block)
    root = sum(part.num_weights for part in parts) - blocks
    group = make_group(layout.shards, machine.fabric, stride=layout.heads)
    num_bytes, num_calls = work.matmul_bytes * (root + 2 * blocks), 1 + 2 * _count_blocks(work)
    seconds = compute_all_gather_seconds(num_bytes, group, machine.fabric, num_calls=num_calls)
    return layout.count_micro_batches(work) * seconds


def _count_blocks(work: Workload) -> int:
    return work.shape.num_layers + work.shape.num_decoder_layers


def _compute_tensor_seconds(work: Workload, layout: Layout, machine: Machine) -> float:
    """All-reduces of activations and of their gradients inside a group that shares heads, in a step."""
    if layout.heads == 1:
        return 0.0
    shape, group = work.shape, make_group(layout.heads, machine.fabric)
    examples = work.passes * work.examples_per_step / layout.copies / layout.count_micro_batches(work)  # a micro-batch
    inputs, targets = (FP32 * shape.d_model * examples * n for n in (work.num_inputs, work.num_targets))
    forwards = 2 if work.recompute else 1
    in_16_bits = work.matmul_bytes / FP32  # of sums in the forward pass

    def reduce(num_bytes: float) -> float:
        return compute_all_reduce_seconds(num_bytes, group, machine.fabric)

    encoder = shape.num_layers * (2 * forwards * reduce(in_16_bits * inputs) + 2 * reduce(inputs))
    decoder = shape.num_decoder_layers * (
        3 * forwards * reduce(in_16_bits * targets) + 3 * reduce(targets) + reduce(inputs)
    )
    return layout.count_micro_batches(work) * (encoder + decoder)


def _compute_pipeline_seconds(work: Workload, layout: Layout, machine: Machine) -> float:
    """Activations and gradients that pass the busiest border between two stages, in a step."""
    if layout.stages == 1:
        return 0.0
    examples = work.passes * work.examples_per_step / layout.copies
    num_bytes = FP32 * work.shape.d_model * examples * (work.num_inputs + work.num_targets)
    return 2 * compute_send_seconds(num_bytes, make_group(layout.stages, machine.fabric), machine.fabric)
