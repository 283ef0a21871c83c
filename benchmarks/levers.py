"""What each part of the flat forward gives on a CPU: the same step with one of them replaced by the usual way.

In: a model's name, examples per batch. Out: a table of CPU seconds per forward and backward pass, and ratios.

    OMP_NUM_THREADS=1 python -m benchmarks.levers --model t5-small --batch-size 16 --rounds 3

With one thread the clock is the CPU time of the process, which other programs disturb least; the ways take turns.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import facts, make_parser, publish_result, table
from benchmarks.workloads import COMMON, MODELS, WORKLOADS
from fivetune.data.corpus import CHECKPOINT
from fivetune.data.store.batch import pad
from fivetune.model import attention, flat, layers, ops
from fivetune.model.load import load_model_and_tokenizer
from fivetune.types import Batch

Step = Callable[[Any, Batch], Tensor]


def serial_draw(count: int, rate: float, device: torch.device) -> Tensor | None:
    """One Bernoulli number per value, as nn.Dropout draws them."""
    return torch.empty(count, device=device).bernoulli_(rate).bool() if rate else None


def threshold_draw(count: int, rate: float, device: torch.device) -> Tensor | None:
    """16 random bits per value."""
    if not rate:
        return None
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=device).random_(-(2**63), None)
    return words.view(torch.int16)[:count] < round(rate * 2**16) - 2**15


def separate_products(x: Tensor, modules: Any) -> Tensor:
    """One product per weight."""
    return torch.cat([F.linear(x, module.weight) for module in modules], -1)


class PlainNorm:
    """torch's own."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, kind: torch.dtype) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps).to(kind)


WAYS: dict[str, list[tuple[Any, str, Any]]] = {
    "all levers": [],
    "dropout: a Bernoulli draw per value": [(module, "draw_dropout", serial_draw) for module in (layers, attention)],
    "dropout: 16-bit thresholds": [(module, "draw_dropout", threshold_draw) for module in (layers, attention)],
    "keys and values of the whole source": [(ops, "should_attend_memory", lambda *_: False)],
    "norm of torch": [(layers, "RmsNorm", PlainNorm)],
    "q, k, v and gates apart": [(ops, "apply_projections", separate_products)],
    "one block per sequence": [(attention, "MAX_BLOCK_ROWS", 0)],
}


def flat_step(model: Any, batch: Batch) -> Tensor:
    return flat.compute_flat_losses(model, batch).mean()


def padded_step(model: Any, batch: Batch) -> Tensor:
    """transformers' own forward and loss."""
    padded = pad(batch, pad_id=0)
    return model(input_ids=padded.input_ids, attention_mask=padded.attention_mask, labels=padded.labels).loss


@contextmanager
def way(name: str) -> Iterator[Step]:
    """The step of one row of the table."""
    attention.build_blocks.cache_clear()
    with ExitStack() as stack:
        for module, attribute, value in WAYS.get(name, []):
            stack.enter_context(patch.object(module, attribute, value))
        yield padded_step if name.startswith("transformers") else flat_step


def make_batch(workload: str, size: int, vocab_size: int) -> Batch:
    random = np.random.default_rng(1)
    ends = [torch.from_numpy(np.cumsum([0, *law.draw(random, size)])) for law in WORKLOADS[workload]]
    seeded = torch.Generator().manual_seed(1)
    inputs, labels = (torch.randint(3, vocab_size, (int(end[-1]),), generator=seeded) for end in ends)
    return Batch(inputs, labels, ends[0], ends[1], tuple(map(str, range(size))))


def make_model(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
        return load_model_and_tokenizer(folder, tokenizer=str(CHECKPOINT), init="random").model.train()


def seconds(step: Step, model: Any, batch: Batch) -> float:
    """Of one forward and backward pass, gradients made anew; CPU seconds with one thread."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    model.zero_grad(set_to_none=True)
    started = clock()
    step(model, batch).backward()
    return clock() - started


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="t5-small", choices=MODELS)
    parser.add_argument("--workload", default="squad", choices=WORKLOADS)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = make_model(options.model)
    batch = make_batch(options.workload, options.batch_size, MODELS[options.model]["vocab_size"])
    times: dict[str, list[float]] = {name: [] for name in (*WAYS, "transformers, sdpa", "transformers, eager")}
    for _ in range(options.rounds):
        for name, found in times.items():
            model.set_attn_implementation("eager" if name.endswith("eager") else "sdpa")
            with way(name) as step:
                seconds(step, model, batch)
                found.append(seconds(step, model, batch))
    best = min(times["all levers"])
    rows = [("way", "best s", "median s", "best / all levers")]
    rows += [(n, f"{min(t):.2f}", f"{np.median(t):.2f}", f"{min(t) / best:.2f}") for n, t in times.items()]
    result = {"facts": facts("cpu"), "seconds": times, "ratios": {name: min(t) / best for name, t in times.items()}}
    tokens, width = batch.num_input_tokens, batch.cu_seqlens_src.diff().max().item() * options.batch_size
    print(f"{options.model}, {options.batch_size} examples, {tokens} input tokens in {width} padded positions")
    print(table(rows))
    publish_result(options, f"levers-{options.model}", result)


if __name__ == "__main__":
    main(sys.argv[1:])
