"""Is the CUDA path right? The stages of `benchmarks.gpu_day right`, each a function with the device as its argument.

In: cuda, or cpu for a reduced form in which Triton's interpreter runs the kernels and a function that calls again
stands in for a CUDA graph. Out: facts, and checks with what was found and what is allowed; JSON in the last line.
    python -m benchmarks.gpu_right models --device cuda
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fivetune
from benchmarks.harness import facts, make_parser, matmul_peak
from benchmarks.kernel_checks import Sizes, run_checks
from benchmarks.plan import LR, MAX_STEPS, Plan
from benchmarks.sides import own_setup
from benchmarks.workloads import COMMON, MODELS, Examples, make_model, write_examples
from fivetune.data.batch import IGNORE_INDEX, pad
from fivetune.errors import InterruptedRunError, NumericError
from fivetune.model.cuda import dispatch, tiles
from fivetune.model.flat import compute_flat_losses
from fivetune.model.forward import compute_padded_losses
from fivetune.progress import Progress
from fivetune.telemetry.sampler import Sampler
from fivetune.training.autotune import graphs
from fivetune.training.setup import Setup
from fivetune.training.update import Update, make_nonfinite_flag, refuse_nonfinite, train_step
from fivetune.types import Batch

SMALL_TILES = {"norm": (2, 0), "pointwise": (0, 64), "optimizer": (4, 4096), "rows": (4, 64)}


@dataclass(slots=True)
class Findings:
    """What a stage found.

    Args:
        checks: name, what was found, the most that is allowed.
        facts: figures without a limit.
    """

    checks: list[tuple[str, float, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, found: float, allowed: float = 0.0) -> None:
        self.checks.append((name, float(found), allowed))

    def require(self, name: str, holds: bool) -> None:
        self.check(name, float(not holds))

    def to_json(self) -> dict[str, Any]:
        """Wrong is what is above its limit, and NaN."""
        wrong = [
            f"{name}: {found:.3g}, allowed {allowed:.3g}"
            for name, found, allowed in self.checks
            if not found <= allowed
        ]
        state = "failed" if wrong else "passed"
        return {"state": state, "wrong": wrong, "num_checks": len(self.checks), "checks": self.checks, **self.facts}


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args = parser.parse_args()
    print(json.dumps(run_stage(args.stage, args.device)))


def run_stage(name: str, device: str) -> dict[str, Any]:
    """What a stage found; on a CPU in its reduced form."""
    findings = Findings()
    with act_as_cuda() if device == "cpu" else nullcontext():
        STAGES[name](findings, device)
    return findings.to_json()


@contextmanager
def act_as_cuda() -> Iterator[None]:
    """The CPU counts as a device of kernels and graphs; a graph calls its function, and tiles are small."""
    small = {key: tiles.Tile(*SMALL_TILES.get(key[0], (32, 32)), warps=1) for key in tiles.TILES}
    with (
        patch.dict(tiles.TILES, small),
        patch.object(dispatch, "DEVICES", ("cuda", "cpu")),
        patch.object(graphs, "supports_graphs", lambda device: True),
        patch.object(graphs, "make_graph_recorder", lambda: lambda function: function),
    ):
        yield


# --- facts, kernels ---


def measure_facts(findings: Findings, device: str) -> None:
    """Names and versions, and what the device reaches: products, copies, nodes of a graph."""
    findings.facts |= facts(device)
    if device == "cpu":
        findings.facts["bytes_copied_per_second"] = _measure_copy(device, 2**20)
        return
    import triton

    findings.facts |= {
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "capability": torch.cuda.get_device_capability(),
        "bytes_copied_per_second": _measure_copy(device, 2**30),
        "flops_bf16": matmul_peak(device),
        "flops_fp32": _measure_products("highest"),
        "flops_tf32": _measure_products("high"),
        "seconds_per_graph_node": _measure_node(),
    }


def _measure_copy(device: str, num_bytes: int) -> float:
    """Bytes read and written per second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_time(lambda: target.copy_(source), device) for _ in range(5))


def _measure_products(precision: str) -> float:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    seconds = min(_time(lambda: a @ b, "cuda") for _ in range(4))
    torch.set_float32_matmul_precision(before)
    return 2 * 8192**3 / seconds


def _measure_node(num_nodes: int = 1000) -> float:
    """Seconds between the starts of dependent kernels of one warp in a graph."""
    x = torch.zeros(32, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_nodes):
            x.add_(1)
    return min(_time(graph.replay, "cuda") for _ in range(5)) / num_nodes


