"""Memory of a rank by strategy and number of ranks: weights, gradients, optimizer state, and the peak of loading.

    python -m benchmarks.sharding --model t5-base --strategies fsdp,tensor --ranks 1,2,4

In: the name of a model in real shapes and random weights. Out: a table, and results/sharding-<model>.json. The bytes of
weights and state are counted from the tensors that a rank holds after one step; the peak of loading is the anonymous
memory of its process (Linux), sampled every millisecond, beyond what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import facts, make_parser, publish_result, table
from benchmarks.workloads import make_model
from fivetune import plugins
from fivetune.data.corpus import CHECKPOINT
from fivetune.distributed.sharding import get_local
from fivetune.distributed.world import World
from fivetune.model.flat import compute_flat_losses
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.shards import load_shards
from fivetune.training.step.groups import group_weights
from fivetune.types import Batch

LENGTHS = (128, 16)  # tokens of the inputs and of the targets of the only example


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="t5-base", help="as in benchmarks.workloads")
    parser.add_argument("--strategies", default="fsdp,tensor")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # a rank: the model's folder
    args = parser.parse_args()
    if args.folder:
        measure_rank(args.strategies, args.folder)
        return
    with tempfile.TemporaryDirectory(prefix="fivetune-sharding-") as place:
        folder = make_model(args.model, Path(place))
        rows = [
            {"strategy": name, "ranks": count, **start_ranks(args, name, count, folder)}
            for name in args.strategies.split(",")
            for count in map(int, args.ranks.split(","))
        ]
    of_first = f"of {rows[0]['ranks']}"
    head = ["strategy", "ranks", "weights", "state", "sum", of_first, "peak of loading", of_first]
    lines = [head]
    for row in rows:
        alone = next(r for r in rows if r["strategy"] == row["strategy"] and r["ranks"] == rows[0]["ranks"])
        held, held_alone = (r["weight_bytes"] + r["state_bytes"] for r in (row, alone))
        cells = [row["weight_bytes"], row["state_bytes"], held]
        lines.append(
            [
                row["strategy"],
                str(row["ranks"]),
                *(f"{cell / 2**20:,.0f} MiB" for cell in cells),
                f"{held / held_alone:.3f}",
                f"{row['load_peak_bytes'] / 2**20:,.0f} MiB",
                f"{row['load_peak_bytes'] / alone['load_peak_bytes']:.3f}",
            ]
        )
    print(table(lines))
    publish_result(args, f"sharding-{args.model}", {"facts": facts("cpu"), "model": args.model, "rows": rows})


def start_ranks(args: argparse.Namespace, strategy: str, count: int, folder: Path) -> dict[str, int]:
    """Run one configuration; returns the largest figures of its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"]
    command += ["benchmarks.sharding", "--strategies", strategy, "--folder", str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ)
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or len(found) != count:
        sys.exit(f"{strategy} on {count} ranks ended with {ended.returncode}:\n{ended.stderr}")
    return {key: max(one[key] for one in found) for key in found[0]}


def measure_rank(name: str, folder: str) -> None:
    """Load the model, run one step, and print the figures of this rank as a line of JSON."""
    torch.set_num_threads(1)
    strategy = plugins.load_plugin("strategies", name)()
    with World.from_environment().connect(cuda=False, timeout_minutes=5) as joined, strategy.suppress_warnings():
        world = joined.split(strategy.get_model_size(joined.size), "cpu")
        load_model_and_tokenizer(str(CHECKPOINT))  # imports and caches are no part of the peak
        with MemoryPeak() as peak:
            # On one rank too the values are read into memory, so that its peak can be compared.
            loaded = load_model_and_tokenizer(folder, on_meta=strategy.sharded)
            model = strategy.wrap(loaded.model, "cpu", world) if world.size > 1 else loaded.model
            if loaded.files:
                load_shards(model, loaded.files, "cpu", where=folder)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(group_weights(model), foreach=True)
        compute_flat_losses(model, make_batch()).mean().backward()
        optimizer.step()
        states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
        figures = {
            "weight_bytes": count_bytes(parameters),
            "state_bytes": count_bytes([value for value in states if isinstance(value, torch.Tensor)]),
            "load_peak_bytes": peak.num_bytes,
        }
        print(json.dumps(figures), flush=True)
        world.barrier()


def make_batch() -> Batch:
    random = torch.Generator().manual_seed(0)
    inputs, labels = (torch.randint(3, 1000, (length,), generator=random) for length in LENGTHS)
    bounds = [torch.tensor([0, length]) for length in LENGTHS]
    return Batch(input_ids=inputs, labels=labels, cu_seqlens_src=bounds[0], cu_seqlens_tgt=bounds[1], ids=("q",))


def count_bytes(tensors: list[Any]) -> int:
    return sum(get_local(tensor).numel() * tensor.element_size() for tensor in tensors)


class MemoryPeak:
    """The largest anonymous memory of this process inside the block, beyond that at its start."""

    num_bytes = 0

    def __enter__(self) -> MemoryPeak:
        self._before, self._done = read_anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, read_anonymous_bytes() - self._before)
            if self._done.is_set():
                return
            time.sleep(0.001)


def read_anonymous_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
