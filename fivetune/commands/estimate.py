"""Estimate memory and step time of a recipe by strategy.

On any number of devices; nothing is run.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

from fivetune.commands import format_settings, print_json, print_text
from fivetune.errors import ConfigError

if TYPE_CHECKING:
    from fivetune.config import RunConfig
    from fivetune.fleet.estimation.choice import Change, Estimate, Refusal
    from fivetune.fleet.estimation.speed import Machine
    from fivetune.fleet.estimation.workload import Layout, Workload

TAKES_SETTINGS = True
GIB = 2**30
MIB = 2**20
HEADER = ["strategy", "weight", "grad", "state", "activ", "buffer", "peak", "fits, GiB", "step {}", "comm", "tok/s"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, name of a shipped recipe, or a run directory")
    parser.add_argument("--devices", metavar="N", type=int, required=True, help="devices of the run, one process each")
    parser.add_argument("--device", metavar="NAME", required=True, help="h100, a100, l4, ... or cpu (this machine)")
    parser.add_argument("--devices-per-node", metavar="N", type=int, help="default: of the device's usual node")
    parser.add_argument(
        "--link", metavar="GB/S", type=float, help="between the devices of a node, in one direction; default: by device"
    )
    parser.add_argument(
        "--network", metavar="GB/S", type=float, help="between nodes, for each device of a node; default: by device"
    )
    parser.add_argument(
        "--mfu",
        metavar="SHARE",
        type=float,
        help="of the peak in matrix products; default: 0.3 in 16 bits, 0.5 in fp32",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.epilog = "Any setting can follow: --model.path google-t5/t5-11b --train.batch_size 4 --train.recompute true"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.fleet.estimation.choice import Change, choose_estimate, estimate_strategies, find_change
    from fivetune.fleet.estimation.recipe import (
        build_machine,
        build_workload,
        explain_excluded_layout,
        find_device,
        resolve_precision,
    )

    _refuse_bad_numbers(args)
    device = find_device(args.device)
    # How many processes share the run, and by which strategy, is what the estimate varies.
    settings = {**parse_overrides(args.settings), "launch.nproc": 1, "launch.nnodes": 1}
    config = load_config(args.recipe, settings)
    work = build_workload(config, device)
    precision = resolve_precision(config.train.precision, device)
    machine = build_machine(
        device,
        precision,
        args.devices,
        devices_per_node=args.devices_per_node,
        link=args.link,
        network=args.network,
        peak_share=args.mfu,
    )

    _refuse_partial_nodes(args.devices, machine)
    find_obstacle = partial(explain_excluded_layout, config, batch_size=work.batch_size)
    estimates = estimate_strategies(work, machine, args.devices, find_obstacle)
    chosen = choose_estimate(estimates)
    change = None if chosen else find_change(work, machine, args.devices, find_obstacle)
    verdict = _describe_choice(chosen, config, machine) if chosen else ""
    verdict = _describe_change(change, config, args.devices, machine) if change else verdict
    assumptions = _list_assumptions(args, config, work, machine, precision)
    if args.json:
        print_json(
            {
                "model": config.model.config or config.model.path,
                "parameters": work.shape.num_weights,
                "devices": args.devices,
                "device": args.device,
                "precision": precision,
                "strategies": [_as_json(estimate, config, work) for estimate in estimates],
                "choice": _build_settings(chosen.layout, config) if chosen else None,
                "change": _build_changed_settings(change, config) if isinstance(change, Change) else None,
                "verdict": verdict,
                "assumptions": assumptions,
            }
        )
        return 0
    name = config.model.config or config.model.path
    _print_estimates(f"{name}: {work.shape.num_weights:,} parameters, {precision}", estimates, work)
    _print_verdict(verdict, assumptions)
    return 0


def _print_estimates(title: str, estimates: list[Estimate], work: Workload) -> None:
    """Print the table in units that the smallest figures fit: MiB for small models, milliseconds for short steps."""
    unit = MIB if all(one.memory is None or one.memory.peak < GIB for one in estimates) else GIB
    scale = 1000 if any(one.time and one.time.total < 0.1 for one in estimates) else 1
    header = [word.format("ms" if scale == 1000 else "s") for word in HEADER]
    print_text(f"{title}, {'MiB' if unit == MIB else 'GiB'} per rank")
    print(*_format_table([header, *(_format_row(one, work, unit, scale) for one in estimates)]), sep="\n")
    for estimate in estimates:
        if estimate.obstacle:
            print(f"{_name_layout(estimate.layout)}: {estimate.obstacle}.")


def _print_verdict(verdict: str, assumptions: list[str]) -> None:
    print(f"\n{verdict}\n\nAssumptions")
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    for line in assumptions:
        print(textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))


def _refuse_bad_numbers(args: argparse.Namespace) -> None:
    for name in ("devices", "devices_per_node", "link", "network", "mfu"):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag}: {value} is not possible. Allowed: above 0. Try {flag} {_EXAMPLES[name]}.")
    if args.mfu is not None and args.mfu > 1:
        raise ConfigError(f"--mfu: {args.mfu} is more than the peak. Allowed: above 0, at most 1. Try --mfu 0.3.")


_EXAMPLES = {"devices": 8, "devices_per_node": 8, "link": 450, "network": 50, "mfu": 0.3}


def _refuse_partial_nodes(num_devices: int, machine: Machine) -> None:
    if not machine.can_fill_nodes(num_devices):
        per_node = machine.fabric.devices_per_node
        whole = num_devices - num_devices % per_node
        raise ConfigError(
            f"--devices: {num_devices} are not whole nodes of {per_node} devices, and every node starts as many "
            f"processes. Try --devices {whole} or {whole + per_node}, or --devices-per-node NUMBER."
        )


def _name_layout(layout: Layout) -> str:
    """The strategy, and the ranks that share a copy of the model if it has a size."""
    size = {"tensor": layout.heads, "fsdp_tensor": layout.heads, "pipeline": layout.stages}.get(layout.strategy, 0)
    if layout.strategy == "fsdp" and layout.replicas > 1:
        return f"fsdp {layout.replicas} copies"
    return f"{layout.strategy} {size}" if size else layout.strategy


def _format_row(estimate: Estimate, work: Workload, unit: int, scale: int) -> list[str]:
    memory, time = estimate.memory, estimate.time
    if memory is None:
        return [_name_layout(estimate.layout), *["-"] * 10]
    kinds = (memory.weights, memory.gradients, memory.state, memory.activations, memory.buffers, memory.peak)
    room = f"{'yes' if estimate.fits else 'no'} {_format_number(estimate.room / GIB):>5}"
    cells = ["n/a"] * 3
    if time:
        rate = work.tokens_per_step / time.total
        cells = [_format_number(scale * time.total), f"{time.exposed / time.total:.0%}", f"{rate / 1000:,.0f}k"]
    return [_name_layout(estimate.layout), *(_format_number(kind / unit) for kind in kinds), room, *cells]


def _format_number(number: float) -> str:
    """At most five characters: 0.178, 4.3, 243."""
    if abs(number) < 1:
        return f"{number:.3g}" if abs(number) >= 0.005 else "0"
    return f"{number:.1f}" if abs(number) < 99.95 else f"{number:.0f}"


def _format_table(rows: list[list[str]]) -> list[str]:
    """Lines of a table of 80 characters, which a terminal's smallest width holds."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return [
        f"{row[0]:<{widths[0]}} "
        + " ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _as_json(estimate: Estimate, config: RunConfig, work: Workload) -> dict[str, Any]:
    layout, memory, time = estimate.layout, estimate.memory, estimate.time
    found: dict[str, Any] = {
        "strategy": layout.strategy,
        "settings": _build_settings(layout, config),
        "world": layout.world,
        "obstacle": estimate.obstacle or None,
    }
    if memory is not None:
        found |= {
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
    if time is not None:
        found |= {
            "step_seconds": time.total,
            "compute_seconds": time.compute,
            "bubble_seconds": time.bubble,
            "exposed_communication_seconds": time.exposed,
            "hidden_communication_seconds": time.hidden,
            "optimizer_seconds": time.optimizer,
            "tokens_per_second": work.tokens_per_step / time.total,
        }
    return found


def _build_settings(layout: Layout, config: RunConfig) -> dict[str, object]:
    """The settings that give a layout: some exclude train.batch_size auto, which is estimated with one example."""
    from fivetune.fleet.estimation.recipe import explain_excluded_layout

    needs_number = config.train.batch_size == "auto" and explain_excluded_layout(config, layout)
    return {**layout.as_settings(), **({"train.batch_size": 1} if needs_number else {})}


def _build_changed_settings(change: Change, config: RunConfig) -> dict[str, object]:
    layout = change.estimate.layout
    return {**(_build_settings(layout, config) if layout.world > 1 else {}), **change.settings}


def _build_launch_settings(num_devices: int, machine: Machine) -> dict[str, object]:
    per_node = machine.fabric.devices_per_node
    if num_devices == 1:
        return {}
    if num_devices <= per_node:
        return {"launch.nproc": num_devices}
    return {"launch.nnodes": num_devices // per_node, "launch.nproc": per_node}


def _describe_choice(chosen: Estimate, config: RunConfig, machine: Machine) -> str:
    layout = chosen.layout
    why = "the fastest that fits" if chosen.time else "the simplest that fits"
    used = "" if layout.world > 1 else " (one device)"
    settings = {**_build_launch_settings(layout.world, machine), **_build_settings(layout, config)}
    return (
        f"Take {_name_layout(layout)}{used}: {why}, with {chosen.room / GIB:.1f} GiB to spare:\n"
        f"{' '.join(format_settings(settings))}"
    )


def _describe_refusal(refusal: Refusal) -> str:
    """Settings that exclude fsdp on more devices come first; without any, memory is the reason."""
    most = "recomputation and micro-batches of one example"
    most = f"fsdp, {most} and offload on {refusal.tried} devices" if refusal.tried > 1 else most
    text = f"None fits, not even with {most}. " if refusal.tried else "None fits. "
    if refusal.obstacle:
        return f"{text}With fsdp on {refusal.num_devices} devices: {refusal.obstacle}."
    return f"{text}Shorten the examples: data.max_input_tokens."


def _describe_change(change: Change | Refusal, config: RunConfig, num_devices: int, machine: Machine) -> str:
    from fivetune.fleet.estimation.choice import Refusal

    if isinstance(change, Refusal):
        return _describe_refusal(change)
    settings = {
        **_build_launch_settings(change.num_devices, machine),
        **_build_changed_settings(change, config),
    }
    more = "" if change.num_devices == num_devices else f" on {change.num_devices} devices"
    return (
        f"None fits. This does{more}, with {change.estimate.room / GIB:.1f} GiB to spare:\n"
        f"{' '.join(format_settings(settings))}"
    )


def _list_assumptions(
    args: argparse.Namespace, config: RunConfig, work: Workload, machine: Machine, precision: str
) -> list[str]:
    from fivetune.fleet.estimation.choice import USABLE_SHARE
    from fivetune.fleet.estimation.communication import ACHIEVED_SHARE, LINK_LATENCY, NETWORK_LATENCY
    from fivetune.fleet.estimation.recipe import PEAK_SHARE

    memory, fabric = machine.memory_bytes / GIB, machine.fabric
    auto = " (auto: estimated with one)" if config.train.batch_size == "auto" else ""
    lines = [
        f"All examples have {work.num_inputs:,} input and {work.num_targets:,} target tokens, the recipe's limits; "
        f"{work.batch_size:,} in a micro-batch{auto}, {work.examples_per_step:,} in a step.",
        f"{args.device}: {memory:.1f} GiB per rank, of which {USABLE_SHARE:.0%} are usable. The columns are those of "
        "the moment of the peak and add up to it.",
        "Flat forward; on GPUs with Triton's kernels. Recomputation costs another forward pass.",
        *_list_unused_options(config),
    ]
    if frozen := [key for key in ("adapter", "freeze", "unfreeze") if getattr(config.model, key)]:
        lines.append(
            f"All weights are counted as trained in fp32: {' and '.join(f'model.{key}' for key in frozen)} takes "
            "less memory and time, which `fivetune check` measures."
        )
    if machine.flops is None:
        return [
            *lines,
            "Operations per second of a CPU are unknown, so there are no times; memory is shared by all ranks.",
        ]
    share = args.mfu or PEAK_SHARE[precision]
    return [
        *lines,
        f"Matrix products reach {share:.0%} of the peak, {machine.flops / 1e12:.0f} TFLOP/s (--mfu).",
        f"{fabric.devices_per_node} devices per node (--devices-per-node); {fabric.link / 1e9:g} GB/s between them "
        f"(--link), {fabric.network / 1e9:g} GB/s for each device between nodes (--network), of which "
        f"{ACHIEVED_SHARE:.0%} are reached; {1e6 * LINK_LATENCY:g} and {1e6 * NETWORK_LATENCY:g} microseconds per "
        "message.",
        "comm is the communication that computation does not hide. Launches of kernels and reading data cost nothing.",
    ]


def _list_unused_options(config: RunConfig) -> list[str]:
    """A line about the options of the recipe's strategy, if it sets any."""
    from fivetune import plugins

    name = config.strategy.plugin_name()
    defaults = plugins.load_plugin("strategies", name)().model_dump()
    given = [f"{key} {value}" for key, value in config.strategy.model_dump().items() if value != defaults[key]]
    if not given:
        return []
    return [
        f"The recipe's options of strategy {name} are not used: {', '.join(given)}. Every strategy is estimated with "
        "its default options and the settings that are printed with it."
    ]
