"""Memory that `fivetune estimate` predicts, beside the memory that training steps take: python -m benchmarks.estimate

In: ten small configurations on this CPU, each in its own process or processes. Out: a table, and
results/estimate-cpu.json. Measured is the largest anonymous memory of a rank (RssAnon, Linux, sampled every
millisecond) in three optimizer steps, beyond what the process had after three steps of a tiny model: imports, threads,
buffers of the libraries. glibc maps every block of 64 KiB or more on its own (MALLOC_MMAP_THRESHOLD_), so that freed
tensors return to the system at once, and the figure is that of live tensors, those inside of torch's kernels and
numpy's included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import facts, make_parser, publish_result, table
from benchmarks.sharding import MemoryPeak, read_anonymous_bytes
from fivetune.config import RunConfig, load_config
from fivetune.distributed.pipeline import find_stage
from fivetune.distributed.world import World
from fivetune.fleet.estimation.memory import estimate_memory
from fivetune.fleet.estimation.recipe import build_workload
from fivetune.model.backend import Forward
from fivetune.model.flops import list_block_flops
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.step.groups import build_optimizer
from fivetune.training.step.learner import Learner
from fivetune.training.step.pipeline import PipelineEngine
from fivetune.training.step.plain import PlainEngine
from fivetune.training.step.update import train_step
from fivetune.types import Batch

NUM_STEPS = 3
QUIET = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration: the shape of a model, tokens of an example, and settings."""

    name: str
    shape: dict[str, Any]
    lengths: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1


def make_shape(d: int, ff: int, heads: int, layers: int, vocab: int = 32128, *, gated: bool = False) -> dict[str, Any]:
    return {
        "model_type": "mt5" if gated else "t5", "d_model": d, "d_kv": 64, "d_ff": ff, "num_heads": heads,
        "num_layers": layers, "vocab_size": vocab, "tie_word_embeddings": not gated, "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu" if gated else "relu", "pad_token_id": 0, "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }  # fmt: skip


SMALL, NARROW = make_shape(512, 2048, 8, 6), make_shape(256, 1024, 4, 4)
CASES = [
    Case("t5-small, adamw", SMALL, (256, 64), {"train.batch_size": 8}),
    Case("t5-small, adafactor", SMALL, (400, 16), {"train.batch_size": 8, "optimizer.name": "adafactor"}),
    Case("t5-small, recompute", SMALL, (512, 128), {"train.batch_size": 8, "train.recompute": True}),
    Case("narrow, short examples, no dropout", NARROW, (40, 40), {"train.batch_size": 64, "model.dropout": 0}),
    Case("gated, large vocabulary", make_shape(128, 256, 2, 4, 250112, gated=True), (200, 64), {"train.batch_size": 8}),
    Case("gated, ddp", make_shape(384, 1024, 6, 6, gated=True), (256, 80), {"strategy.name": "ddp"}, 2),
    Case("t5-small, tensor", SMALL, (256, 64), {"strategy.name": "tensor", "train.batch_size": 8}, 2),
    Case(
        "t5-small, pipeline, accumulation",
        SMALL,
        (256, 64),
        {
            "strategy.name": "pipeline",
            "strategy.balance": "counted",
            "train.batch_size": 4,
            "train.global_batch_size": 16,
        },
        2,
    ),
    Case("t5-small, fsdp", SMALL, (256, 64), {"strategy.name": "fsdp"}, 2),
    Case(
        "gated, fsdp, recompute, accumulation",
        make_shape(512, 1024, 6, 8, gated=True),
        (256, 64),
        {"strategy.name": "fsdp", "train.recompute": True, "train.batch_size": 4, "train.global_batch_size": 16},
        2,
    ),
]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="of a case, from 1; nothing is written")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # a rank: where config.json is
    args = parser.parse_args()
    if args.folder:
        measure_rank(CASES[args.only - 1], args.folder)
        return
    chosen = range(len(CASES)) if args.only is None else [args.only - 1]
    rows = [start_case(number) for number in chosen]
    head = ["configuration", "ranks", "predicted MiB", "measured MiB", "ratio", "peak at"]
    lines = [head]
    for row in rows:
        predicted, measured = row["predicted_bytes"], row["measured_bytes"]
        sizes = [f"{number / 2**20:,.0f}" for number in (predicted, measured)]
        lines.append([row["name"], str(row["ranks"]), *sizes, f"{predicted / measured:.3f}", row["moment"]])
    print(table(lines))
    result = {"facts": facts("cpu"), "rows": rows}
    if args.only is None:
        publish_result(args, "estimate-cpu", result)
    elif args.json:
        print(json.dumps(result))


