"""The inputs of estimates, from a recipe and the name of a device.

In: a RunConfig, numbers of the command line. Out: a Workload, a Machine, and a strategy for several ranks.
"""

from __future__ import annotations

from pathlib import Path

from fivetune.config import RunConfig
from fivetune.config.recipes import is_run_directory
from fivetune.config.sections import STRATEGY_OF_SEVERAL
from fivetune.errors import ConfigError, FiveTuneError, format_size, suggest_names
from fivetune.fleet.estimation.choice import USABLE_SHARE, Machine, choose_estimate, estimate_strategies
from fivetune.fleet.estimation.workload import FP32, Workload
from fivetune.machine.telemetry.accelerators import ACCELERATORS, Accelerator, find_accelerator, find_peak_flops
from fivetune.machine.telemetry.limits import get_host_memory
from fivetune.machine.telemetry.nvml import Nvml
from fivetune.model.shapes import ModelShape, read_shape

CPU = "cpu"
PER_HOST = 2**20  # processes that a host may run


def find_device(name: str, memory_mib: int | None = None) -> Accelerator | None:
    """Find an accelerator by name, and by its memory if that is known; None for a CPU.

    Raises ConfigError with the known names for one that is not in the tables and whose memory is not known.
    """
    if name == CPU:
        return None
    found = find_accelerator(name, memory_mib)
    if found is None:
        known = suggest_names(name, [*ACCELERATORS, CPU])
        raise ConfigError(f"--device: there is no {name!r}. {known} For another GPU add its memory: --memory 16G.")
    return found


def resolve_precision(requested: str, device: Accelerator | None) -> str:
    """The precision that train.precision auto chooses on a device. Raises ConfigError if the device has it not.

    On a device without bf16 the upper bound is taken, fp32: a run that is not sharded tries fp16 at its start.
    The same of one that is not in the tables.
    """
    if device is None:
        return "fp32"
    if not device.is_known:
        return "fp32" if requested == "auto" else requested
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
    precision = resolve_precision(config.train.precision, device)
    batch_size = 1 if config.train.batch_size == "auto" else config.train.batch_size
    shape = read_shape(config.model.path, config.model.config)
    tables = shape.table_share
    state_bytes = tables * optimizer.get_state_bytes("table") + (1 - tables) * optimizer.get_state_bytes("matrix")
    if config.train.ema:
        state_bytes += FP32
    return Workload(
        shape=shape,
        batch_size=batch_size,
        examples_per_step=config.train.examples_per_step,
        num_inputs=config.data.max_input_tokens,
        num_targets=config.data.max_target_tokens,
        matmul_bytes=FP32 if precision in ("fp32", "tf32") else 2,
        dropout=config.model.dropout or 0.0,
        recompute=config.train.recompute,
        state_bytes=state_bytes,
        gathers_state=optimizer.gathers_state,
        on_gpu=device is not None,
        passes=2 if config.loss.r_drop else 1,
        teacher=_read_teacher_shape(config),
    )


def _read_teacher_shape(config: RunConfig) -> ModelShape | None:
    """The shape of a teacher that is computed in every step; None without one."""
    name = config.distill.teacher
    if name is None or config.distill.kind != "logits":
        return None
    if is_run_directory(name):
        name = str(Path(name) / "model")
    return read_shape(name, None)


def build_machine(
    device: Accelerator | None,
    num_devices: int,
    *,
    devices_per_node: int | None = None,
    host_bytes: float | None = None,
) -> Machine:
    """Build the machine of an estimate; processes on a CPU share the memory of their host.

    Args:
        devices_per_node: default: devices of the device's usual node.
        host_bytes: memory of the host of a CPU; default: this host's.
    """
    if device is None:
        per_node = devices_per_node or PER_HOST
        return Machine((host_bytes or get_host_memory()[0]) / min(num_devices, per_node), per_node)
    return Machine(device.memory_bytes, devices_per_node or device.devices_per_node)


def find_local_device(requested: str) -> Accelerator | None:
    """Find what `device: requested` is on this node; None for a CPU. Raises ConfigError for an unknown GPU."""
    if requested not in ("auto", "cuda"):
        return None
    samples = Nvml().sample()
    if not samples:
        return None
    first = samples[0]
    for sample in samples:
        if sample.cuda_index == 0:
            first = sample
    memory_mib = first.memory_total_bytes // 2**20 if first.memory_total_bytes else None
    return find_device(first.name or "a device without a name", memory_mib)


def suggest_strategy(config: RunConfig, nnodes: int, nproc: int) -> tuple[dict[str, object], str]:
    """Propose a strategy for several ranks on devices like this node's: the default if it fits, else the simplest.

    Args:
        config: settings of the run, read for one process.
        nnodes: nodes of the run.
        nproc: processes of each node.

    Returns the dotted settings of the strategy, and the reason.
    """
    # An estimate that cannot be made must not keep a run from starting.
    default: dict[str, object] = {"strategy.name": STRATEGY_OF_SEVERAL}
    try:
        device = find_local_device(config.device)
        work = build_workload(config, device)
        machine = build_machine(device, nnodes * nproc, devices_per_node=nproc)
    except FiveTuneError as error:
        return default, f"the default; memory cannot be estimated: {str(error).partition('. ')[0]}"
    # The default if it fits, else the simplest that does.
    found = estimate_strategies(work, machine, nnodes * nproc, config)
    several = [one for one in found if one.layout.world > 1 and one.memory is not None]
    usual = [one for one in several if one.strategy.plugin_name() == STRATEGY_OF_SEVERAL][:1]
    if not usual or usual[0].memory is None:
        return default, "the default"
    need = format_size(usual[0].memory.peak)
    usable = format_size(USABLE_SHARE * machine.memory_bytes)
    if usual[0].fits:
        return default, f"which fits: {need} of {usable} for each process by estimate"
    chosen = choose_estimate(several)
    why = f"because {STRATEGY_OF_SEVERAL} needs {need} of {usable} for each process by estimate"
    if chosen is None:
        chosen = min(several, key=lambda one: one.memory.peak if one.memory else 0.0)
        why += "; no strategy fits, this one needs least (fivetune estimate prints what to change)"
        obstacles = [one.obstacle for one in found if one.obstacle]
        if obstacles:
            why += f". {obstacles[0]}"
    assert chosen.memory is not None
    return chosen.as_settings(), f"{why}, this one {format_size(chosen.memory.peak)}"
