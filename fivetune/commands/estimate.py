"""Estimate the memory of a recipe by strategy.

On any number of devices; nothing is run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from fivetune.commands import add_flag, format_settings, print_json, print_table, print_text
from fivetune.errors import ConfigError

if TYPE_CHECKING:
    from fivetune.config import RunConfig
    from fivetune.fleet.estimation.choice import Estimate, Machine
    from fivetune.fleet.estimation.workload import Workload

TAKES_SETTINGS = True
GIB = 2**30
MIB = 2**20
HEADER = ["strategy", "weight", "grad", "state", "activ", "buffer", "peak", "fits, room"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, name of a shipped recipe, or a run directory")
    parser.add_argument("--devices", metavar="N", type=int, default=1, help="of the run, one process each; default: 1")
    parser.add_argument("--device", metavar="NAME", help="h100, a100, l4, t4, ... or cpu (this machine)")
    parser.add_argument("--memory", metavar="SIZE", help="of a GPU that has no name here, or another than usual: 16G")
    parser.add_argument("--devices-per-node", metavar="N", type=int, help="default: of the device's usual node")
    add_flag(parser, "--json", "print one JSON object instead of the table")
    parser.epilog = "Any setting can follow: --model.path google-t5/t5-11b --train.batch_size 4 --train.recompute true"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.fleet.estimation.choice import choose_estimate, estimate_strategies
    from fivetune.fleet.estimation.recipe import build_machine, build_workload, find_device, resolve_precision

    for name in ("devices", "devices_per_node"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: {value} is not possible. Allowed: above 0. Try {flag} 8.")
    memory_mib = None if args.memory is None else _read_mib(args.memory)
    if args.device is None and memory_mib is None:
        raise ConfigError(
            "--device: not given. Add the name of a GPU, --device h100, or the memory of one, --memory 16G."
        )
    name = args.device or f"a GPU of {args.memory}"
    device = find_device(name, memory_mib)
    # How many processes share the run is what the estimate varies.
    settings = {**parse_overrides(args.settings), "launch.nproc": 1, "launch.nnodes": 1}
    config = load_config(args.recipe, settings)
    work = build_workload(config, device)
    precision = resolve_precision(config.train.precision, device)
    host_bytes = MIB * memory_mib if memory_mib else None
    machine = build_machine(device, args.devices, devices_per_node=args.devices_per_node, host_bytes=host_bytes)
    per_node = machine.devices_per_node
    rest = args.devices % per_node
    if args.devices > per_node and rest:
        whole = args.devices - rest
        raise ConfigError(
            f"--devices: {args.devices} are not whole nodes of {per_node} devices, and every node starts as many "
            f"processes. Try --devices {whole} or {whole + per_node}, or --devices-per-node NUMBER."
        )
    estimates = estimate_strategies(work, machine, args.devices, config, batch_size=work.batch_size)
    chosen = choose_estimate(estimates)
    verdict = _describe_choice(chosen, config, machine) if chosen else _describe_refusal(estimates, work)
    assumptions = _list_assumptions(name, config, work, machine)
    if device and not device.is_known and config.train.precision == "auto":
        assumptions.append(
            f"{name} is not in the tables, so train.precision auto is taken for fp32, which needs most. Add "
            "--train.precision bf16 or fp16 if it has them."
        )
    model = config.model.config or config.model.path
    if args.json:
        print_json(
            {
                "model": model,
                "parameters": work.shape.num_weights,
                "devices": args.devices,
                "device": name,
                "precision": precision,
                "strategies": [_as_json(estimate, config) for estimate in estimates],
                "choice": _build_settings(chosen, config) if chosen else None,
                "verdict": verdict,
                "assumptions": assumptions,
            }
        )
        return 0
    _print_estimates(f"{model}: {work.shape.num_weights:,} parameters, {precision}", estimates)
    print(f"\n{verdict}\n\nAssumptions")
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    for line in assumptions:
        print(textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))
    return 0


def _read_mib(text: str) -> int:
    """Read a size of memory in MiB: 16G, 16 GiB, 512 MB, units of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])(?:I?B)?", text.strip().upper())
    size = float(found[1]) * 1024 ** "MGT".index(found[2]) if found else 0
    if size < 1:
        raise ConfigError(f"--memory: {text!r} is not a size. Write a number above 0 with M, G or T: --memory 16G.")
    return round(size)


