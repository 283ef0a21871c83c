"""All strategies beside each other, and which to take.

In: a Workload, a Machine, a number of devices. Out: the best Estimate of each strategy; the fastest that fits, or what
to change if none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fivetune.estimation.memory import Memory, estimate_memory
from fivetune.estimation.speed import Machine, StepTime, estimate_step_time
from fivetune.estimation.workload import Layout, Workload

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
        if size <= per_node and not (shape.num_heads % size or shape.d_ff % size):
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


def find_change(
    work: Workload, machine: Machine, num_devices: int, find_obstacle: Obstacle = ignore_settings
) -> Change | None:
    """Find what makes a run fit; None if nothing does.

    Each step is on top of the one before: fsdp that reduces gradients after each micro-batch, recomputation,
    micro-batches of one example, offload to the host's memory, twice the devices.
    """
    recomputed = replace(work, recompute=True)
    smallest = replace(recomputed, batch_size=1)
    settings: dict[str, object] = {}
    while num_devices <= MAX_DEVICES:
        base = Layout("fsdp", num_devices, shards=num_devices) if num_devices > 1 else Layout("single")
        for changed, offload in ((work, False), (recomputed, False), (smallest, False), (smallest, True)):
            is_whole = num_devices == 1 or base.count_micro_batches(changed) == 1
            layout = replace(base, offload=offload and num_devices > 1, reduce_once=is_whole)
            settings = layout.as_settings() if num_devices > 1 else {}
            if changed.recompute:
                settings["train.recompute"] = "true"
            if changed.batch_size != work.batch_size:
                settings["train.batch_size"] = changed.batch_size
            found = estimate_layout(changed, layout, machine, find_obstacle)
            if found.fits:
                return Change(settings, num_devices, found)
        num_devices *= 2
    return None
