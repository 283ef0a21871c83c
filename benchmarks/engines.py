"""FiveTune's parallel engines beside torch's own on two gloo ranks: gradients, time, and a rank without memory.

    python -m benchmarks.engines

In: t5-nano, and micro-batches of different lengths. Out: a table, and results/engines.json. Torch's engines compute the
same flat forward:

    ddp         DistributedDataParallel with a communication hook that sums; all micro-batches but the last in no_sync
    pipeline    torch.distributed.pipelining, 1F1B; activations are padded to the longest micro-batch of the step
    tensor      parallelize_module with ColwiseParallel and RowwiseParallel

Every rank has one thread. Two experiments of torch's engines follow, each in ranks of its own, because they end badly:
rank 1 runs out of memory in a backward pass (the time limit of the ranks is 20 s), and activations are not padded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from benchmarks.harness import Work, facts, interleaved, make_parser, publish_result, ratio, table
from fivetune.data.corpus import CHECKPOINT
from fivetune.distributed.pipeline import STAGE, find_stage, order_passes
from fivetune.distributed.sharding import gather_tensor
from fivetune.distributed.world import World
from fivetune.model.flat import compute_flat_losses
from fivetune.model.load import load_model_and_tokenizer
from fivetune.training.strategies._stages import assign_stage
from fivetune.training.strategies._tensor import split_heads
from fivetune.training.strategies.ddp import DDP
from fivetune.types import Batch

ENGINES = ("ddp", "pipeline", "tensor")
LENGTHS = ((300, 5), (200, 9), (100, 20), (50, 3))  # tokens of the inputs and targets of an example, by micro-batch
BATCH_SIZE = 4  # examples of a micro-batch
LIMIT_MINUTES = 1 / 3
Run = Callable[[Sequence[Batch]], object]


@dataclass
class Steps:
    """A side of the comparison: the gradients of a step."""

    name: str
    model: Any
    run: Run
    batches: Sequence[Batch]

    def work(self, num_units: int) -> Work:
        for _ in range(num_units):
            self.model.zero_grad(set_to_none=True)
            self.run(self.batches)
        return Work(num_units)

    def compute_gradients(self) -> list[Tensor]:
        self.work(1)
        held = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        return [gather_tensor(parameter.grad).clone() for parameter in held]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=8, help="of each side")
    parser.add_argument("--experiment", help=argparse.SUPPRESS)  # a rank: what it computes
    args = parser.parse_args()
    if args.experiment:
        run_rank(args.experiment, args.windows)
        return
    rows = [json.loads(start_ranks(engine, args.windows)) for engine in ENGINES]
    lines = [["engine", "worst difference", "largest gradient", "time, torch's : ours", "all-reduces, ours", "torch's"]]
    for row in rows:
        middle, low, high = row["time_ratio"]
        cells = [f"{row['difference']:.1e}", f"{row['largest']:.1e}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
        lines.append([row["engine"], *cells, *map(str, row["all_reduces"])])
    print(table(lines))
    failures = {name: start_ranks(name, 0) for name in (*(f"{name}-memory" for name in ENGINES), "pipeline-lengths")}
    for name, text in failures.items():
        print(f"{name}: {text}")
    publish_result(args, "engines", {"facts": facts("cpu"), "rows": rows, "failures": failures})


def start_ranks(experiment: str, num_windows: int) -> str:
    """Run an experiment on two ranks; returns the line that it prints, or the last words of the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "benchmarks.engines", "--experiment", experiment, "--windows", str(num_windows)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    told = [line for line in ended.stdout.splitlines() if line.startswith(("{", "rank"))]
    if told:
        return told[-1]
    causes = [line for line in ended.stderr.splitlines() if "what():" in line or "Error:" in line]
    return (causes or [f"the ranks ended with {ended.returncode}"])[0].strip()


def run_rank(experiment: str, num_windows: int) -> None:
    engine, _, kind = experiment.partition("-")
    torch.set_num_threads(1)
    with World.from_environment().connect(cuda=False, timeout_minutes=LIMIT_MINUTES) as world:
        build = {"ddp": build_ddp, "pipeline": build_pipeline, "tensor": build_tensor}[engine]
        ours, theirs = build(world, padded=kind != "lengths")
        if kind == "memory":
            fail_on_second_rank(theirs, world)
        elif kind == "lengths":
            theirs.work(1)
        else:
            print_comparison(engine, ours, theirs, num_windows, world)


