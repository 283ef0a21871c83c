"""Training: FiveTune against transformers' Seq2SeqTrainer in several set-ups, and a plain loop.

Same weights, examples, updates, optimizer and dropout; windows of optimizer steps interleaved A B B A in one run.
Start-up, time to N steps and peak memory are taken from a fresh process for each side.
Speeds are compared in tokens without padding: the Trainer's length grouping goes from long to short over 50 batches,
so that the examples of a short run are longer than those of the others.
    python -m benchmarks.train --device cpu --model t5-small --workload squad --peers default,tuned
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import (
    UnequalWork,
    Window,
    facts,
    interleaved,
    matmul_peak,
    num_units_in,
    peak_resident,
    rates,
    ratio,
    same_totals,
    table,
    timed_window,
    write_result,
)
from benchmarks.sides import PEERS, Plan, make_side
from benchmarks.workloads import MODELS, WORKLOADS, Examples, make_model, write_examples
from fivetune.model.load import num_parameters
from fivetune.telemetry.devices import num_cores

NUM_EXAMPLES, NUM_WINDOWS = 3_200, 6  # as many examples as four of the Trainer's pools of 50 batches of 16
WARM_UP, MOST_STEPS = {"cpu": 2, "cuda": 20}, {"cpu": 5, "cuda": 50}
MOST_ALONE = {"cpu": 20, "cuda": 200}
SHARE_OF_WINDOWS, SHARE_ALONE = 0.5, 0.15  # of --minutes; the rest is start-up and warm-up


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads or num_cores())
    torch.manual_seed(args.seed)
    if args.alone:
        print(json.dumps(alone(args)))
        return
    with tempfile.TemporaryDirectory(prefix="fivetune-bench-") as folder:
        args.folder = Path(folder)
        prepare(args)
        result = measure(args)
    report(result)
    print(f"written to {write_result(result['name'], result, args.results)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="t5-small", choices=list(MODELS))
    parser.add_argument("--workload", default="squad", choices=list(WORKLOADS))
    parser.add_argument("--peers", default="default,tuned", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--batch-size", type=int, help="examples per step; default 16 (mt5-small on a CPU: 8), GPU 32")
    parser.add_argument("--minutes", type=float, default=9, help="about how long all of it may take")
    parser.add_argument("--threads", type=int, help="CPU threads; default: physical cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # one side in this process, for start-up and memory
    parser.add_argument("--attention", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.peers.split(",") if name not in PEERS]
    if unknown:
        parser.error(f"--peers: there is no {', '.join(unknown)}. Allowed: {', '.join(PEERS)}.")
    args.kind = args.device.partition(":")[0]
    if args.batch_size is None:
        args.batch_size = 32 if args.kind == "cuda" else {"mt5-small": 8}.get(args.model, 16)
    return args


def prepare(args: argparse.Namespace) -> None:
    """Write the model folder and the examples that all sides, in whatever process, start from."""
    make_model(args.model, args.folder, seed=args.seed)
    vocab_size = MODELS[args.model]["vocab_size"]
    write_examples(args.folder, args.workload, NUM_EXAMPLES, vocab_size=vocab_size, seed=args.seed)


def make_plan(args: argparse.Namespace, name: str) -> Plan:
    """The plan of what `prepare` wrote, with a folder for the side `name`."""
    own = args.folder / name
    own.mkdir(parents=True, exist_ok=True)
    model = args.folder / args.model
    return Plan(model, Examples(args.folder), args.workload, args.batch_size, args.device, own)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All windows of all sides, and each side alone."""
    names = ["fivetune", *args.peers.split(",")]
    attention = _attention_of_tuned(args, names)
    plan, peak = make_plan(args, "facts"), matmul_peak(args.device)
    windows, seconds_per_step = measure_together(args, names, attention)
    gc.collect()
    steps_alone = num_units_in(
        60 * args.minutes * SHARE_ALONE, list(seconds_per_step.values()), 1, most=MOST_ALONE[args.kind]
    )
    print(f"each side alone, {steps_alone} steps", flush=True)
    processes = {name: run_alone(args, name, attention, steps_alone) for name in names}
    return {
        "name": f"train-{args.device}-{args.model}-{args.workload}-{args.batch_size}",
        "model": args.model, "workload": args.workload, "lengths": plan.examples.lengths_from,
        "batch_size": args.batch_size, "precision": "bf16" if plan.on_gpu else "fp32", "attention_of_tuned": attention,
        "steps_per_window": windows["fivetune"][0].work.num_units, "num_windows": NUM_WINDOWS,
        "steps_alone": steps_alone, "matmul_peak_flops": peak, "machine": facts(args.device),
        "sides": {name: side_figures(windows[name], peak) | processes[name] for name in names},
        "ratios": {name: peer_figures(windows, name) for name in names[1:]},
    }  # fmt: skip


def _attention_of_tuned(args: argparse.Namespace, names: list[str]) -> str | None:
    """The faster attention; None if no side that is tuned takes part."""
    if not {"tuned", "compiled"} & set(names):
        return None
    from benchmarks.peers import best_attention

    return best_attention(make_plan(args, "choice"))


