"""All Triton kernels of a training step and of a decoding step, compiled side by side before anything is measured.

In: a device. Out: their number and the seconds, as a stage of `benchmarks.gpu_day`; the kernels are in Triton's cache.
Each launch of a step is compiled instead of run, with the arguments that it would have: in threads where Triton has
AsyncCompileMode (3.6), elsewhere by one process per model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu_checks import Findings
from benchmarks.gpu_kernels import make_batch
from benchmarks.workloads import COMMON, MODELS, Examples, write_examples
from fivetune.model.backend import Forward
from fivetune.model.cuda import attention, cross_entropy, norm, optimizer, pointwise, rows
from fivetune.model.cuda.buckets import Buckets, describe_batch, plan_buckets
from fivetune.model.cuda.graphed import GraphedAdamW, GraphedUpdate
from fivetune.model.cuda.kernel_trial import find_kernel_fault
from fivetune.model.cuda.tiles import Tile
from fivetune.model.decode import Decoding, generate
from fivetune.model.weight_cache import list_factors

LAUNCHERS = (attention, cross_entropy, norm, optimizer, pointwise, rows)
NAMES = ("t5-small", "t5-base")
LENGTHS = [(511, 30), (175, 5), (64, 3), (129, 8)]
NUM_THREADS = 14
HEAD_SIZES = (64, 32)  # of the published models, and of t5-nano

Launch = Callable[..., None]
"""Takes the arguments of `fivetune.model.cuda.tiles.launch`."""


def warm_up(findings: Findings, device: str, *, only: str = "") -> None:
    """Compile the kernels of training and decoding; on a CPU the launches are noted alone.

    Args:
        only: name of the one model, in a process of its own; the others are compiled by further processes.
    """
    started = time.perf_counter()
    if device == "cpu":
        noted: list[str] = []
        launch_step("t5-tiny", device, lambda kernel, *_, **__: noted.append(kernel.__name__))
        findings.note("launches", len(noted))
        findings.require("attention, norms and the optimizer are launched", len(set(noted)) > 8)
        return
    import triton

    modes = getattr(triton, "AsyncCompileMode", None)
    names = (only,) if only else NAMES if modes else NAMES[:1]
    others = [] if modes or only else [_start_other(name) for name in NAMES[1:]]
    compiled: list[object] = []
    with ThreadPoolExecutor(NUM_THREADS) as threads, ThreadPoolExecutor() as testers:
        tests = {
            size: testers.submit(find_kernel_fault, size, torch.bfloat16, device)  # processes, which compile too
            for size in (() if only else HEAD_SIZES)
        }
        with modes(threads) if modes else nullcontext():
            for name in names:
                launch_step(name, device, partial(_compile, compiled))
        findings.note("launches", len(compiled))
        findings.note("seconds", time.perf_counter() - started)
        for size, test in tests.items():
            fault = test.result()
            findings.require(f"a run uses the kernels for heads of {size}{f': {fault}' if fault else ''}", not fault)
    findings.require("the other models' kernels compile", all(process.wait() == 0 for process in others))


def _start_other(name: str) -> subprocess.Popen[bytes]:
    code = f"from benchmarks.gpu_warm import *; warm_up(Findings(print), 'cuda', only={name!r})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)


def _compile(compiled: list[object], kernel: Any, grid: tuple[int, ...], *args: Any, tile: Tile, **named: Any) -> None:
    compiled.append(kernel.warmup(*args, grid=grid, num_warps=tile.warps, num_stages=tile.stages, **named))


def launch_step(name: str, device: str, launch: Launch) -> None:
    """A launched and a captured step in bf16 with dropout, an update and an answer of a model with a block per stack.

    No value means anything where `launch` runs no kernel.
    """
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    settings = {**COMMON, **MODELS[name], "num_layers": 1, "num_decoder_layers": 1}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model = AutoModelForSeq2SeqLM.from_config(config).train()
    autocast = partial(torch.autocast, device, torch.bfloat16)
    batch = make_batch(LENGTHS if device == "cuda" else [(5, 2), (3, 1)])
    with replace_launches(launch):
        with autocast():
            losses, _ = Forward("flat", "", parts="triton").compute_losses(model, batch, device=device)
        losses.mean().backward()
        model.zero_grad(set_to_none=True)
        norms = [p for n, p in model.named_parameters() if "norm" in n]
        weights = [p for n, p in model.named_parameters() if "norm" not in n]
        groups = [{"params": weights, "kind": "matrix"}, {"params": norms, "kind": "norm"}]
        adamw = torch.optim.AdamW(groups, lr=1e-4)
        update = GraphedAdamW(adamw, max_norm=1.0, factors=list_factors(model), kind=torch.bfloat16)
        facts = describe_batch(batch)
        buckets = Buckets(len(batch.ids), facts[2], facts[3], plan_buckets(np.array([facts]), max_buckets=1))
        flat = update.flat
        settings = {"device": device, "autocast": autocast, "fused": True}
        graphs = GraphedUpdate(model, flat.grads, buckets, copies=flat.copies, **settings)
        graphs.accumulate_gradients([batch], num_scored_tokens=batch.num_target_tokens)
        update.step()
        _answer(model.eval(), device, autocast)


def _answer(model: Any, device: str, autocast: Callable[[], Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as folder:
        write_examples(Path(folder), "translation", 4, vocab_size=model.config.vocab_size)
        store: Any = Examples(Path(folder))
        decoding = Decoding(2, batch_size=4, score_targets=False)
        list(generate(model, store, [0, 1, 2, 3], decoding, device=device, autocast=autocast))


@contextmanager
def replace_launches(launch: Launch) -> Iterator[None]:
    """Hand what would launch a kernel to another function; the test of the kernels counts as passed."""
    with ExitStack() as stack:
        for module in LAUNCHERS:
            stack.enter_context(patch.object(module, "launch", launch))
        stack.enter_context(patch("fivetune.model.attention.explain_unsupported_kernel", lambda *_: ""))
        yield
