"""Training: FiveTune against transformers' Seq2SeqTrainer in several set-ups, and a plain loop.

Same weights, examples, updates, optimizer and dropout. Each side lives in a process of its own, so that no side's
memory is in another's way; windows of optimizer steps are interleaved A B B A, one process working at a time.
Every side goes once through the same examples, in an order of its own: so the ratio of the seconds is that of the same
work. Windows differ in length where a side sorts (the Trainer's length grouping goes from long to short), so the spread
is told in tokens. On a GPU every side first goes through all examples once: what is compiled, recorded and allocated is
there, and the peaks of memory are those of the windows.

Peers run as their users start them; FiveTune's sides have what `import fivetune` sets in the environment. Where
FiveTune computes in bf16 on a CPU, its own fp32 takes part too.
    python -m benchmarks.train --device cpu --model t5-small --workload squad --peers default,tuned,tuned-bf16 --json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import (
    UnequalWork,
    Window,
    Work,
    facts,
    interleaved,
    make_parser,
    matmul_peak,
    num_units_in,
    peak_resident,
    publish_result,
    rates,
    ratio,
    same_totals,
    table,
    timed_window,
)
from benchmarks.plan import OWN, PEERS, Plan
from benchmarks.sides import make_side
from benchmarks.workloads import MODELS, WORKLOADS, Examples, make_model, write_examples
from fivetune import ENVIRONMENT
from fivetune.model.load import count_parameters
from fivetune.telemetry.devices import count_cores

NUM_WINDOWS = 6
WARM_UP, MOST_STEPS = {"cpu": 2, "cuda": 20}, {"cpu": 5, "cuda": 50}
NUM_UNTIMED = {"cpu": 0, "cuda": 1}  # times that all examples are gone through before the windows
SHARE_OF_WINDOWS = 0.65  # of --minutes; the rest is start-up and warm-up


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads or count_cores())
    torch.manual_seed(args.seed)
    if args.side:
        serve(args)
        return
    result = measure_models(args)
    report(result)
    publish_result(args, result["name"], result)


def measure_models(args: argparse.Namespace) -> dict[str, Any]:
    """The result of all sides, on a model in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fivetune-bench-") as folder:
        args.folder = Path(folder)
        make_model(args.model, args.folder, seed=args.seed)
        return measure(args)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="t5-small", choices=list(MODELS))
    parser.add_argument("--workload", default="squad", choices=list(WORKLOADS))
    known = [*PEERS, *list(OWN)[1:]]
    parser.add_argument("--peers", default="default,tuned", help=f"of {', '.join(known)}")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "tf32"), help="of all sides")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adafactor"))
    parser.add_argument("--adapter", default="", help="name of the adapter that all sides train; default: all weights")
    parser.add_argument("--batch-size", type=int, help="examples per step; default 16 (mt5-small on a CPU: 8), GPU 32")
    parser.add_argument("--minutes", type=float, default=9, help="about how long all of it may take")
    parser.add_argument("--threads", type=int, help="CPU threads; default: physical cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", help=argparse.SUPPRESS)  # be the process of this side
    parser.add_argument("--attention", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    unknown = [name for name in args.peers.split(",") if name not in known]
    if unknown:
        parser.error(f"--peers: there is no {', '.join(unknown)}. Allowed: {', '.join(known)}.")
    args.kind = args.device.partition(":")[0]
    if args.batch_size is None:
        args.batch_size = 32 if args.kind == "cuda" else {"mt5-small": 8}.get(args.model, 16)
    return args


def prepare(args: argparse.Namespace, name: str, num_steps: int) -> None:
    """Write the examples of so many steps, which all sides, in whatever process, go through once."""
    folder = args.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = MODELS[args.model]["vocab_size"]
    write_examples(folder, args.workload, num_steps * args.batch_size, vocab_size=vocab_size, seed=args.seed)


def make_plan(args: argparse.Namespace, name: str, examples: str) -> Plan:
    """The plan of the model and the examples that were written, with a folder for the side `name`."""
    own = args.folder / examples / name
    own.mkdir(parents=True, exist_ok=True)
    model = args.folder / args.model
    lines = Examples(args.folder / examples)
    return Plan(
        model, lines, args.workload, args.batch_size, args.device, own, args.adapter, args.precision, args.optimizer
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start all sides, warm them up, and let them take turns."""
    queue = ["fivetune", *args.peers.split(",")]
    prepare(args, "warm-up", WARM_UP[args.kind])
    attention = _choose_attentions(args, queue)
    peak = matmul_peak(args.device)
    print(f"start-up and warm-up: {WARM_UP[args.kind]} steps of each side", flush=True)
    sides: list[Remote] = []
    starts: dict[str, Any] = {}
    try:
        for name in queue:
            sides.append(Remote(args, name, attention.get(name)))
            starts[name] = sides[-1].ask("warm-up", WARM_UP[args.kind])
            if name == "fivetune" and _adds_fp32(args, starts[name]):
                queue.append("fivetune-fp32")
        last = [start["last_step_seconds"] * (1 + NUM_UNTIMED[args.kind]) for start in starts.values()]
        num_steps = num_units_in(60 * args.minutes * SHARE_OF_WINDOWS, last, NUM_WINDOWS, most=MOST_STEPS[args.kind])
        prepare(args, "measured", NUM_WINDOWS * num_steps)
        same_weights({side.name: side.ask("measured", 0)["weights"] for side in sides})
        for side in sides * NUM_UNTIMED[args.kind]:
            side.ask("untimed", NUM_WINDOWS * num_steps)
        print(f"{NUM_WINDOWS} windows of {num_steps} steps each", flush=True)
        windows = interleaved(sides, num_steps, NUM_WINDOWS)
        ends = {side.name: side.ask("end", 0) for side in sides}
    finally:
        for side in sides:
            side.close()
    same_totals(windows, "examples")
    same_totals(windows, "tokens")
    plan = make_plan(args, "facts", "measured")
    return {
        "name": f"{args.adapter or 'train'}-{args.device}-{args.model}-{args.workload}-{args.batch_size}",
        "adapter": args.adapter,
        "model": args.model,
        "workload": args.workload,
        "lengths": plan.examples.lengths_from,
        "num_examples": len(plan.examples),
        "batch_size": args.batch_size,
        "precision": args.precision,
        "optimizer": args.optimizer,
        "attention_of_tuned": attention,
        "steps_per_window": num_steps,
        "num_windows": NUM_WINDOWS,
        "warm_up_steps": WARM_UP[args.kind],
        "matmul_peak_flops": peak,
        "machine": facts(args.device),
        "sides": {name: side_figures(windows[name], peak) | starts[name] | ends[name] for name in queue},
        "ratios": {name: peer_figures(windows, name) for name in queue[1:]},
    }


def _adds_fp32(args: argparse.Namespace, start: dict[str, Any]) -> bool:
    """Whether FiveTune's fp32 takes part although nobody asked for it: where its own choice on a CPU is bf16."""
    return args.kind == "cpu" and start["precision"] == "bf16" and "fivetune-fp32" not in args.peers.split(",")


def _choose_attentions(args: argparse.Namespace, names: list[str]) -> dict[str, str]:
    """The faster attention of every tuned side, in the precision of that side."""
    tuned = [name for name in names if name.startswith(("tuned", "compiled"))]
    if not tuned:
        return {}
    from benchmarks.peers import best_attention

    plan = make_plan(args, "choice", "warm-up")
    found = {bf16: best_attention(plan, bf16=bf16) for bf16 in sorted({name == "tuned-bf16" for name in tuned})}
    return {name: found[name == "tuned-bf16"] for name in tuned}


def make_environment(name: str) -> dict[str, str]:
    """The environment of a side: FiveTune's has what `import fivetune` sets, a peer's only what the user set."""
    given = psutil.Process().environ()
    added = set[str]() if name in OWN else ENVIRONMENT.keys() - given
    return {key: value for key, value in os.environ.items() if key not in added}


class Remote:
    """A side in a process of its own, which does what it is asked for and waits in between."""

    def __init__(self, args: argparse.Namespace, name: str, attention: str | None) -> None:
        self.name = name
        command = [
            sys.executable,
            "-m",
            "benchmarks.train",
            "--side",
            name,
            "--device",
            args.device,
            "--model",
            args.model,
            "--workload",
            args.workload,
            "--folder",
            str(args.folder),
            "--batch-size",
            str(args.batch_size),
            "--threads",
            str(torch.get_num_threads()),
            "--seed",
            str(args.seed),
            *("--precision", args.precision, "--optimizer", args.optimizer),
            *(["--attention", attention] if attention else []),
            *(["--adapter", args.adapter] if args.adapter else []),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=make_environment(name),
        )

    def ask(self, what: str, num_steps: int) -> dict[str, Any]:
        """The process's answer. Raises RuntimeError if it has died."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([what, num_steps]) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name}: its process ended with code {self._process.wait()}; see above.")
        return json.loads(line)

    def work(self, num_units: int) -> Work:
        return Work(**self.ask("work", num_units))

    def close(self) -> None:
        with self._process as process:  # closes the pipes and waits
            process.terminate()


def serve(args: argparse.Namespace) -> None:
    """The process of a side: answers the questions of `Remote.ask`, one per line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    gc.disable()
    side = None
    for line in sys.stdin:
        what, num_steps = json.loads(line)
        gc.collect()
        if what in ("warm-up", "measured"):
            if side is not None:
                side.close()
                side = None
                gc.collect()
            side = make_side(args.side, make_plan(args, args.side, what), attention=args.attention)
        assert side is not None
        answers_of = {"warm-up": _warmed_up, "measured": _weights, "untimed": _untimed, "work": _worked, "end": _ended}
        answer = answers_of[what]
        print(json.dumps(answer(side, num_steps, args)), file=answers, flush=True)
        if platform.libc_ver()[0] == "glibc":  # which keeps what was freed: five sides of t5-small would fill 24 GiB
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    if side is not None:
        side.close()


def _warmed_up(side: Any, num_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds since the process began until the side was ready, and until it had done its first steps."""
    started = psutil.Process().create_time()
    ready = time.time() - started
    timed_window(side, num_steps - 1, device=args.device)
    last = timed_window(side, 1, device=args.device).seconds
    return {
        "start_up_seconds": ready,
        "warmed_up_seconds": time.time() - started,
        "last_step_seconds": last,
        "precision": side.precision,
        "wait_policy": psutil.Process().environ().get("OMP_WAIT_POLICY"),
    }


def _weights(side: Any, num_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """What tells one set of weights from another: how many, and their mean sizes together, without an adapter's."""
    sizes = sum(
        float(p.detach().abs().mean()) for p in side.model.parameters() if p.requires_grad != bool(args.adapter)
    )
    return {"weights": [count_parameters(side.model), round(sizes, 4)]}


def _untimed(side: Any, num_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Steps before the windows; then peaks of memory begin again."""
    _worked(side, num_steps, args)
    gc.collect()
    if args.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return {}


def _worked(side: Any, num_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """What was done, with the CPU seconds of this process, which other programs change little (workers apart)."""
    before = time.process_time()
    work = side.work(num_steps)
    work.counts["cpu_seconds"] = time.process_time() - before
    if args.kind == "cuda":
        torch.cuda.synchronize()
    return {"num_units": work.num_units, "counts": work.counts}


def _ended(side: Any, num_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Most memory in use at once: on a GPU during the windows, on a CPU since the process began."""
    peak = torch.cuda.max_memory_allocated() if args.kind == "cuda" else peak_resident()
    return {"peak_bytes": peak, **side.facts()}


def same_weights(found: dict[str, Any]) -> None:
    """Raises UnequalWork unless all sides hold as many weights, of the same values."""
    if len({tuple(weights) for weights in found.values()}) > 1:
        raise UnequalWork(f"the sides do not start from the same weights (number, mean sizes): {found}.")


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
    """How many times faster FiveTune is than a peer: on the same examples, and in tokens per second over windows."""
    ours, theirs = (sum(w.seconds for w in windows[name]) for name in ("fivetune", peer))
    cpu = {name: sum(w.work.counts["cpu_seconds"] for w in windows[name]) for name in ("fivetune", peer)}
    return {
        "same_examples": theirs / ours,
        "same_examples_cpu_seconds": cpu[peer] / cpu["fivetune"],
        "tokens_per_second": ratio(windows["fivetune"], windows[peer], "tokens").as_list(),
    }


def report(result: dict[str, Any]) -> None:
    """Print the tables."""
    sides = result["sides"]
    head = [
        "side",
        "precision",
        "tokens/s",
        "(least to most)",
        "examples/s",
        "s/step",
        "padding",
        "MFU",
        "loss",
        "start-up s",
        f"s to {result['warm_up_steps']} steps",
        "peak GB",
    ]
    rows = [head]
    for name, side in sides.items():
        speed = side["tokens_per_second"]
        rows.append(
            [
                name,
                _name_precision(result, name),
                f"{speed[0]:,.0f}",
                f"{speed[1]:,.0f} to {speed[2]:,.0f}",
                f"{side['examples_per_second_overall']:.2f}",
                f"{side['seconds_per_step']:.3g}",
                f"{side['padding_fraction']:.0%}",
                f"{side['mfu']:.1%}",
                f"{side['mean_loss']:.3f}",
                f"{side['start_up_seconds']:.1f}",
                f"{side['warmed_up_seconds']:.1f}",
                _gigabytes(side["peak_bytes"]),
            ]
        )
    print(
        f"\n{result['model']}, {result['workload']}, batch {result['batch_size']}; lengths: "
        f"{result['num_examples']} of {result['lengths']}; {result['machine']['num_threads']} threads\n"
    )
    print(table(rows), "\n")
    ours = sides["fivetune"]
    rows = [
        [
            f"FiveTune ({_name_precision(result, 'fivetune')}) against",
            "same examples",
            "CPU seconds",
            "tokens/s",
            "(least to most)",
            f"to step {result['warm_up_steps']}",
            "memory",
        ]
    ]
    for name, figures in result["ratios"].items():
        speed = figures["tokens_per_second"]
        rows.append(
            [
                f"{name} ({_name_precision(result, name)})",
                f"{figures['same_examples']:.2f}x",
                f"{figures['same_examples_cpu_seconds']:.2f}x",
                f"{speed[0]:.2f}x",
                f"{speed[1]:.2f} to {speed[2]:.2f}",
                f"{sides[name]['warmed_up_seconds'] / ours['warmed_up_seconds']:.2f}x",
                f"{ours['peak_bytes'] / sides[name]['peak_bytes']:.2f}x" if ours["peak_bytes"] else "?",
            ]
        )
    print(table(rows), "\n")
    print(
        f"MFU: against a matrix product of {result['matmul_peak_flops'] / 1e9:,.0f} GFLOP/s on this machine. "
        "tokens: without padding, source and target."
    )


def _name_precision(result: dict[str, Any], side: str) -> str:
    """What a side computed in; results of old files have one precision for all."""
    return str(result["sides"][side].get("precision", result["precision"]))


def _gigabytes(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


if __name__ == "__main__":
    main()