def _time(run: Callable[[], Any], device: str) -> float:
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compile_kernels(findings: Findings, device: str) -> None:
    """Registers, spilled bytes and shared memory of every kernel on this device; spills are no failure."""
    from triton.backends.compiler import GPUTarget

    from benchmarks.kernel_compile import HOPPER, cases, compiled

    target = HOPPER
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        target = GPUTarget("cuda", 10 * major + minor, 32)
    rows = []
    for name, kernel, kind, constants, tile in cases():
        if device == "cpu" and name != "norm forward":
            continue
        started = time.perf_counter()
        used = compiled(kernel, kind.partition(",")[0], constants, tile, target)
        rows.append([name, kind, *map(int, used), round(time.perf_counter() - started, 2)])
    findings.facts["registers_spills_shared_seconds"] = rows
    findings.require("every kernel compiles", bool(rows))


def check_kernels(findings: Findings, device: str) -> None:
    """Each kernel against its definition in fp64."""
    small = Sizes("cpu", head_sizes=(8,), num_heads=2, longest=65, rows=12, width=48, num_weights=5000)
    for check in run_checks(small if device == "cpu" else Sizes(device)):
        findings.check(check.name, check.error, check.allowed)


def check_memory(findings: Findings, device: str) -> None:
    """One small forward and backward per kernel under NVIDIA's compute-sanitizer: no access outside, no race."""
    if device == "cpu":
        findings.facts["left_out"] = "compute-sanitizer needs a GPU"
        return
    code = (
        "from benchmarks.kernel_checks import *;"
        "sizes = Sizes('cuda', head_sizes=(64,), num_heads=2, longest=129, rows=100, width=64, num_weights=3000);"
        "assert all(check.is_right for check in run_checks(sizes))"
    )
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "python3", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[1])
        findings.facts[tool] = done.stdout.strip().splitlines()[-3:]
        findings.require(tool, done.returncode == 0)


# --- models ---

FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5"},
    "v1_1": {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"model_type": "umt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "byt5": {
        "model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 3,
        "num_decoder_layers": 1,
    },
}  # fmt: skip


def check_models(findings: Findings, device: str) -> None:
    """The flat forward, with norms of Triton and of torch, and its recomputation against the padded eager model."""
    lengths = [(36, 2), (1, 1), (5, 9)] if device == "cpu" else [(511, 30), (175, 5), (1, 1), (64, 64), (129, 3)]
    batch = make_batch(lengths)
    for family in list(FAMILIES) if device == "cuda" else ["t5", "umt5"]:
        model = build_model(family, device)
        exact = _compute_padded(model, batch.to(device))
        loss, gradients = exact[0].item(), exact[1]
        ways = {"triton": {"fused": True}, "torch": {"fused": False}}
        for name, options in ways.items() if device == "cuda" else list(ways.items())[: 1 + (family == "t5")]:
            ours = _compute_flat(model, batch, **options)
            findings.check(f"{family}, {name}, loss", abs(ours[0].item() / loss - 1), 1e-5)
            findings.check(f"{family}, {name}, gradients", _compare(ours[1], gradients), 1e-4)
        if device == "cpu":
            continue
        again = _compute_flat(model, batch, fused=True, recompute=True)
        findings.check(f"{family}, recomputed", _compare(again[1], _compute_flat(model, batch, fused=True)[1]))
        with torch.autocast(device, torch.bfloat16):
            half = _compute_flat(model, batch, fused=True)
        findings.check(f"{family}, bf16, loss", abs(half[0].item() / loss - 1), 2e-2)
        findings.check(f"{family}, bf16, gradients", _compare(half[1], gradients), 5e-2)


