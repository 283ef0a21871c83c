"""The Triton kernels against plain torch in fp64: outputs and gradients on fresh data, dropout masks, repeated runs.

In: a device and sizes. Out: a name, the error that was found and the error that is allowed, one per check. Memory that
kernels do not write is NaN, and lengths stand at the edges of tiles. On a CPU Triton's interpreter runs the kernels
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fivetune.model.cuda.attention import compute_attention
from fivetune.model.cuda.cross_entropy import compute_nats, compute_nats_gradient
from fivetune.model.cuda.kernel_trial import attend_eagerly
from fivetune.model.cuda.norm import compute_branch_norm
from fivetune.model.cuda.optimizer import FlatAdamW
from fivetune.model.cuda.pointwise import add_dropout, compute_activation_dropout, compute_dropout
from fivetune.model.cuda.random import round_dropout_rate
from fivetune.model.cuda.rows import add_rows_

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # largest error relative to the largest value or 1
KINDS = ("bfloat16", "float32")
LENGTHS = (0, 1, 63, 64, 65, 127, 129, 511, 2048, 4096)  # at the edges of tiles
DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes that the kernels are checked with.

    Args:
        longest: of LENGTHS, those up to it.
        rows, width: of norms, dropout and activations; width is even.
    """

    device: str
    head_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    num_heads: int = 4
    longest: int = 4096
    rows: int = 4000
    width: int = 768
    num_weights: int = 300_000


@dataclass(frozen=True, slots=True)
class Check:
    """A check that has run; it failed if `error` is above `allowed` or NaN."""

    name: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed


def run_checks(sizes: Sizes, *, kinds: Sequence[str] = KINDS, others: bool = True) -> Iterator[Check]:
    """The attention kernels in these dtypes, each check as soon as it is made.

    Args:
        others: then norms, dropout, activations, tables and losses too; with fp32 also the optimizer, and the masks.
    """
    torch.manual_seed(0)
    for kind in kinds:
        dtype = getattr(torch, kind)
        for name, error in chain(check_attention(sizes, dtype), check_pointwise(sizes, dtype) if others else ()):
            yield Check(f"{name}, {kind}", error, 0.0 if name.endswith("again") else ALLOWED[dtype])
    if others and "float32" in kinds:
        yield Check("adamw, float32", _check_optimizer(sizes), ALLOWED[torch.float32])
        yield Check("masks of dropout", check_dropout_mask(sizes), 0.0)
        yield Check("masks of attention", check_attention_mask(sizes), 0.0)


# --- attention ---


