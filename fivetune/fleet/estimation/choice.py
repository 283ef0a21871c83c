"""Memory of all strategies, and which one to take.

In: a Workload, a Machine, a number of devices. Out: the best Estimate of each strategy; the simplest one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivetune import plugins
from fivetune.config import RunConfig
from fivetune.fleet.estimation.memory import Memory, estimate_memory
from fivetune.fleet.estimation.workload import Workload
from fivetune.types import Layout, RunSettings, Strategy

USABLE_SHARE = 0.9  # of a device's memory; the rest is for the driver, libraries, NCCL and fragmentation
MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of a run.

    Args:
        memory_bytes: memory of one device.
        devices_per_node: devices of one node.
    """

    memory_bytes: float
    devices_per_node: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """One strategy with its options.

    Args:
        obstacle: why it cannot run; "" if it can, then memory is known.
        room: usable bytes of the device that remain at the peak; negative if it does not fit.
    """

    strategy: Strategy
    layout: Layout
    obstacle: str = ""
    memory: Memory | None = None
    room: float = 0.0

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.room >= 0

    @property
    def name(self) -> str:
        """The strategy, with the ranks that share a copy of the model or with the copies, if it has several."""
        name = self.strategy.plugin_name()
        if self.layout.shards > 1 and self.layout.replicas > 1:
            return f"{name} {self.layout.replicas} copies"
        size = max(self.layout.heads, self.layout.stages)
        return f"{name} {size}" if size > 1 else name

    def as_settings(self) -> dict[str, object]:
        """The dotted settings of the strategy."""
        settings: dict[str, object] = {"strategy.name": self.strategy.plugin_name()}
        for key, value in self.strategy.model_dump(exclude_defaults=True).items():
            settings[f"strategy.{key}"] = str(value).lower() if isinstance(value, bool) else value
        return settings


def list_strategies() -> list[type[Strategy]]:
    """List the options classes of all strategies, the simplest first."""
    classes: list[type[Strategy]] = [
        plugins.load_plugin("strategies", name) for name in plugins.list_plugins("strategies")
    ]
    return sorted(classes, key=lambda one: one.complexity)


def list_candidates(machine: Machine, num_devices: int, own: Strategy | None = None) -> Iterator[Strategy]:
    """Yield the strategies of so many devices with the options to compare, the simplest first.

    Args:
        own: strategy of the recipe; if it has other options than the defaults, only they are compared.
    """
    per_node = min(machine.devices_per_node, num_devices)
    for kind in list_strategies():
        if own is not None and isinstance(own, kind) and own.model_dump(exclude_defaults=True):
            yield own
        elif num_devices > 1 or not kind.supports_multiple:
            yield from kind.list_variants(num_devices, per_node)


def estimate_strategy(
    work: Workload,
    strategy: Strategy,
    machine: Machine,
    num_devices: int,
    config: RunConfig | None = None,
    *,
    batch_size: int | None = None,
) -> Estimate:
    """Estimate one strategy on so many devices.

    Args:
        config: recipe whose settings may exclude the strategy.
        batch_size: in place of its train.batch_size.
    """
    # The first obstacle is told: the batch, the shape of the model, then the settings.
    layout, shape = strategy.get_layout(num_devices), work.shape
    obstacle = ""
    if work.examples_per_step % layout.copies:
        obstacle = f"train.global_batch_size {work.examples_per_step} is not a multiple of {layout.copies} copies"
    elif shape.num_heads % layout.heads or shape.d_ff % layout.heads:
        obstacle = f"{layout.heads} ranks cannot share {shape.num_heads} heads and {shape.d_ff} features equally"
    elif layout.stages > (most := min(MAX_STAGES, shape.num_layers + shape.num_decoder_layers)):
        obstacle = f"{layout.stages} stages are more than the {most} that are estimated"
    elif config is not None:
        obstacle = explain_excluded_strategy(config, strategy, layout, batch_size=batch_size)
    if obstacle:
        return Estimate(strategy, layout, obstacle)
    memory = estimate_memory(work, layout)
    return Estimate(strategy, layout, "", memory, USABLE_SHARE * machine.memory_bytes - memory.peak)


def estimate_strategies(
    work: Workload,
    machine: Machine,
    num_devices: int,
    config: RunConfig | None = None,
    *,
    batch_size: int | None = None,
) -> list[Estimate]:
    """Estimate each strategy with its best options, the simplest first; copies of sharded weights count as their own.

    Args:
        config, batch_size: see `estimate_strategy`; the options of the recipe's strategy are compared alone.
    """
    kinds: dict[tuple[str, bool], list[Estimate]] = {}
    for strategy in list_candidates(machine, num_devices, config.strategy if config else None):
        estimate = estimate_strategy(work, strategy, machine, num_devices, config, batch_size=batch_size)
        has_copies = estimate.layout.shards > 1 and estimate.layout.replicas > 1
        kinds.setdefault((strategy.plugin_name(), has_copies), []).append(estimate)
    return [min(each, key=_order_estimate) for each in kinds.values()]


def explain_excluded_strategy(
    config: RunConfig, strategy: Strategy, layout: Layout, *, batch_size: int | None = None
) -> str:
    """Explain why the settings of a recipe exclude a strategy; empty if they do not.

    Args:
        batch_size: in place of train.batch_size.
    """
    if layout.world == 1:
        return ""
    name, size = strategy.plugin_name(), strategy.get_model_size(layout.world)
    if layout.world % size:
        return f"strategy.{strategy.size_option} {size} does not divide {layout.world} devices"
    if strategy.sharded and config.distill.teacher and config.distill.kind == "logits":
        return f"strategy.name {name} divides the model, and the teacher of distill.kind logits is whole"
    if strategy.sharded and config.model.adapter:
        return f"strategy.name {name} divides the weights, and model.adapter adds others to them"
    train = config.train
    return strategy.explain_incompatibility(
        RunSettings(
            config.optimizer.plugin_name(),
            config.optimizer.supports_shards,
            train.precision,
            train.forward,
            batch_size or train.batch_size,
            num_ranks=layout.world,
        )
    )


def _order_estimate(estimate: Estimate) -> tuple[bool, bool, float]:
    """First what can run, then what fits, in the order of the candidates; of what does not fit what takes least."""
    if estimate.memory is None:
        return True, True, 0.0
    return False, not estimate.fits, 0.0 if estimate.fits else estimate.memory.peak


def choose_estimate(estimates: Sequence[Estimate]) -> Estimate | None:
    """Choose the simplest that fits and uses all devices, else the one device that is enough; None if none fits."""
    fitting = [estimate for estimate in estimates if estimate.fits]
    return next((one for one in fitting if one.layout.world > 1), fitting[0] if fitting else None)