def build_model(family: str, device: str) -> Any:
    """A model in fp32 without dropout, every weight of a size that shows in the loss."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 8, "vocab_size": 4096, "num_layers": 2}
    if device == "cpu":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 2, "vocab_size": 384, "num_layers": 1}
    settings = {**COMMON, "dropout_rate": 0.0, **sizes, **FAMILIES[family]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    if not settings.get("tie_word_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * config.d_model**-0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(device).train()


def make_batch(lengths: list[tuple[int, int]]) -> Batch:
    """Random examples of these lengths of inputs and targets, on the host."""
    random = torch.Generator().manual_seed(0)
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0)
    inputs, labels = (torch.randint(3, 384, (int(n),), generator=random) for n in ends[-1])
    return Batch(inputs, labels, ends[:, 0].contiguous(), ends[:, 1].contiguous(), tuple(map(str, range(len(lengths)))))


def _compute_padded(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    padded = pad(batch, pad_id=0)
    return _backward(model, compute_padded_losses(model, padded)[padded.labels != IGNORE_INDEX].mean())


def _compute_flat(model: Any, batch: Batch, **options: bool) -> tuple[Tensor, dict[str, Tensor]]:
    return _backward(model, compute_flat_losses(model, batch, **options).mean())


def _backward(model: Any, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of two gradients, as a share of the length of the second."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(((ours[name] - grad).norm() / grad.norm().clamp_min(1e-12)).item() for name, grad in theirs.items())


# --- training steps ---


@contextmanager
def prepare_plan(device: str, *, model: str = "t5-small", batch_size: int = 16, num_steps: int = 60) -> Iterator[Plan]:
    """A plan of benchmarks/train.py in a temporary folder; on a CPU of a tiny model and a few short examples."""
    if device == "cpu":
        model, batch_size, num_steps = "t5-tiny", 2, 3
    with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as name:
        folder = Path(name)
        make_model(model, folder)
        workload = "translation" if device == "cpu" else "squad"
        write_examples(folder, workload, num_steps * batch_size, vocab_size=MODELS[model]["vocab_size"])
        yield Plan(folder / model, Examples(folder), workload, batch_size, device, folder)


class Steps:
    """The optimizer steps of a set-up, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.flag = setup, make_nonfinite_flag(setup.learner)
        self.groups = setup.data.stream.iter_micro_batches(0, MAX_STEPS)
        self.taken = 0

    def run(self, num: int = 1, *, lr: float = LR) -> list[Update]:
        found = []
        for _ in range(num):
            self.taken += 1
            group = next(self.groups)
            found.append(train_step(self.setup.learner, group, lr=lr, step=self.taken, nonfinite_flag=self.flag))
        return found

    def close(self) -> None:
        self.groups.close()  # type: ignore[attr-defined]


def count_calls(setup: Setup) -> tuple[int, int]:
    """Micro-batches that graphs replayed, and that were launched."""
    steps = setup.learner.graphs.steps if setup.learner.graphs else None
    return (steps.num_replayed, steps.num_launched) if steps else (0, 0)


def check_capture(findings: Findings, device: str) -> None:
    """Replayed steps against launched ones; random numbers; accumulation; a step that is not finite."""
    with prepare_plan(device) as plan:
        num_steps = len(plan.examples) // plan.batch_size
        launched = Steps(own_setup(plan, dropout=0.0, capture="off"))
        before = _list_weights(launched.setup)
        losses = [update.loss for update in _finish(launched.run(num_steps), device)]
        replayed = Steps(own_setup(plan, dropout=0.0, capture="on"))
        ours = [update.loss for update in _finish(replayed.run(num_steps), device)]
        findings.check("losses", max(abs(a / b - 1) for a, b in zip(ours, losses, strict=True)), 1e-2)
        ends = [_list_weights(steps.setup) for steps in (launched, replayed)]
        away, way = (
            math.hypot(*[(a - b).norm() for a, b in zip(*pair, strict=True)]) for pair in (ends, (before, ends[0]))
        )
        findings.check("weights, as a share of their way", away / way, 0.3)
        findings.facts["replayed_and_launched"] = count_calls(replayed.setup)
        findings.require("all steps are replayed", count_calls(replayed.setup) == (num_steps, 0))
        _check_not_finite(findings, replayed)
        for steps in (launched, replayed):
            steps.close()
        _check_random_numbers(findings, plan)
        if device == "cuda":
            _check_accumulation(findings, plan)
            _check_out_of_memory(findings, plan)
            findings.facts["peak_bytes"] = torch.cuda.max_memory_allocated()


def _finish(updates: list[Update], device: str) -> list[Update]:
    _wait(device)
    return updates


def _list_weights(setup: Setup) -> list[Tensor]:
    return [parameter.detach().to("cpu", torch.float64, copy=True) for parameter in setup.learner.model.parameters()]


def _check_not_finite(findings: Findings, steps: Steps) -> None:
    """A weight that is not a number: the step is refused by the host, and no later step changes any weight."""
    with torch.no_grad():
        steps.setup.learner.model.shared.weight[:, 0] = torch.nan
    before, refused = _list_weights(steps.setup), False
    try:
        (update,) = _finish(steps.run(), steps.setup.learner.compute.device)
        refuse_nonfinite(steps.setup.learner, next(steps.groups), steps.taken, update.loss, update.grad_norm)
    except NumericError:
        refused = True
    findings.require("a loss that is not finite is refused", refused)
    same = [
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, _list_weights(steps.setup), strict=True)
    ]
    findings.require("it changes no weight", all(same))