def print_comparison(engine: str, ours: Steps, theirs: Steps, num_windows: int, world: World) -> None:
    found, expected = theirs.compute_gradients(), ours.compute_gradients()
    difference = max((float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), default=0.0)
    counts = [count_all_reduces(side) for side in (ours, theirs)]
    windows = interleaved([ours, theirs], 1, num_windows)
    row = {
        "engine": engine,
        "difference": max(world.gather(difference)),
        "largest": max(world.gather(max(float(one.abs().max()) for one in expected))),
        "time_ratio": ratio(windows["ours"], windows["torch"], "units").as_list(),
        "all_reduces": counts,
    }
    if world.is_first:
        print(json.dumps(row), flush=True)


def count_all_reduces(side: Steps) -> int:
    with profile() as seen:
        side.work(1)
    return sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::allreduce"))


def fail_on_second_rank(theirs: Steps, world: World) -> None:
    """Print what the first rank sees when the second one runs out of memory in its backward pass and waits."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    if world.rank:
        theirs.model.decoder.block[-1].layer[0].SelfAttention.v.weight.register_hook(fail)
    began = time.monotonic()
    try:
        theirs.work(1)
        text = "goes on"
    except RuntimeError as error:  # torch.distributed.pipelining wraps the error of a device without memory
        if world.rank:
            time.sleep(60 * LIMIT_MINUTES + 5)
        cause = re.search(r"Timed out[^\n]*", str(error))
        text = cause[0] if cause else str(error)
    if world.is_first:
        print(f"rank 0, after {time.monotonic() - began:.0f} s: {text}", flush=True)


def load_model() -> Any:
    model: Any = load_model_and_tokenizer(str(CHECKPOINT)).model.eval()  # no dropout
    return model


def make_batches(seed: int) -> list[Batch]:
    batches: list[Batch] = []
    random = torch.Generator().manual_seed(seed)
    for lengths in LENGTHS:
        inputs, labels = (torch.randint(3, 1000, (BATCH_SIZE * length,), generator=random) for length in lengths)
        ends = [torch.arange(BATCH_SIZE + 1) * length for length in lengths]
        batches.append(Batch(inputs, labels, ends[0], ends[1], tuple(map(str, range(BATCH_SIZE)))))
    return batches


# --- data parallel ---


class Whole(nn.Module):
    """The flat forward as a module, which DistributedDataParallel wraps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return compute_flat_losses(self.model, batch).sum()