def start_case(number: int) -> dict[str, Any]:
    """Run one configuration in its own processes; returns its figures, those of the rank with the larger peak."""
    case = CASES[number]
    with tempfile.TemporaryDirectory(prefix="fivetune-estimate-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.shape))
        command = [sys.executable, "-m"]
        if case.ranks > 1:
            command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m"]
        command += ["benchmarks.estimate", "--only", str(number + 1), "--folder", folder]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET})
        found = [json.loads(text) for text in re.findall("{.+?}", ended.stdout)]  # ranks may share a line
        if ended.returncode or len(found) != case.ranks:
            sys.exit(f"{case.name} ended with {ended.returncode}:\n{ended.stderr}")
        config = build_config(case, folder)
        memory = estimate_memory(build_workload(config, None), config.strategy.get_layout(case.ranks))
    return {
        "name": case.name,
        "ranks": case.ranks,
        "predicted_bytes": round(memory.peak),
        "measured_bytes": max(one["measured_bytes"] for one in found),
        "moment": memory.moment,
        "weights_bytes": round(memory.weights),
        "gradients_bytes": round(memory.gradients),
        "state_bytes": round(memory.state),
        "activations_bytes": round(memory.activations),
        "buffers_bytes": round(memory.buffers),
    }


def build_config(case: Case, folder: str) -> RunConfig:
    settings = {"optimizer.name": "adamw", "launch.nproc": case.ranks, **case.settings}
    settings |= dict(zip(("data.max_input_tokens", "data.max_target_tokens"), case.lengths, strict=True))
    return load_config({"model": {"init": "random", "config": folder}, "task": {"name": "jsonl"}}, settings)


def measure_rank(case: Case, folder: str) -> None:
    """Train on random ids, and print the largest memory of this rank as a line of JSON."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    config = build_config(case, folder)
    with World.from_environment().connect(cuda=False, timeout_minutes=5) as joined, config.strategy.suppress_warnings():
        world = joined.split(config.strategy.get_model_size(joined.size), "cpu")
        train(make_shape(64, 128, 2, 2, vocab=512), (32, 8), config, world)
        before = read_anonymous_bytes()
        measured = train(case.shape, case.lengths, config, world) - before
        print(json.dumps({"measured_bytes": measured}), flush=True)
        world.barrier()


def train(shape: dict[str, Any], lengths: tuple[int, int], config: RunConfig, world: World) -> int:
    """Run NUM_STEPS steps of a new model; returns the largest anonymous memory of this process during them."""
    model = make_random_model(shape, config)
    costs = list_block_flops(model.config, *([length] for length in lengths))
    model = config.strategy.wrap(model, "cpu", world, costs=costs)
    forward = Forward("flat", "", recompute=config.train.recompute)
    learner = Learner(
        model=model,
        optimizer=build_optimizer(config, model),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        forward=forward,
        compute=ComputeConfig("cpu", "fp32"),
        strategy=config.strategy,
        engine=PipelineEngine() if find_stage(model) else PlainEngine(),
        max_grad_norm=config.train.max_grad_norm,
        world=world,
    )
    assert config.train.batch_size != "auto"
    share = config.train.examples_per_step // world.data_size
    batch_size = min(config.train.batch_size, share)
    with MemoryPeak() as peak:
        start = read_anonymous_bytes()
        for step in range(NUM_STEPS):
            group = [make_batch(batch_size, lengths, shape["vocab_size"]) for _ in range(share // batch_size)]
            train_step(learner, group, lr=1e-4, step=step)
    return start + peak.num_bytes


def make_random_model(shape: dict[str, Any], config: RunConfig) -> Any:
    transformers: Any = import_module("transformers")
    settings = transformers.AutoConfig.for_model(**{**shape, "dropout_rate": config.model.dropout or 0.0})
    model = transformers.AutoModelForSeq2SeqLM.from_config(settings)
    if not shape["tie_word_embeddings"]:
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    return model


def make_batch(num: int, lengths: tuple[int, int], vocab_size: int) -> Batch:
    inputs, labels = (torch.randint(3, vocab_size, (num * length,)) for length in lengths)
    bounds = [torch.arange(num + 1) * length for length in lengths]
    ids = tuple(map(str, range(num)))
    return Batch(input_ids=inputs, labels=labels, cu_seqlens_src=bounds[0], cu_seqlens_tgt=bounds[1], ids=ids)


if __name__ == "__main__":
    main()