def _print_estimates(title: str, estimates: list[Estimate]) -> None:
    """Print the table in the unit that the smallest figures fit: MiB for small models."""
    peaks = [one.memory.peak for one in estimates if one.memory is not None]
    unit = MIB
    name = "MiB"
    if max(peaks, default=0) >= GIB:
        unit = GIB
        name = "GiB"
    rows: list[list[str]] = []
    for one in estimates:
        memory = one.memory
        if memory is None:
            rows.append([one.name, *["n/a"] * 7])
            continue
        kinds = (memory.weights, memory.gradients, memory.state, memory.activations, memory.buffers, memory.peak)
        sizes = [_format_number(kind / unit) for kind in kinds]
        fits = "yes" if one.fits else "no"
        rows.append([one.name, *sizes, f"{fits} {_format_number(one.room / unit):>5}"])
    print_text(f"{title}, {name} per rank")
    print_table(HEADER, rows)
    for one in estimates:
        if one.obstacle:
            print(f"{one.name}: {one.obstacle}.")


def _format_number(number: float) -> str:
    """Format a number in at most five characters: 0.178, 4.3, 243."""
    if abs(number) < 0.005:
        return "0"
    if abs(number) < 1:
        return f"{number:.3g}"
    return f"{number:.1f}" if abs(number) < 99.95 else f"{number:.0f}"


def _as_json(estimate: Estimate, config: RunConfig) -> dict[str, Any]:
    memory = estimate.memory
    found: dict[str, Any] = {
        "strategy": estimate.strategy.plugin_name(),
        "settings": _build_settings(estimate, config),
        "world": estimate.layout.world,
        "obstacle": estimate.obstacle or None,
    }
    if memory is None:
        return found
    return found | {
        "fits": estimate.fits,
        "room_bytes": round(estimate.room),
        "peak_bytes": round(memory.peak),
        "weight_bytes": round(memory.weights),
        "gradient_bytes": round(memory.gradients),
        "state_bytes": round(memory.state),
        "activation_bytes": round(memory.activations),
        "buffer_bytes": round(memory.buffers),
        "peak_at": memory.moment,
    }


def _build_settings(estimate: Estimate, config: RunConfig) -> dict[str, object]:
    """Build the settings of a strategy."""
    from fivetune.fleet.estimation.choice import explain_excluded_strategy

    settings = dict(estimate.as_settings())
    # Some strategies exclude train.batch_size auto, which is estimated with one example.
    is_auto = config.train.batch_size == "auto"
    if is_auto and explain_excluded_strategy(config, estimate.strategy, estimate.layout):
        settings["train.batch_size"] = 1
    return settings


def _describe_choice(chosen: Estimate, config: RunConfig, machine: Machine) -> str:
    num = chosen.layout.world
    per_node = machine.devices_per_node
    launch: dict[str, object] = {}
    if num > per_node:
        launch = {"launch.nnodes": num // per_node, "launch.nproc": per_node}
    elif num > 1:
        launch = {"launch.nproc": num}
    used = "" if num > 1 else " (one device)"
    return (
        f"Take {chosen.name}{used}: the simplest that fits, with {chosen.room / GIB:.1f} GiB to spare:\n"
        f"{' '.join(format_settings({**launch, **_build_settings(chosen, config)}))}"
    )


def _describe_refusal(estimates: list[Estimate], work: Workload) -> str:
    """Describe that none fits, with the settings that take less; each can follow the command."""
    missing = ""
    possible = [one for one in estimates if one.memory]
    if possible:
        least = max(possible, key=lambda one: one.room)
        missing = f"; {least.name} lacks least, {-least.room / GIB:.1f} GiB"
    advice: list[str] = []
    if not work.recompute:
        advice.append("--train.recompute true")
    if work.batch_size > 1:
        advice.append(f"--train.batch_size 1 --train.global_batch_size {work.examples_per_step}")
    advice += ["--strategy.name fsdp --strategy.offload true", "more --devices", "a smaller --data.max_input_tokens"]
    return f"None fits{missing}. Add, one after the other: {', '.join(advice)}."


def _list_assumptions(device: str, config: RunConfig, work: Workload, machine: Machine) -> list[str]:
    from fivetune.fleet.estimation.choice import USABLE_SHARE

    auto = " (auto: estimated with one)" if config.train.batch_size == "auto" else ""
    lines = [
        f"All examples have {work.num_inputs:,} input and {work.num_targets:,} target tokens, the recipe's limits; "
        f"{work.batch_size:,} in a micro-batch{auto}, {work.examples_per_step:,} in a step.",
        f"{device}: {machine.memory_bytes / GIB:.1f} GiB per rank, of which {USABLE_SHARE:.0%} are usable. The columns "
        "are those of the moment of the peak and add up to it.",
        "Flat forward; on GPUs with Triton's kernels.",
    ]
    frozen = [key for key in ("adapter", "freeze", "unfreeze") if getattr(config.model, key)]
    if frozen:
        lines.append(
            f"All weights are counted as trained in fp32: {' and '.join(f'model.{key}' for key in frozen)} takes "
            "less memory, which `fivetune check` measures."
        )
    return lines