def check_attention(sizes: Sizes, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """The parts of T5 for each head size, at once with all lengths; and whether a second run gives the same bits."""
    for head_size in sizes.head_sizes:
        for part in ("encoder", "decoder", "cross"):
            name = f"attention, {part}, heads of {head_size}"
            error, change = _check_part(sizes, part, head_size, dtype)
            yield name, error
            yield f"{name}, again", change
        yield f"attention, dropout, heads of {head_size}", _check_dropout(sizes, head_size, dtype)


def _check_part(sizes: Sizes, part: str, head_size: int, dtype: torch.dtype) -> tuple[float, float]:
    """The error without dropout, and the largest difference of two runs with it."""
    edges = [length for length in LENGTHS if length <= sizes.longest]
    keys = edges[::-1] if part == "cross" else edges
    leaves = _draw_qkv(edges, keys, sizes, head_size, dtype)
    if part != "cross":
        leaves.append(_draw(sizes, sizes.num_heads, 2 * max(edges) - 1, dtype=torch.float32))
    cu_q, cu_k, causal = _sum_lengths(edges, sizes), _sum_lengths(keys, sizes), part == "decoder"
    seed = torch.full((1,), 7, dtype=torch.int64, device=sizes.device)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        return compute_attention(q, k, v, cu_q, cu_k, max(edges), max(edges), bias, causal, dropout, seed)

    def definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return attend_eagerly(q, k, v, bias, cu_q, cu_k, causal)

    return _measure_error(ours, leaves, definition), _measure_change(partial(ours, dropout=DROPOUT), leaves)


def _check_dropout(sizes: Sizes, head_size: int, dtype: torch.dtype) -> float:
    """Outputs are linear in v: <grad, f(v)> is <grad of v, v> if forward and backward drop the same weights."""
    lengths = [length for length in LENGTHS if length <= min(sizes.longest, 511)]
    q, k, v = _draw_qkv(lengths, lengths, sizes, head_size, dtype)
    cu, seed = _sum_lengths(lengths, sizes), torch.full((1,), 7, dtype=torch.int64, device=sizes.device)
    out = compute_attention(q, k, v, cu, cu, max(lengths), max(lengths), dropout=DROPOUT, seed=seed)
    grad = torch.randn_like(out)
    (grad_v,) = torch.autograd.grad(out, [v], grad)
    products = (grad.double() * out.double()), (grad_v.double() * v.double())
    return ((products[0].sum() - products[1].sum()).abs() / products[0].norm()).item()


# --- norms, dropout, activations, the optimizer, tables ---


def check_pointwise(sizes: Sizes, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """All other kernels, the optimizer's masters after three steps against torch's AdamW among them."""
    x, other = (_draw(sizes, sizes.rows, sizes.width, dtype=dtype) for _ in range(2))
    weight, half = _draw(sizes, sizes.width, dtype=dtype), sizes.width // 2
    norm = lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w  # noqa: E731
    yield "norm", _measure_error(lambda x, w: compute_branch_norm(x, w, 1e-6)[1], [x, weight], norm)
    stream, scale = (_draw(sizes, *shape, dtype=torch.float32) for shape in ((sizes.rows, sizes.width), (sizes.width,)))
    branch = lambda x, w: torch.add(*compute_branch_norm(x, w, 1e-6, dtype))  # noqa: E731
    yield "norm beside the stream", _measure_error(branch, [stream, scale], lambda x, w: x + norm(x, w))
    seed = torch.full((1,), 5, dtype=torch.int64, device=sizes.device)
    kept = compute_dropout(torch.ones_like(stream), DROPOUT, seed).double()
    drop = {"probability": DROPOUT, "seed": seed}
    summed = lambda x, y, w: torch.add(*compute_branch_norm(x, w, 1e-6, dtype, branch=y, **drop))  # noqa: E731
    sum_norm = lambda x, y, w: (x + y * kept) + norm(x + y * kept, w)  # noqa: E731
    yield "norm of a sum", _measure_error(summed, [stream, other, scale], sum_norm)
    relu = lambda x: compute_activation_dropout(x, "relu", gated=False)  # noqa: E731
    yield "relu", _measure_error(relu, [x], torch.relu)
    gated = lambda x: compute_activation_dropout(x, "gelu_new", gated=True)  # noqa: E731
    yield "gated gelu", _measure_error(gated, [x], lambda x: F.gelu(x[:, :half], approximate="tanh") * x[:, half:])
    yield (
        "residual and dropout",
        _measure_error(lambda x, y: add_dropout(y, x, DROPOUT, seed), [x, other], lambda x, y: y + x * kept),
    )
    yield "rows of a table", _check_rows(sizes, dtype)
    yield "cross-entropy", _check_losses(sizes, dtype)


def _check_optimizer(sizes: Sizes) -> float:
    ours, theirs = (nn.Parameter(torch.ones(sizes.num_weights, device=sizes.device)) for _ in range(2))
    optimizer = FlatAdamW([ours], [], lr=1e-2)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0)
    for _ in range(3):
        theirs.grad = torch.randn_like(theirs)
        optimizer.grads[: theirs.numel()] = theirs.grad
        optimizer.step()
        reference.step()
    return (ours - theirs).abs().max().item()


def _check_rows(sizes: Sizes, dtype: torch.dtype) -> float:
    """The gradient of a table of 50 rows, so that most ids repeat."""
    ids = torch.randint(50, (sizes.rows,), device=sizes.device)
    grad = torch.randn(sizes.rows, sizes.width, device=sizes.device).to(dtype)
    exact = torch.zeros(50, sizes.width, dtype=torch.float64, device=sizes.device).index_add_(0, ids, grad.double())
    ours = add_rows_(torch.zeros(50, sizes.width, device=sizes.device), ids, grad)
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def _check_losses(sizes: Sizes, dtype: torch.dtype) -> float:
    """Losses and the gradient of logits whose rows end within a block; errors are relative to the largest value."""
    logits = _draw(sizes, sizes.rows, 8 * sizes.width + 1, dtype=dtype).detach()
    labels = torch.randint(logits.shape[1], (sizes.rows,), device=sizes.device)
    weights = torch.rand(sizes.rows, device=sizes.device)
    nats, norms = compute_nats(logits, labels)
    found = compute_nats_gradient(logits, norms, labels, weights)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (grad,) = torch.autograd.grad(expected, exact, weights.double())
    pairs = ((nats, expected), (found, grad))
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)


