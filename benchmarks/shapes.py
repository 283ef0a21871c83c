"""Filler of the captured steps' shapes over three epochs, without a GPU: python -m benchmarks.shapes

In: nothing; lengths are drawn by the laws of benchmarks/workloads.py. Out: a table as Markdown. Nothing is timed.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from benchmarks.harness import make_parser
from benchmarks.workloads import WORKLOADS
from fivetune.data.store.stream import BatchPlan, make_length_bucketed_batches
from fivetune.model.cuda.buckets import Bucket, plan_buckets

RUNS = [
    ("squad", 87_600, 8),
    ("squad", 87_600, 32),
    ("squad", 87_600, 128),
    ("summarisation", 100_000, 32),
    ("translation", 100_000, 128),
]
NUM_EPOCHS = 3
MAX_BUCKETS = 32


def hold_batches(workload: str, num_examples: int, batch_size: int) -> tuple[np.ndarray, list[Bucket]]:
    """Plan the shapes of a run; returns facts of its micro-batches, [n, 5] as of `describe_batch`, and their buckets.

    Raises ValueError for a micro-batch that no bucket holds.
    """
    inputs, targets = (law.draw(np.random.default_rng(i), num_examples) for i, law in enumerate(WORKLOADS[workload]))
    plan = BatchPlan(batch_size, batch_size, bucket_pool=50, seed=0)
    facts: list[list[int]] = []
    for epoch in range(NUM_EPOCHS):
        for rows in make_length_bucketed_batches(inputs + targets, plan, epoch):
            source, target = inputs[rows], targets[rows]
            facts.append([source.sum(), target.sum(), source.max(), target.max(), len(rows)])
    counts = np.array(facts)
    buckets = plan_buckets(counts, max_buckets=MAX_BUCKETS)
    held: list[Bucket] = []
    for fact in counts.tolist():
        fitting = [bucket for bucket in buckets if bucket.can_hold(*fact)]
        held.append(min(fitting, key=lambda bucket: bucket.num_positions))
    return counts, held


def measure_filler(workload: str, num_examples: int, batch_size: int) -> dict[str, Any]:
    """Measure the share of positions that are filler, of inputs and of targets, in percent."""
    counts, held = hold_batches(workload, num_examples, batch_size)
    num_inputs = sum(bucket.num_inputs for bucket in held)
    num_targets = sum(bucket.num_targets for bucket in held)
    return {
        "lengths": workload,
        "examples": num_examples,
        "batch_size": batch_size,
        "inputs": 100 * (1 - counts[:, 0].sum() / num_inputs),
        "targets": 100 * (1 - counts[:, 1].sum() / num_targets),
        "graphs": len(set(held)),
    }


if __name__ == "__main__":
    args = make_parser(__doc__, results=None).parse_args()
    results = [measure_filler(*run) for run in RUNS]
    print("| lengths | examples, micro-batch | filler of inputs and targets | graphs |\n|---|---|---|---|")
    for row in results:
        size = f"{row['examples']:,}, {row['batch_size']}"
        print(f"| {row['lengths']} | {size} | {row['inputs']:.1f} and {row['targets']:.1f} % | {row['graphs']} |")
    if args.json:
        print(json.dumps(results))
