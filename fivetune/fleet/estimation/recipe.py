"""The inputs of estimates, from a recipe and the name of a device.

In: a RunConfig, numbers of the command line. Out: a Workload, a Machine, and why settings exclude a layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from fivetune import plugins
from fivetune.config import RunConfig
from fivetune.config.recipes import is_run_directory
from fivetune.errors import ConfigError, FiveTuneError, format_size, suggest_names
from fivetune.fleet.estimation.choice import USABLE_SHARE, choose_estimate, estimate_strategies
from fivetune.fleet.estimation.communication import Fabric
from fivetune.fleet.estimation.speed import Machine
from fivetune.fleet.estimation.workload import FP32, Layout, Workload
from fivetune.machine.telemetry.accelerators import ACCELERATORS, Accelerator, find_accelerator, find_peak_flops
from fivetune.machine.telemetry.limits import get_host_memory
from fivetune.machine.telemetry.nvml import Nvml
from fivetune.model.shapes import ModelShape, read_shape
from fivetune.training.optimizers import get_state_bytes
from fivetune.types import RunSettings

CPU = "cpu"
HOST_FABRIC = Fabric(10e9, 1.25e9, 2**20)  # gloo over memory; unused for times, because a CPU's operations are unknown
PEAK_SHARE = {"fp32": 0.5, "tf32": 0.3, "fp16": 0.3, "bf16": 0.3}
"""Assumed share of the peak that a step reaches; it was not measured."""


def find_device(name: str, memory_mib: int | None = None) -> Accelerator | None:
    """Find an accelerator by name, and by its memory if that is known; None for a CPU.

    Raises ConfigError with the known names.
    """
    if name == CPU:
        return None
    if (found := find_accelerator(name, memory_mib)) is None:
        raise ConfigError(f"--device: there is no {name!r}. {suggest_names(name, [*ACCELERATORS, CPU])}")
    return found


def resolve_precision(requested: str, device: Accelerator | None) -> str:
    """The precision that train.precision auto chooses on a device. Raises ConfigError if the device has it not."""
    if device is None:
        return "fp32"
    if requested == "auto":
        return "bf16" if find_peak_flops(device.peak_name, "bf16") else "fp32"
    if find_peak_flops(device.peak_name, requested) is None:
        raise ConfigError(
            f"train.precision: {device.peak_name} does not support {requested}. Use auto, or another --device."
        )
    return requested


def build_workload(config: RunConfig, device: Accelerator | None) -> Workload:
    """Build the workload of a recipe. Raises ConfigError without length limits, ModelError for an unknown model."""
    for name in ("max_input_tokens", "max_target_tokens"):
        if getattr(config.data, name) is None:
            raise ConfigError(
                f"data.{name}: not set, so the length of the longest example is unknown. Add --data.{name} NUMBER."
            )
    assert config.data.max_input_tokens and config.data.max_target_tokens
    optimizer = config.optimizer
    momentum = FP32 if optimizer.plugin_name() == "adafactor" and getattr(optimizer, "beta1", None) else 0
    precision = resolve_precision(config.train.precision, device)
    batch_size = 1 if config.train.batch_size == "auto" else config.train.batch_size
    shape = read_shape(config.model.path, config.model.config)
    tables = shape.table_share
    return Workload(
        shape=shape,
        batch_size=batch_size,
        examples_per_step=config.train.examples_per_step,
        num_inputs=config.data.max_input_tokens,
        num_targets=config.data.max_target_tokens,
        matmul_bytes=FP32 if precision in ("fp32", "tf32") else 2,
        dropout=config.model.dropout or 0.0,
        recompute=config.train.recompute,
        state_bytes=tables * get_state_bytes(optimizer, "table")
        + (1 - tables) * get_state_bytes(optimizer, "matrix")
        + momentum
        + (FP32 if config.train.ema else 0),
        gathers_state=optimizer.plugin_name() == "adafactor",
        on_gpu=device is not None,
        passes=2 if config.loss.r_drop else 1,
        teacher=_read_teacher_shape(config),
    )


def _read_teacher_shape(config: RunConfig) -> ModelShape | None:
    """The shape of a teacher that is computed in every step; None without one."""
    name = config.distill.teacher
    if name is None or config.distill.kind != "logits":
        return None
    return read_shape(str(Path(name) / "model") if is_run_directory(name) else name, None)


def build_machine(
    device: Accelerator | None,
    precision: str,
    num_devices: int,
    *,
    devices_per_node: int | None = None,
    link: float | None = None,
    network: float | None = None,
    peak_share: float | None = None,
) -> Machine:
    """Build the machine of an estimate; processes on a CPU share the memory of their host, which is as large as this.

    Args:
        link, network: GB/s, in place of those of the device; peak_share: in place of PEAK_SHARE.
    """
    if device is None:
        per_node = devices_per_node or HOST_FABRIC.devices_per_node
        fabric = replace(HOST_FABRIC, devices_per_node=per_node)
        return Machine(get_host_memory()[0] / min(num_devices, per_node), None, 0.0, fabric)
    peak = find_peak_flops(device.peak_name, precision)
    assert peak is not None
    fabric = Fabric(
        1e9 * (link or device.link), 1e9 * (network or device.network), devices_per_node or device.devices_per_node
    )
    return Machine(device.memory_bytes, peak * (peak_share or PEAK_SHARE[precision]), 1e9 * device.bandwidth, fabric)


def find_local_device(requested: str) -> Accelerator | None:
    """Find what `device: requested` is on this node; None for a CPU. Raises ConfigError for an unknown GPU."""
    samples = Nvml().sample() if requested in ("auto", "cuda") else ()
    if not samples:
        return None
    first = next((sample for sample in samples if sample.cuda_index == 0), samples[0])
    memory_mib = first.memory_total_bytes // 2**20 if first.memory_total_bytes else None
    return find_device(first.name or "a device without a name", memory_mib)


def suggest_strategy(config: RunConfig, nnodes: int, nproc: int) -> tuple[dict[str, object], str]:
    """Propose a strategy for several ranks on devices like this node's: ddp if it fits, else the fastest that does.

    Args:
        config: of the run, read for one process.
        nnodes: nodes of the run. nproc: processes of each.

    Returns: its dotted settings, and the reason.
    """
    default: dict[str, object] = {"strategy.name": "ddp"}
    try:
        device = find_local_device(config.device)
        work = build_workload(config, device)
        precision, num_ranks = resolve_precision(config.train.precision, device), nnodes * nproc
        machine = build_machine(device, precision, num_ranks, devices_per_node=nproc)
    except FiveTuneError as error:
        return default, f"the default; memory cannot be estimated: {str(error).partition('. ')[0]}"
    found = estimate_strategies(work, machine, num_ranks, partial(explain_excluded_layout, config))
    several = [one for one in found if one.layout.world > 1 and one.memory is not None]
    ddp = next((one for one in several if one.layout.strategy == "ddp"), None)
    if ddp is None or ddp.memory is None:
        return default, "the default"
    need, usable = (format_size(size) for size in (ddp.memory.peak, USABLE_SHARE * machine.memory_bytes))
    if ddp.fits:
        return default, f"which fits: {need} of {usable} for each process by estimate"
    chosen = choose_estimate(several)
    why = f"because ddp needs {need} of {usable} for each process by estimate"
    if chosen is None:
        chosen = min(several, key=lambda one: one.memory.peak if one.memory else 0.0)
        excluded = next((f". {one.obstacle}" for one in found if one.obstacle), "")
        why += f"; no strategy fits, this one needs least (fivetune estimate prints what to change){excluded}"
    assert chosen.memory is not None
    return chosen.layout.as_settings(), f"{why}, this one {format_size(chosen.memory.peak)}"


def explain_excluded_layout(config: RunConfig, layout: Layout, *, batch_size: int | None = None) -> str:
    """Explain why the settings of a recipe exclude a layout; empty if they do not.

    Args:
        batch_size: in place of train.batch_size.
    """
    if layout.world == 1:
        return ""
    settings = {key.removeprefix("strategy."): value for key, value in layout.as_settings().items()}
    strategy = plugins.load_plugin("strategies", str(settings.pop("name"))).model_validate(settings)
    if strategy.sharded and config.distill.teacher and config.distill.kind == "logits":
        return (
            f"strategy.name {strategy.plugin_name()} divides the model, and the teacher of distill.kind logits is whole"
        )
    if strategy.sharded and config.model.adapter:
        return f"strategy.name {strategy.plugin_name()} divides the weights, and model.adapter adds others to them"
    train = config.train
    return strategy.explain_incompatibility(
        RunSettings(
            config.optimizer.plugin_name(),
            getattr(config.optimizer, "supports_shards", False),
            train.precision,
            train.forward,
            batch_size or train.batch_size,
            num_ranks=layout.world,
        )
    )
