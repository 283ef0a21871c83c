"""The share of a step in which data parallel processes wait for the all-reduce of their gradients (strategy ddp).

    python -m benchmarks.overlap --model t5-small --ranks 2

In: the name of a model in real shapes and random weights. Out: a table, and results/overlap-<model>.json. Every process
has one thread, and computes steps of flat tokens whose gradients are all-reduced after the backward pass (`after`) or
while it goes on (`overlapped`), in interleaved windows of one run. The wait is the time from the end of the backward
pass until all gradients are summed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import Spread, Work, facts, interleaved, make_parser, publish_result, ratio, table
from benchmarks.workloads import make_model
from fivetune.distributed.world import World
from fivetune.model.flat import compute_flat_losses
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.modules import T5Model
from fivetune.training.strategies.ddp import DDP
from fivetune.types import Batch

LENGTHS = (175, 5)  # tokens of the inputs and of the targets of every example, about SQuAD's means
NUM_STEPS = 4  # of a window


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="t5-small", help="as in benchmarks.workloads")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-sizes", default="1,4", help="examples of each process in a step")
    parser.add_argument("--windows", type=int, default=6, help="of each side")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # a rank: the model's folder
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    if args.folder:
        measure_rank(args.folder, sizes, args.windows)
        return
    with tempfile.TemporaryDirectory(prefix="fivetune-overlap-") as place:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        command += ["-m", "benchmarks.overlap", "--folder", str(make_model(args.model, Path(place)))]
        command += ["--batch-sizes", args.batch_sizes, "--windows", str(args.windows)]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or len(rows) != len(sizes):
        sys.exit(f"the ranks ended with {ended.returncode}:\n{ended.stderr}")
    lines = [["examples", "step, after", "wait", "share", "step, overlapped", "wait", "share", "faster"]]
    for row in rows:
        cells = [str(row["batch_size"])]
        for side in ("after", "overlapped"):
            step, wait = row[side]["step_seconds"][0], row[side]["wait_seconds"][0]
            cells += [f"{1000 * step:.0f} ms", f"{1000 * wait:.0f} ms", f"{100 * wait / step:.1f} %"]
        low, high = row["speedup"][1:]
        lines.append([*cells, f"{row['speedup'][0]:.2f} ({low:.2f} to {high:.2f})"])
    print(table(lines))
    result = {"facts": facts("cpu"), "model": args.model, "ranks": args.ranks, "rows": rows}
    publish_result(args, f"overlap-{args.model}", result)


class Steps:
    """A side of the comparison: forward and backward pass of a batch on every rank, and the sum of the gradients."""

    def __init__(self, name: str, model: T5Model, batch: Batch, world: World) -> None:
        self.name, self._model, self._batch, self._world = name, model, batch, world

    def work(self, num_units: int) -> Work:
        strategy, wait = DDP(), 0.0
        for _ in range(num_units):
            strategy.prepare_backward(self._model, self._world, is_last=self.name == "overlapped")
            compute_flat_losses(self._model, self._batch).sum().backward()
            began = time.perf_counter()
            strategy.reduce_gradients(self._model, self._world)
            wait += time.perf_counter() - began
            self._model.zero_grad(set_to_none=True)
        return Work(num_units, {"wait": wait})


def measure_rank(folder: str, batch_sizes: list[int], num_windows: int) -> None:
    """Measure this rank; the first one prints a line of JSON for every batch size."""
    torch.set_num_threads(1)
    with World.from_environment().connect(cuda=False, timeout_minutes=5) as world:
        model = DDP().wrap(load_model_and_tokenizer(folder).model.train(), "cpu", world)
        for batch_size in batch_sizes:
            sides = [Steps(name, model, make_batch(batch_size, world.rank), world) for name in ("after", "overlapped")]
            interleaved(sides, 1, 2)  # the first steps allocate
            windows = interleaved(sides, NUM_STEPS, num_windows)
            row: dict[str, object] = {"batch_size": batch_size}
            for side, own in windows.items():
                steps = [window.seconds / NUM_STEPS for window in own]
                waits = [window.work.counts["wait"] / NUM_STEPS for window in own]
                row[side] = {"step_seconds": Spread.of(steps).as_list(), "wait_seconds": Spread.of(waits).as_list()}
            row["speedup"] = ratio(windows["overlapped"], windows["after"], "units").as_list()
            if world.is_first:
                print(json.dumps(row), flush=True)
            world.barrier()


def make_batch(size: int, seed: int) -> Batch:
    """A batch of `size` examples of random ids."""
    random = torch.Generator().manual_seed(seed)
    inputs, labels = (torch.randint(3, 1000, (size * length,), generator=random) for length in LENGTHS)
    ends = [torch.arange(size + 1) * length for length in LENGTHS]
    return Batch(inputs, labels, ends[0], ends[1], tuple(map(str, range(size))))


if __name__ == "__main__":
    main()