def _check_random_numbers(findings: Findings, plan: Plan) -> None:
    """Two replays of one batch draw different masks; the same random state draws the same."""
    steps = Steps(own_setup(plan, capture="on"))
    group = next(steps.groups)
    learner = steps.setup.learner

    def draw() -> float:
        return train_step(learner, group, lr=0.0, step=1).loss

    state = torch.cuda.get_rng_state() if plan.on_gpu else torch.get_rng_state()
    first, second = draw(), draw()
    (torch.cuda.set_rng_state if plan.on_gpu else torch.set_rng_state)(state)
    again = draw()
    findings.require("two replays draw different masks", first != second)
    findings.check("a random state that is put back repeats its masks", abs(again / first - 1), 1e-5)
    if plan.on_gpu:
        many = [draw() for _ in range(60)]
        launched = replace(learner, graphs=None)
        others = [train_step(launched, group, lr=0.0, step=1, nonfinite_flag=steps.flag).values for _ in range(60)]
        torch.cuda.synchronize()
        there = [float(values[0]) for values in others]
        error = math.sqrt(sum((x - mean(v)) ** 2 for v in (many, there) for x in v) / 59 / 60)
        findings.check("mean loss with dropout, in standard errors", abs(mean(many) - mean(there)) / error, 3.5)
    steps.close()