def build_ddp(world: World, *, padded: bool) -> tuple[Steps, Steps]:
    models, strategy = (load_model(), load_model()), DDP()
    wrapped = DistributedDataParallel(Whole(models[1]), broadcast_buffers=False, bucket_cap_mb=16)
    wrapped.register_comm_hook(None, sum_bucket)
    batches = make_batches(world.rank)[: 4 - world.rank]  # the second rank has fewer micro-batches

    def run_ours(batches: Sequence[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            strategy.prepare_backward(models[0], world, is_last=number == len(batches))
            compute_flat_losses(models[0], batch).sum().backward()
        strategy.reduce_gradients(models[0], world)

    def run_theirs(batches: Sequence[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else wrapped.no_sync():
                wrapped(batch).backward()

    return Steps("ours", models[0], run_ours, batches), Steps("torch", models[1], run_theirs, batches)


def sum_bucket(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are texts
    work: Any = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# --- pipeline ---


class GivenStage:
    """A stage whose activations come as arguments and leave as results, in place of those that ours exchanges."""

    def __init__(self, stage: Any) -> None:
        self.__dict__.update(stage=stage)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stage"], name)

    def receive(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [tensor[: shape[0]] for tensor, shape in zip(self.given, shapes, strict=True)]

    def send(self, *tensors: Tensor) -> None:
        self.results = tensors


class Blocks(nn.Module):
    """The blocks of this rank as a module, which PipelineStage wraps; it finds a micro-batch by its number."""

    def __init__(self, model: Any, batches: Sequence[Batch], *, padded: bool) -> None:
        super().__init__()
        self.model, self.batches, self.padded = model, batches, padded
        self.rows = [max(len(batch.input_ids) for batch in batches), max(len(batch.labels) for batch in batches)]

    def forward(self, *given: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        stage = self.model.__dict__[STAGE]
        stage.given, stage.results = given, ()
        losses = compute_flat_losses(self.model, self.batches[int(number)])
        if stage.is_last:
            return losses.sum().reshape(1)
        if not self.padded:
            return stage.results
        pairs = zip(stage.results, self.rows, strict=False)
        return tuple(F.pad(tensor, (0, 0, 0, rows - len(tensor))) for tensor, rows in pairs)

    def describe(self, count: int) -> tuple[Tensor, ...]:
        """Tensors like the first `count` activations of two stages, so that torch does not run a micro-batch twice."""
        width = self.model.config.d_model
        return tuple(torch.empty(rows, width, requires_grad=True) for rows in self.rows[:count])


def build_pipeline(world: World, *, padded: bool) -> tuple[Steps, Steps]:
    world = world.split(2, "cpu")
    models, batches = (load_model(), load_model()), make_batches(0)
    for model in models:
        assign_stage(model, "cpu", world, ())
    models[1].__dict__[STAGE] = GivenStage(find_stage(models[1]))
    blocks = Blocks(models[1], batches, padded=padded)

    def run_ours(batches: Sequence[Batch]) -> None:
        stage = find_stage(models[0])
        assert stage is not None
        waiting, losses = {"F": iter(batches), "B": iter(batches)}, deque[Tensor]()
        for kind in order_passes(stage.schedule, stage.number, 2, len(batches)):
            batch = next(waiting[kind])
            stage.begin_pass()
            if kind == "F":
                losses.append(compute_flat_losses(models[0], batch).sum())
            else:
                stage.run_backward(losses.popleft(), torch.autograd.backward)
        stage.finish_sends()

    def run_theirs(batches: Sequence[Batch]) -> None:
        known: dict[str, Any] = {}
        if padded:  # the first stage is the encoder, the second the decoder
            inner, last = blocks.describe(1), torch.empty(1, requires_grad=True)
            known = {"input_args": inner if world.rank else (), "output_args": last if world.rank else inner}
        stage = PipelineStage(blocks, world.rank, 2, torch.device("cpu"), **known)
        schedule = Schedule1F1B(stage, len(batches), loss_fn=lambda losses, target: losses.sum(), scale_grads=False)
        numbers = torch.arange(len(batches))
        schedule.step(number=numbers, target=numbers if world.rank else None)

    return Steps("ours", models[0], run_ours, batches), Steps("torch", models[1], run_theirs, batches)


# --- tensor parallel ---


def build_tensor(world: World, *, padded: bool) -> tuple[Steps, Steps]:
    mesh = world.split(2, "cpu").mesh
    assert mesh is not None
    models, batches = (load_model(), load_model()), make_batches(0)
    split_heads(models[0], mesh["model"])
    for stack in (models[1].encoder, models[1].decoder):
        for block in stack.block:
            for layer in block.layer[:-1]:
                split_attention(getattr(layer, "SelfAttention", None) or layer.EncDecAttention, mesh["model"])
            dense = block.layer[-1].DenseReluDense
            for name, module in dense.named_children():
                if isinstance(module, nn.Linear):
                    plan = RowwiseParallel() if name == "wo" else ColwiseParallel()
                    parallelize_module(module, mesh["model"], plan)

    def build(name: str, model: Any) -> Steps:
        def run(batches: Sequence[Batch]) -> None:
            for batch in batches:
                compute_flat_losses(model, batch).sum().backward()

        return Steps(name, model, run, batches)

    return build("ours", models[0]), build("torch", models[1])


def split_attention(attention: Any, mesh: Any) -> None:
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    if attention.has_relative_attention_bias:
        plan["relative_attention_bias"] = ColwiseParallel()
    parallelize_module(attention, mesh, plan)
    attention.n_heads //= mesh.size()
    attention.inner_dim //= mesh.size()


if __name__ == "__main__":
    main()
