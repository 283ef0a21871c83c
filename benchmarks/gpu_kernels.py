"""Stages of `benchmarks.gpu_day` below a training step: what the device reaches, its kernels, whole models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_checks import Findings, measure_seconds
from benchmarks.gpu_day import DEVICE_WORKS
from benchmarks.harness import facts
from benchmarks.kernel_checks import KINDS, Sizes, run_checks
from benchmarks.workloads import COMMON
from fivetune.data.store.batch import IGNORE_INDEX, pad
from fivetune.machine.telemetry.devices import measure_product_flops, restore_fp32_products, set_fp32_products
from fivetune.model.cuda.buckets import Buckets, describe_batch, plan_buckets
from fivetune.model.flat import compute_flat_losses
from fivetune.model.forward import compute_padded_losses
from fivetune.training.autotune import graphs
from fivetune.types import Batch

# --- the device ---


def measure_facts(findings: Findings, device: str) -> None:
    """Names and versions, and what the device reaches: products, copies, nodes of a graph."""
    for name, value in facts(device).items():
        findings.note(name, value)
    if device == "cpu":
        findings.note("bytes_copied_per_second", _measure_copy(device, 2**20))
        return
    findings.note("cuda", torch.version.cuda)
    free, total = torch.cuda.mem_get_info()
    findings.note("free_bytes", free)
    findings.note("total_bytes", total)
    findings.note("bytes_copied_per_second", _measure_copy(device, 2**30))
    findings.note(DEVICE_WORKS, True)
    findings.note("capability", torch.cuda.get_device_capability())
    findings.note("cudnn", torch.backends.cudnn.version())
    for precision in ("bf16", "fp16", "fp32", "tf32"):
        with restore_fp32_products():
            set_fp32_products(precision)
            findings.note(f"flops_{precision}", measure_product_flops(device, precision))
    findings.note("seconds_per_graph_node", _measure_node())
    import triton

    findings.note("triton", triton.__version__)


def _measure_copy(device: str, num_bytes: int) -> float:
    """Bytes read and written per second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(measure_seconds(lambda: target.copy_(source), device) for _ in range(5))


def _measure_node(num_nodes: int = 1000) -> float:
    """Seconds between the starts of dependent kernels of one warp in a graph."""
    x = torch.zeros(32, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_nodes):
            x.add_(1)
    return min(measure_seconds(graph.replay, "cuda") for _ in range(5)) / num_nodes


# --- kernels ---


def check_kernels(findings: Findings, device: str, *, head_size: int, kind: str = "", others: bool = False) -> None:
    """Each kernel against its definition in fp64.

    Args:
        head_size: of attention. kind: bfloat16 or float32; "" for both. others: the other kernels too.
    """
    sizes = Sizes(device, head_sizes=(head_size,))
    if device == "cpu":
        sizes = Sizes("cpu", head_sizes=(8,), num_heads=1, longest=63, rows=12, width=48, num_weights=5000)
    for check in run_checks(sizes, kinds=(kind,) if kind else KINDS, others=others):
        findings.check(check.name, check.error, check.allowed)