# --- masks ---


def draw_philox(seed: int, num_groups: int) -> NDArray[np.uint64]:
    """Philox 4x32-10 (Salmon et al. 2011): 8 numbers of 16 bits for each group, [num_groups, 8]."""
    low = np.uint64(0xFFFFFFFF)
    wide = np.uint64(32)
    group = np.arange(num_groups, dtype=np.uint64)
    a, b, c, d = group & low, group >> wide, np.zeros_like(group), np.zeros_like(group)
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (second >> wide) ^ b ^ np.uint64(keys[0]), second & low
        c, d = (first >> wide) ^ d ^ np.uint64(keys[1]), first & low
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    halves = [half for word in (a, c, b, d) for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    return np.stack(halves, -1)


def check_dropout_mask(sizes: Sizes) -> float:
    """The share of elements that are dropped differently from the definition."""
    seed, number = torch.full((1,), 2**40 + 5, dtype=torch.int64, device=sizes.device), sizes.rows * 8
    kept = compute_dropout(torch.ones(number, device=sizes.device), DROPOUT, seed) > 0
    expected = draw_philox(int(seed), sizes.rows).reshape(-1) >= round_dropout_rate(DROPOUT)
    return float((kept.cpu().numpy() != expected).mean())


def check_attention_mask(sizes: Sizes) -> float:
    """Likewise of attention, whose weights are read off by values that are the identity."""
    lengths, num_heads, most = [37, 64, 1], sizes.num_heads, 64
    cu, seed = _sum_lengths(lengths, sizes), torch.full((1,), 2**40 + 5, dtype=torch.int64, device=sizes.device)
    q = torch.zeros(sum(lengths), num_heads, most, device=sizes.device)
    v = torch.cat([torch.eye(most, device=sizes.device)[:length] for length in lengths])
    v = v[:, None].expand(-1, num_heads, -1).contiguous()
    kept = compute_attention(q, q, v, cu, cu, most, most, dropout=DROPOUT, seed=seed).cpu().numpy() > 0
    drawn = draw_philox(int(seed), sum(lengths) * num_heads * most // 8).reshape(-1, num_heads, most)
    expected = drawn >= round_dropout_rate(DROPOUT)
    inside = np.concatenate([np.broadcast_to(np.arange(most) < n, (n, most)) for n in lengths])[:, None]
    return float((kept != (expected & inside)).mean())


# --- errors ---


@contextmanager
def poison_memory() -> Iterator[None]:
    """Memory that torch.empty returns is NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def _compute(ours: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    """Output and gradients; the gradient of the output is 1 unless it is given."""
    with poison_memory():
        out = ours(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)
    return [out.detach(), *grads]


def _measure_error(ours: Callable[..., Tensor], leaves: Sequence[Tensor], definition: Callable[..., Tensor]) -> float:
    """Largest error of output and gradients against the definition in fp64, relative to the largest value or 1."""
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = definition(*doubles)
    grad = torch.randn_like(exact).to(leaves[0].dtype)
    theirs = [exact, *torch.autograd.grad(exact, doubles, grad.double())]
    pairs = zip(_compute(ours, leaves, grad), theirs, strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in pairs)


def _measure_change(ours: Callable[..., Tensor], leaves: Sequence[Tensor]) -> float:
    """Largest difference between two runs."""
    pairs = zip(_compute(ours, leaves, None), _compute(ours, leaves, None), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


# --- inputs ---


def _sum_lengths(lengths: Sequence[int], sizes: Sizes) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(sizes.device)


def _draw(sizes: Sizes, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=sizes.device).to(dtype).requires_grad_()


def _draw_qkv(
    lengths: Sequence[int], keys: Sequence[int], sizes: Sizes, head_size: int, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values; queries scaled so that the softmax is neither flat nor a single one."""
    q, k, v = (torch.randn(sum(n), sizes.num_heads, head_size, device=sizes.device) for n in (lengths, keys, keys))
    return [x.to(dtype).requires_grad_() for x in (q * head_size**-0.5, k, v)]
