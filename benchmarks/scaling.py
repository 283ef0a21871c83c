"""Strong and weak scaling over processes or GPUs, beside what the machine itself allows, and the losses by cause.

    python -m benchmarks.scaling --processes 1,2 --strategies ddp,fsdp,tensor,pipeline

In: a model in real shapes and random weights, the quickstart's corpus. Out: the page of `fivetune compare`, a table,
and results/scaling-<device>-<model>.json. The variants are the runs of a sweep, which interleaves them:

    strong    the same global batch on all numbers of processes
    weak      a global batch that grows with the processes

The limit of the machine is measured in the same way, in turns: as many independent one-process runs at the same time as
there are processes. They exchange nothing, but share caches, memory bandwidth and power, so no strategy can be
expected to be faster. On a CPU every process computes with one thread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.harness import abba, facts, make_parser, publish_result, table
from benchmarks.workloads import MODELS, make_model
from fivetune.fleet.experiments.record import compare_sweep, read_sweep_variants
from fivetune.fleet.experiments.runs import RECIPES
from fivetune.reading.compare.records import Variant
from fivetune.rundir import read_run
from fivetune.rundir.figures import compute_examples_per_second

MICRO_BATCH, MICRO_BATCHES = 8, 2  # examples at once, and how many of these a step of one process has
ALONE = "1 process"
CAUSES = ("forward", "backward", "bubble", "exchange", "optimizer")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="t5-small", choices=list(MODELS))
    parser.add_argument("--processes", default="1,2", help="numbers of processes; begins with 1")
    parser.add_argument("--strategies", default="ddp,fsdp,tensor,pipeline")
    parser.add_argument("--steps", type=int, default=14, help="of a run; the first ones are warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every variant")
    parser.add_argument("--folder", type=Path, help="keep the runs and the page here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fivetune-scaling-") as place:
        folder: Path = args.folder or Path(place)
        sizes = [int(size) for size in args.processes.split(",")]
        sweep = write_sweep(args, sizes, folder)
        run_fivetune("compare", str(sweep))
        comparison = compare_sweep(folder / "runs", read_sweep_variants(folder / "runs"))
        alone = next(variant for variant in comparison.variants if variant.name == ALONE)
        recipe = folder / "runs" / RECIPES / f"{alone.runs[0].name}.yaml"
        limits = {size: measure_limit(folder / "limit", recipe, size, args.rounds) for size in sizes if size > 1}
        rows = [describe(variant, limits) for variant in comparison.variants]
        print(table([list(rows[0]), *([format_cell(cell) for cell in row.values()] for row in rows)]))
        print("The machine's limit: " + ", ".join(f"{size} processes {limit:.3f}" for size, limit in limits.items()))
        result = {"facts": facts(args.device), "model": args.model, "steps": args.steps, "rounds": args.rounds}
        result |= {"limits": limits, "disturbed": comparison.disturbed, "rows": rows}
        if args.folder:
            print(f"page: {folder / 'runs' / 'comparison.html'}")
        publish_result(args, f"scaling-{args.device}-{args.model}", result)


def write_sweep(args: argparse.Namespace, sizes: list[int], folder: Path) -> Path:
    """Write the sweep file; returns its path."""
    cpu = args.device == "cpu"
    variants: list[dict[str, Any]] = [{"name": ALONE, "launch.nproc": 1, "strategy.name": "single"}]
    for size in sizes:
        for strategy in args.strategies.split(",") if size > 1 else []:
            placed = {"launch.nproc": size, "strategy.name": strategy}
            batch = MICRO_BATCH * MICRO_BATCHES * size
            variants += [
                {"name": f"{size} {strategy}, strong", **placed},
                {"name": f"{size} {strategy}, weak", **placed, "train.global_batch_size": batch},
            ]
    content = {
        "title": f"Scaling of {args.model}",
        "base": "quickstart",
        "dir": str(folder / "runs"),
        "corpus": {"dir": str(folder / "corpus"), "num_train": 4_000, "num_eval": 40},
        "set": {
            "model": {"path": str(make_model(args.model, folder / "model"))},
            "device": args.device,
            "data": {"train": str(folder / "corpus/train.json"), "eval": str(folder / "corpus/dev.json")},
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "train": {
                "num_steps": args.steps,
                "batch_size": MICRO_BATCH,
                "global_batch_size": MICRO_BATCH * MICRO_BATCHES,
                "precision": "fp32" if cpu else "bf16",
                **({"num_threads": 1} if cpu else {}),
            },
            "eval": {"every_steps": args.steps, "max_examples": 8},
            "report.beside": [],
        },
        "list": variants,
        "seeds": list(range(args.rounds)),
        "baseline": ALONE,
        "metric": "f1",
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def measure_limit(folder: Path, recipe: Path, size: int, rounds: int) -> float:
    """Examples per second of `size` independent runs at the same time, divided by `size` times those of one alone."""
    rates: dict[int, list[float]] = {1: [], size: []}
    for turn, count in enumerate(abba("1n", rounds)):
        count = size if count == "n" else 1
        names = [folder / f"{size}-{turn}-{number}" for number in range(count)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "fivetune", "train", str(recipe), f"--run.dir={name}", "--quiet"],
                stdout=subprocess.DEVNULL,
            )
            for name in names
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(f"{recipe}: a run of the machine's limit failed")
        rates[count].append(sum(compute_examples_per_second(read_run(name).steps) or 0.0 for name in names))
    return median(rates[size]) / (size * median(rates[1]))


def run_fivetune(*arguments: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "fivetune", *arguments])
    if ended.returncode:
        sys.exit(f"fivetune {' '.join(arguments)} ended with {ended.returncode}")


def describe(variant: Variant, limits: dict[int, float]) -> dict[str, Any]:
    """The figures of a variant; shares are of its own time."""
    measures, losses = variant.measures, variant.scaling_losses
    efficiency, size = measures["scaling_efficiency"].value, int(measures["world_size"].value or 1)
    return {
        "variant": variant.name,
        "examples/s": measures["examples_per_second"].value,
        "efficiency": efficiency,
        "of the limit": efficiency and efficiency / limits[size],
        **{f"lost in {phase}": losses.get(phase) for phase in CAUSES},
        "lost elsewhere": sum(loss for phase, loss in losses.items() if phase not in CAUSES) if losses else None,
    }


def format_cell(cell: float | str | None) -> str:
    return cell if isinstance(cell, str) else "" if cell is None else f"{cell:.3f}"


if __name__ == "__main__":
    main()