def measure_together(
    args: argparse.Namespace, names: list[str], attention: str | None
) -> tuple[dict[str, list[Window]], dict[str, float]]:
    """The interleaved windows of all sides, and the seconds of a step by which their length was chosen."""
    sides = [make_side(name, make_plan(args, name), attention=attention) for name in names]
    same_weights(sides)
    print(f"warm-up: {WARM_UP[args.kind]} steps of each of {', '.join(names)}", flush=True)
    seconds = {}
    for side in sides:
        for _ in range(2):
            window = timed_window(side, WARM_UP[args.kind] // 2, device=args.device)
            seconds[side.name] = window.seconds / window.work.num_units
    num_steps = num_units_in(
        60 * args.minutes * SHARE_OF_WINDOWS, list(seconds.values()), NUM_WINDOWS, most=MOST_STEPS[args.kind]
    )
    print(f"{NUM_WINDOWS} windows of {num_steps} steps each", flush=True)
    windows = interleaved(sides, num_steps, NUM_WINDOWS, device=args.device)
    same_totals(windows, "examples")
    for side in sides:
        side.close()
    return windows, seconds


def same_weights(sides: list[Any]) -> None:
    """Raises UnequalWork unless all sides hold as many weights, of the same values."""
    keys = {
        side.name: (num_parameters(side.model), sum(float(p.detach().abs().mean()) for p in side.model.parameters()))
        for side in sides
    }
    if len({(count, round(total, 4)) for count, total in keys.values()}) > 1:
        raise UnequalWork(f"the sides do not start from the same weights (number, mean sizes): {keys}.")


def side_figures(windows: list[Window], peak: float) -> dict[str, Any]:
    """What one side did: median, least and most over its windows, and over all of them together."""
    seconds = sum(w.seconds for w in windows)
    total = {name: sum(w.work.counts[name] for w in windows) for name in windows[0].work.counts}
    num_steps = sum(w.work.num_units for w in windows)
    return {
        "tokens_per_second": rates(windows, "tokens").as_list(),
        "examples_per_second": rates(windows, "examples").as_list(),
        "tokens_per_second_overall": total["tokens"] / seconds,
        "examples_per_second_overall": total["examples"] / seconds,
        "seconds_per_step": seconds / num_steps,
        "padding_fraction": 1 - total["tokens"] / total["positions"],
        "mfu": total["flops"] / seconds / peak,
        "mean_loss": total["nats"] / num_steps,
        "windows": [{"seconds": w.seconds, **w.work.counts} for w in windows],
    }


def peer_figures(windows: dict[str, list[Window]], peer: str) -> dict[str, Any]:
    """How many times faster FiveTune is than a peer, in tokens without padding."""
    return {"tokens_per_second": ratio(windows["fivetune"], windows[peer], "tokens").as_list()}


def run_alone(args: argparse.Namespace, name: str, attention: str | None, num_steps: int) -> dict[str, Any]:
    """One side in a fresh process: seconds until it is ready and until N steps are done, and its peak memory."""
    command = [
        sys.executable, "-m", "benchmarks.train", "--alone", name, "--steps", str(num_steps),
        "--device", args.device, "--model", args.model, "--workload", args.workload, "--folder", str(args.folder),
        "--batch-size", str(args.batch_size), "--threads", str(torch.get_num_threads()), "--seed", str(args.seed),
        *(["--attention", attention] if attention else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"{name} alone: failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """What `run_alone` measures, in the process that it started."""
    started = psutil.Process().create_time()
    side = make_side(args.alone, make_plan(args, f"alone-{args.alone}"), attention=args.attention)
    on_gpu = args.kind == "cuda"
    loaded = torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss
    ready = time.time() - started
    timed_window(side, args.steps, device=args.device)
    done = time.time() - started
    side.close()
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_resident()
    return {
        "start_up_seconds": ready, "seconds_to_last_step": done, "peak_bytes": peak,
        "peak_bytes_above_loaded": None if peak is None else peak - loaded,
    }  # fmt: skip


def report(result: dict[str, Any]) -> None:
    """Print the tables."""
    sides = result["sides"]
    head = ["side", "tokens/s", "(least to most)", "examples/s", "tokens/example", "s/step", "padding", "MFU", "loss",
            "start-up s", f"s to {result['steps_alone']} steps", "peak GB"]  # fmt: skip
    rows = [head]
    for name, side in sides.items():
        speed = side["tokens_per_second"]
        rows.append([
            name, f"{speed[0]:,.0f}", f"{speed[1]:,.0f} to {speed[2]:,.0f}",
            f"{side['examples_per_second_overall']:.2f}",
            f"{side['tokens_per_second_overall'] / side['examples_per_second_overall']:.0f}",
            f"{side['seconds_per_step']:.3g}",
            f"{side['padding_fraction']:.0%}", f"{side['mfu']:.1%}", f"{side['mean_loss']:.3f}",
            f"{side['start_up_seconds']:.1f}", f"{side['seconds_to_last_step']:.1f}", _gigabytes(side["peak_bytes"]),
        ])  # fmt: skip
    print(f"\n{result['model']}, {result['workload']}, batch {result['batch_size']}, {result['precision']}; lengths: "
          f"{result['lengths']}; {result['machine']['num_threads']} threads\n")  # fmt: skip
    print(table(rows), "\n")
    ours = sides["fivetune"]
    rows = [["FiveTune against", "tokens/s", "(least to most)", "to the last step", "memory"]]
    for name, figures in result["ratios"].items():
        speed = figures["tokens_per_second"]
        rows.append([
            name, f"{speed[0]:.2f}x", f"{speed[1]:.2f} to {speed[2]:.2f}",
            f"{sides[name]['seconds_to_last_step'] / ours['seconds_to_last_step']:.2f}x",
            f"{ours['peak_bytes'] / sides[name]['peak_bytes']:.2f}x" if ours["peak_bytes"] else "?",
        ])  # fmt: skip
    print(table(rows), "\n")
    print(f"MFU: against a matrix product of {result['matmul_peak_flops'] / 1e9:,.0f} GFLOP/s on this machine. "
          "tokens: without padding, source and target.")  # fmt: skip


def _gigabytes(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


if __name__ == "__main__":
    main()