def check_memory(findings: Findings, device: str) -> None:
    """One small forward and backward per kernel under NVIDIA's compute-sanitizer: no access outside.

    Its racecheck reports hazards in Triton's own reductions (triton#7264), so it is not run.
    """
    program = shutil.which("compute-sanitizer")
    if device == "cpu" or program is None:
        findings.note("left_out", "there is no GPU, or no compute-sanitizer on the PATH")
        return
    code = (
        "from benchmarks.kernel_checks import *;"
        "sizes = Sizes('cuda', head_sizes=(64,), num_heads=2, longest=129, rows=100, width=64, num_weights=3000);"
        "assert all(check.is_right for check in run_checks(sizes))"
    )
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else an access outside meets torch's cache
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment)
    findings.note("memcheck", [*done.stdout.strip().splitlines()[-3:], *done.stderr.strip().splitlines()[-1:]])
    findings.require("memcheck", done.returncode == 0)


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
    """The flat forward with norms of Triton and of torch, recomputed and replayed, against the padded eager model."""
    lengths = [(12, 2), (1, 1), (5, 6)] if device == "cpu" else [(511, 30), (175, 5), (1, 1), (64, 64), (129, 3)]
    batch = make_batch(lengths)
    for family in list(FAMILIES) if device == "cuda" else ["t5", "umt5"]:
        model = build_model(family, device)
        exact, gradients = _compute_padded(model, batch, device)
        for name, fused in (("triton", True), ("torch", False)):
            loss, ours = _compute_flat(model, batch, fused=fused)
            findings.check(f"{family}, {name}, loss", abs(loss / exact - 1), 1e-5)
            findings.check(f"{family}, {name}, gradients", _compare(ours, gradients), 1e-4)
        loss, ours = _compute_replayed(build_model(family, device), batch, device)
        findings.check(f"{family}, replayed, loss", abs(loss / exact - 1), 1e-5)
        findings.check(f"{family}, replayed, gradients", _compare(ours, gradients), 1e-4)
        if device == "cpu":
            continue
        again = _compute_flat(model, batch, fused=True, recompute=True)[1]
        findings.check(f"{family}, recomputed", _compare(again, _compute_flat(model, batch, fused=True)[1]))
        loss, ours = _compute_flat(model, batch, fused=True, bf16=True)
        theirs = _compare(_compute_padded(model, batch, device, bf16=True)[1], gradients)
        findings.note(f"{family}, bf16, error of transformers' gradients", theirs)
        findings.check(f"{family}, bf16, loss", abs(loss / exact - 1), 2e-2)
        findings.check(f"{family}, bf16, gradients", _compare(ours, gradients), 1.3 * theirs + 0.01)


def build_model(family: str, device: str) -> Any:
    """A model in fp32 without dropout, every weight of a size that shows in the loss."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 8, "vocab_size": 4096, "num_layers": 2}
    if device == "cpu":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 1, "vocab_size": 384, "num_layers": 1}
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


def _compute_padded(model: Any, batch: Batch, device: str, *, bf16: bool = False) -> tuple[float, dict[str, Tensor]]:
    padded = pad(batch, pad_id=0).to(device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        loss = compute_padded_losses(model, padded)[padded.labels != IGNORE_INDEX].mean()
    return _backward(model, loss)


def _compute_flat(
    model: Any, batch: Batch, *, fused: bool, recompute: bool = False, bf16: bool = False
) -> tuple[float, dict[str, Tensor]]:
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        loss = compute_flat_losses(model, batch, fused=fused, recompute=recompute).mean()
    return _backward(model, loss)


def _compute_replayed(model: Any, batch: Batch, device: str) -> tuple[float, dict[str, Tensor]]:
    """By a graph with filler, whose weights are kept in one buffer."""
    from fivetune.model.cuda.graphed import GraphedUpdate, attach_flat_gradients

    facts = describe_batch(batch)
    buckets = Buckets(len(batch.ids), facts[2], facts[3], plan_buckets(np.array([facts]), max_buckets=1))
    gradients = attach_flat_gradients(model)
    update = GraphedUpdate(model, gradients, buckets, device=device, autocast=nullcontext, fused=True)
    update.record(graphs.make_graph_recorder())
    loss = update.accumulate_gradients([batch], num_scored_tokens=batch.num_target_tokens)[0].item()
    if update.steps.num_replayed != 1:
        raise RuntimeError(f"the batch was not replayed: {update.steps.failure}")
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def _backward(model: Any, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of two gradients, as a share of the length of the second."""
    if ours.keys() != theirs.keys():
        return float("nan")
    return max(((ours[name] - grad).norm() / grad.norm().clamp_min(1e-12)).item() for name, grad in theirs.items())