def _check_accumulation(findings: Findings, plan: Plan) -> None:
    """A step of four micro-batches is that of one batch."""
    norms = []
    for size in (plan.batch_size, plan.batch_size // 4):
        setup = own_setup(plan, dropout=0.0, capture="on", batch_size=size, global_batch_size=plan.batch_size)
        steps = Steps(setup)
        (update,) = _finish(steps.run(), plan.device)
        norms.append(update.grad_norm)
        steps.close()
    findings.check("gradient norm of four micro-batches", abs(norms[1] / norms[0] - 1), 2e-2)


def _check_out_of_memory(findings: Findings, plan: Plan) -> None:
    """With little memory left, a launched step is halved until it fits."""
    big = replace(plan, batch_size=len(plan.examples))
    setup = own_setup(big, capture="off")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    ballast = torch.empty(max(0, free - 3 * 2**30), dtype=torch.uint8, device="cuda")
    steps = Steps(setup)
    (update,) = _finish(steps.run(), "cuda")
    findings.facts["batch_size_with_3_gib"] = update.batch_size
    findings.require("a loss is found with less memory", math.isfinite(update.loss))
    del ballast
    steps.close()


def check_failed_capture(findings: Findings, device: str) -> None:
    """A read of the device inside the step, which no capture allows: the run goes on launched, and still draws."""
    original = compute_flat_losses.__globals__["compute_device_losses"]

    def read(*args: Any, **named: Any) -> Tensor:
        losses = original(*args, **named)
        if device == "cpu" or torch.cuda.is_current_stream_capturing():
            if device == "cpu":
                raise RuntimeError("operation not permitted when stream is capturing")
            losses.sum().item()
        return losses

    with (
        prepare_plan(device) as plan,
        patch("fivetune.model.cuda.static_step.compute_device_losses", read),
        patch.object(graphs, "_try_elsewhere", lambda setup: ""),
    ):
        setup = own_setup(plan, capture="auto")
        findings.require("steps are launched", setup.learner.graphs is None)
        steps = Steps(setup)
        losses = [update.loss for update in _finish(steps.run(2), device)]
        findings.require("they go on", all(math.isfinite(loss) for loss in losses))
        steps.close()


def check_syncs(findings: Findings, device: str) -> None:
    """No step waits for the device, and how many kernels a step runs."""
    with prepare_plan(device, num_steps=80) as plan:
        for capture in ("off", "on"):
            steps = Steps(own_setup(plan, capture=capture))
            steps.run(2)
            if device == "cpu":
                findings.require(f"capture {capture}", steps.taken == 2)
                continue
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                steps.run(20)
                findings.require(f"no wait with capture {capture}", True)
            except RuntimeError as error:
                findings.facts[f"wait with capture {capture}"] = str(error).splitlines()[0]
                findings.require(f"no wait with capture {capture}", False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            findings.facts[f"kernels per step, capture {capture}"] = count_kernels(steps.run)
            findings.facts[f"seconds per step, capture {capture}"] = _time(lambda s=steps: s.run(20), device) / 20
            steps.close()


def count_kernels(run: Callable[[], Any]) -> int:
    """Kernels and copies that a call runs on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in found.events())


# --- telemetry, resuming ---


def check_telemetry(findings: Findings, device: str) -> None:
    """The sampler beside nvidia-smi during training: means of utilisation, memory and power; on a CPU the host's."""
    seconds, every = (20.0, 0.5) if device == "cuda" else (1.0, 0.2)
    records: list[dict[str, Any]] = []
    query = "utilization.gpu,utilization.memory,memory.used,power.draw,clocks.sm,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-lms", "500"]
    with prepare_plan(device) as plan:
        steps = Steps(own_setup(plan))
        steps.run(2)
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if device == "cuda" else None
        with Sampler(records.append, every_seconds=every):
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                _finish(steps.run(), device)
        steps.close()
    findings.require(
        "the host is sampled", len(records) > 2 and all(r.get("cpu_utilisation", 0) >= 0 for r in records[1:])
    )
    if watcher is None:
        return
    watcher.terminate()
    lines = (watcher.communicate()[0]).strip().splitlines()[2:]
    theirs = [[float(cell) for cell in line.split(",")] for line in lines if line.count(",") == 5]
    ours = [record["devices"][0] for record in records[2:] if record.get("devices")]
    pairs = (("utilisation", 0, 0.01, 0.05), ("memory_used_bytes", 2, 2**20, 0.01), ("power_watts", 3, 1.0, 0.05))
    for name, place, unit, allowed in pairs:
        mine, other = mean(float(one[name]) for one in ours), mean(row[place] * unit for row in theirs)
        findings.facts[name] = [mine, other]
        findings.check(name, abs(mine / other - 1), allowed)


def check_resume(findings: Findings, device: str) -> None:
    """A run that is stopped at half its steps and resumed against one that is not, with AdamW and with Adafactor."""
    num_steps = 40 if device == "cuda" else 4
    for optimizer in ("adamw", "adafactor"):
        with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as name:
            recipe = _write_recipe(Path(name), device, optimizer, num_steps)
            weights = {}
            for run in ("whole", "stopped"):
                recipe["run"] = {"dir": str(Path(name) / run), "seed": 1}
                if run == "stopped":
                    with stop_after(num_steps // 2), suppress(InterruptedRunError):
                        fivetune.train(recipe, preflight=False, quiet=True)
                fivetune.train(recipe, preflight=False, quiet=True, resume=run == "stopped")
                weights[run] = _read_weights(Path(name) / run)
            captured = json.loads((Path(name) / "whole" / "machine.json").read_text()).get("capture")
        findings.facts[f"capture, {optimizer}"] = captured
        difference = max(
            (weights["whole"][key] - value).abs().max().item() for key, value in weights["stopped"].items()
        )
        findings.check(f"largest difference, {optimizer}", difference)


def _write_recipe(folder: Path, device: str, optimizer: str, num_steps: int) -> dict[str, Any]:
    """A recipe of short posts with labels, for a small model of random weights."""
    model = make_model("t5-tiny" if device == "cpu" else "t5-small", folder)
    for name, count in (("train", 400), ("eval", 8)):
        lines = [
            {"id": str(i), "inputs": f"Ann has a red hat {i} " * (1 + i % 9), "targets": f"hat {i % 7}"}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "model": {"path": str(model)},
        "task": {"name": "jsonl"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "train": {"num_steps": num_steps, "batch_size": 4, "num_threads": 1},
        "eval": {"every_steps": num_steps, "max_new_tokens": 4},
        "device": device,
    }


@contextmanager
def stop_after(step: int) -> Iterator[None]:
    """The process gets a SIGTERM when the record of that step is shown."""
    original, left = Progress.show_step, [True]

    def show_step(self: Progress, record: Any, *rest: Any) -> Any:
        if record.step == step and left:
            left.clear()
            signal.raise_signal(signal.SIGTERM)
        return original(self, record, *rest)

    with patch.object(Progress, "show_step", show_step):
        yield


def _read_weights(run: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "model" / "model.safetensors")


def check_decoding(findings: Findings, device: str) -> None:
    """Answers equal those of `generate`, greedily and with beams; in bf16 nearly all of them."""
    from benchmarks.gpu_decode import measure_agreement

    for name, share, allowed in measure_agreement(device):
        findings.check(f"{name}: share of other answers", 1 - share, allowed)


STAGES: dict[str, Callable[[Findings, str], None]] = {
    "facts": measure_facts,
    "models": check_models,
    "kernels": check_kernels,
    "capture": check_capture,
    "failed-capture": check_failed_capture,
    "resume": check_resume,
    "decode-right": check_decoding,
    "syncs": check_syncs,
    "compile": compile_kernels,
    "telemetry": check_telemetry,
    "sanitizer": check_memory,
}


if __name__ == "__main__":
    main()
