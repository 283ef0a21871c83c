"""The Triton kernels on a GPU: first against plain torch in fp64, then timed against what torch offers for the same.

In: nothing. Out: a table of errors, a table of microseconds and ratios, results/kernels.json. Both sides of a pair are
replayed as CUDA graphs, as a training step is, so that launching from Python is not what is measured.
    python -m benchmarks.kernels
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Spread, Work, facts, interleaved, make_parser, publish_result, rates, ratio, table
from benchmarks.kernel_checks import Sizes, run_checks
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.model.cuda.attention import compute_attention
from fivetune.model.cuda.norm import compute_rms_norm
from fivetune.model.cuda.optimizer import FlatAdamW
from fivetune.model.cuda.pointwise import add_dropout, compute_activation_dropout

DEVICE, HEADS, HEAD_SIZE, WIDTH, DROPOUT = "cuda", 12, 64, 768, 0.1  # t5-base
NUM_CALLS, NUM_WINDOWS = 50, 6


def main() -> None:
    args = make_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise FiveTuneEnvironmentError("benchmarks.kernels: torch sees no CUDA device. This benchmark needs one.")
    checks = list(run_checks(Sizes(DEVICE, head_sizes=(HEAD_SIZE,))))
    print(table([["check", "error", "allowed"], *([c.name, f"{c.error:.1e}", f"{c.allowed:g}"] for c in checks)]))
    if bad := [check.name for check in checks if not check.is_right]:
        sys.exit(f"wrong: {', '.join(bad)}. Not timed.")
    timed = {name: compared(ours, theirs) for name, ours, theirs in pairs()}
    rows = [
        [name, *(f"{1e6 / each.median:.1f}" for each in both[:2]), f"{both[2].median:.2f}"]
        for name, both in timed.items()
    ]
    print(table([["forward and backward, bf16", "us", "us, torch", "ratio"], *rows]))
    speeds = {name: [each.as_list() for each in both] for name, both in timed.items()}
    errors = {check.name: check.error for check in checks}
    publish_result(args, "kernels", {"errors": errors, "calls_per_second_and_ratio": speeds, **facts(DEVICE)})


@dataclass(slots=True)
class Calls:
    """One side of a comparison: a call, recorded as a CUDA graph."""

    name: str
    call: Callable[[], Any]

    def work(self, num_units: int) -> Work:
        for _ in range(num_units):
            self.call()
        return Work(num_units)


def compared(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Spread, Spread, Spread]:
    """Calls per second of both, and the ratio of the medians."""
    sides = [Calls("ours", record_graph(ours)), Calls("torch", record_graph(theirs))]
    windows = interleaved(sides, NUM_CALLS, NUM_WINDOWS, device=DEVICE)
    mine, other = windows["ours"], windows["torch"]
    return rates(mine, "units"), rates(other, "units"), ratio(mine, other, "units")


def record_graph(call: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def pairs() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """What is timed: our call and torch's, forward and backward, in bf16."""
    for name, lengths in (("175 of up to 512", _lengths(32, 512)), ("512", [512] * 32), ("2048", [2048] * 8)):
        for dropout in (0.0, DROPOUT):
            yield f"attention, {name}, dropout {dropout:g}", *_attention_pair(lengths, dropout)
    x, residual = (_random(32 * 175, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    weight, wide = _random(WIDTH, dtype=torch.bfloat16), _random(32 * 175, 4096, dtype=torch.bfloat16)
    yield (
        "norm",
        _step(lambda: compute_rms_norm(x, weight, 1e-6), [x, weight]),
        _step(lambda: F.rms_norm(x, (WIDTH,), weight, 1e-6), [x, weight]),
    )
    yield (
        "residual and dropout",
        _step(lambda: add_dropout(residual, x, DROPOUT), [x, residual]),
        _step(lambda: residual + F.dropout(x, DROPOUT), [x, residual]),
    )
    yield (
        "gated gelu and dropout",
        _step(lambda: compute_activation_dropout(wide, "gelu_new", gated=True, probability=DROPOUT), [wide]),
        _step(lambda: F.dropout(F.gelu(wide[:, :2048], approximate="tanh") * wide[:, 2048:], DROPOUT), [wide]),
    )
    yield "clip and adamw in fp32, 220 million", *_optimizer_pair()


def _step(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], Any]:
    """Forward and backward as one call."""
    grad = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def _attention_pair(lengths: list[int], dropout: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours on flat tokens; torch's on rectangles with a mask that carries the bias, as transformers calls it.

    The mask is made once, as it is once for all layers of a stack; each layer adds to its gradient.
    """
    longest, cu = max(lengths), _starts(lengths)
    q, k, v = _qkv(lengths, lengths, torch.bfloat16)
    bias = _bias(longest)
    ours = _step(lambda: compute_attention(q, k, v, cu, cu, longest, longest, bias, False, dropout), [q, k, v, bias])
    shape = (len(lengths), HEADS, longest, HEAD_SIZE)
    padded = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    places = torch.arange(longest, device=DEVICE)
    index = places - places[:, None] + longest - 1
    hidden = (places >= torch.tensor(lengths, device=DEVICE)[:, None])[:, None, None]

    mask = torch.where(hidden, -torch.inf, bias.detach()[:, index]).to(torch.bfloat16).requires_grad_()

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(*padded, attn_mask=mask, dropout_p=dropout, scale=1.0)

    return ours, _step(masked, [*padded, mask])


def _optimizer_pair() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours; torch's clip and fused AdamW."""
    tensors = [nn.Parameter(torch.randn(2048, 1024, device=DEVICE)) for _ in range(105)]
    optimizer = FlatAdamW([nn.Parameter(t.detach().clone()) for t in tensors], [], lr=1e-4, max_norm=1.0)
    optimizer.grads.normal_()
    optimizer.step()  # from here on, no block is left out for want of a gradient
    reference = torch.optim.AdamW(tensors, lr=1e-4, fused=True, capturable=True)
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)

    def theirs() -> None:
        nn.utils.clip_grad_norm_(tensors, 1.0)
        reference.step()

    return optimizer.step, theirs


# --- inputs ---


def _lengths(count: int, longest: int) -> list[int]:
    """Lengths like those of question answering inputs: lognormal, mean about 175; the first is the longest allowed."""
    drawn = torch.randn(count).mul(0.36).add(5.1).exp().long().clamp(1, longest)
    drawn[0] = longest
    return drawn.tolist()


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def _qkv(lengths: Sequence[int], keys: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values; queries scaled so that the softmax is neither flat nor a single one."""
    q, k, v = (torch.randn(sum(n), HEADS, HEAD_SIZE, device=DEVICE) for n in (lengths, keys, keys))
    return [x.to(dtype).requires_grad_() for x in (q * HEAD_SIZE**-0.5, k, v)]


def _bias(longest: int) -> Tensor:
    return _random(HEADS, 2 * longest - 1, dtype=torch.float32)


if __name__ == "__main__":
    main()
