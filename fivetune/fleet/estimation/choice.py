"""All strategies beside each other, and which to take.

In: a Workload, a Machine, a number of devices. Out: the best Estimate of each strategy; the fastest that fits, or if
none does what to change, or why nothing helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fivetune.fleet.estimation.memory import Memory, estimate_memory
from fivetune.fleet.estimation.speed import Machine, StepTime, estimate_step_time
from fivetune.fleet.estimation.workload import Layout, Workload

USABLE_SHARE = 0.9  # of a device's memory; the rest is for the driver, libraries, NCCL and fragmentation
SAME_SPEED = 1.05  # step times up to this ratio are a tie, and the simpler strategy is taken
BY_SIMPLICITY = ("single", "ddp", "fsdp", "tensor", "fsdp_tensor", "pipeline")
MAX_STAGES = 16
MAX_DEVICES = 4096

Obstacle = Callable[[Layout], str]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout of a run.

    Args:
        obstacle: why it cannot run; "" if it can, then memory is known.
        room: usable bytes of the device that remain at the peak; negative if it does not fit.
        time: None if the device's speed is unknown.
    """

    layout: Layout
    obstacle: str = ""
    memory: Memory | None = None
    room: float = 0.0
    time: StepTime | None = None

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.room >= 0


def ignore_settings(layout: Layout) -> str:
    """No layout is excluded."""
    return ""


def list_layouts(work: Workload, machine: Machine, num_devices: int) -> Iterator[Layout]:
    """Yield the layouts of so many devices; groups that share heads stay inside a node."""
    for layout in _list_divisions(work, machine, num_devices):
        yield layout
        if layout.shards > 1 and layout.count_micro_batches(work) > 1:
            yield replace(layout, reduce_once=False)


def _list_divisions(work: Workload, machine: Machine, num_devices: int) -> Iterator[Layout]:
    per_node = min(machine.fabric.devices_per_node, num_devices)
    yield Layout("single")
    if num_devices == 1:
        return
    yield Layout("ddp", num_devices)
    yield Layout("fsdp", num_devices, shards=num_devices)
    if num_devices > per_node and num_devices % per_node == 0:
        yield Layout("fsdp", num_devices, shards=per_node)
    shape = work.shape
    for size in _list_divisors(num_devices):
        if not (per_node % size or shape.num_heads % size or shape.d_ff % size):
            yield Layout("tensor", num_devices, heads=size)
            if size < num_devices:
                yield Layout("fsdp_tensor", num_devices, heads=size, shards=num_devices // size)
        if size <= min(MAX_STAGES, shape.num_layers + shape.num_decoder_layers):
            yield Layout("pipeline", num_devices, stages=size)


def _list_divisors(number: int) -> list[int]:
    return [size for size in range(2, number + 1) if number % size == 0]


def estimate_layout(
    work: Workload, layout: Layout, machine: Machine, find_obstacle: Obstacle = ignore_settings
) -> Estimate:
    """Estimate one layout.

    Args:
        find_obstacle: explains why the settings of the run exclude a layout.
    """
    if work.examples_per_step % layout.copies:
        return Estimate(
            layout, f"train.global_batch_size {work.examples_per_step} is not a multiple of {layout.copies} copies"
        )
    if obstacle := find_obstacle(layout):
        return Estimate(layout, obstacle)
    memory = estimate_memory(work, layout)
    room = USABLE_SHARE * machine.memory_bytes - memory.peak
    return Estimate(layout, "", memory, room, estimate_step_time(work, layout, machine))


def estimate_strategies(
    work: Workload, machine: Machine, num_devices: int, find_obstacle: Obstacle = ignore_settings
) -> list[Estimate]:
    """Estimate the best layout of each strategy; fsdp with replicas counts as one of its own."""
    kinds: dict[tuple[str, bool], list[Estimate]] = {}
    for layout in list_layouts(work, machine, num_devices):
        key = layout.strategy, layout.strategy == "fsdp" and layout.replicas > 1
        kinds.setdefault(key, []).append(estimate_layout(work, layout, machine, find_obstacle))
    found = [min(each, key=_order_estimate) for each in kinds.values()]
    return sorted(found, key=lambda estimate: BY_SIMPLICITY.index(estimate.layout.strategy))


def _order_estimate(estimate: Estimate) -> tuple[bool, bool, float, float]:
    """First what can run, then what fits, then what is fast, then what takes little."""
    if estimate.memory is None:
        return True, True, 0.0, 0.0
    seconds = estimate.time.total if estimate.time and estimate.fits else 0.0
    return False, not estimate.fits, seconds, estimate.memory.peak


def choose_estimate(estimates: Sequence[Estimate]) -> Estimate | None:
    """Choose the fastest that fits, on a tie the simplest; None if none fits. Without times the simplest that fits."""
    fitting = [estimate for estimate in estimates if estimate.fits]
    if timed := [estimate.time.total for estimate in fitting if estimate.time]:
        return next(one for one in fitting if one.time and one.time.total <= SAME_SPEED * min(timed))
    return next((one for one in fitting if one.layout.world > 1), fitting[0] if fitting else None)


@dataclass(frozen=True, slots=True)
class Change:
    """Settings with which a run fits that does not fit as it is."""

    settings: dict[str, object]
    num_devices: int
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no change makes a run fit.

    Args:
        tried: the largest number of devices on which memory is known and too small; 0 if on none.
        num_devices, obstacle: on how many devices settings exclude fsdp, and why; 0 and "" if they do not.
    """

    tried: int
    num_devices: int = 0
    obstacle: str = ""


def find_change(
    work: Workload, machine: Machine, num_devices: int, find_obstacle: Obstacle = ignore_settings
) -> Change | Refusal:
    """Find what makes a run fit, or why nothing does.

    Each step is on top of the one before: fsdp that reduces gradients after each micro-batch, recomputation,
    micro-batches of one example, offload to the host's memory, twice the devices. Nodes are used whole.
    """
    refusal = Refusal(0)
    while num_devices <= MAX_DEVICES:
        for changed, layout in _list_changes(work, num_devices) if machine.can_fill_nodes(num_devices) else ():
            found = estimate_layout(changed, layout, machine, find_obstacle)
            if found.fits:
                return Change(_build_settings(work, changed, layout), num_devices, found)
            if not found.obstacle:
                refusal = replace(refusal, tried=num_devices)
            elif not refusal.obstacle:
                refusal = replace(refusal, num_devices=num_devices, obstacle=found.obstacle)
        num_devices *= 2
    return refusal


def _list_changes(work: Workload, num_devices: int) -> list[tuple[Workload, Layout]]:
    """List what to try on so many devices, each once."""
    recomputed = replace(work, recompute=True)
    smallest = replace(recomputed, batch_size=1)
    if num_devices == 1:
        return list(dict.fromkeys((changed, Layout("single")) for changed in (work, recomputed, smallest)))
    base = Layout("fsdp", num_devices, shards=num_devices)
    tried = ((work, False), (recomputed, False), (smallest, False), (smallest, True))
    return list(
        dict.fromkeys(
            (changed, replace(base, offload=offload, reduce_once=base.count_micro_batches(changed) == 1))
            for changed, offload in tried
        )
    )


def _build_settings(work: Workload, changed: Workload, layout: Layout) -> dict[str, object]:
    settings = layout.as_settings() if layout.world > 1 else {}
    if changed.recompute:
        settings["train.recompute"] = "true"
    if changed.batch_size != work.batch_size:
        settings["train.batch_size"] = changed.batch_size
    return settings
